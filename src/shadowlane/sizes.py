"""Sizes as people write them, and how much RAM is free to plan with.

A budget that is read differently from how it was meant costs an out-of-memory kill, so the grammar
is small and everything else is refused: a number, then an optional unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_DOWN, Decimal
from numbers import Integral
from pathlib import Path

from shadowlane.planner.placement import show_nbytes

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Graphics cards and RAM are sold in powers of two, so a bare `G` is one of them; `GB` is what disks
# are sold in. A bare number is GiB, as in `--ram 6`.
_UNITS: dict[str, int] = {
    "": GIB,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
MOST_BARE = 1024  # a bare number from here on was meant in another unit
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)

#: RAM left for what is not in the arena: interpreters, torch, Ray's daemons, the page cache.
HEADROOM_NBYTES = 2 * GIB


def parse_size(size: str | int, name: str = "size") -> int:
    """Bytes meant by `size`: "6" and "6G" and "6GiB" are 6 * 2**30, "1.5GB" is 1.5 * 10**9.

    Units are not case-sensitive; fractions are rounded to whole bytes. An int is taken as bytes.
    `name` is what an error calls the value. Raises ValueError for anything else, below 1 byte, and
    for a bare number of `MOST_BARE` or more.
    """
    if isinstance(size, Integral) and not isinstance(size, bool):
        nbytes = int(size)
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{name} must be a size such as 6GiB, 512MiB or 1.5GB; got {size!r}")
        if not match[2] and Decimal(match[1]) >= MOST_BARE:
            meant = f"{match[1]}{'MiB' if Decimal(match[1]) < MIB else 'B'}"
            raise ValueError(
                f"{name} must have a unit from {MOST_BARE} on, since a bare number is GiB; got "
                f"{size!r}; {meant} is {show_nbytes(parse_size(meant))}"
            )
        exact = Decimal(match[1]) * _UNITS[match[2].lower()]
        nbytes = int(exact.to_integral_value(ROUND_HALF_DOWN))
    if nbytes < 1:
        raise ValueError(f"{name} must be at least one byte; got {size!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """`nbytes` for reading, in binary units with three or four digits: "93.8 MiB", "512 B".

    The planner's own messages show bytes with the same function.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative; got {nbytes}")
    return show_nbytes(nbytes)


@dataclass(frozen=True, slots=True)
class FreeRam:
    """How much RAM a plan may use when nobody said so, and where the figure comes from."""

    free_nbytes: int  # what could be allocated now without swapping or being killed
    headroom_nbytes: int  # left alone for everything outside the arena
    source: str  # "MemAvailable", or the control group that is tighter

    @property
    def budget_nbytes(self) -> int:
        return self.free_nbytes - self.headroom_nbytes


def free_ram(root: Path = Path("/")) -> FreeRam:
    """The tighter of MemAvailable and the room in every control group above this process.

    `root` stands in for the file system in tests. Raises OSError where /proc/meminfo is missing.
    """
    free, source = _mem_available(root), "MemAvailable"
    for group, room in _cgroup_rooms(root):
        if room < free:
            free, source = room, f"control group {group}"
    # On a small machine half of what is free is the better guess: a fixed headroom would leave
    # nothing to plan with.
    return FreeRam(free, min(HEADROOM_NBYTES, free // 2), source)


def available_ram() -> int:
    """Bytes of the default RAM budget: what is free, less the headroom."""
    return free_ram().budget_nbytes


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise OSError("/proc/meminfo names no MemAvailable; Linux 3.14 or later is needed")


def _cgroup_rooms(root: Path) -> list[tuple[str, int]]:
    """(name, bytes of room) of each control group above this process that has a memory limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[tuple[str, int]] = []
    for line in lines:
        hierarchy, controllers, name = line.split(":", 2)
        if hierarchy == "0":
            mount = root / "sys/fs/cgroup"
            limits, usage, stat = ("memory.max", "memory.high"), "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limits = ("memory.limit_in_bytes",)
            usage, stat = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # Inside a container the name may be the host's and the mount its own root; groups that
        # are not there are skipped and the mount itself is always looked at.
        group = mount / name.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, limits, usage, stat)
            if room is not None:
                rooms.append(("/" + "/".join(folder.relative_to(mount).parts), room))
            if folder == mount:
                break
    return rooms


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or the limit is the word "max"
        return None


def _room(folder: Path, limits: tuple[str, ...], usage: str, reclaimable: str) -> int | None:
    """Bytes that still fit into the control group at `folder`; None if it sets no limit.

    limits: files with one each; above the one that is high tasks are throttled and not killed.
    """
    most = min(
        (nbytes for each in limits if (nbytes := _limit(folder / each)) is not None), default=None
    )
    if most is None:
        return None
    try:
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    # File pages that nobody uses count as usage but make way for an allocation.
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == reclaimable:
                used -= int(value)
    except OSError:
        pass
    return max(0, most - max(0, used))
