"""The search for a placement: sizes first, then who computes what, then what stays in RAM.

Candidates are priced by the simulator and the fastest wins; among those within `TIE` of it, the
one that is simplest to defend. So a plan is never predicted slower than a hand-made one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shadowlane.planner.catalog import Catalog, Experts
from shadowlane.planner.chunks import choose_chunk, with_beside
from shadowlane.planner.context import choose_context
from shadowlane.planner.cost import CostModel, CostTable
from shadowlane.planner.expanded import with_copies
from shadowlane.planner.hit_rate import missing_nbytes
from shadowlane.planner.pins import catalog_homes, matching
from shadowlane.planner.placement import (
    MIN_SLOTS,
    InfeasiblePlan,
    LaneSpec,
    Placement,
    Request,
    Share,
    show_nbytes,
    whole_pages,
)
from shadowlane.planner.simulate import simulate, simulate_parts
from shadowlane.planner.spread import candidates

UNDIVIDED = ("router", "experts")  # kinds of groups that are one lane's
TIE = 0.005  # predictions closer than this are the same
RING_NBYTES = 64 << 20  # a ring hides jitter of the disk; more would cost residency for nothing
RING_SLOTS = 16
RING_PART = 8  # and it takes at most this part of the bytes left for weights
SPARE_EXPERTS = 2  # slots beside those of one token's experts in one layer, to read into


@dataclass(frozen=True, slots=True)
class _Weights:
    """The blocks, sorted by what may become of them."""

    pinned: tuple[int, ...]  # kept by the user's wish
    free: tuple[int, ...]  # the planner's choice, in consumption order
    forced: tuple[int, ...]  # streamed by the user's wish
    gathered: tuple[int, ...]  # of an untied `embed`: never streamed, kept if there is room left


@dataclass(frozen=True, slots=True)
class _Candidate:
    step_s: float
    strategy: str
    resident: list[bool]
    sweep: tuple[int, ...]
    shares: dict[str, tuple[Share, ...]]


def place(
    catalog: Catalog,
    request: Request,
    cost: CostModel,
    *,
    placement_id: int = 0,
    weights: Mapping[str, float] | None = None,
    current: Placement | None = None,
    copies: Sequence[int] | None = None,
) -> Placement:
    """The best placement found for `request`.

    weights: how fast each lane counts for the split of rows; None: as fast as predicted, and the
    planner may leave a lane out. A lane of weight 0 gets nothing.
    current: what runs now. Then as little as possible moves: what is resident stays where the
    budget allows that, and where it does not, nothing else becomes resident instead.
    copies: blocks of which there are expanded copies, to be kept or dropped; None: to be chosen.

    Raises InfeasiblePlan naming each part of the sum, ValueError for a pin that matches no group.
    """

    def place_with(subchunks: int) -> Placement:
        return _place(
            catalog.with_subchunks(subchunks),
            replace(request, subchunks=subchunks),
            cost,
            placement_id,
            weights,
            current,
            copies,
        )

    asked = request.subchunks if current is None else current.subchunks
    if asked is not None:
        placement = place_with(asked)
    else:
        placement = choose_chunk(catalog, place_with(1), cost, place_with)
    return with_beside(catalog, request, placement, cost)


def _place(
    catalog: Catalog,
    request: Request,
    cost: CostModel,
    placement_id: int,
    weights: Mapping[str, float] | None,
    current: Placement | None,
    copies: Sequence[int] | None,
) -> Placement:
    """`place`, for a catalog and a request whose chunks have been chosen."""
    sorted_weights = _sort_blocks(catalog, request.pins)
    context = choose_context(catalog, request, _least_weights(catalog, request, sorted_weights))
    constants = whole_pages(catalog.constants_nbytes)
    scratch = whole_pages(catalog.scratch_nbytes)
    room = request.ram - constants - scratch - context.kv_nbytes
    if current is not None:
        sorted_weights = _anchor(catalog, request, sorted_weights, room, current)
    num_slots, kept = _ring(catalog, request, sorted_weights, room)
    slots_nbytes = num_slots * catalog.slot_nbytes
    room -= slots_nbytes + kept
    expert_slots, experts_nbytes = _expert_slots(catalog, room, current)
    room -= experts_nbytes

    def price(name: str, resident: list[bool], shares: dict[str, tuple[Share, ...]]) -> _Candidate:
        sweep = tuple(
            index
            for group in catalog.groups
            if group.kind != "embed"
            for index in group.blocks
            if not resident[index]
        )
        simulation = simulate_parts(
            catalog,
            request.lanes,
            shares,
            resident,
            sweep,
            num_slots,
            cost,
            expert_slots=expert_slots,
        )
        return _Candidate(simulation.step_s, name, resident, sweep, shares)

    # Who computes what is decided on the first way of filling RAM, which serves any split alike,
    # and once more on the way that was chosen.
    best: _Candidate | None = None
    best_name, best_suffix = "", ""
    splits = _splits(catalog, request.lanes, cost, weights)
    for suffix, shares in splits:
        name, resident = _residents(catalog, request, cost, sorted_weights, room, shares)[0]
        candidate = price(name + suffix, resident, shares)
        if best is None or _is_faster(candidate, best):
            best, best_name, best_suffix = candidate, name, suffix
    assert best is not None
    shares = best.shares
    for name, resident in _residents(catalog, request, cost, sorted_weights, room, shares)[1:]:
        candidate = price(name + best_suffix, resident, shares)
        if _is_faster(candidate, best):
            best, best_name = candidate, name
    resident = best.resident
    for suffix, shares in splits:
        if shares != best.shares:
            candidate = price(best_name + suffix, resident, shares)
            if _is_faster(candidate, best):
                best = candidate
    resident, sweep, strategy = best.resident, best.sweep, best.strategy
    if catalog.experts is not None and expert_slots < catalog.experts.total:
        strategy = f"cached experts{best_suffix}"
    held = sum(block.held_nbytes for block in catalog.blocks if resident[block.index])
    placement = Placement(
        placement_id=placement_id,
        strategy=strategy,
        lanes=request.lanes,
        resident=tuple(resident),
        sweep=sweep,
        num_slots=num_slots,
        slot_nbytes=catalog.slot_nbytes,
        context_tokens=context.tokens,
        kv_pages=context.pages,
        shares=best.shares,
        ram=request.ram,
        weights_nbytes=held,
        slots_nbytes=slots_nbytes,
        kv_nbytes=context.kv_nbytes,
        scratch_nbytes=scratch,
        constants_nbytes=constants,
        read_nbytes_per_step=sum(catalog.blocks[index].held_nbytes for index in sweep)
        + missing_nbytes(catalog.experts, expert_slots),
        predicted_step_s=best.step_s,
        notes=context.notes + _notes(catalog, resident, cost),
        expert_slots=expert_slots,
        experts_nbytes=experts_nbytes,
        subchunks=request.subchunks or 1,
    )
    placement = with_copies(catalog, request, placement, cost, copies)
    assert placement.total_nbytes <= request.ram, placement
    return placement


def later_slots(slot_nbytes: int) -> int:
    """Slots of the ring of a plan that needs none yet, should it ever have to stream."""
    return max(MIN_SLOTS, min(RING_SLOTS, RING_NBYTES // max(1, slot_nbytes)))


def least_slots(experts: Experts) -> int:
    """The fewest experts in RAM with which a mixture can run."""
    return min(experts.total, experts.top_k + SPARE_EXPERTS)


def most_kept(experts: Experts, slots: int) -> int:
    """Experts that may keep their slots in RAM, whatever routers choose. With a slot for each of
    all experts none is ever in need of another's."""
    return slots if slots >= experts.total else max(0, slots - least_slots(experts))


def most_more_kept(experts: Experts, slots: int, kept: int) -> int:
    """Experts that may keep their slots beside `kept` others while a plan changes to another.

    What moves meanwhile may hold up to half of the slots, too.
    """
    if slots >= experts.total:
        return slots
    return max(0, most_kept(experts, slots) - max(kept, slots // 2))


def _sort_blocks(catalog: Catalog, pins: Mapping[str, str]) -> _Weights:
    groups = [(group.name, group.kind) for group in catalog.groups]
    for pattern in pins:
        routed = next((name for name, kind in matching(groups, pattern) if kind == "experts"), None)
        if routed is not None:
            raise ValueError(
                f"pin {pattern!r} must not match routed experts, which share RAM by use and cannot "
                f"be pinned; it matches {routed}"
            )
    homes = catalog_homes(catalog, pins, cards=0)
    pinned: list[int] = []
    free: list[int] = []
    forced: list[int] = []
    gathered: list[int] = []
    for group in catalog.groups:
        for index in group.blocks:
            wish = homes.get(group.name)
            if wish == "cpu":
                pinned.append(index)
            elif group.kind == "embed":
                if wish is None:
                    gathered.append(index)
            elif wish == "disk":
                forced.append(index)
            elif catalog.experts is not None:  # every token needs it, and only some each expert
                pinned.append(index)
            else:
                free.append(index)
    return _Weights(tuple(pinned), tuple(free), tuple(forced), tuple(gathered))


def _is_faster(candidate: _Candidate, best: _Candidate) -> bool:
    """By more than a tie: `best` was named first, and is the simpler to defend."""
    return candidate.step_s < best.step_s * (1 - TIE)


def _held(catalog: Catalog, blocks: Sequence[int]) -> int:
    return sum(catalog.blocks[index].held_nbytes for index in blocks)


def _least_weights(catalog: Catalog, request: Request, weights: _Weights) -> tuple[int, int, int]:
    """Bytes for all weights to stay, for the pinned ones, and for the smallest ring."""
    ring = (request.num_slots or MIN_SLOTS) * catalog.slot_nbytes
    pinned = _held(catalog, weights.pinned)
    if catalog.experts is not None:
        experts = catalog.experts
        least = least_slots(experts) * experts.slot_nbytes
        return pinned + experts.total * experts.slot_nbytes, pinned, least
    everything = pinned + _held(catalog, weights.free) + (ring if weights.forced else 0)
    return everything, pinned, ring


def _ring(catalog: Catalog, request: Request, weights: _Weights, room: int) -> tuple[int, int]:
    """(number of slots, bytes of pinned blocks); no slots where nothing has to stream."""
    pinned = _held(catalog, weights.pinned)
    if not weights.forced and pinned + _held(catalog, weights.free) <= room:
        return 0, pinned
    if request.num_slots is not None:
        return request.num_slots, pinned
    # Powers of two, so that a slightly different budget asks for the same ring.
    affordable = min(RING_NBYTES, (room - pinned) // RING_PART) // max(1, catalog.slot_nbytes)
    slots = MIN_SLOTS
    while slots * 2 <= min(RING_SLOTS, affordable):
        slots *= 2
    return slots, pinned


def _expert_slots(catalog: Catalog, room: int, current: Placement | None) -> tuple[int, int]:
    """(slots, bytes) for the experts of a mixture; as many as there are while one runs."""
    experts = catalog.experts
    if experts is None:
        return 0, 0
    slots = min(experts.total, room // experts.slot_nbytes)
    if current is not None:
        if slots < current.expert_slots:
            parts = {f"{current.expert_slots} experts": current.expert_slots * experts.slot_nbytes}
            raise InfeasiblePlan("a running engine keeps its experts", parts, max(0, room))
        slots = current.expert_slots
    return slots, slots * experts.slot_nbytes


def _anchor(
    catalog: Catalog, request: Request, weights: _Weights, room: int, current: Placement
) -> _Weights:
    """What may still change beside `current`: more stays, or else only less."""

    def is_resident(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index for index in blocks if current.resident[index])

    def is_missing(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index for index in blocks if not current.resident[index])

    staying = weights.pinned + is_resident(weights.free) + is_resident(weights.gathered)
    more = _Weights(
        pinned=staying,
        free=is_missing(weights.free),
        forced=weights.forced,
        gathered=is_missing(weights.gathered),
    )
    num_slots, kept = _ring(catalog, request, more, room)
    if num_slots * catalog.slot_nbytes + kept <= room:
        return more
    return _Weights(
        pinned=weights.pinned,
        free=is_resident(weights.free),
        forced=weights.forced + is_missing(weights.free),
        gathered=is_resident(weights.gathered),
    )


def _residents(
    catalog: Catalog,
    request: Request,
    cost: CostModel,
    weights: _Weights,
    room: int,
    shares: Mapping[str, tuple[Share, ...]],
) -> list[tuple[str, list[bool]]]:
    """Candidates for the `room` bytes beside the pinned blocks: (name, resident per block)."""
    found: list[tuple[str, list[bool]]] = []
    if _held(catalog, weights.free) <= room:
        named = [("all resident" if not weights.forced else "pinned", [True] * len(weights.free))]
    else:
        pace_s = _pace(catalog, request.lanes, cost, weights, shares)
        named = candidates(catalog, weights.free, pace_s, room)
    for name, keep in named:
        resident = [False] * len(catalog.blocks)
        left = room
        for index in weights.pinned:
            resident[index] = True
        for index, is_kept in zip(weights.free, keep, strict=True):
            if is_kept:
                resident[index] = True
                left -= catalog.blocks[index].held_nbytes
        if left < 0:
            raise AssertionError(f"{name} keeps {-left} bytes too many")
        for index in weights.gathered:
            if catalog.blocks[index].held_nbytes <= left:
                resident[index] = True
                left -= catalog.blocks[index].held_nbytes
        found.append((name, resident))
    return found


def _pace(
    catalog: Catalog,
    lanes: Sequence[LaneSpec],
    cost: CostModel,
    weights: _Weights,
    shares: Mapping[str, tuple[Share, ...]],
) -> list[float]:
    """Per free block, the compute time since the free block before it."""
    table = cost.table(catalog, lanes, streaming=True)
    free = set(weights.free)
    pace: list[float] = []
    carried = 0.0  # of groups without free blocks
    for index, group in enumerate(catalog.groups):
        seconds = max(
            table.share_s(share.lane, index, share.last_unit - share.first_unit, group.units)
            for share in shares[group.name]
        )
        mine = [block for block in group.blocks if block in free]
        if not mine:
            carried += seconds
            continue
        total = max(1, _held(catalog, mine))
        for block in mine:
            part = catalog.blocks[block].held_nbytes / total
            pace.append(carried + seconds * part)
            carried = 0.0
    return pace


def split_rows(
    catalog: Catalog, lanes: Sequence[LaneSpec], speeds: Mapping[str, Sequence[float]]
) -> dict[str, tuple[Share, ...]]:
    """Shares of each group in proportion to the speed of each lane on it, whole units, exactly.

    speeds: lane -> units per second (any scale) of each group by its index; 0 leaves a lane out.
    The largest remainders round up; `embed` goes to the first lane with any speed. Who chooses
    experts and computes them is one lane, the fastest: a choice is made once.
    """
    active = [lane.name for lane in lanes if any(speed > 0 for speed in speeds[lane.name])]
    if not active:
        raise ValueError("at least one lane must have a speed above 0; got none")
    shares: dict[str, tuple[Share, ...]] = {}
    fastest = max(active, key=lambda name: sum(speeds[name]))
    for index, group in enumerate(catalog.groups):
        if group.kind in UNDIVIDED:
            shares[group.name] = (Share(fastest, 0, group.units),)
            continue
        total = sum(speeds[name][index] for name in active)
        if group.kind == "embed" or len(active) == 1 or total <= 0:
            shares[group.name] = (Share(active[0], 0, group.units),)
            continue
        exact = [group.units * speeds[name][index] / total for name in active]
        counts = [int(each) for each in exact]
        by_rest = sorted(range(len(active)), key=lambda i: counts[i] - exact[i])
        for position in by_rest[: group.units - sum(counts)]:
            counts[position] += 1
        first = 0
        parts: list[Share] = []
        for name, count in zip(active, counts, strict=True):
            if count:
                parts.append(Share(name, first, first + count))
                first += count
        shares[group.name] = tuple(parts)
    return shares


def with_weights(
    catalog: Catalog, placement: Placement, cost: CostModel, weights: Mapping[str, float]
) -> Placement:
    """The same bytes in the same places, other shares: a switch to it moves nothing.

    weights: lane -> part of the rows its speed would earn it; 0 drops it; missing lanes count 1.
    """
    table = cost.table(catalog, placement.lanes, streaming=False)
    speeds = {
        lane.name: _speeds(table, lane.name, weights.get(lane.name, 1.0))
        for lane in placement.lanes
    }
    changed = replace(placement, shares=split_rows(catalog, placement.lanes, speeds))
    return replace(changed, predicted_step_s=simulate(catalog, changed, cost).step_s)


def _splits(
    catalog: Catalog,
    lanes: Sequence[LaneSpec],
    cost: CostModel,
    weights: Mapping[str, float] | None,
) -> list[tuple[str, dict[str, tuple[Share, ...]]]]:
    """(suffix of the plan's name, shares): all lanes by their speed, and each lane alone."""
    table = cost.table(catalog, lanes, streaming=False)
    speeds = {lane.name: _speeds(table, lane.name, 1.0) for lane in lanes}
    if weights is not None:
        speeds = {
            lane.name: _speeds(table, lane.name, weights.get(lane.name, 1.0)) for lane in lanes
        }
        return [("", split_rows(catalog, lanes, speeds))]
    found = [("", split_rows(catalog, lanes, speeds))]
    if len(lanes) > 1:
        for lane in lanes:
            alone = {
                name: each if name == lane.name else [0.0] * len(each)
                for name, each in speeds.items()
            }
            found.append((f", {lane.name} alone", split_rows(catalog, lanes, alone)))
    return found


def _speeds(table: CostTable, lane: str, weight: float) -> list[float]:
    return [weight / max(seconds, 1e-12) for seconds in table.full_s[lane]]


def _notes(catalog: Catalog, resident: Sequence[bool], cost: CostModel) -> tuple[str, ...]:
    notes = []
    missing = [
        catalog.blocks[index].held_nbytes
        for group in catalog.groups
        if group.kind == "embed"
        for index in group.blocks
        if not resident[index]
    ]
    if missing:
        notes.append(f"{show_nbytes(sum(missing))} of embedding rows are gathered from disk")
    if not cost.measured:
        notes.append("nothing was measured here yet: speeds are predicted from assumed figures")
    return tuple(notes)
