"""Compiled loops for `overhead.py`: a counter going back and forth, and walks of empty programs.

Apart from the scripts so that Ray actors can import them by name, compiled code and all.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numba import types

from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, now_ns, publish, wait_counter
from shadowlane.ops.compiled import cfunc, njit
from shadowlane.ops.walker import walk

PING, PONG, ABORT = (number * t.COUNTER_NBYTES for number in range(3))  # two counters, abort word
HOPS_NBYTES = 4096
GIVE_UP_NS = 20_000_000_000


@njit
def compute_for(nanoseconds: int) -> None:
    """Keep this core busy for so long."""
    until = now_ns() + nanoseconds
    while now_ns() < until:
        pass


@njit
def serve_hops(base: int, count: int, spin_ns: int, work_ns: int) -> int:
    """Answer each value of the ping counter with the same one of the pong counter.

    Computes for half of `work_ns` after each, so that it is back in time for the next.
    """
    for value in range(1, count + 1):
        if wait_counter(base + PING, value, base + ABORT, spin_ns, GIVE_UP_NS) != WAIT_OK:
            return value
        publish(base + PONG, value)
        if work_ns > 0:
            compute_for(work_ns // 2)
    return 0


@njit
def time_hops(base: int, count: int, spin_ns: int, work_ns: int, taken_ns: Any) -> int:
    """Send `count` values and wait for each to come back; taken_ns[i]: the round trip.

    Computes for `work_ns` before each, which is not counted.
    """
    for value in range(1, count + 1):
        if work_ns > 0:
            compute_for(work_ns)
        began = now_ns()
        publish(base + PING, value)
        if wait_counter(base + PONG, value, base + ABORT, spin_ns, GIVE_UP_NS) != WAIT_OK:
            return value
        taken_ns[value - 1] = now_ns() - began
    return 0


@cfunc(types.void(*[types.int64] * 12))
def no_operator(  # type: ignore[no-untyped-def]
    layout, expand, weights, row_nbytes, rows, cols, x, x_stride, inputs, y, y_stride, scratch
):
    """An operator that does nothing: what is left of an instruction is the engine."""


def time_empty_steps(num_instructions: int, num_steps: int, num_workers: int) -> list[float]:
    """Seconds per instruction of each step in which workers walk empty operators.

    The real walk with its waits, tickets, counters and spans, each worker a thread, one call from
    Python per step as in the engine; every instruction has one item per worker. Half of the steps
    warm up.
    """
    geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
    offsets = {
        t.COUNTERS: t.MAX_LANES * t.COUNTER_NBYTES,
        t.TICKETS: num_instructions * t.TICKET_NBYTES,
        t.WORKERS: num_workers * t.WORKER_NBYTES,
        t.SPIN_NS: 64,
        t.ABORT: 64,
        t.SCRATCH: 4096,
    }
    end = 4096
    for field, nbytes in offsets.items():
        geometry[field] = end
        end += -(-nbytes // 4096) * 4096
    # The scratch of outputs is not written: the operator does nothing and has no rows.
    record_nbytes = -(-t.RECORD_HEADER_FIELDS * 8 // 64) * 64
    arena = np.zeros(end + record_nbytes * num_steps + 4096, np.uint8)
    base = -(-arena.ctypes.data // 4096) * 4096
    words = arena[base - arena.ctypes.data :]
    words[geometry[t.SPIN_NS] :][:8].view(np.int64)[0] = 50_000

    instructions = np.zeros((num_instructions, t.INSTRUCTION_COLUMNS), np.int64)
    instructions[:, t.KIND] = t.LINEAR
    instructions[:, t.ITEM_COUNT] = num_workers
    instructions[:, t.NORM_WEIGHT] = instructions[:, t.BIAS] = -1
    instructions[:, t.ORDINAL] = np.arange(num_instructions)
    instructions[:, t.PEER_WAIT : t.PEER_WAIT + t.MAX_LANES] = -1
    items = np.zeros((num_workers, t.ITEM_COLUMNS), np.int64)
    blocks = np.zeros((1, t.BLOCK_COLUMNS), np.int64)
    blocks[0, t.SWEEP_ORDINAL] = -1
    blocks[0, t.OPERATOR] = no_operator.address
    for step in range(num_steps):
        record = words[end + step * record_nbytes :][: t.RECORD_HEADER_FIELDS * 8].view(np.int64)
        record[t.STEP], record[t.NUM_DECODE] = step + 1, 1
        record[t.LANE_BASE] = step * num_instructions

    finished = np.zeros((num_workers, num_steps))
    gate = threading.Barrier(num_workers)

    def work(worker: int) -> None:
        gate.wait()
        for step in range(num_steps):
            record = base + end + step * record_nbytes
            scratch = base + geometry[t.SCRATCH]
            walk(base, geometry, instructions, items, blocks, record, step + 1, worker, scratch)
            finished[worker, step] = time.perf_counter()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A worker that was held up walks through finished steps in no time; the first one through a
    # step says how fast the lane was.
    ends = finished.min(axis=0)
    return list(np.diff(ends)[num_steps // 2 :] / num_instructions)
