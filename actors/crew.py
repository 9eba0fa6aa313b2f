"""The lanes of an engine: their processes, the placements they hold, and what lives in the arena.

Starts them, gives them placements, moves the sweep from one placement to the next, and sets all
going again when one has failed. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_crew import (
    ChangeOfHeads,
    answer_of,
    changes_of_heads,
    choose_copier,
    use_process,
    wait_between_steps,
)
from shadowlane.actors.copy_choice import Choice
from shadowlane.actors.copy_ring import ring_nbytes
from shadowlane.actors.expert_moves import ExpertMoves
from shadowlane.actors.held_heads import CardSizes, Heads, heads_on, page_nbytes
from shadowlane.actors.homes import Homes
from shadowlane.actors.hosts import Host, LaneDied, Pending, Remote, Settled
from shadowlane.actors.recovery import (
    find_failure,
    kill_quietly,
    set_abort,
    settle_counters,
    wait_until_parked,
)
from shadowlane.actors.requests import lanes_of
from shadowlane.actors.spec import EngineSettings
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles
from shadowlane.planner.heat import Heat
from shadowlane.planner.placement import DISK_LANE, Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program, build_programs

Progress = Callable[[str, float | None], None]
PARCEL_NBYTES = 256 << 20  # of expanded copies, made between two reports of how far it is


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A lane's answer to a placement, perhaps still to come."""

    lane: str
    placement_id: int
    pending: Pending


@dataclass(frozen=True, slots=True)
class Published:
    """A placement that the lanes know, and its programs."""

    placement: Placement
    programs: dict[Phase, dict[str, Program]]  # one for both phases where they are alike
    lengths: dict[Phase, tuple[int, ...]]  # instructions of each compute lane in one step


@dataclass(slots=True)
class Taken:
    """Room taken for blocks that are on their way."""

    homes: Homes[Any]
    offsets: dict[Any, int]


@dataclass(slots=True)
class Moves:
    """What is on its way for a placement, in the background."""

    placement: Placement
    taken: list[Taken] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    later: list[tuple[Remote, dict[int, int]]] = field(default_factory=list)  # per card
    read: set[int] = field(default_factory=set)  # of these, on their way off the disk
    parcels: Iterator[tuple[Pending, int]] | None = None  # of what is later, on cards that are here
    experts: ExpertMoves = field(default_factory=ExpertMoves)
    why: str | None = None  # it cannot be
    is_withdrawn: bool = False  # nobody wants it any more


class Crew:
    """See the module. `placement` is the one that steps run under."""

    placement: Placement

    def __init__(
        self,
        host: Host,
        settings: EngineSettings,
        blueprint: Blueprint,
        files: ModelFiles,
        pages_in_use: Callable[[int, int], Sequence[int]],
    ) -> None:
        """pages_in_use: of the KV cache, those that hold anything, by the tokens of a page and the
        pages of a sequence; asked between steps."""
        self._pages_in_use = pages_in_use
        self.lanes = lanes_of(settings)
        self._host = host
        self._settings = settings
        self._blueprint = blueprint
        self._files = files
        self._published: dict[int, Published]
        self.newest_id: int  # the highest id that any placement had
        self.lane_bases: list[int]  # instructions retired before the next step
        self.disk_base: int  # the same of blocks read
        self._link_bases: list[int]  # the same of blocks brought to cards
        self._brought: tuple[int, Phase] | None  # placement and phase of the newest step
        self._arriving: list[Placement]  # what is moved for, and not yet published
        self._opened: list[Pending]  # of lanes that map an arena
        self._choices: dict[int, Choice]  # who copies to each card that is here
        self._moving: Moves | None  # under way
        self._held: dict[int, list[int]]  # placement -> experts in RAM that left cards for it
        # placement -> arena offsets of the experts that it brings: they keep their slots
        self._sources: dict[int, dict[int, int]]
        self._landing: Pending | None  # the newest call that uses the landing place
        self._forget()
        self._heat: Heat | None = None
        self.runs: dict[str, Pending] = {}
        self.cpus: list[Remote] = []  # compute lanes of processors
        self.cards: list[Remote] = []  # compute lanes of cards
        self.links: list[Remote] = []  # a transfer lane for each of them
        self.disk: Remote | None = None

    # -- processes

    def launch(self) -> None:
        """Start the lanes' processes; they come up while the caller goes on."""
        if self.disk is None:
            self.cpus = [
                self._host.start_cpu(number, cores)
                for number, cores in enumerate(self._settings.cores)
            ]
            cards = range(len(self._settings.cards))
            self.cards = [self._start_card(card) for card in cards]
            self.links = [self._host.start_link(card) for card in cards]
            self.disk = self._start_disk()

    def _start_card(self, card: int) -> Remote:
        number, is_emulated = len(self._settings.cores) + card, not self._settings.are_cards_here
        uuid = self._settings.cards[card].uuid
        return self._host.start_card(number, card, is_emulated=is_emulated, uuid=uuid)

    def _start_disk(self) -> Remote:
        settings = self._settings
        return self._host.start_disk(settings.depth, settings.direct, settings.prefetch)

    @property
    def computing(self) -> list[Remote]:
        """All compute lanes, by their numbers."""
        return [*self.cpus, *self.cards]

    @property
    def all_lanes(self) -> list[Remote]:
        return [*self.computing, *self.links, *([self.disk] if self.disk is not None else [])]

    @property
    def disk_lane(self) -> Remote:
        assert self.disk is not None, "the lanes must be launched first"
        return self.disk

    def open(self, arena: Arena, layout: ArenaLayout) -> list[Pending]:
        """Every lane maps the arena; the compute lanes may still be at it when this returns."""
        self._arena, self._layout = arena, layout
        sizes = self._blueprint.held_nbytes
        self.homes: Homes[int] = Homes(layout.weights, layout.weights_nbytes, sizes)
        of_cards = CardSizes(self._blueprint, layout.num_pages)
        self.card_homes: list[Homes[int | Heads]] = [
            Homes(card.weights, card.weights_nbytes, of_cards) for card in layout.cards
        ]
        self._copies: set[int] = set(layout.expanded)  # blocks whose expanded copy is there
        return self._open_lanes()

    def _open_lanes(self) -> list[Pending]:
        where = (self._blueprint, self._layout, self._arena.handle)
        self._opened = [lane.call("open", *where) for lane in [*self.computing, *self.links]]
        self.disk_lane.call("open", *where, self._files.stamps).result()
        return self._opened

    def run(self) -> None:
        self.runs = {lane.name: lane.call("run") for lane in self.all_lanes}

    def look_after(self) -> None:
        """Raise LaneDied if a lane's loop has ended, or is to end."""
        is_aborted = bool(self._arena.view(self._layout.abort, np.int32, 1)[0])
        failure = find_failure(self.runs, is_aborted)
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """End every lane's loop."""
        set_abort(self._arena, self._layout, True)

    def restart(self, step: int) -> None:
        """Every lane maps the arena anew and gets the placements that are published.

        Blocks in RAM stay; what the ring held is read again. The abort word must be set. Raises
        LaneDied, or what a lane raised while it opened the model.
        """
        self._replace_lost()
        if self._landing is not None:
            with suppress(Exception):  # whoever waits for it is told
                self._landing.result()
        set_abort(self._arena, self._layout, False)
        settle_counters(self._arena, self._layout, step, self.lane_bases, self._link_bases)
        self._brought = None
        for ring in self._layout.copy_rings:  # what was on its way is not wanted any more
            self._arena.view(ring, np.uint8, ring_nbytes())[:] = 0
        for each in self._open_lanes():
            each.result()
        self._use_processes()
        self.load_cards()
        if self._blueprint.experts is not None:
            self.disk_lane.call("keep_experts", self._heat, self._settings.expert_policy).result()
        # What an older placement alone had in memory is gone, and no step will run under it.
        now = self.placement.placement_id
        self._published = {key: each for key, each in self._published.items() if key >= now}
        for published in list(self._published.values()):
            self._keep_sources(published.placement)
            for answer in self.publish(published.placement):
                answer.pending.result()
        self._start_sweep(self.placement, keeps_ring=False)
        self.run()

    def _replace_lost(self) -> None:
        """Wait until every loop has ended; new processes for lanes that have none any more."""
        lost = wait_until_parked(self.runs)
        self.runs = {}
        self._forget_holds()
        for number, cores in enumerate(self._settings.cores):
            if self.cpus[number].name in lost:
                kill_quietly([self.cpus[number]])
                self.cpus[number] = self._host.start_cpu(number, cores)
        for card in range(len(self.cards)):
            if self.cards[card].name in lost:
                kill_quietly([self.cards[card]])
                self.cards[card] = self._start_card(card)
            if self.links[card].name in lost:
                kill_quietly([self.links[card]])
                self.links[card] = self._host.start_link(card)
        if self.disk_lane.name in lost:
            kill_quietly([self.disk_lane])
            self.disk = self._start_disk()

    def begin_anew(self, settings: EngineSettings) -> None:
        """Take everything off the lanes, which then wait for another arena. Their processes stay.

        The abort word must be set. Raises LaneDied.
        """
        with suppress(Exception):  # one that did not get its memory is why we are here
            for each in self._opened:
                each.result()
        self._replace_lost()
        for lane in [*self.links, *self.cards]:
            lane.call("stop").result()  # gives back what one that never ran has taken
        self._settings = settings
        self._forget()

    def _forget(self) -> None:
        """As before the first arena: nothing is published, and nothing has run."""
        self._published = {}
        self.newest_id = 0
        self.lane_bases = [0] * len(self.lanes)
        self.disk_base = 0
        self._link_bases = [0] * len(self._settings.cards)
        self._brought = None
        self._arriving = []
        self._opened = []
        self._landing = None
        self._choices = {}
        self._moving, self._held, self._sources = None, {}, {}

    def _forget_holds(self) -> None:
        """The disk lane begins anew and gives all slots of experts away as it likes.

        So nothing may be on its way to one any more, nor count on one. The abort word ends copies.
        """
        self._held, self._sources = {}, {}
        if self._moving is not None:
            for each in self._moving.pending:
                with suppress(Exception):  # told to who waits for it
                    each.result()
            self._moving.experts = ExpertMoves()

    def close(self) -> None:
        """Stop the lanes, those that do not answer as well."""
        for lane in self.all_lanes:
            lane.call("stop")
        wait_until_parked(self.runs)
        kill_quietly(self.all_lanes)

    # -- placements

    def publish(self, placement: Placement) -> list[Acknowledgement]:
        """Give a placement to every lane; returns the answers to wait for."""
        programs = self._programs(placement)
        lengths = {
            phase: tuple(len(of_phase[lane.name].instructions) for lane in self.lanes)
            for phase, of_phase in programs.items()
        }
        self._published[placement.placement_id] = Published(placement, programs, lengths)
        self.newest_id = max(self.newest_id, placement.placement_id)
        homes, copies = self.homes_of(placement), self.copies_of(placement)
        calls: list[tuple[Remote, tuple[object, ...]]] = []
        for lane in self.cpus:
            calls.append((lane, (self._of_lane(programs, lane), homes, copies)))
        for lane, part, there in zip(self.cards, placement.cards, self.card_homes, strict=True):
            held = {each: there.offsets[each] for each in self._blueprint.on_card(part)}
            if self._settings.are_cards_here:
                now = heads_on(self._blueprint, self.placement, lane.name)
                heads = {each: there.offsets.get(each) for each in now}
                calls.append((lane, (programs, held, heads)))
            else:
                calls.append((lane, (self._of_lane(programs, lane), held)))
        sources = homes | self._sources.get(placement.placement_id, {})
        for lane in self.links:
            calls.append((lane, (programs, sources)))
        answers = [
            Acknowledgement(
                lane.name, placement.placement_id, lane.call("adopt", placement, *arguments)
            )
            for lane, arguments in calls
        ]
        # the disk lane takes it up at the switch: what it reads is decided between steps
        answers.append(
            Acknowledgement(DISK_LANE, placement.placement_id, Settled(placement.placement_id))
        )
        return answers

    def _programs(self, placement: Placement) -> dict[Phase, dict[str, Program]]:
        catalog = self._blueprint.catalog
        programs: dict[Phase, dict[str, Program]] = {"decode": build_programs(catalog, placement)}
        if placement.prefill_shares is not None:
            programs["prefill"] = build_programs(catalog, placement, "prefill")
        return programs

    @staticmethod
    def _of_lane(programs: dict[Phase, dict[str, Program]], lane: Remote) -> dict[Phase, Program]:
        return {phase: of_phase[lane.name] for phase, of_phase in programs.items()}

    def published(self, placement_id: int) -> Placement:
        return self._published[placement_id].placement

    def retire(self, placement_id: int) -> None:
        """Forget a placement that no step will use again, and what was moved for it alone."""
        self._published.pop(placement_id, None)
        self._release_experts(placement_id)
        self._release_sources(placement_id)
        for lane in [*self.computing, *self.links]:
            lane.call("retire", placement_id)
        kept = [each.placement for each in self._published.values()]
        self._drop_all_but(kept)
        self._drop_copies(self._copies.difference(*(each.expanded for each in kept)))

    def retire_all_but_current(self) -> None:
        """Nobody will announce what else is published: forget it, and what was moved for it."""
        current = self.placement.placement_id
        for placement_id in [each for each in self._published if each != current]:
            self.retire(placement_id)

    def switch(self, placement: Placement, *, is_first: bool = False) -> None:
        """Make `placement` the one that the next step runs under. Between steps only."""
        keeps_ring = not is_first and self.placement.sweep == placement.sweep
        changes = [] if is_first else changes_of_heads(self._blueprint, self.placement, placement)
        page_tokens, max_pages = self._blueprint.catalog.page_tokens, self._layout.max_pages
        pages = self._pages_in_use(page_tokens, max_pages) if changes else ()
        wait_between_steps([self._leave_cached(each, pages) for each in changes])
        self._start_sweep(placement, keeps_ring)
        self.placement = placement
        self._drop_all_but([placement])
        if self._settings.are_cards_here:
            wait_between_steps([self._take_cached(each, pages) for each in changes])
        for each in [each for each in self._held if each <= placement.placement_id]:
            self._release_experts(each)

    def _release_experts(self, placement_id: int) -> None:
        """Those that left cards for a placement may lose their slots as any others."""
        first = len(self._blueprint.sources)
        ExpertMoves(first).release(self.disk_lane, self._held.pop(placement_id, []))

    def _keep_sources(self, placement: Placement) -> bool:
        """Let the experts that a placement brings keep their slots. False: some have none."""
        brought = self._brought_experts(placement)
        if not brought:
            return True
        first = len(self._blueprint.sources)
        keys = [number - first for number in brought]
        kept = self.disk_lane.call("keep_experts_in_place", keys).result()
        if kept:
            held = {first + key: at for key, at in kept.items()}
            self._sources[placement.placement_id] = held
        return bool(kept)

    def _release_sources(self, placement_id: int) -> None:
        """What a placement brought may lose its slots: no step runs under it any more."""
        first = len(self._blueprint.sources)
        numbers = list(self._sources.pop(placement_id, {}))
        ExpertMoves(first).release(self.disk_lane, numbers)

    def _brought_experts(self, placement: Placement) -> list[int]:
        """The routed experts that come to cards for prompts, by their numbers."""
        first = len(self._blueprint.sources)
        return [n for part in placement.cards for n in part.prefill_sweep if n >= first]

    def _leave_cached(self, change: ChangeOfHeads, pages: Sequence[int]) -> Pending:
        """Of a card that is emulated, the time of all that moves; its bytes stay."""
        if self._settings.are_cards_here:
            return self.cards[change.card].call("leave_cached", change.left, pages)
        nbytes = page_nbytes(self._blueprint) * len(pages) * change.num_moved
        if not nbytes:
            return Settled(None)
        return self.links[change.card].call("move_cached", nbytes)

    def _take_cached(self, change: ChangeOfHeads, pages: Sequence[int]) -> Pending:
        there = self.card_homes[change.card]
        heads = {each: there.take([each]).get(each) for each in change.come}
        return self.cards[change.card].call("take_cached", change.left, heads, pages)

    def _start_sweep(self, placement: Placement, keeps_ring: bool) -> None:
        """Tell the disk lane what to read from now on. `keeps_ring`: what was read ahead counts."""
        if not keeps_ring:
            self.disk_base = self.disk_lane.call("park").result()
        published = self._published[placement.placement_id]
        sweep = disk.Sweep.of(
            published.programs["decode"][DISK_LANE],
            placement.num_slots,
            self.disk_base,
            {lane.name: number for number, lane in enumerate(self.lanes)},
            self.lane_bases,
            published.lengths["decode"],
        )
        homes = self.homes_of(placement)
        self.disk_lane.call("adopt", sweep, homes, placement.placement_id).result()
        self._leave_to_cards(placement)

    def _leave_to_cards(self, placement: Placement) -> None:
        """Tell the disk lane which experts need no slot in RAM."""
        if placement.cards and self._blueprint.experts is not None:
            first = len(self._blueprint.sources)
            numbers = (n for part in placement.cards for n in self._blueprint.on_card(part))
            keys = sorted(number - first for number in numbers if number >= first)
            self.disk_lane.call("leave_to_cards", keys).result()

    def begin_step(self, phase: Phase) -> list[int]:
        """Blocks brought to each card before the next step.

        What a link has copied ahead, for a step like the one before, is passed over where the next
        one is another: it cannot be more than the ring holds.
        """
        kind = self.placement.placement_id, phase
        if self._brought not in (None, kind):
            for card, part in enumerate(self.placement.cards):
                self._link_bases[card] += max(part.num_slots, self._layout.cards[card].num_slots)
        self._brought = kind
        return self._link_bases

    def finish_step(self, phase: Phase) -> None:
        """Count a whole step of the current placement as retired."""
        for number, length in enumerate(self.lengths(phase)):
            self.lane_bases[number] += length
        self.disk_base += len(self.placement.sweep)
        for card, part in enumerate(self.placement.cards):
            self._link_bases[card] += len(part.stream(phase).sweep)

    def lengths(self, phase: Phase) -> tuple[int, ...]:
        """Instructions of each compute lane in a step of the current placement."""
        lengths = self._published[self.placement.placement_id].lengths
        return lengths.get(phase, lengths["decode"])

    # -- blocks

    def homes_of(self, placement: Placement) -> dict[int, int]:
        """Arena offset of each resident block of a placement."""
        return {
            index: self.homes.offsets[index]
            for index, kept in enumerate(placement.resident)
            if kept
        }

    def copies_of(self, placement: Placement) -> tuple[int, ...]:
        """Blocks that prefill reads from their expanded copies under a placement.

        Copies are made once. What a placement wants beyond those that are left is expanded in each
        chunk, which gives the same bits.
        """
        return tuple(block for block in placement.expanded if block in self._copies)

    def load_first(
        self, placement: Placement, statistics: np.ndarray, tell: Progress, heat: Heat | None
    ) -> None:
        """Read what a placement keeps in RAM; `statistics` are the disk lane's.

        heat: how often earlier runs chose each expert of a mixture.
        """
        self._heat = heat
        self.placement = placement
        homes = self.homes.take(index for index, kept in enumerate(placement.resident) if kept)
        sizes = self._blueprint.held_nbytes
        total = sum(self._blueprint.sources[block].nbytes for block in homes)
        jobs: list[tuple[str, tuple[object, ...]]] = [("load", (homes,))]
        for part, there in zip(placement.cards, self.card_homes, strict=True):
            held = there.take(self._blueprint.on_card(part))
            if self._settings.are_cards_here:
                there.take(heads_on(self._blueprint, placement, part.lane))
                continue
            total += sum(sizes[number] for number in self._blueprint.on_card(part))
            jobs.append(("load", (held,)))
        if self._blueprint.experts is not None:
            policy = self._settings.expert_policy
            self.disk_lane.call("keep_experts", heat, policy).result()
            self._leave_to_cards(placement)
            first = len(self._blueprint.sources)
            keys = [number - first for number in self._brought_experts(placement)]
            jobs.append(("load_experts", (keys,)))
            total += placement.expert_slots * self._blueprint.experts.catalog.nbytes
        for method, arguments in jobs:
            loading = self.disk_lane.call(method, *arguments)
            while not loading.is_done():
                loaded = int(statistics[disk.LOAD_NBYTES])
                tell("loading weights", min(1.0, loaded / total) if total else None)
                try:
                    loading.result(timeout=0.1)
                except TimeoutError:
                    continue
            loading.result()
        if not self._keep_sources(placement):
            raise RuntimeError("experts that are brought to cards must have slots in RAM")
        tell("loading weights", 1.0)

    def choose_copiers(self) -> list[str]:
        """Find out who copies faster to each card that is here, and have them do it.

        Before anything is loaded there. Returns lines for people.
        """
        if not self._settings.are_cards_here:
            return []
        for number, (card, link) in enumerate(zip(self.cards, self.links, strict=True)):
            self._choices[number] = choose_copier(number, card, link, self._layout)
        told = [each.told(self.cards[number].name) for number, each in self._choices.items()]
        return told + self._use_processes()

    def _use_processes(self) -> list[str]:
        """Have those processes copy that were chosen. Returns why some cannot."""
        chosen = [n for n, each in self._choices.items() if each.submitter == "process"]
        failed = (use_process(self.cards[number], self.links[number]) for number in chosen)
        return [each for each in failed if each is not None]

    def load_cards(self, tell: Progress | None = None) -> None:
        """Bring what lives on cards that are here; their lanes must be open, and none running.

        Off the disk a block lands in RAM first, together with as many others as there is room for.
        """
        if not self._settings.are_cards_here:
            return
        sizes = self._blueprint.held_nbytes
        wanted: list[dict[int, int]] = [
            {each: at for each, at in there.offsets.items() if not isinstance(each, Heads)}
            for there in self.card_homes
        ]
        total = sum(sizes[block] for offsets in wanted for block in offsets)
        done = 0
        for link, offsets in zip(self.links, wanted, strict=True):
            for call, nbytes in self._parcels_for(link, offsets, {}):
                answer_of(call, self.cards)
                done += nbytes
                if tell is not None:
                    tell("loading the cards", done / total)

    def _parcels_for(
        self, link: Remote, targets: Mapping[int, int], held: Mapping[int, int]
    ) -> Iterator[tuple[Pending, int]]:
        """Bring blocks from where they lie onto a card: calls, and the bytes that each brings.

        held: experts that keep their slots in RAM meanwhile. Each call must have ended before the
        next is asked for, since they share the landing place.
        """
        sizes = self._blueprint.held_nbytes
        for parcel in self._landings(sorted(targets), held):
            there = {*self.homes.offsets, *held}
            missing = {block: at for block, at in parcel.items() if block not in there}
            if missing:
                yield self.disk_lane.call("load", missing), 0
            copies = [(block, at, targets[block]) for block, at in parcel.items()]
            yield link.call("move", copies), sum(sizes[block] for block in parcel)

    def _landings(self, blocks: Iterable[int], held: Mapping[int, int]) -> Iterator[dict[int, int]]:
        """Blocks with the arena offsets they are copied from: in RAM, or in the landing place."""
        start, end = self._layout.landing, self._layout.landing + self._layout.landing_nbytes
        sizes = self._blueprint.held_nbytes
        parcel: dict[int, int] = {}
        at = start
        for block in blocks:
            home = self.homes.offsets.get(block, held.get(block))
            if home is not None:
                parcel[block] = home
                continue
            nbytes = sizes[block]
            if at + nbytes > end:
                yield parcel
                parcel, at = {}, start
            parcel[block] = at
            at += nbytes
        if parcel:
            yield parcel

    def expand_first(self, placement: Placement, tell: Progress) -> None:
        """Make the expanded copies of a placement that is published; before any step runs."""
        copies = self.copies_of(placement)
        done, total = 0, placement.expanded_nbytes
        for parcels in self._parcels(copies):
            tell("expanding weights", done / total)
            calls = [
                lane.call("expand", placement.placement_id, blocks)
                for lane, blocks in zip(self.cpus, parcels, strict=False)
            ]
            for call in calls:
                call.result()
            done += sum(self._copy_nbytes(block) for blocks in parcels for block in blocks)
        if copies:
            tell("expanding weights", 1.0)

    def _parcels(self, copies: Sequence[int]) -> Iterator[list[list[int]]]:
        """Rounds of blocks, so many for each lane as are told of at a time."""
        round_nbytes = 0
        parcels: list[list[int]] = [[] for _ in self.cpus]
        for number, block in enumerate(copies):
            parcels[number % len(parcels)].append(block)
            round_nbytes += self._copy_nbytes(block)
            if round_nbytes >= PARCEL_NBYTES:
                yield parcels
                round_nbytes, parcels = 0, [[] for _ in self.cpus]
        if round_nbytes:
            yield parcels

    def _copy_nbytes(self, block: int) -> int:
        return self._blueprint.catalog.blocks[block].expanded_nbytes

    def start_moving(self, placement: Placement) -> Moves:
        """Begin to bring what a placement adds into RAM and onto cards, beside what is there.

        Steps go on meanwhile. The rings stay as they were laid out, so a placement that wants
        another is refused.
        """
        why = self._misfit(placement)
        if why is not None:
            return Moves(placement, why=why)
        new = [block for block, kept in enumerate(placement.resident) if kept]
        taken = self.homes.take(new)
        moves = Moves(placement, [Taken(self.homes, taken)])
        if not taken and not self.homes.offsets.keys() >= set(new):
            moves.why = "no room to move blocks before old copies are dropped"
        for part, there in zip(placement.cards, self.card_homes, strict=True):
            wanted = self._blueprint.on_card(part)
            held = there.take(wanted)
            moves.taken.append(Taken(there, held))
            if not held and not there.offsets.keys() >= set(wanted):
                moves.why = f"no room on {part.lane} before old copies are dropped"
        if moves.why is not None:
            self.abandon(moves)
            return moves
        self._arriving.append(placement)
        self._moving = moves
        try:
            self._exchange_experts(moves)
        except LaneDied:
            self.abandon(moves)
            raise
        if taken:
            moves.pending.append(self.disk_lane.call("load", taken))
        for link, each in zip(self.links, moves.taken[1:], strict=True):
            if each.offsets:
                moves.later.append((link, each.offsets))
                if not self._settings.are_cards_here:
                    self._read_for_cards(moves, each.offsets)
        return moves

    def go_on_moving(self, moves: Moves) -> bool:
        """Whether all has arrived. What goes to cards follows once it is in RAM.

        Raises LaneDied; then nothing is on its way any more, and all of it has to be moved anew.
        """
        if moves.why is not None:
            return True
        if moves.is_withdrawn:
            moves.later = []
        try:
            while moves.pending or moves.later:
                if not moves.pending:
                    self._move_to_cards(moves)
                elif not moves.pending[0].is_done():
                    return False
                else:
                    moves.pending.pop(0).result()
            if not moves.is_withdrawn:
                kept = moves.experts.settle(self.disk_lane, is_there=True)
                self._held[moves.placement.placement_id] = kept
                if not self._keep_sources(moves.placement):
                    moves.why = "experts that are to be brought to cards have no slots in RAM"
                    self._release_experts(moves.placement.placement_id)
        except LaneDied:
            self.abandon(moves)
            raise
        except (ModelError, ValueError, OSError) as error:
            moves.why = str(error)
            self.abandon(moves)
        else:
            if moves.is_withdrawn or moves.why is not None:  # now that nothing writes there
                self.abandon(moves)
            else:
                self._arriving.remove(moves.placement)
                self._moving = None
        return True

    def _read_for_cards(self, moves: Moves, offsets: Mapping[int, int]) -> bool:
        """Begin to read what cards want and RAM has at no home of its own. Whether there is any.

        NOTE: slots of experts are no homes: what is there may have to go at any moment, unless it
        is held.
        """
        there = {*self.homes.offsets, *moves.experts.held, *moves.read}
        read = {number: at for number, at in offsets.items() if number not in there}
        if read:
            moves.read.update(read)
            moves.pending.append(self.disk_lane.call("load", read))
        return bool(read)

    def _move_to_cards(self, moves: Moves) -> None:
        """Out of RAM where a block is there; else off the disk, and then the time of its copy."""
        if self._settings.are_cards_here:
            if moves.parcels is None:
                moves.parcels = chain.from_iterable(
                    self._parcels_for(link, offsets, moves.experts.held)
                    for link, offsets in moves.later
                )
            call = next(moves.parcels, None)
            if call is None:
                moves.later = []
            else:
                moves.pending.append(call[0])
                self._landing = call[0]
            return
        wanted = {number: at for _, offsets in moves.later for number, at in offsets.items()}
        if self._read_for_cards(moves, wanted):
            return  # homes have been dropped meanwhile
        for link, offsets in moves.later:
            copies = [
                (number, at if number in moves.read else self._in_ram(moves, number), at)
                for number, at in offsets.items()
            ]
            moves.pending.append(link.call("move", copies))
        moves.later = []

    def _in_ram(self, moves: Moves, number: int) -> int:
        return moves.experts.held.get(number) or self.homes.offsets[number]

    def _exchange_experts(self, moves: Moves) -> None:
        """Begin what `ExpertMoves` says. Raises LaneDied."""
        if self._blueprint.experts is None:
            return
        first = len(self._blueprint.sources)
        coming = [number for each in moves.taken[1:] for number in each.offsets if number >= first]
        after = self._on_cards(moves.placement)
        # NOTE: nobody may ask for what leaves before it is in RAM, and a placement that is to come
        # into force before this one would, of what it has on no card.
        others = [self.placement, *self._arriving, *(p.placement for p in self._published.values())]
        before = [each for each in others if each.placement_id < moves.placement.placement_id]
        always = set.intersection(*map(self._on_cards, before))
        parts = zip(self.links, self.card_homes, self.placement.cards, strict=True)
        leaving = {
            number: (link, there.offsets[number])
            for link, there, part in parts
            for number in self._blueprint.on_card(part)
            if number >= first and number in always - after
        }
        moves.experts, copies = ExpertMoves.begin(self.disk_lane, first, coming, leaving)
        moves.pending += copies

    def _on_cards(self, placement: Placement) -> set[int]:
        return {n for part in placement.cards for n in self._blueprint.on_card(part)}

    def _misfit(self, placement: Placement) -> str | None:
        if placement.sweep and placement.num_slots != self._layout.num_slots:
            return (
                f"the ring has {self._layout.num_slots} slots, laid out at the start; "
                f"{placement.num_slots} are wanted"
            )
        if placement.expert_slots != self._layout.num_expert_slots:
            return (
                f"RAM has {self._layout.num_expert_slots} slots for experts, laid out at the "
                f"start; {placement.expert_slots} are wanted"
            )
        for part, there in zip(placement.cards, self._layout.cards, strict=True):
            brings = part.decode_sweep or part.prefill_sweep
            if brings and part.slot_nbytes > there.slot_nbytes:
                return (
                    f"a slot of {part.lane} has {there.slot_nbytes} bytes, laid out at the start; "
                    f"{part.slot_nbytes} are wanted"
                )
            if brings and part.num_slots != there.num_slots:
                return (
                    f"the ring of {part.lane} has {there.num_slots} slots, laid out at the start; "
                    f"{part.num_slots} are wanted"
                )
        return None

    def abandon(self, moves: Moves) -> None:
        """Wait for what is under way, and give back what was taken for it: it will not come."""
        for call in moves.pending:  # nothing may be written there once it is given to others
            with suppress(Exception):  # it is not wanted, whatever became of it
                call.result()
        moves.pending, moves.later, moves.parcels = [], [], None
        for each in moves.taken:
            self._drop(each.homes, list(each.offsets))
        moves.taken, self._moving = [], None
        with suppress(Exception):  # a disk lane that is gone holds nothing
            moves.experts.settle(self.disk_lane, is_there=False)
        if moves.placement in self._arriving:
            self._arriving.remove(moves.placement)

    def _drop_all_but(self, placements: Sequence[Placement]) -> None:
        """Give back the homes of blocks that none of these keeps, nor any that is to come."""
        newest = max(each.placement_id for each in placements)
        coming = (each.placement for each in self._published.values())
        kept = [*placements, *self._arriving]
        kept += [each for each in coming if each.placement_id > newest]
        self._drop(
            self.homes,
            [b for b in self.homes.offsets if not any(each.resident[b] for each in kept)],
        )
        for card, there in enumerate(self.card_homes):
            held: set[int | Heads] = {
                n for each in kept for n in self._blueprint.on_card(each.cards[card])
            }
            if self._settings.are_cards_here:  # heads move at the switch
                held |= set(heads_on(self._blueprint, self.placement, self.cards[card].name))
            self._drop(there, [block for block in there.offsets if block not in held])

    def _drop_copies(self, blocks: Iterable[int]) -> None:
        for block in list(blocks):
            self._copies.discard(block)
            self._release(self._layout.expanded[block], self._copy_nbytes(block))

    def _drop(self, homes: Homes[Any], blocks: Iterable[Any]) -> None:
        for offset, nbytes in homes.drop(blocks):
            self._release(offset, nbytes)

    def _release(self, offset: int, nbytes: int) -> None:
        """Give room back to the system, unless a card may have pinned it (or it is the card's)."""
        if not self._settings.are_cards_here:
            self._arena.release(offset, nbytes)
