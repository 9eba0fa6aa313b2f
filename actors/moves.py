"""What lives where in the arena, and what is on its way there beside the steps that run.

Who publishes placements has `start` bring what one of them adds, calls `go_on` until all of it is
there, and then gives it to the lanes. Until then, and again once `drop_all_but` leaves it out, a
placement's blocks may lie anywhere or nowhere. Steps never wait for any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_crew import answer_of
from shadowlane.actors.expert_moves import ExpertMoves
from shadowlane.actors.held_heads import CardSizes, Heads, heads_on
from shadowlane.actors.homes import Homes
from shadowlane.actors.hosts import LaneDied, Pending, Remote
from shadowlane.ops.errors import ModelError
from shadowlane.planner.placement import Placement

Progress = Callable[[str, float | None], None]


class Lanes(Protocol):
    """Who moves; a lane that failed is another one afterwards."""

    cards: list[Remote]
    links: list[Remote]

    @property
    def disk_lane(self) -> Remote: ...


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


class Mover:
    """See the module."""

    def __init__(self, lanes: Lanes, blueprint: Blueprint) -> None:
        self._lanes = lanes
        self._blueprint = blueprint
        self.forget()

    def forget(self) -> None:
        """As before the first arena: nothing is on its way, and nothing is held."""
        self._arriving: list[Placement] = []  # what is moved for, and not yet published
        self._moving: Moves | None = None  # under way
        # placement -> experts in RAM that left cards for it
        self._held: dict[int, list[int]] = {}
        # placement -> arena offsets of the experts that it brings: they keep their slots
        self._sources: dict[int, dict[int, int]] = {}
        self._landing: Pending | None = None  # the newest call that uses the landing place

    def open(self, arena: Arena, layout: ArenaLayout) -> None:
        """Nothing lives in the arena yet."""
        self._arena, self._layout = arena, layout
        self._are_cards_here = bool(layout.cards) and not layout.is_emulated
        sizes = self._blueprint.held_nbytes
        self.homes: Homes[int] = Homes(layout.weights, layout.weights_nbytes, sizes)
        of_cards = CardSizes(self._blueprint, layout.num_pages)
        self.card_homes: list[Homes[int | Heads]] = [
            Homes(card.weights, card.weights_nbytes, of_cards) for card in layout.cards
        ]

    def wait_for_landing(self) -> None:
        """Nothing uses the landing place when this returns; the abort word ends copies."""
        if self._landing is not None:
            with suppress(Exception):  # whoever waits for it is told
                self._landing.result()

    # -- what lives where

    def homes_of(self, placement: Placement) -> dict[int, int]:
        """Arena offset of each resident block of a placement."""
        return {
            index: self.homes.offsets[index]
            for index, kept in enumerate(placement.resident)
            if kept
        }

    def sources_of(self, placement: Placement) -> dict[int, int]:
        """Arena offset of whatever links may have to bring under a placement."""
        return self.homes_of(placement) | self._sources.get(placement.placement_id, {})

    def release(self, placement_id: int) -> None:
        """No step runs under it any more: experts that had slots for its sake may lose them."""
        self.release_experts(placement_id)
        self._release_sources(placement_id)

    def arrived(self, placement: Placement) -> None:
        """Steps run under it from now on: what left cards for it is as any others are."""
        for each in [each for each in self._held if each <= placement.placement_id]:
            self.release_experts(each)

    def drop_all_but(self, placements: Sequence[Placement], now: Placement) -> None:
        """Give back the homes of what none of these keeps, nor any that is moved for.

        now: what steps run under.
        """
        kept = [*placements, *self._arriving]
        self._drop(
            self.homes,
            [b for b in self.homes.offsets if not any(each.resident[b] for each in kept)],
        )
        for card, there in enumerate(self.card_homes):
            held: set[int | Heads] = {
                n for each in kept for n in self._blueprint.on_card(each.cards[card])
            }
            if self._are_cards_here:  # heads move at the switch
                held |= set(heads_on(self._blueprint, now, self._lanes.cards[card].name))
            self._drop(there, [block for block in there.offsets if block not in held])

    def _drop(self, homes: Homes[Any], blocks: Iterable[Any]) -> None:
        for offset, nbytes in homes.drop(blocks):
            self.free(offset, nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give room back to the system, unless a card may have pinned it (or it is the card's)."""
        if not self._are_cards_here:
            self._arena.release(offset, nbytes)

    # -- moves beside steps

    def start(self, placement: Placement, now: Placement, others: Sequence[Placement]) -> Moves:
        """Begin to bring what a placement adds into RAM and onto cards, beside what is there.

        Steps go on meanwhile. The rings stay as they were laid out, so a placement that wants
        another is refused. now: what steps run under; others: that the lanes know.
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
            self._exchange_experts(moves, now, others)
        except LaneDied:
            self.abandon(moves)
            raise
        if taken:
            moves.pending.append(self._lanes.disk_lane.call("load", taken))
        for link, each in zip(self._lanes.links, moves.taken[1:], strict=True):
            if each.offsets:
                moves.later.append((link, each.offsets))
                if not self._are_cards_here:
                    self._read_for_cards(moves, each.offsets)
        return moves

    def go_on(self, moves: Moves) -> bool:
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
                kept = moves.experts.settle(self._lanes.disk_lane, is_there=True)
                self._held[moves.placement.placement_id] = kept
                if not self.keep_sources(moves.placement):
                    moves.why = "experts that are to be brought to cards have no slots in RAM"
                    self.release_experts(moves.placement.placement_id)
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
            moves.experts.settle(self._lanes.disk_lane, is_there=False)
        if moves.placement in self._arriving:
            self._arriving.remove(moves.placement)

    def _misfit(self, placement: Placement) -> str | None:
        reads = placement.sweep or placement.prefill_sweep
        if reads and placement.num_slots != self._layout.num_slots:
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

    def _read_for_cards(self, moves: Moves, offsets: Mapping[int, int]) -> bool:
        """Begin to read what cards want and RAM has at no home of its own. Whether there is any.

        NOTE: slots of experts are no homes: what is there may have to go at any moment, unless it
        is held.
        """
        there = {*self.homes.offsets, *moves.experts.held, *moves.read}
        read = {number: at for number, at in offsets.items() if number not in there}
        if read:
            moves.read.update(read)
            moves.pending.append(self._lanes.disk_lane.call("load", read))
        return bool(read)

    def _move_to_cards(self, moves: Moves) -> None:
        """Out of RAM where a block is there; else off the disk, and then the time of its copy."""
        if self._are_cards_here:
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

    # -- routed experts

    def _exchange_experts(self, moves: Moves, now: Placement, others: Sequence[Placement]) -> None:
        """Begin what `ExpertMoves` says. Raises LaneDied."""
        if self._blueprint.experts is None:
            return
        first = len(self._blueprint.sources)
        coming = [number for each in moves.taken[1:] for number in each.offsets if number >= first]
        after = self._on_cards(moves.placement)
        # NOTE: nobody may ask for what leaves before it is in RAM, and a placement that is to come
        # into force before this one would, of what it has on no card.
        known = [now, *self._arriving, *others]
        before = [each for each in known if each.placement_id < moves.placement.placement_id]
        always = set.intersection(*map(self._on_cards, before))
        parts = zip(self._lanes.links, self.card_homes, now.cards, strict=True)
        leaving = {
            number: (link, there.offsets[number])
            for link, there, part in parts
            for number in self._blueprint.on_card(part)
            if number >= first and number in always - after
        }
        brought = set(self.brought_experts(moves.placement))  # which must have slots
        leaving = dict(sorted(leaving.items(), key=lambda each: each[0] not in brought))
        moves.experts, copies = ExpertMoves.begin(self._lanes.disk_lane, first, coming, leaving)
        moves.pending += copies

    def _on_cards(self, placement: Placement) -> set[int]:
        return {n for part in placement.cards for n in self._blueprint.on_card(part)}

    def brought_experts(self, placement: Placement) -> list[int]:
        """The routed experts that come to cards out of slots in RAM, by their numbers."""
        return sorted(placement.experts_out_of_ram(self._blueprint.catalog))

    def keep_sources(self, placement: Placement) -> bool:
        """Let the experts that a placement brings keep their slots. False: some have none."""
        brought = self.brought_experts(placement)
        if not brought:
            return True
        first = len(self._blueprint.sources)
        keys = [number - first for number in brought]
        kept = self._lanes.disk_lane.call("keep_experts_in_place", keys).result()
        if kept:
            held = {first + key: at for key, at in kept.items()}
            self._sources[placement.placement_id] = held
        return bool(kept)

    def release_experts(self, placement_id: int) -> None:
        """Those that left cards for a placement may lose their slots as any others."""
        first = len(self._blueprint.sources)
        ExpertMoves(first).release(self._lanes.disk_lane, self._held.pop(placement_id, []))

    def _release_sources(self, placement_id: int) -> None:
        """What a placement brought may lose its slots: no step runs under it any more."""
        first = len(self._blueprint.sources)
        numbers = list(self._sources.pop(placement_id, {}))
        ExpertMoves(first).release(self._lanes.disk_lane, numbers)

    def forget_holds(self) -> None:
        """The disk lane begins anew and gives all slots of experts away as it likes.

        So nothing may be on its way to one any more, nor count on one. The abort word ends copies.
        """
        self._held, self._sources = {}, {}
        if self._moving is not None:
            for each in self._moving.pending:
                with suppress(Exception):  # told to who waits for it
                    each.result()
            self._moving.experts = ExpertMoves()

    # -- onto cards that are here, through the landing place

    def load_cards(self, tell: Progress | None = None) -> None:
        """Bring what lives on cards that are here; their lanes must be open, and none running.

        Off the disk a block lands in RAM first, together with as many others as there is room for.
        """
        if not self._are_cards_here:
            return
        sizes = self._blueprint.held_nbytes
        wanted: list[dict[int, int]] = [
            {each: at for each, at in there.offsets.items() if not isinstance(each, Heads)}
            for there in self.card_homes
        ]
        total = sum(sizes[block] for offsets in wanted for block in offsets)
        done = 0
        for link, offsets in zip(self._lanes.links, wanted, strict=True):
            for call, nbytes in self._parcels_for(link, offsets, {}):
                answer_of(call, self._lanes.cards)
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
                yield self._lanes.disk_lane.call("load", missing), 0
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
