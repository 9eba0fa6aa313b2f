"""What this machine is: cores that may be used, and a fingerprint for cached measurements."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> list[int]:
    """One logical processor per physical core that this process may run on, in order."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen: list[int] = []
    seen: set[str] = set()
    for core in allowed:
        path = CPU_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(core)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(core)
    return chosen


def quota_cores() -> float | None:
    """Cores' worth of time that a cgroup grants this process; None: no limit."""
    v2 = _read_numbers(Path("/sys/fs/cgroup/cpu.max"))
    if len(v2) == 2:
        return v2[0] / v2[1]
    quota = _read_numbers(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    period = _read_numbers(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    if quota and period and quota[0] > 0:
        return quota[0] / period[0]
    return None


def _read_numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def assign_cores(
    threads: int | None, workers: int
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Cores of each compute lane, and notices for the user.

    threads: workers of all lanes together (None: all physical cores); workers: number of lanes.
    More threads than cores are clamped. Raises ValueError for counts below one, or more lanes than
    cores.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"cpu_threads must be at least 1; got {threads}")
    if workers < 1:
        raise ValueError(f"cpu_workers must be at least 1; got {workers}")
    cores = usable_cores()
    quota = quota_cores()
    limit = len(cores) if quota is None else max(1, min(len(cores), int(quota)))
    notes: list[str] = []
    count = threads or limit
    if count > limit:
        notes.append(f"cpu_threads {count} is more than the {limit} cores there are: using {limit}")
        count = limit
    if workers > count:
        raise ValueError(
            f"cpu_workers must not be more than the {count} threads they share; got {workers}"
        )
    lanes: list[tuple[int, ...]] = []
    start = 0
    for lane in range(workers):
        size = count // workers + (lane < count % workers)
        lanes.append(tuple(cores[start : start + size]))
        start += size
    return lanes, tuple(notes)


def hardware_fingerprint(threads: Sequence[int], disk: Path) -> str:
    """Changes when a measured profile would: processor, threads per lane, memory, the disk."""
    parts = [platform.machine(), processor_name(), ",".join(map(str, threads))]
    parts.append(str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 28))
    parts.append(str(os.stat(disk).st_dev))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """The processor as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
