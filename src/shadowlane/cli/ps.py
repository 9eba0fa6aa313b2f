"""`shadowlane ps`: the processes of running engines, and what memory and time they take.

Found by what they share: each of them maps an arena, an anonymous file whose name is "shadowlane"
and the model's path. That needs no connection to Ray, so it works for any cluster, also for one
that does not answer.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from shadowlane.cli import options
from shadowlane.models import typed_name
from shadowlane.sizes import format_size

EPILOG = options.epilog("shadowlane ps", "shadowlane ps --json")

_ARENA = "/memfd:shadowlane"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    pid: int
    model: str  # as it can be typed, where that is known; empty: the arena does not say
    name: str  # as Ray titles it: actor class, then the method that runs
    age_s: float
    cpu_pct: float  # of one core, since the process started
    own_nbytes: int  # resident memory that is not shared: interpreter, torch, buffers
    arena_nbytes: int  # of the arenas, as far as mapped; processes share them


def ps(json_output: options.JsonOutput = False) -> None:
    """Show the processes of running engines: model, memory of their own, arena they share, CPU use.

    A model is called as it can be typed. Processes of one engine have the same arena.
    """
    found = engine_processes()
    if json_output:
        print(json.dumps([asdict(process) for process in found]))
        return
    if not found:
        print("no engine is running")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("pid", "age", "cpu", "own memory", "arena"):
        table.add_column(title, justify="right")
    table.add_column("model", overflow="fold")
    table.add_column("process")
    for process in found:
        table.add_row(
            str(process.pid),
            f"{process.age_s:.0f} s",
            f"{process.cpu_pct:.0f} %",
            format_size(process.own_nbytes),
            format_size(process.arena_nbytes),
            Text(process.model or "-"),
            Text(process.name),
        )
    Console(highlight=False).print(table)


def engine_processes() -> list[EngineProcess]:
    """Processes that map an arena and that we may look at, the oldest first."""
    import psutil  # type: ignore[import-untyped]

    found: list[EngineProcess] = []
    for process in psutil.process_iter():
        try:
            arenas = _arenas(process.pid)
            if not arenas:
                continue
            with process.oneshot():
                age_s = max(time.time() - process.create_time(), 1e-3)
                times = process.cpu_times()
                memory = process.memory_info()
                name = " ".join(" ".join(process.cmdline()).split()) or process.name()
        except (psutil.Error, OSError):  # ended meanwhile, or belongs to someone else
            continue
        cpu_pct = 100 * (times.user + times.system) / age_s
        own_nbytes = max(0, memory.rss - memory.shared)
        models = ", ".join(dict.fromkeys(typed_name(path) for path in arenas if path))
        nbytes = sum(arenas.values())
        found.append(EngineProcess(process.pid, models, name, age_s, cpu_pct, own_nbytes, nbytes))
    return sorted(found, key=lambda process: -process.age_s)


def _arenas(pid: int) -> dict[str, int]:
    """Path of the model -> bytes of its arenas in the address space of `pid`.

    A range that is mapped twice counts once.
    """
    ranges: dict[tuple[str, int, int], str] = {}  # (inode, offset, length) -> path
    with open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if _ARENA in line:
                addresses, _, offset, _, inode = line.split()[:5]
                start, end = (int(address, 16) for address in addresses.split("-"))
                name = line.partition(_ARENA)[2].rstrip("\n").removesuffix(" (deleted)")
                path = name.strip() if name.startswith(" ") else ""
                ranges[inode, int(offset, 16), end - start] = path
    found: dict[str, int] = {}
    for (_, _, length), path in ranges.items():
        found[path] = found.get(path, 0) + length
    return found
