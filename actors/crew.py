"""The lanes of an engine: their processes, the placements they hold, and what lives in the arena.

Starts them, gives them placements, moves the sweep from one placement to the next, and sets all
going again when one has failed. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import LINK_COUNTER, STEP_COUNTER, Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_crew import (
    ChangeOfHeads,
    changes_of_heads,
    choose_copier,
    use_process,
    wait_between_steps,
)
from shadowlane.actors.copy_choice import Choice
from shadowlane.actors.copy_ring import ring_nbytes
from shadowlane.actors.disk_sweep import Sweep
from shadowlane.actors.held_heads import heads_on, page_nbytes
from shadowlane.actors.hosts import Host, Pending, Remote, Settled
from shadowlane.actors.moves import Mover, Moves, Progress
from shadowlane.actors.recovery import (
    find_failure,
    kill_quietly,
    set_abort,
    settle_counters,
    wait_until_parked,
)
from shadowlane.actors.requests import lanes_of
from shadowlane.actors.spec import EngineSettings
from shadowlane.ops.atomics import counter_value
from shadowlane.ops.files import ModelFiles
from shadowlane.planner.heat import Heat
from shadowlane.planner.placement import DISK_LANE, Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program, build_programs
from shadowlane.planner.validate import is_reached

NO_SOURCES = "experts that are brought to cards must have slots in RAM"
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
        self._sweep_phase: Phase  # that the disk reads for
        self._opened: list[Pending]  # of lanes that map an arena
        self._choices: dict[int, Choice]  # who copies to each card that is here
        self.mover = Mover(self, blueprint)
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
        self.mover.open(arena, layout)
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
        self.mover.wait_for_landing()
        set_abort(self._arena, self._layout, False)
        settle_counters(self._arena, self._layout, step, self.lane_bases, self._link_bases)
        self._brought = None
        for ring in self._layout.copy_rings:  # what was on its way is not wanted any more
            self._arena.view(ring, np.uint8, ring_nbytes())[:] = 0
        for each in self._open_lanes():
            each.result()
        self._use_processes()
        self.mover.load_cards()
        if self._blueprint.experts is not None:
            self.disk_lane.call("keep_experts", self._heat, self._settings.expert_policy).result()
        # What an older placement alone had in memory is gone, and no step will run under it.
        now = self.placement.placement_id
        self._published = {key: each for key, each in self._published.items() if key >= now}
        for published in list(self._published.values()):
            if not self.mover.keep_sources(published.placement):
                raise ValueError(NO_SOURCES)
            for answer in self.publish(published.placement):
                answer.pending.result()
        self._start_sweep(self.placement, keeps_ring=False)
        self._leave_to_cards(self.placement)
        self.run()

    def _replace_lost(self) -> None:
        """Wait until every loop has ended; new processes for lanes that have none any more."""
        lost = wait_until_parked(self.runs)
        self.runs = {}
        self.mover.forget_holds()
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
        self._sweep_phase: Phase = "decode"
        self._opened = []
        self._choices = {}
        self.mover.forget()

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
        homes, copies = self.mover.homes_of(placement), self.copies_of(placement)
        calls: list[tuple[Remote, tuple[object, ...]]] = []
        for lane in self.cpus:
            calls.append((lane, (self._of_lane(programs, lane), homes, copies)))
        there_of = self.mover.card_homes
        for lane, part, there in zip(self.cards, placement.cards, there_of, strict=True):
            held = {each: there.offsets[each] for each in self._blueprint.on_card(part)}
            if self._settings.are_cards_here:
                now = heads_on(self._blueprint, self.placement, lane.name)
                heads = {each: there.offsets.get(each) for each in now}
                calls.append((lane, (programs, held, heads)))
            else:
                calls.append((lane, (self._of_lane(programs, lane), held)))
        sources = self.mover.sources_of(placement)
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
        if placement.has_prefill_programs:
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
        self.mover.release(placement_id)
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
        keeps_ring &= self._sweep_phase == "decode"
        changes = [] if is_first else changes_of_heads(self._blueprint, self.placement, placement)
        page_tokens, max_pages = self._blueprint.catalog.page_tokens, self._layout.max_pages
        pages = self._pages_in_use(page_tokens, max_pages) if changes else ()
        wait_between_steps([self._leave_cached(each, pages) for each in changes])
        self._start_sweep(placement, keeps_ring)
        if self.placement.num_slots and not placement.num_slots:
            self._give_ring_back()
        self._leave_to_cards(placement)
        self.placement = placement
        self._drop_all_but([placement])
        if self._settings.are_cards_here:
            wait_between_steps([self._take_cached(each, pages) for each in changes])
        self.mover.arrived(placement)

    def _give_ring_back(self) -> None:
        """The ring that nothing comes into any more: other blocks have its part of the budget."""
        if not self._settings.are_cards_here:  # there its pages are pinned
            nbytes = self.placement.num_slots * self.placement.slot_nbytes
            self._arena.release(self._layout.ring, nbytes)

    def start_moving(self, placement: Placement) -> Moves:
        """Begin to bring what a placement adds; see `Mover.start`."""
        others = [each.placement for each in self._published.values()]
        return self.mover.start(placement, self.placement, others)

    def _drop_all_but(self, placements: Sequence[Placement]) -> None:
        """Give back the homes of blocks that none of these keeps, nor any that is to come."""
        newest = max(each.placement_id for each in placements)
        coming = (each.placement for each in self._published.values())
        later = [each for each in coming if each.placement_id > newest]
        self.mover.drop_all_but([*placements, *later], self.placement)

    def _leave_cached(self, change: ChangeOfHeads, pages: Sequence[int]) -> Pending:
        """Of a card that is emulated, the time of all that moves; its bytes stay."""
        if self._settings.are_cards_here:
            return self.cards[change.card].call("leave_cached", change.left, pages)
        nbytes = page_nbytes(self._blueprint) * len(pages) * change.num_moved
        if not nbytes:
            return Settled(None)
        return self.links[change.card].call("move_cached", nbytes)

    def _take_cached(self, change: ChangeOfHeads, pages: Sequence[int]) -> Pending:
        there = self.mover.card_homes[change.card]
        heads = {each: there.take([each]).get(each) for each in change.come}
        return self.cards[change.card].call("take_cached", change.left, heads, pages)

    def _start_sweep(self, placement: Placement, keeps_ring: bool, phase: Phase = "decode") -> None:
        """Tell the disk lane what to read from now on. `keeps_ring`: what was read ahead counts."""
        if not keeps_ring:
            self.disk_base = self.disk_lane.call("park").result()
        published = self._published[placement.placement_id]
        programs = published.programs
        if placement.prefill_sweep:  # each phase has its own, and is told so when it begins
            programs = {"decode": programs.get(phase, programs["decode"])}
        counters = {lane.name: number for number, lane in enumerate(self.lanes)}
        counters |= {part.link: LINK_COUNTER + n for n, part in enumerate(placement.cards)}
        step = self._arena.base + self._layout.counter(STEP_COUNTER)
        sweep = Sweep.of(
            programs, placement.num_slots, self.disk_base, counter_value(step) + 1, counters
        )
        homes = self.mover.homes_of(placement)
        self.disk_lane.call("adopt", sweep, homes, placement.placement_id).result()
        self._sweep_phase = phase

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
        one is another: it cannot be more than the ring holds. What the disk has read ahead is, too,
        where it reads in prompts alone. Raises LaneDied.
        """
        kind = self.placement.placement_id, phase
        drops = self._brought not in (None, kind) or self._is_link_behind()
        if drops:
            for card, part in enumerate(self.placement.cards):
                slots = max(part.num_slots, self._layout.cards[card].num_slots)
                self._link_bases[card] += slots + 1  # never where it is: it begins anew
        if self.placement.prefill_sweep and (drops or phase != self._sweep_phase):
            self._start_sweep(self.placement, keeps_ring=False, phase=phase)
        self._brought = kind
        return self._link_bases

    def _is_link_behind(self) -> bool:
        """Whether one has not come to the end of the step before, where it needs the disk for that:
        the step was left out, or nobody chose the last of what came."""
        if self._sweep_phase == "decode":
            return False
        for card, part in enumerate(self.placement.cards):
            if part.stream("prefill").sweep:  # others never publish anything in such a step
                at = self._arena.base + self._layout.counter(LINK_COUNTER + card)
                if not is_reached(counter_value(at), self._link_bases[card]):
                    return True
        return False

    def finish_step(self, phase: Phase) -> None:
        """Count a whole step of the current placement as retired."""
        for number, length in enumerate(self.lengths(phase)):
            self.lane_bases[number] += length
        self.disk_base += len(self.placement.disk_stream(phase).sweep)
        for card, part in enumerate(self.placement.cards):
            self._link_bases[card] += len(part.stream(phase).sweep)

    def lengths(self, phase: Phase) -> tuple[int, ...]:
        """Instructions of each compute lane in a step of the current placement."""
        lengths = self._published[self.placement.placement_id].lengths
        return lengths.get(phase, lengths["decode"])

    # -- blocks

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
        homes = self.mover.homes.take(
            index for index, kept in enumerate(placement.resident) if kept
        )
        sizes = self._blueprint.held_nbytes
        total = sum(self._blueprint.sources[block].nbytes for block in homes)
        jobs: list[tuple[str, tuple[object, ...]]] = [("load", (homes,))]
        for part, there in zip(placement.cards, self.mover.card_homes, strict=True):
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
            keys = [number - first for number in self.mover.brought_experts(placement)]
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
        if not self.mover.keep_sources(placement):
            raise RuntimeError(NO_SOURCES)
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

    def _drop_copies(self, blocks: Iterable[int]) -> None:
        for block in list(blocks):
            self._copies.discard(block)
            self.mover.free(self._layout.expanded[block], self._copy_nbytes(block))
