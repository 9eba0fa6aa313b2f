"""Are these programs those of this placement, and can they run for ever without waiting for ever?

The first half compares program and placement; the second runs a few steps on counters alone. A
lane's next instruction depends on nothing but counters, and counters only grow, so the order in
which the lanes are tried cannot change whether they get through: one order proves it for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from shadowlane.planner.catalog import Catalog, Group, router_of
from shadowlane.planner.micro_batches import check_micro_batches
from shadowlane.planner.placement import DISK_LANE, Placement, Stream
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import (
    ComputeInstruction,
    Program,
    Read,
    Wait,
    build_programs,
    units_of_experts,
)
from shadowlane.planner.search import most_kept

COUNTER_MASK = 0xFFFFFFFF


class InconsistentPrograms(Exception):
    """A bug of the planner; the text tells the story of the lane or block concerned."""


def is_reached(value: int, wanted: int) -> bool:
    """Whether the cyclic 32-bit counter `value` has come to `wanted` (both taken modulo 2**32)."""
    return (value - wanted) & COUNTER_MASK < 1 << 31


def validate(
    catalog: Catalog,
    placement: Placement,
    programs: Mapping[str, Program],
    phase: Phase = "decode",
    *,
    steps: int = 3,
    first_counter: int = COUNTER_MASK - 5,
) -> None:
    """Raises InconsistentPrograms, and ValueError for micro-batches that a placement cannot have.

    Counters start at `first_counter`, by default near the wrap.
    """
    check_micro_batches(catalog, placement)
    streams = {DISK_LANE: placement.disk_stream(phase)}
    streams |= {card.link: card.stream(phase) for card in placement.cards}
    expected = {lane.name for lane in placement.lanes} | set(streams)
    if set(programs) != expected:
        raise InconsistentPrograms(f"programs for {sorted(programs)}; lanes {sorted(expected)}")
    _check_cards(catalog, placement)
    _check_waits(programs, streams)
    _check_units(catalog, programs, placement.micro_batches_in(phase))
    _check_dependencies(catalog, placement, programs, phase)
    for stream in streams.values():
        _check_reads(catalog, placement, programs, stream, phase)
    _run_counters(placement, {phase: programs}, (phase,) * steps, first_counter)


def validate_phases(
    catalog: Catalog,
    placement: Placement,
    phases: Sequence[Phase] = ("prefill", "decode", "decode", "prefill", "prefill", "decode"),
) -> None:
    """`validate` of each phase, and steps of one after steps of another."""
    programs: dict[Phase, dict[str, Program]] = {}
    for phase in dict.fromkeys(phases):
        programs[phase] = build_programs(catalog, placement, phase)
        validate(catalog, placement, programs[phase], phase)
    _run_counters(placement, programs, phases, COUNTER_MASK - 5)


def _check_cards(catalog: Catalog, placement: Placement) -> None:
    """Cards hold what they may, and what is brought to them lies in RAM or is read."""
    for card in placement.cards:
        if card.total_nbytes > card.budget:
            raise InconsistentPrograms(
                f"{card.lane} holds {card.total_nbytes} bytes; its budget is {card.budget}"
            )
        if card.num_slots * card.slot_nbytes > card.slots_nbytes:
            raise InconsistentPrograms(
                f"{card.lane}: {card.num_slots} slots of {card.slot_nbytes} bytes in room for "
                f"{card.slots_nbytes}"
            )
        held = sum(catalog.blocks[index].held_nbytes for index in card.resident)
        if held > card.weights_nbytes:
            raise InconsistentPrograms(
                f"{card.lane}: blocks of {held} bytes in room for {card.weights_nbytes}"
            )
        for index in {*card.decode_sweep, *card.prefill_sweep}:
            if catalog.held_nbytes(index) > card.slot_nbytes:
                raise InconsistentPrograms(
                    f"{card.link} brings {catalog.held_nbytes(index)} bytes of {index} at once; a "
                    f"slot of {card.lane} has {card.slot_nbytes}"
                )
            if not (
                catalog.is_expert(index) or placement.resident[index] or index in placement.sweep
            ):
                raise InconsistentPrograms(
                    f"{card.link} brings block {index} of {catalog.blocks[index].group}, which is "
                    "neither in RAM nor read"
                )
    _check_experts(catalog, placement)


def _check_experts(catalog: Catalog, placement: Placement) -> None:
    """Each routed expert is on one card at most, and the card has a share for it in its layer.

    One lane computes a layer's router, since it chooses when it is done, and one adds up.
    """
    experts = catalog.experts
    for card in placement.cards:
        if not card.experts:
            continue
        if experts is None or len(card.experts) != experts.num_layers:
            raise InconsistentPrograms(
                f"{card.lane} holds experts of {len(card.experts)} layers; the model has "
                f"{experts.num_layers if experts else 0} with some"
            )
        held = card.num_experts * experts.slot_nbytes
        if held > card.experts_nbytes:
            raise InconsistentPrograms(
                f"{card.lane}: experts of {held} bytes in room for {card.experts_nbytes}"
            )
    for layer, group in enumerate(catalog.sparse_groups):
        assert experts is not None, "the model has routed experts"
        on_cards = [each for card in placement.cards for each in card.experts_of(layer)]
        if len(set(on_cards)) < len(on_cards) or not set(on_cards) <= set(range(experts.per_layer)):
            raise InconsistentPrograms(
                f"{group.name}: experts on cards must be different ones below "
                f"{experts.per_layer}; got {sorted(on_cards)}"
            )
        for phase in ("decode", "prefill"):
            _check_expert_shares(catalog, placement, phase, layer, group)
    _check_brought_experts(catalog, placement)


def _check_brought_experts(catalog: Catalog, placement: Placement) -> None:
    """Prompts may have any brought that live on no card; each keeps its slot in RAM meanwhile."""
    experts = catalog.experts
    if experts is None:
        return
    for card in placement.cards:
        if any(catalog.is_expert(number) for number in card.decode_sweep):
            raise InconsistentPrograms(f"{card.link} brings experts before a router has chosen")
    brought = [n for card in placement.cards for n in card.prefill_sweep if catalog.is_expert(n)]
    read = placement.prefill_sweep
    if len(set(read)) < len(read) or not set(read) <= set(brought):
        raise InconsistentPrograms(
            f"the disk must read different experts, of those that links bring; got {sorted(read)}"
        )
    if read and (placement.sweep or placement.slot_nbytes < experts.slot_nbytes):
        raise InconsistentPrograms(
            f"experts of {experts.slot_nbytes} bytes are read through slots of "
            f"{placement.slot_nbytes}, beside {len(placement.sweep)} blocks"
        )
    on_cards = {
        catalog.expert_number(layer, expert)
        for card in placement.cards
        for layer, of_layer in enumerate(card.experts)
        for expert in of_layer
    }
    if len(set(brought)) < len(brought) or on_cards.intersection(brought):
        raise InconsistentPrograms(
            "experts that are brought must be different ones that live on no card; got "
            f"{sorted(brought)} beside {sorted(on_cards)}"
        )
    room = most_kept(experts, placement.expert_slots)
    kept = len(brought) - len(read)
    if kept > room:
        raise InconsistentPrograms(
            f"{kept} experts are brought out of their slots in RAM; there is room for {room} that "
            "stay"
        )


def _check_expert_shares(
    catalog: Catalog, placement: Placement, phase: Phase, layer: int, group: Group
) -> None:
    shares = placement.shares_of(phase)[group.name]
    for card in placement.cards:
        held = len(card.experts_of(layer))
        come = len(catalog.experts_in(card.stream(phase).sweep)[layer])
        units = [share.last_unit - share.first_unit for share in shares if share.lane == card.lane]
        adds_up = int(shares[-1].lane == card.lane)
        if sum(units) != held + come + adds_up or len(units) > 1 + bool(come):
            more = f" and {come} come" * bool(come) + ", and the sum is its" * adds_up
            raise InconsistentPrograms(
                f"{group.name}: {card.lane} has a share of {sum(units)} in {phase}; "
                f"{held} experts live there{more}"
            )
    routers = placement.shares_of(phase).get(router_of(group.name), ())
    if len(routers) > 1:
        choosers = ", ".join(each.lane for each in routers)
        raise InconsistentPrograms(f"{group.name}: one lane must choose them; got {choosers}")


def compute_instructions(program: Program) -> tuple[ComputeInstruction, ...]:
    return tuple(each for each in program.instructions if isinstance(each, ComputeInstruction))


def reads(program: Program) -> tuple[Read, ...]:
    return tuple(each for each in program.instructions if isinstance(each, Read))


def _check_waits(programs: Mapping[str, Program], streams: Collection[str]) -> None:
    for name, program in programs.items():
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Read) != (name in streams):
                raise InconsistentPrograms(
                    f"{name}[{position}] is not for this lane: {instruction}"
                )
            waits = (
                instruction.consumers
                if isinstance(instruction, Read)
                else (*instruction.waits, *instruction.joins)
            )
            if isinstance(instruction, Read):
                waits = (*waits, *instruction.waits)
            for wait in waits:
                length = len(programs[wait.lane].instructions) if wait.lane in programs else 0
                if not 1 <= wait.rel <= length:
                    raise InconsistentPrograms(
                        f"{name}[{position}] {instruction} waits for {wait}, never produced: "
                        f"{wait.lane} has {length} instructions"
                    )


def _check_units(catalog: Catalog, programs: Mapping[str, Program], micro_batches: int) -> None:
    computed: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    for name, program in programs.items():
        for each in compute_instructions(program):
            what = each.first_unit, each.last_unit, name
            computed.setdefault((each.group, each.micro_batch), []).append(what)
    for group in catalog.groups:
        first_of = micro_batches - 1 if group.kind == "lm_head" else 0
        for micro_batch in range(first_of, micro_batches):
            position = 0
            for first, last, name in sorted(computed.pop((group.name, micro_batch), [])):
                if first != position or last <= first:
                    raise InconsistentPrograms(
                        f"{group.name}: {name} computes units {first}..{last}, "
                        f"expected from {position}"
                    )
                position = last
            if position != group.units:
                raise InconsistentPrograms(
                    f"{group.name}: units {position}..{group.units} are computed by nobody"
                )
    if computed:
        raise InconsistentPrograms(f"nobody wants {sorted(computed)}")


def _check_dependencies(
    catalog: Catalog, placement: Placement, programs: Mapping[str, Program], phase: Phase
) -> None:
    order = {group.name: index for index, group in enumerate(catalog.groups)}
    on_card = {card.lane: set(card.resident) for card in placement.cards}
    # lane, group, micro-batch -> instructions when it is done
    done_at: dict[tuple[str, str, int], int] = {}
    for name, program in programs.items():
        for position, each in enumerate(compute_instructions(program)):
            done_at[name, each.group, each.micro_batch] = position + 1
    for name, program in programs.items():
        waited: dict[str, int] = {}
        last_index, micro_batch = 0, 0
        stream = placement.stream_of(name, phase)
        ordinals = {block: ordinal for ordinal, block in enumerate(stream.sweep)}
        for position, each in enumerate(compute_instructions(program)):
            for wait in each.waits:
                waited[wait.lane] = max(wait.rel, waited.get(wait.lane, 0))
            index = order[each.group]
            story = f"{name}[{position}] {each}"
            if each.micro_batch > micro_batch:
                last_index, micro_batch = 0, each.micro_batch
            if index < last_index or each.micro_batch < micro_batch:
                raise InconsistentPrograms(f"{story} comes after {catalog.groups[last_index].name}")
            last_index = index
            if index:
                before = catalog.groups[index - 1].name
                peers = set(programs)
                if catalog.groups[index - 1].kind == "experts":  # who adds up waits for the others
                    peers = {placement.shares_of(phase)[before][-1].lane}
                for peer in peers:
                    needed = done_at.get((peer, before, micro_batch), 0)
                    if peer != name and waited.get(peer, 0) < needed:
                        raise InconsistentPrograms(
                            f"{story} does not wait for {peer}, which has part of {before}"
                        )
            group = catalog.groups[index]
            if group.kind == "experts" and each.last_unit == group.units:
                joined = {wait.lane: wait.rel for wait in each.joins}
                others = {
                    peer: done_at[peer, group.name, micro_batch]
                    for peer in programs
                    if peer != name and (peer, group.name, micro_batch) in done_at
                }
                if joined != others:
                    raise InconsistentPrograms(
                        f"{story} adds up experts of {sorted(others)} and waits for {each.joins}"
                    )
            if group.kind == "experts":
                _check_experts_wait(catalog, placement, phase, name, each, waited, ordinals)
            for block_index in catalog.groups[index].blocks:
                block = catalog.blocks[block_index]
                used = block.first_unit < each.last_unit and block.last_unit > each.first_unit
                ordinal = ordinals.get(block_index)
                if used and ordinal is not None and waited.get(stream.lane, 0) <= ordinal:
                    raise InconsistentPrograms(
                        f"{story} does not wait for block {block_index}, read {ordinal}"
                    )
                if (
                    used
                    and ordinal is None
                    and not (
                        block_index in on_card[name]
                        if name in on_card
                        else placement.resident[block_index]
                        or catalog.groups[index].kind == "embed"
                    )
                ):
                    raise InconsistentPrograms(f"{story} reads block {block_index}, not there")


def _check_experts_wait(
    catalog: Catalog,
    placement: Placement,
    phase: Phase,
    lane: str,
    instruction: ComputeInstruction,
    waited: Mapping[str, int],
    ordinals: Mapping[int, int],
) -> None:
    if lane not in {card.lane for card in placement.cards}:
        return
    layer = [each.name for each in catalog.sparse_groups].index(instruction.group)
    link = placement.stream_of(lane, phase).lane
    for number, unit in units_of_experts(catalog, placement, phase, lane, layer).items():
        used = instruction.first_unit <= unit < instruction.last_unit
        if used and number in ordinals and waited.get(link, 0) <= ordinals[number]:
            raise InconsistentPrograms(
                f"{lane}: {instruction} does not wait for expert {number}, read {ordinals[number]}"
            )


def _check_reads(
    catalog: Catalog,
    placement: Placement,
    programs: Mapping[str, Program],
    stream: Stream,
    phase: Phase,
) -> None:
    brought = reads(programs[stream.lane])
    if tuple(each.block for each in brought) != stream.sweep:
        raise InconsistentPrograms(f"{stream.lane} does not bring its sweep in its order")
    used_until: dict[int, dict[str, int]] = {each.block: {} for each in brought}
    groups = {group.name: group for group in catalog.groups}
    sparse = [group.name for group in catalog.sparse_groups]
    if stream.lane == DISK_LANE:
        _check_passed_on(placement, programs, used_until, phase)
    for name, program in programs.items():
        if placement.stream_of(name, phase).lane != stream.lane:
            continue
        for position, each in enumerate(compute_instructions(program)):
            for index in groups[each.group].blocks:
                block = catalog.blocks[index]
                used = block.first_unit < each.last_unit and block.last_unit > each.first_unit
                if used and index in used_until:
                    used_until[index][name] = position + 1
            if groups[each.group].kind == "experts" and stream.lane != DISK_LANE:
                layer = sparse.index(each.group)
                units = units_of_experts(catalog, placement, phase, name, layer)
                for number, unit in units.items():
                    if each.first_unit <= unit < each.last_unit and number in used_until:
                        used_until[number][name] = position + 1
    for ordinal, read in enumerate(brought):
        if read.ordinal != ordinal:
            raise InconsistentPrograms(f"{read} is at {ordinal} of the sweep")
        if {wait.lane: wait.rel for wait in read.consumers} != used_until[read.block]:
            raise InconsistentPrograms(
                f"{read}: its slot would be freed at the wrong time; used until "
                f"{used_until[read.block]}"
            )


def _check_passed_on(
    placement: Placement,
    programs: Mapping[str, Program],
    used_until: Mapping[int, dict[str, int]],
    phase: Phase,
) -> None:
    """Links take what the disk has read for them once it is there. used_until: filled in."""
    sweep = placement.disk_stream(phase).sweep
    places = {number: place for place, number in enumerate(sweep)}
    for card in placement.cards:
        for ordinal, read in enumerate(reads(programs[card.link])):
            place = places.get(read.block)
            expected = () if place is None else (Wait(DISK_LANE, place + 1),)
            if read.waits != expected:
                raise InconsistentPrograms(f"{card.link}: {read} must wait for {expected}")
            if place is not None:
                used_until[read.block][card.link] = ordinal + 1


def _run_counters(
    placement: Placement,
    programs: Mapping[Phase, Mapping[str, Program]],
    phases: Sequence[Phase],
    first_counter: int,
) -> None:
    """Steps of these phases, one after the other, on counters alone.

    The disk reads on into steps that have not begun; links may, which is left out here: who waits
    longer can only run into more deadlocks.
    """
    lanes = programs[phases[0]].keys()
    slots = {DISK_LANE: placement.num_slots} | {c.link: c.num_slots for c in placement.cards}
    compute = [lane.name for lane in placement.lanes]
    per_step = [
        {lane: len(programs[phase][lane].instructions) for lane in lanes} for phase in phases
    ]
    ends = {lane: list(accumulate(each[lane] for each in per_step)) for lane in lanes}
    retired = dict.fromkeys(lanes, 0)

    def place_of(lane: str, number: int) -> tuple[int, int]:
        """(step, place in its program) of the instruction after so many."""
        step = bisect_right(ends[lane], number)
        return step, number - (ends[lane][step - 1] if step else 0)

    def is_passed(wait: Wait, step: int) -> bool:
        base = first_counter + (ends[wait.lane][step - 1] if step else 0)
        counter = (first_counter + retired[wait.lane]) & COUNTER_MASK
        return is_reached(counter, base + wait.rel)

    def is_filled(step: int) -> bool:
        """When all compute lanes are through the one before it."""
        return not step or all(retired[lane] >= ends[lane][step - 1] for lane in compute)

    def can_retire(name: str) -> bool:
        if retired[name] == ends[name][-1]:
            return False
        step, position = place_of(name, retired[name])
        instruction = programs[phases[step]][name].instructions[position]
        if name != DISK_LANE and not is_filled(step):
            return False
        if isinstance(instruction, Read):
            if not all(is_passed(wait, step) for wait in instruction.waits):
                return False
            overwritten = retired[name] - slots[name]
            if overwritten < 0:
                return True
            old_step, old_position = place_of(name, overwritten)
            old = programs[phases[old_step]][name].instructions[old_position]
            assert isinstance(old, Read)
            return is_filled(old_step) and all(is_passed(wait, old_step) for wait in old.consumers)
        return all(is_passed(wait, step) for wait in (*instruction.waits, *instruction.joins))

    progressed = True
    while progressed:
        progressed = False
        for name in lanes:
            while can_retire(name):
                retired[name] += 1
                progressed = True
    places = {
        name: place_of(name, retired[name]) for name in lanes if retired[name] < ends[name][-1]
    }
    if places:
        story = "; ".join(
            f"{name} at {programs[phases[step]][name].instructions[position]} of step {step}"
            for name, (step, position) in places.items()
        )
        rings = ", ".join(f"{count} slots of {name}" for name, count in slots.items())
        raise InconsistentPrograms(f"deadlock with {rings}: {story}")
