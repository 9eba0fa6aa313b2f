"""Ray's memory monitor on a cluster that somebody else started: it ends workers when RAM is short.

It counts the arena's pages as a worker's own and would end a lane for them. Where we start Ray we
turn it off, since the plan is what bounds memory; where we join, the plan has to stay below it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from shadowlane.actors.cluster import process_environment
from shadowlane.actors.spec import ServiceSpec
from shadowlane.sizes import FreeRam, format_size, free_ram

DEFAULT_THRESHOLD = 0.95  # Ray's own, where the environment of its node says nothing
PROCESSES_NBYTES = 512 << 20  # what engine and lanes take beside the arena


@dataclass(frozen=True, slots=True)
class MemoryMonitor:
    threshold: float  # fraction of the node's memory in use at which workers are ended


def read_monitor(environment: Mapping[str, str]) -> MemoryMonitor | None:
    """The monitor of a node whose raylet has this environment; None where it is off."""
    with suppress(ValueError):
        if int(environment.get("RAY_memory_monitor_refresh_ms", "1")) == 0:
            return None
    threshold = DEFAULT_THRESHOLD
    with suppress(ValueError):
        threshold = float(environment.get("RAY_memory_usage_threshold", DEFAULT_THRESHOLD))
    return MemoryMonitor(min(1.0, max(0.0, threshold)))


def monitor_of_this_node() -> MemoryMonitor | None:
    """The monitor of the node this process is connected to.

    None where it is off, and where it cannot be told: the raylet is another user's, or far away.
    """
    import ray

    session = getattr(getattr(ray._private.worker, "_global_node", None), "_session_dir", None)
    if not session:
        return None
    environment = process_environment("raylet", session)
    return None if environment is None else read_monitor(environment)


def fit_below(
    monitor: MemoryMonitor,
    spec: ServiceSpec,
    is_asked: bool,
    free: FreeRam | None = None,
    total_nbytes: int | None = None,
) -> ServiceSpec:
    """`spec` with a RAM budget that keeps the node below the monitor's threshold, and a note.

    is_asked: the user named the budget, which is kept then; the note says what may happen.
    """
    free = free or free_ram()
    total = total_nbytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = free.free_nbytes - round((1 - monitor.threshold) * total) - PROCESSES_NBYTES
    ram = spec.settings.ram
    if ram <= room:
        return spec
    what = f"this cluster's memory monitor ends workers at {monitor.threshold:.0%} of memory in use"
    if is_asked or room <= 0:
        left = format_size(max(0, room))
        note = f"{what}: {left} are left below that, and the budget is {format_size(ram)}"
        return replace(spec, notes=(*spec.notes, note))
    note = f"{what}: planning with {format_size(room)} to stay below"
    return replace(spec, settings=replace(spec.settings, ram=room), notes=(*spec.notes, note))
