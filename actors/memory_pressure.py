"""How short of memory this machine is, as Linux tells it: what is free, and who waits for it."""

from __future__ import annotations

import time
from pathlib import Path

from shadowlane.planner.ram_watch import RamRead
from shadowlane.sizes import free_ram


def read_ram(root: Path = Path("/")) -> RamRead:
    """A look that takes some tenths of a millisecond. `root`: the file system, in tests.

    Raises OSError where /proc/meminfo is missing.
    """
    return RamRead(time.monotonic(), free_ram(root).free_nbytes, stalled_percent(root))


def stalled_percent(root: Path = Path("/")) -> float:
    """Percent of the last ten seconds in which some task waited for memory, here or in the control
    groups above us; the most of all. 0 where the kernel does not say."""
    return max((_some_avg10(path) for path in _pressure_files(root)), default=0.0)


def _pressure_files(root: Path) -> list[Path]:
    mount = root / "sys/fs/cgroup"
    found = [root / "proc/pressure/memory"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        if line.startswith("0::"):
            group = mount / line.removeprefix("0::").lstrip("/")
            folders = [each for each in (group, *group.parents) if each.is_relative_to(mount)]
            found += [folder / "memory.pressure" for folder in folders]
    return found


def _some_avg10(path: Path) -> float:
    """Of a file such as `some avg10=0.12 avg60=0.03 avg300=0.00 total=1234`."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # no such group, or a kernel without this
        return 0.0
    for line in lines:
        if line.startswith("some "):
            for field in line.split()[1:]:
                name, _, value = field.partition("=")
                if name == "avg10":
                    return float(value)
    return 0.0
