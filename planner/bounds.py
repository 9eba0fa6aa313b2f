"""What no plan can beat: two lower bounds on the seconds of a step, printed beside predictions.

The resource bound asks only that the busiest resource does its work, under the best of all
feasible placements. The critical-path bound asks that the groups come one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import DECODE, CostModel, Workload
from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.placement import MIN_SLOTS, Placement, whole_pages


@dataclass(frozen=True, slots=True)
class Bounds:
    resource_s: float
    resource: str  # the one that binds: "compute", "dram" or "disk"
    resources_s: dict[str, float]  # each at its least
    critical_path_s: float


def bounds(
    catalog: Catalog, placement: Placement, cost: CostModel, *, workload: Workload = DECODE
) -> Bounds:
    """Of `placement` only the budget, the lanes and the context count, never its choices.

    Least disk time: as much as possible resident beside constants, scratch, the KV of this context
    and the smallest ring; embedding rows are gathered, and routed experts happen to be there. Least
    compute time: every group divided among the lanes so that all of them end at once. DRAM: weights
    and KV once, and what streams once more for its way in.
    """
    fixed = (
        whole_pages(catalog.constants_nbytes)
        + whole_pages(catalog.scratch_nbytes)
        + placement.kv_nbytes
    )
    swept = [
        catalog.blocks[index].held_nbytes
        for group in catalog.groups
        if group.kind != "embed"
        for index in group.blocks
    ]
    room = placement.ram - fixed
    if sum(swept) <= room:
        read = 0
    else:
        read = max(0, sum(swept) - max(0, room - MIN_SLOTS * catalog.slot_nbytes))
    # Resident or not, nothing is charged to contention here: a bound may only err downwards.
    tables = [cost.table(catalog, [lane], workload, streaming=False) for lane in placement.lanes]
    compute_s = path_s = 0.0
    for index in range(len(catalog.groups)):
        alone_s = [
            table.full_s[lane.name][index]
            for table, lane in zip(tables, placement.lanes, strict=True)
        ]
        path_s += tables[0].instruction_s
        if min(alone_s) == 0.0:
            continue  # nothing worth counting: rows of the embedding that are in RAM
        together_s = 1.0 / sum(1.0 / each for each in alone_s)
        compute_s += together_s
        # One unit cannot be divided: the longest branch has at least a whole one.
        path_s += max(together_s, min(alone_s) / catalog.groups[index].units)
    num_attn = sum(1 for group in catalog.groups if group.kind == "attn")
    sequences = workload.rows if workload.phase == "decode" else 1
    kv_read = catalog.page_nbytes / catalog.page_tokens * workload.context * sequences
    weights_read = sum(
        catalog.blocks[index].nbytes
        for group in catalog.groups
        if group.kind != "embed"
        for index in group.blocks
    )
    if catalog.experts is not None:  # each of those that a step chooses is read once
        experts = catalog.experts
        distinct = expected_distinct(experts.per_layer, experts.top_k, workload.rows)
        weights_read += int(experts.num_layers * distinct * experts.nbytes)
    dram = cost.dram_bytes_per_s(streaming=False)
    mean_nbytes = sum(swept) // len(swept) if swept else 0
    disk_s = read / cost.disk_bytes_per_s(mean_nbytes, contended=False) * cost.disk_drift
    resources = {
        "compute": compute_s,
        "dram": (weights_read + read + (kv_read if num_attn else 0.0)) / dram,
        "disk": disk_s,
    }
    resource = max(resources, key=lambda name: resources[name])
    return Bounds(resources[resource], resource, resources, path_s + tables[0].step_s)
