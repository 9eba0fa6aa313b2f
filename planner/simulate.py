"""A placement played through under a cost model: when does each lane work, when does it wait?

Discrete events, but in one pass: instructions are taken in an order in which everything they can
wait for has been timed already (by group, then by the last read they need). Reads are timed one by
one in a bare loop, so that 20,000 blocks cost milliseconds and candidates can be priced by the
dozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import DECODE, CostModel, Workload
from shadowlane.planner.hit_rate import missing_of_layer
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Share
from shadowlane.planner.program import cut

MIN_STEPS = 4  # the first is cold, the second may still profit from an empty ring


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    what: str  # group, or "block <index>"
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    step_s: float  # one step, once the ring has found its rhythm
    first_step_s: float  # the cold one, with an empty ring
    busy_s: Mapping[str, float]  # lane -> seconds at work in one steady step
    bottleneck: str  # the lane that works most
    spans: tuple[Span, ...]  # empty unless asked for


def simulate(
    catalog: Catalog,
    placement: Placement,
    cost: CostModel,
    *,
    workload: Workload = DECODE,
    steps: int = MIN_STEPS,
    record: bool = False,
) -> Simulation:
    """Seconds per step of `placement` for one kind of step, repeated."""
    return simulate_parts(
        catalog,
        placement.lanes,
        placement.shares,
        placement.resident,
        placement.sweep,
        placement.num_slots,
        cost,
        workload=workload,
        steps=steps,
        record=record,
        expert_slots=placement.expert_slots,
    )


def simulate_parts(
    catalog: Catalog,
    lanes: Sequence[LaneSpec],
    shares: Mapping[str, tuple[Share, ...]],
    resident: Sequence[bool],
    sweep: Sequence[int],
    num_slots: int,
    cost: CostModel,
    *,
    workload: Workload = DECODE,
    steps: int = MIN_STEPS,
    record: bool = False,
    expert_slots: int = 0,
) -> Simulation:
    """As `simulate`, for a candidate that is not a placement yet."""
    active_names = {share.lane for each in shares.values() for share in each}
    active = [lane for lane in lanes if lane.name in active_names]
    mean_nbytes = sum(catalog.blocks[i].held_nbytes for i in sweep) // len(sweep) if sweep else 0
    table = cost.table(catalog, active, workload, streaming=bool(sweep), block_nbytes=mean_nbytes)
    pieces = cut(catalog, shares, sweep, num_slots)
    gather_s = table.gather_s * missing_embedding(catalog, resident)
    seconds = [
        table.share_s(
            piece.lane,
            piece.group_index,
            piece.last_unit - piece.first_unit,
            catalog.groups[piece.group_index].units,
        )
        + (gather_s if catalog.groups[piece.group_index].kind == "embed" else 0.0)
        for piece in pieces
    ]
    missing_s = cost.missing_s(catalog, expert_slots, workload)
    waits = [
        missing_s if catalog.groups[piece.group_index].kind == "experts" else 0.0
        for piece in pieces
    ]
    computing_s = dict.fromkeys(active_names, 0.0)
    for piece, piece_s in zip(pieces, seconds, strict=True):
        computing_s[piece.lane] += piece_s
    held = [catalog.blocks[index].held_nbytes for index in sweep]
    read_s_per_byte = table.mean_read_s_per_byte(sum(held), max(computing_s.values()))
    read_s = [nbytes * read_s_per_byte for nbytes in held]
    num_reads = len(sweep)
    steps = steps if record else (max(MIN_STEPS, steps) if sweep else 1)

    spans: list[Span] = []
    freed = [0.0] * (num_reads * steps)  # when the slot of each read is free again
    disk_s, next_read = 0.0, 0  # the disk lane's clock, and the read it does next
    finished: list[float] = []
    now_s = 0.0
    for step in range(steps):
        base = step * num_reads
        lane_s = dict.fromkeys(active_names, now_s)
        group_index, barrier_s = 0, now_s
        for piece, piece_s, wait_s in zip(pieces, seconds, waits, strict=True):
            if piece.group_index != group_index:
                group_index, barrier_s = piece.group_index, max(lane_s.values())
            start_s = max(lane_s[piece.lane], barrier_s)
            end = base + piece.end_ordinal
            if piece.end_ordinal:
                for read in range(next_read, end):
                    begin_s = disk_s
                    if read >= num_slots and freed[read - num_slots] > begin_s:
                        begin_s = freed[read - num_slots]
                    disk_s = begin_s + read_s[read - base]
                    if record:
                        what = f"block {sweep[read - base]}"
                        spans.append(Span(DISK_LANE, what, step, begin_s, disk_s))
                next_read = max(next_read, end)
                # A block that two lanes share was timed for the first of them: it came last.
                start_s = max(start_s, disk_s)
            end_s = start_s + piece_s + wait_s
            lane_s[piece.lane] = end_s
            for read in range(base + piece.first_ordinal, end):
                freed[read] = max(freed[read], end_s)
            if record:
                name = catalog.groups[group_index].name
                spans.append(Span(piece.lane, name, step, start_s, end_s))
        now_s = max(lane_s.values()) + table.step_s
        finished.append(now_s)

    busy_s = dict.fromkeys((lane.name for lane in lanes), 0.0)
    for piece, piece_s in zip(pieces, seconds, strict=True):
        busy_s[piece.lane] += piece_s
    busy_s[DISK_LANE] = sum(read_s) + _fetching_s(catalog, expert_slots, cost, workload)
    if len(finished) >= MIN_STEPS:
        half = len(finished) // 2
        step_s = (finished[-1] - finished[half - 1]) / (len(finished) - half)
    else:
        step_s = finished[-1] / len(finished)
    return Simulation(
        step_s=step_s,
        first_step_s=finished[0],
        busy_s=busy_s,
        bottleneck=max(busy_s, key=lambda lane: busy_s[lane]),
        spans=tuple(spans),
    )


def _fetching_s(catalog: Catalog, slots: int, cost: CostModel, workload: Workload) -> float:
    """Seconds of the disk lane in a step, reading experts that RAM has not."""
    experts = catalog.experts
    if experts is None or slots >= experts.total:
        return 0.0
    is_decode = workload.phase == "decode"
    missing = missing_of_layer(experts, slots, workload.rows, is_decode=is_decode)
    nbytes = experts.num_layers * missing * experts.held_nbytes
    return cost.experts_read_s(experts, nbytes) * cost.disk_drift


def missing_embedding(catalog: Catalog, resident: Sequence[bool]) -> float:
    """The part of the embedding rows, by bytes, that a gather has to fetch from disk."""
    holder = next((group for group in catalog.groups if group.kind == "embed"), None)
    if holder is None or not holder.blocks:  # tied: the rows are those of lm_head
        holder = next((group for group in catalog.groups if group.kind == "lm_head"), None)
    if holder is None or not holder.blocks:
        return 0.0
    total = sum(catalog.blocks[index].nbytes for index in holder.blocks)
    missing = sum(catalog.blocks[i].nbytes for i in holder.blocks if not resident[i])
    return missing / total
