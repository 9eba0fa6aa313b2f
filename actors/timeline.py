"""The last steps of every lane as a timeline for Perfetto: one row per worker, with waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shadowlane.planner.catalog import Catalog

LANE_PROCESS = {"cpu": 1, "disk": 100}
WAIT_NS = 1000  # shorter gaps are the walk itself


def make_timeline(
    catalog: Catalog,
    workers: Iterable[tuple[int, int, np.ndarray]],
    disk_spans: np.ndarray,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Trace events, JSON-able.

    workers: (lane, worker, spans), spans int64 [n, 5] as `ops/table.py` has them; disk_spans: int64
    [n, 5]: step, block, start_ns, end_ns, bytes.
    """
    events: list[dict[str, Any]] = []
    for lane, worker, spans in workers:
        process = LANE_PROCESS["cpu"] + lane
        _name(events, process, f"cpu:{lane}", worker, f"worker {worker}")
        before: tuple[int, int] | None = None
        for step, group, start, end, waited in spans.tolist():
            if before is not None and before[0] == step and start - before[1] > WAIT_NS:
                events.append(_event("wait", process, worker, before[1], start, {"step": step}))
            details: dict[str, Any] = {"step": step}
            if waited:
                details["waited_for_disk_us"] = waited / 1000
            events.append(_event(catalog.groups[group].name, process, worker, start, end, details))
            before = (step, end)
    process = LANE_PROCESS["disk"]
    rows: list[int] = []  # end of the last read in each row: reads overlap, rows must not
    for step, block, start, end, nbytes in sorted(disk_spans.tolist(), key=lambda each: each[2]):
        row = next((index for index, until in enumerate(rows) if until <= start), len(rows))
        if row == len(rows):
            rows.append(end)
            _name(events, process, "disk:0", row, f"read {row}")
        rows[row] = end
        details = {"sweep": step, "bytes": nbytes}
        what = _read_of(catalog, block)
        events.append(_event(f"read {what}", process, row, start, end, details))
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": {"notes": list(notes)}}


def _read_of(catalog: Catalog, number: int) -> str:
    """What a read was of: a block's group, or, behind all blocks, an expert by its key."""
    key = number - len(catalog.blocks)
    if key < 0 or catalog.experts is None:
        return catalog.blocks[number].group
    layer, expert = divmod(key, catalog.experts.per_layer)
    groups = [group.name for group in catalog.groups if group.kind == "experts"]
    return f"{groups[layer]} {expert}"


def _name(events: list[dict[str, Any]], process: int, lane: str, row: int, title: str) -> None:
    for kind, value in (("process_name", lane), ("thread_name", title)):
        events.append(
            {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": value}}
        )


def _event(
    name: str, process: int, row: int, start: int, end: int, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": row,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": details,
    }
