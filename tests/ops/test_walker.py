"""The walk of a decode step, on a table made by hand: order, late workers, waits and abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shadowlane.ops import table as t
from shadowlane.ops.atomics import BEDS, WAIT_ABORTED, WAIT_OK, counter_value, publish, wake_all
from shadowlane.ops.expand import expand_row_address
from shadowlane.ops.kernels import EXPAND_AT, matvec_address
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.walker import walk

COLS = 64
DISK, GATHER = t.MAX_LANES, t.MAX_LANES + 1
NUM_SLOTS = 4
RECORD_RING = 8
PATIENCE_S = 60


class Chain:
    """`length` instructions that each multiply the state by a matrix of their own.

    Instruction n reads buffer n % 2 and writes the other. One lane; its workers are threads.
    """

    def __init__(
        self, length: int = 6, items: int = 4, workers: int = 1, streamed: bool = False
    ) -> None:
        self.length = length
        random = np.random.default_rng(1)
        self.weights = random.standard_normal((length, COLS, COLS)).astype(np.float32) / 8
        self._end = 0
        record_nbytes = 1024
        sizes = {
            t.ABORT: 64,
            t.COUNTERS: (t.MAX_LANES + 4) * t.COUNTER_NBYTES,
            t.TICKETS: length * t.TICKET_NBYTES,
            t.SPIN_NS: 64,
            t.WORKERS: workers * t.WORKER_NBYTES,
            t.RING: NUM_SLOTS * self.weights[0].nbytes,
        }
        self.geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
        for field, nbytes in sizes.items():
            self.geometry[field] = self._take(nbytes)
        self.geometry[t.BRINGS_COUNTER], self.geometry[t.GATHER_COUNTER] = DISK, GATHER
        self.geometry[t.SWEEP_BASE], self.geometry[t.EMULATION] = t.DISK_BASE, -1
        self.geometry[t.SLOT_NBYTES] = self.weights[0].nbytes
        self.geometry[t.NUM_SLOTS] = NUM_SLOTS
        self.geometry[t.SCRATCH_INPUT] = 32 << 10
        self.geometry[t.SCRATCH_OUTPUT] = 64 << 10
        records = self._take(RECORD_RING * record_nbytes)
        buffers = [self._take(t.MAX_DECODE_ROWS * COLS * 4) for _ in range(2)]
        homes = self._take(self.weights.nbytes)
        scratch = [self._take(256 << 10) for _ in range(workers)]
        assert EXPAND_AT + 4 * COLS * 4 < 32 << 10
        self.memory = np.zeros(self._end + 4096, np.uint8)
        self.base = -(-self.memory.ctypes.data // 4096) * 4096
        self._shift = self.base - self.memory.ctypes.data
        self.view(homes, np.float32, self.weights.size)[:] = self.weights.ravel()
        self.instructions = np.full((length, t.INSTRUCTION_COLUMNS), -1, np.int64)
        rows = -(-COLS // items)
        self.items = np.zeros((length * items, t.ITEM_COLUMNS), np.int64)
        self.blocks = np.zeros((length, t.BLOCK_COLUMNS), np.int64)
        for number, row in enumerate(self.instructions):
            row[t.KIND], row[t.GROUP], row[t.ORDINAL] = t.LINEAR, number, number
            row[t.COLS], row[t.ROWS], row[t.EPILOGUE] = COLS, COLS, t.STORE
            row[t.ITEM_START], row[t.ITEM_COUNT] = number * items, items
            row[t.INPUT], row[t.OUTPUT] = buffers[number % 2], buffers[1 - number % 2]
            for part in range(items):
                item = self.items[number * items + part]
                item[t.BLOCK], item[t.SECOND_BLOCK] = number, -1
                item[t.ROW_IN_BLOCK] = item[t.FIRST_ROW] = part * rows
                item[t.NUM_ROWS] = min(rows, COLS - part * rows)
            block = self.blocks[number]
            block[t.OFFSET] = -1 if streamed else homes + number * self.weights[0].nbytes
            block[t.SWEEP_ORDINAL] = number if streamed else -1
            block[t.BLOCK_NUM_ROWS], block[t.ROW_NBYTES] = COLS, COLS * 4
            block[t.LAYOUT] = LAYOUTS["f32"].id
            block[t.OPERATOR], block[t.EXPAND] = matvec_address("f32"), expand_row_address("f32")
        self._records = [records + n * record_nbytes for n in range(RECORD_RING)]
        self._buffers, self._scratch = buffers, scratch

    def _take(self, nbytes: int) -> int:
        start = self._end
        self._end += -(-nbytes // 4096) * 4096
        return start

    def view(self, offset: int, kind: Any, count: int) -> np.ndarray:
        start = self._shift + offset
        return self.memory[start : start + count * np.dtype(kind).itemsize].view(kind)

    def counter(self, number: int) -> int:
        return self.base + int(self.geometry[t.COUNTERS]) + number * t.COUNTER_NBYTES

    def fill(self, step: int, state: np.ndarray) -> None:
        """Write a step's record and its inputs; float32 [rows, COLS]."""
        record = self.view(self._records[step % RECORD_RING], np.int64, t.RECORD_HEADER_FIELDS)
        record[t.STEP], record[t.NUM_DECODE] = step, len(state)
        record[t.LANE_BASE] = (step - 1) * self.length
        record[t.DISK_BASE] = (step - 1) * self.length
        self.view(self._buffers[0], np.float32, state.size)[:] = state.ravel()

    def walk(self, step: int, worker: int = 0) -> int:
        return int(
            walk(
                self.base,
                self.geometry,
                self.instructions,
                self.items,
                self.blocks,
                self.base + self._records[step % RECORD_RING],
                step,
                worker,
                self.base + self._scratch[worker],
            )
        )

    def state(self, rows: int) -> np.ndarray:
        offset = self._buffers[self.length % 2]
        return self.view(offset, np.float32, rows * COLS).reshape(rows, COLS).copy()

    def exact(self, state: np.ndarray) -> np.ndarray:
        wide = state.astype(np.float64)
        for weights in self.weights:
            wide = wide @ weights.T.astype(np.float64)
        return wide

    def abort(self) -> None:
        self.view(int(self.geometry[t.ABORT]), np.int32, 1)[0] = 1
        for number in range(t.MAX_LANES + 4):
            wake_all(self.counter(number))

    def sleepers(self, number: int) -> int:
        beds = self.counter(number) - self.base + BEDS
        return int(self.view(beds, np.int32, 2 * t.NUM_BEDS)[::2].sum())

    def deliver(self, ordinal: int) -> None:
        """What the disk lane does: a block into its slot, then the counter."""
        weights = self.weights[ordinal % self.length]
        slot = int(self.geometry[t.RING]) + ordinal % NUM_SLOTS * weights.nbytes
        self.view(slot, np.float32, weights.size)[:] = weights.ravel()
        publish(self.counter(DISK), ordinal + 1)


def start(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    return thread, result


def wait_until(condition: Callable[[], bool]) -> None:
    ended = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ended, "what was waited for did not happen"
        time.sleep(0)


def states(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, COLS)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_step_multiplies_through(rows: int) -> None:
    chain = Chain()
    for step in range(1, 20):
        chain.fill(step, states(rows))
        assert chain.walk(step) == WAIT_OK
        assert np.allclose(chain.state(rows), chain.exact(states(rows)), atol=1e-5)
        assert counter_value(chain.counter(0)) == step * chain.length


@pytest.mark.parametrize("items", [1, 4, 7])
def test_workers_and_cuts_change_no_bit(items: int) -> None:
    alone = Chain()
    alone.fill(1, states(2))
    alone.walk(1)
    chain = Chain(workers=3, items=items)
    for step in range(1, 40):
        chain.fill(step, states(2))
        threads = [start(lambda n=n, step=step: chain.walk(step, n)) for n in range(3)]
        for thread, _ in threads:
            thread.join(PATIENCE_S)
        assert [result for _, result in threads] == [[WAIT_OK]] * 3
        assert np.array_equal(chain.state(2), alone.state(2))


def test_late_workers_do_no_harm() -> None:
    """Worker 1 is kept off its core for several steps, or for so many that its record is gone."""
    chain = Chain(workers=2)
    for step in range(1, 21):
        chain.fill(step, states(1 + step % 8))
        assert chain.walk(step, 0) == WAIT_OK
        expected = chain.state(1 + step % 8)
        spans = chain.view(int(chain.geometry[t.WORKERS]), np.uint8, 2 * t.WORKER_NBYTES)
        for late in range(1, step + 1):
            before, spans_before = chain.memory.copy(), spans.copy()
            assert chain.walk(late, 1) == WAIT_OK
            spans[:] = spans_before  # the time it waited is noted there
            assert np.array_equal(chain.memory, before)
        assert np.array_equal(chain.state(1 + step % 8), expected)


def test_a_record_being_rewritten_is_left_alone() -> None:
    """Its step is written first: whoever comes late sees that, whatever else it holds already."""
    chain = Chain(workers=2)
    for step in range(1, 5):
        chain.fill(step, states(1))
        assert chain.walk(step, 0) == WAIT_OK
    chain.view(chain._records[4], np.int64, 1)[0] = 4 + RECORD_RING
    before = chain.memory.copy()
    assert chain.walk(4, 1) == WAIT_OK
    assert np.array_equal(chain.memory, before)


def test_instructions_wait_for_their_peers() -> None:
    chain = Chain()
    chain.instructions[3, t.PEER_WAIT + 1] = 2
    chain.fill(1, states(1))
    thread, result = start(lambda: chain.walk(1))
    wait_until(lambda: counter_value(chain.counter(0)) == 3)
    publish(chain.counter(1), 1)
    assert counter_value(chain.counter(0)) == 3
    publish(chain.counter(1), 2)
    thread.join(PATIENCE_S)
    assert result == [WAIT_OK]
    assert np.allclose(chain.state(1), chain.exact(states(1)), atol=1e-5)


def test_items_wait_for_streamed_blocks() -> None:
    chain = Chain(streamed=True)
    for step in range(1, 4):
        chain.fill(step, states(2))
        thread, result = start(lambda step=step: chain.walk(step))
        for number in range(chain.length):
            ordinal = (step - 1) * chain.length + number
            wait_until(lambda ordinal=ordinal: counter_value(chain.counter(0)) == ordinal)
            chain.deliver(ordinal)
        thread.join(PATIENCE_S)
        assert result == [WAIT_OK]
        assert np.allclose(chain.state(2), chain.exact(states(2)), atol=1e-5)
    statistics = chain.view(int(chain.geometry[t.WORKERS]), np.int64, 16)
    assert statistics[t.DISK_WAIT_NS] > 0
    assert statistics[t.NUM_SPANS] == 3 * chain.length


@pytest.mark.parametrize("where", ["peer", "disk"])
@pytest.mark.parametrize("spin_ns", [0, 2_000_000])
def test_abort_ends_every_wait_promptly(where: str, spin_ns: int) -> None:
    chain = Chain(workers=3, streamed=where == "disk")
    chain.view(int(chain.geometry[t.SPIN_NS]), np.int64, 1)[0] = spin_ns
    chain.instructions[2, t.PEER_WAIT + 5] = 1
    chain.fill(1, states(1))
    threads = [start(lambda n=n: chain.walk(1, n)) for n in range(3)]
    reached = 0 if where == "disk" else 2
    wait_until(lambda: counter_value(chain.counter(0)) == reached)
    waited_for = DISK if where == "disk" else 5
    wait_until(lambda: chain.sleepers(waited_for) > 0)
    began = time.monotonic()
    chain.abort()
    for thread, _ in threads:
        thread.join(PATIENCE_S)
    assert time.monotonic() - began < 5
    assert [result for _, result in threads] == [[WAIT_ABORTED]] * 3
    assert chain.sleepers(waited_for) == 0
