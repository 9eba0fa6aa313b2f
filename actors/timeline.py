"""The last steps of every lane as a timeline for Perfetto: one row per worker, with waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shadowlane.actors.link_statistics import KEYS_AND_VALUES, TRIAL
from shadowlane.planner.catalog import Catalog

FIRST_PROCESS = {"cpu": 1, "gpu": 20, "h2d": 40, "disk": 100}
OF_NO_BLOCK = {KEYS_AND_VALUES: "keys and values", TRIAL: "for a trial"}
WAIT_NS = 1000  # shorter gaps are the walk itself


def make_timeline(
    catalog: Catalog,
    workers: Iterable[tuple[str, int, np.ndarray]],
    reads: Mapping[str, np.ndarray],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Trace events, JSON-able.

    workers: (lane, worker, spans), spans int64 [n, 5] as `ops/table.py` has them; reads: of the
    disk and of each link, by the lane's name, int64 [n, 5]: step, block, start_ns, end_ns, bytes.
    """
    events: list[dict[str, Any]] = []
    for lane, worker, spans in workers:
        process = _process(lane)
        _name(events, process, lane, worker, f"worker {worker}")
        before: tuple[int, int] | None = None
        for step, group, start, end, waited in spans.tolist():
            if before is not None and before[0] == step and start - before[1] > WAIT_NS:
                events.append(_event("wait", process, worker, before[1], start, {"step": step}))
            details: dict[str, Any] = {"step": step}
            if waited:
                details["waited_us"] = waited / 1000
            events.append(_event(catalog.groups[group].name, process, worker, start, end, details))
            before = (step, end)
    for lane, spans in reads.items():
        _add_reads(events, catalog, lane, spans)
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": {"notes": list(notes)}}


def _add_reads(
    events: list[dict[str, Any]], catalog: Catalog, lane: str, spans: np.ndarray
) -> None:
    """What the disk has read or a link has copied."""
    process, verb = _process(lane), "read" if lane.startswith("disk") else "copy"
    rows: list[int] = []  # end of the last read in each row: reads overlap, rows must not
    for step, block, start, end, nbytes in sorted(spans.tolist(), key=lambda each: each[2]):
        row = next((index for index, until in enumerate(rows) if until <= start), len(rows))
        if row == len(rows):
            rows.append(end)
            _name(events, process, lane, row, f"{verb} {row}")
        rows[row] = end
        details = {"sweep": step, "bytes": nbytes}
        what = _read_of(catalog, block)
        events.append(_event(f"{verb} {what}", process, row, start, end, details))


def _process(lane: str) -> int:
    """A number for Perfetto, which shows processes in their order."""
    kind, number = lane.split(":")
    return FIRST_PROCESS[kind] + int(number)


def _read_of(catalog: Catalog, number: int) -> str:
    """What a read was of: a block's group, or, behind all blocks, an expert by its key."""
    if number in OF_NO_BLOCK:
        return OF_NO_BLOCK[number]
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
