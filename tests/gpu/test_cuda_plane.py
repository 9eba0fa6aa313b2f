"""The CUDA plane on a real card: what the recording driver stands in for elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from shadowlane.actors.arena import Arena
from shadowlane.actors.copier import StreamCopier
from shadowlane.actors.cuda.devices import find_devices, free_nbytes
from shadowlane.actors.cuda.driver import CudaDriver, CudaError
from shadowlane.actors.cuda.memory import CardMemory
from shadowlane.actors.cuda.pinned import PinnedMemory, StagingRing, pin_arena
from shadowlane.actors.cuda.small_copy import TorchSmallCopy
from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.actors.cuda.watchdog import Watchdog
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.table import COUNTER_NBYTES

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ABORT, WORDS, COUNTERS = 0, 4096, 8192
CONTROL = MIB
NBYTES = 64 * MIB
SPIN_NS = 50_000_000
PATIENCE_NS = 20 * 10**9
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@dataclass
class Rig:
    driver: CudaDriver
    arena: Arena
    pinned: PinnedMemory
    card: CardMemory
    streams: CardStreams

    def counter(self, number: int) -> int:
        return self.arena.base + COUNTERS + number * COUNTER_NBYTES

    def reach(self, number: int, value: int) -> None:
        at = self.counter(number)
        assert wait_counter(at, value, self.arena.base, SPIN_NS, PATIENCE_NS) == WAIT_OK


@pytest.fixture(params=["memops", "events"])
def rig(request: pytest.FixtureRequest, driver: CudaDriver) -> Iterator[Rig]:
    arena = Arena.create(CONTROL + NBYTES)
    pinned = PinnedMemory(driver, 16 * MIB)
    pinned.register(arena.base, CONTROL + NBYTES)
    card = CardMemory.allocate(driver, NBYTES)
    words = arena.base + WORDS if request.param == "memops" else None
    torch = pytest.importorskip("torch")
    small_copy = TorchSmallCopy() if torch.cuda.is_available() else None
    streams = CardStreams(driver, 0, pinned, arena.base + ABORT, words, small_copy)
    if streams.mode != request.param:
        pytest.skip(f"no memory operations on streams: {streams.reason}")
    yield Rig(driver, arena, pinned, card, streams)
    streams.close()
    card.close()
    pinned.close()
    arena.close()


def random_weights(rig: Rig, nbytes: int) -> np.ndarray:
    data = np.random.default_rng(5).integers(0, 255, nbytes, np.uint8)
    rig.arena.memory[CONTROL:][:nbytes] = data
    return data


def test_the_card_is_described(driver: CudaDriver) -> None:
    for device in find_devices(driver):
        assert device.name
        assert device.uuid.startswith("GPU-")
        assert device.capability >= (5, 0)
        assert 0 < free_nbytes(driver, device.ordinal) <= device.nbytes
    driver.set_device(0)


def test_too_much_memory_is_one_line_and_no_later_error(driver: CudaDriver) -> None:
    with pytest.raises(CudaError, match=r"cudaErrorMemoryAllocation; .* are free") as raised:
        CardMemory.allocate(driver, 1 << 50)
    assert raised.value.is_out_of_memory
    CardMemory.allocate(driver, MIB).close()


def test_weights_arrive_after_their_counter_and_come_back(rig: Rig) -> None:
    data = random_weights(rig, 24 * MIB)
    up, down = rig.streams.open(), rig.streams.open()
    up.wait_counter(rig.counter(0), 1)
    up.copy_h2d(rig.card.at(7, 24 * MIB), rig.arena.base + CONTROL, 24 * MIB)
    up.write_counter(rig.counter(1), 1)
    down.wait_counter(rig.counter(1), 1)
    down.copy_d2h(rig.arena.base + CONTROL + 32 * MIB, rig.card.at(7, 24 * MIB), 24 * MIB)
    down.write_counter(rig.counter(2), 1)
    assert not rig.streams.drain(0.1)
    assert counter_value(rig.counter(1)) == 0
    publish(rig.counter(0), 1)
    rig.reach(2, 1)
    assert (rig.arena.memory[CONTROL + 32 * MIB :][: 24 * MIB] == data).all()
    assert rig.streams.drain(10)


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2])
def test_counters_wrap_on_the_card(rig: Rig, start: int) -> None:
    publish(rig.counter(0), start)
    publish(rig.counter(1), start)
    stream = rig.streams.open()
    for ahead in range(1, 5):
        stream.wait_counter(rig.counter(0), start + ahead)
        stream.write_counter(rig.counter(1), start + ahead)
    for ahead in range(1, 5):
        publish(rig.counter(0), start + ahead)
        rig.reach(1, start + ahead)
    assert rig.streams.drain(10)


def test_nothing_is_left_waiting(rig: Rig) -> None:
    streams = [rig.streams.open() for _ in range(4)]
    for step in range(1, 6):
        for number, stream in enumerate(streams):
            stream.wait_counter(rig.counter(number), step)
            stream.write_counter(rig.counter((number + 1) % 4), step)
    assert not rig.streams.drain(0.1)
    assert rig.streams.abandon(10)


def test_an_abort_releases_the_card(rig: Rig) -> None:
    watchdog = Watchdog(rig.streams)
    stream = rig.streams.open()
    stream.wait_counter(rig.counter(0), 9)
    rig.arena.view(ABORT, np.int64, 1)[0] = 1
    assert rig.streams.drain(10)
    watchdog.close()


def test_torch_sees_the_same_bytes_and_graphs_replay(rig: Rig) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    stream = rig.streams.open()
    values = rig.card.tensor(0, 4 * MIB).view(torch.float32)
    values.zero_()
    torch.cuda.synchronize()
    wrapped = torch.cuda.ExternalStream(stream.handle)

    def add(handle: int) -> None:
        with torch.cuda.stream(wrapped):
            values.add_(1.0)

    stream.submit(add)
    assert rig.streams.drain(10)
    graph = stream.capture(add)
    for step in range(1, 4):
        stream.wait_counter(rig.counter(0), step)
        stream.replay(graph)
        stream.write_counter(rig.counter(1), step)
    publish(rig.counter(0), 3)
    rig.reach(1, 3)
    stream.copy_d2h(rig.arena.base + CONTROL, rig.card.address, 4 * MIB)
    assert rig.streams.drain(10)
    assert (rig.arena.view(CONTROL, np.float32, MIB) == 4.0).all()
    rig.driver.destroy_graph(graph)


def test_small_copies_go_through_mapped_memory(rig: Rig) -> None:
    if rig.streams.small_copy is None:
        pytest.skip("torch was built without CUDA")
    stream = rig.streams.open()
    for nbytes in (16 << 10, 1001):
        here = rig.arena.base + CONTROL // 2
        rig.arena.memory[CONTROL // 2 :][:nbytes] = np.arange(nbytes) % 251
        stream.copy_small(rig.card.address, here, nbytes)
        stream.copy_small(here + (64 << 10), rig.card.address, nbytes)
        assert rig.streams.drain(10)
        back = rig.arena.memory[CONTROL // 2 + (64 << 10) :][:nbytes]
        assert (back == np.arange(nbytes) % 251).all()


def test_copies_through_a_staging_ring(driver: CudaDriver) -> None:
    arena = Arena.create(CONTROL + NBYTES)
    pinned = PinnedMemory(driver)
    pinned.register(arena.base, CONTROL)
    staging = StagingRing.largest(driver, 2 * MIB, 8 * MIB, 4 * MIB)
    card = CardMemory.allocate(driver, NBYTES)
    streams = CardStreams(driver, 0, pinned, arena.base + ABORT, arena.base + WORDS)
    copier = StreamCopier(streams.open(), arena, card, ABORT, staging=staging)
    data = np.random.default_rng(6).integers(0, 255, 21 * MIB, np.uint8)
    arena.memory[CONTROL:][: 21 * MIB] = data
    copier.copy(CONTROL, 0, 21 * MIB, COUNTERS, 1)
    copier.copy(0, CONTROL + 32 * MIB, 21 * MIB, COUNTERS, 2, "d2h")
    at = arena.base + COUNTERS
    assert wait_counter(at, 2, arena.base, SPIN_NS, PATIENCE_NS) == WAIT_OK
    assert (arena.memory[CONTROL + 32 * MIB :][: 21 * MIB] == data).all()
    streams.close()
    card.close()
    staging.close()
    pinned.close()
    arena.close()


def test_a_thread_needs_its_device_first(rig: Rig) -> None:
    """What every thread of a lane does; without it a new thread has no context."""
    stream = rig.streams.open()
    failures: list[CudaError] = []

    def work() -> None:
        try:
            rig.driver.set_device(0)
            stream.write_counter(rig.counter(0), 1)
        except CudaError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    rig.reach(0, 1)


CHILD = """
import json, sys
from shadowlane.actors.arena import Arena, ArenaHandle
from shadowlane.actors.card_copier import CardCopier, Regions
from shadowlane.actors.cuda.driver import CudaDriver
from shadowlane.actors.cuda.memory import CardMemoryHandle
given = json.loads(sys.argv[1])
arena = Arena.attach(ArenaHandle(**given["arena"]))
regions = Regions((0, given["control"]), (given["control"], given["nbytes"]), 0, 4096)
handle = CardMemoryHandle(bytes.fromhex(given["blob"]), given["nbytes"], given["uuid"])
copier = CardCopier(CudaDriver(), arena, regions, handle)
copier.wait(*given["wait"])
copier.copy(*given["copy"])
assert copier.streams.drain(20)
copier.close()
assert "torch" not in sys.modules
"""


def test_another_process_copies_into_this_ones_memory(driver: CudaDriver) -> None:
    (device, *_) = find_devices(driver)
    arena = Arena.create(CONTROL + NBYTES)
    access = pin_arena(
        driver, (arena.base, CONTROL), (arena.base + CONTROL, NBYTES), slot_nbytes=4 * MIB
    )
    card = CardMemory.allocate(driver, NBYTES)
    try:
        handle = card.export(device.uuid)
    except CudaError as error:
        pytest.skip(f"memory of the card cannot be shared here: {error}")
    streams = CardStreams(driver, 0, access.pinned, arena.base + ABORT, arena.base + WORDS)
    data = np.random.default_rng(7).integers(0, 255, 21 * MIB, np.uint8)
    arena.memory[CONTROL:][: 21 * MIB] = data
    given = {
        "arena": {**asdict(arena.handle), "pid": os.getpid()},
        "control": CONTROL,
        "nbytes": NBYTES,
        "blob": handle.blob.hex(),
        "uuid": handle.uuid,
        "wait": [COUNTERS, 1],
        "copy": [CONTROL, 5, 21 * MIB, COUNTERS + COUNTER_NBYTES, 1],
    }
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(given)], stderr=subprocess.PIPE
    )
    publish(arena.base + COUNTERS, 1)
    _, errors = child.communicate(timeout=120)
    if b"cudaErrorMapBufferObjectFailed" in errors or b"cudaErrorNotSupported" in errors:
        pytest.skip("memory of the card cannot be opened by another process here")
    assert child.returncode == 0, errors.decode()
    assert counter_value(arena.base + COUNTERS + COUNTER_NBYTES) == 1
    stream = streams.open()
    if access.staging is None:
        stream.copy_d2h(arena.base + CONTROL + 32 * MIB, card.at(5, 21 * MIB), 21 * MIB)
        assert streams.drain(10)
        assert (arena.memory[CONTROL + 32 * MIB :][: 21 * MIB] == data).all()
    streams.close()
    card.close()
    access.close()
    arena.close()


def test_the_first_hour_script_runs_through(driver: CudaDriver, tmp_path: Path) -> None:
    out = tmp_path / "card.jsonl"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--out",
            str(out),
            "--minutes",
            "3",
            "--size",
            "64MiB",
            "--repeats",
            "20",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert any(each["name"] == "crossing" for each in rows), rows
