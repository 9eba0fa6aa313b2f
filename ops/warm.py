"""Loading compiled code before it is needed, so that no step waits for a compiler.

A step calls a fixed set of functions with a fixed set of argument types. Each function here gives
one lane all of its own: from the cache in milliseconds, or, once per machine and version, compiled
in seconds. Lanes that start together do not compile the same thing side by side: one does it under
a lock on a file in the cache, the others then load what it left there.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba import types

from shadowlane.ops import atomics, emulated, file_reads
from shadowlane.ops.compiled import compiled_code_directory

I32, I64 = types.int32, types.int64
ROW = types.Array(types.int64, 1, "C")  # geometry, and one row of a table
TABLE = types.Array(types.int64, 2, "C")

Signature = Sequence[Any]
Kernels = Sequence[tuple[Any, Signature]]
LAYOUTS_PREFIX = "layout-"


def counter_kernels() -> Kernels:
    """What Python code of every process calls on counters."""
    return (
        (atomics.now_ns, ()),
        (atomics.counter_value, (I64,)),
        (atomics.publish, (I64, I32)),
        (atomics.publish, (I64, I64)),
        (atomics.wait_counter, (I64, I64, I64, I64, I64)),
        (atomics.wait_counter, (I64, I32, I64, I64, I64)),
        (atomics.wake_all, (I64,)),
        (emulated.sleep_until, (I64, I64, I64)),
        (file_reads.read_range, (I64, I64, I64, I64, I64, I64)),
    )


def expert_kernels() -> Kernels:
    """What the disk lane calls where not all experts of a mixture are in RAM."""
    from shadowlane.ops import expert_board
    from shadowlane.ops import missing_experts as reads

    tables = {"extents", "fetches", "certain", "likely", "victims", "victim_words", "spans"}
    tables |= {"guess_ids", "guess_slots"}
    fields = [TABLE if name in tables else ROW for name in expert_board.Board._fields]
    board = types.NamedTuple(fields, expert_board.Board)
    place = (I64, ROW, board)
    flags = types.Array(types.boolean, 1, "C")
    return (
        (reads.follow_requests, place),
        (reads.read_missing, place),
        (reads.begin_job, place),
        (reads.end_job, (*place, I64, I64, I64)),
        (expert_board.end_reads, place),
        (expert_board.sleep_until_told, (board, I64)),
        (expert_board.look_at_slots, (*place, ROW, flags)),
        (expert_board.set_victims, (board, TABLE, ROW, ROW)),
        (expert_board.take_counts, (board, ROW)),
    )


def route_kernels() -> Kernels:
    """What the engine calls where cards route layers by themselves."""
    from shadowlane.ops import routes

    return ((routes.mark_all, (I64, ROW, TABLE, TABLE, I64, I64, I64)),)


def decode_kernels() -> Kernels:
    """What a decode step calls: one function for the whole of it."""
    from shadowlane.ops import walker

    return ((walker.walk, (I64, ROW, TABLE, TABLE, TABLE, I64, I64, I64, I64)),)


def prefill_kernels() -> Kernels:
    """What a prefill step calls, one function too; and what makes copies that it may read."""
    from shadowlane.ops import chunk_kernels, chunk_walker

    signature = (I64, ROW, ROW, TABLE, TABLE, TABLE, I64, I64, I64, I64)
    return (
        (chunk_walker.walk_chunk, signature),
        (chunk_kernels.expand_tile, (ROW, I64, I64, I64, I64, I64, I64)),
    )


def warm_counters() -> None:
    """Make ready what engine and disk lane call."""
    _load_kernels("counters", counter_kernels)


def warm_experts() -> None:
    """Make ready what the disk lane of a mixture calls."""
    _load_kernels("experts", expert_kernels)


def warm_routes() -> None:
    """Make ready what the engine calls of a mixture beside cards that are here."""
    _load_kernels("routes", route_kernels)


def arranging_kernels() -> Kernels:
    """What the disk lane calls where experts are arranged on their way into RAM."""
    from shadowlane.ops import arrange

    return ((arrange.join_blocks, (I64,) * 8), (arrange.transpose, (I64,) * 7))


def warm_decode() -> None:
    """Make ready what decode steps call, but for the operators of layouts."""
    _load_kernels("counters", counter_kernels)
    _load_kernels("decode", decode_kernels)


def warm_prefill() -> None:
    """Make ready what prefill steps call, torch's library included."""
    from shadowlane.ops import aten

    aten.load()
    _load_kernels("prefill", prefill_kernels)


def warm_arranging() -> None:
    """Make ready what the disk lane calls for scattered experts."""
    _load_kernels("arranging", arranging_kernels)


def warm_layouts(layouts: Iterable[str]) -> None:
    """Make ready the operators of these layouts, which the tables of a model name by address."""
    from shadowlane.ops.expand import expand_row_address
    from shadowlane.ops.kernels import matvec_address

    for layout in sorted(set(layouts)):
        with _compiling_alone(LAYOUTS_PREFIX + layout):
            matvec_address(layout)
            expand_row_address(layout)


def is_warm(layouts: Iterable[str] = ()) -> bool:
    """Whether everything can be loaded: otherwise the next start compiles, for many seconds."""
    parts = ["counters", "decode", "prefill", *(LAYOUTS_PREFIX + each for each in layouts)]
    return all(_mark(part).exists() for part in parts)


def _load_kernels(part: str, kernels: Callable[[], Kernels]) -> None:
    with _compiling_alone(part):
        for function, signature in kernels():
            function.compile(tuple(signature))


def _mark(part: str) -> Path:
    """A file that says: all of this part is in the cache."""
    return compiled_code_directory() / f"{part}.complete"


@contextmanager
def _compiling_alone(part: str) -> Iterator[None]:
    """Nobody else compiles this part meanwhile; where it only has to be loaded, nobody waits."""
    mark = _mark(part)
    if mark.exists():
        yield
        return
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        lock = mark.with_suffix(".lock").open("w")
    except OSError:  # a cache that cannot be written: each process compiles for itself
        yield
        return
    with lock:  # closing it, or the death of this process, gives the lock back
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        mark.touch()
