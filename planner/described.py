"""A profile of a machine that is described and not here: what its file says of processor and disk.

For plans without cards, which are priced by a profile (`cost.py`); with cards there is no profile,
see `hybrid.py`. Both take the same seconds from the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import Workload, touched_nbytes
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.placement import LaneSpec
from shadowlane.planner.profile import DiskFigure, GroupFigure, Phase, Profile

DECODE_ROWS = (1, 2, 4, 8)
CONTEXTS = (1, 512, 4096)
READ_DEPTH = 4
LEAST_PART = 0.15  # of the DRAM port that cores get, however busy the disk is


def profile_of(machine: Hardware, catalog: Catalog, lanes: Sequence[LaneSpec]) -> Profile:
    """`lanes` share the processor alike. What the file is silent about stays unmeasured."""
    dram = machine.dram_bytes_per_s
    left = max(dram - machine.disk_bytes_per_s, dram * LEAST_PART)
    figures = [
        figure
        for threads in {lane.threads for lane in lanes}
        for figure in _groups(machine, catalog, threads, len(lanes))
    ]
    return Profile(
        hardware=machine.name,
        model=catalog.model,
        groups=tuple(dict.fromkeys(figures)),
        disk=(DiskFigure(catalog.slot_nbytes, READ_DEPTH, machine.disk_bytes_per_s),),
        dram_bytes_per_s=min(dram, machine.cpu_bytes_per_s),
        dram_contended_bytes_per_s=min(left, machine.cpu_bytes_per_s),
        instruction_s=machine.cpu_launch_s,
        step_s=0.0,
    )


def _groups(
    machine: Hardware, catalog: Catalog, threads: int, num_lanes: int
) -> Iterator[GroupFigure]:
    """Whole groups on one lane, beside the launch that each instruction costs."""
    works: list[tuple[Phase, int]] = [("decode", rows) for rows in DECODE_ROWS]
    works += [("prefill", max(1, catalog.subchunk_rows // 2)), ("prefill", catalog.subchunk_rows)]
    for group in catalog.groups:
        if group.kind == "embed":
            continue
        for phase, rows in works:
            for context in CONTEXTS if group.kind == "attn" else (0,):
                flops = group.flops_per_row * rows * max(1, context)
                seconds = num_lanes * max(
                    touched_nbytes(catalog, group, Workload(phase, rows, context))
                    / machine.cpu_bytes_per_s,
                    flops / machine.cpu_flops,
                )
                yield GroupFigure(
                    lane_kind="cpu",
                    threads=threads,
                    kind=group.kind,
                    layout=group.layout,
                    units=group.units,
                    cols=group.cols,
                    phase=phase,
                    rows=rows,
                    context=context,
                    seconds=seconds,
                )
