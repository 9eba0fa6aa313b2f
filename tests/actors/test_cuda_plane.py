"""The parts together: an abort, random programs, and a transfer lane in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_driver import RecordingDriver

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE
from shadowlane.actors.card_copier import CardCopier, Regions, ordinal_of
from shadowlane.actors.copier import StreamCopier
from shadowlane.actors.copy_choice import CopyTimes, Course, choose, time_copies
from shadowlane.actors.copy_ring import CopyRing, CopyThread, RingCopier
from shadowlane.actors.cuda.devices import find_devices
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.cuda.memory import CardMemory, CardMemoryHandle
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.actors.cuda.watchdog import Watchdog
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.table import COUNTER_NBYTES

ABORT, WORDS, COUNTERS, RING = 0, PAGE, 2 * PAGE, 8 * PAGE
CONTROL = 16 * PAGE
NBYTES = 128 * PAGE
REGIONS = Regions((0, CONTROL), (CONTROL, NBYTES - CONTROL), ABORT, WORDS)
PATIENCE_NS = 60 * 10**9


def counter(number: int) -> int:
    return COUNTERS + number * COUNTER_NBYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NBYTES)
    yield arena
    arena.close()


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    driver = RecordingDriver()
    driver.set_device(0)
    yield driver
    driver.shut_down()


def open_streams(driver: RecordingDriver, arena: Arena) -> CardStreams:
    pinned = PinnedMemory(driver, 16 * PAGE)
    pinned.register(arena.base, NBYTES)
    return CardStreams(driver, 0, pinned, arena.base + ABORT, arena.base + WORDS)


# -- the watchdog


def test_the_watchdog_releases_waits_on_an_abort(driver: RecordingDriver, arena: Arena) -> None:
    streams = open_streams(driver, arena)
    watchdog = Watchdog(streams)
    stream = streams.open()
    stream.wait_counter(arena.base + counter(0), 7)
    stream.write_counter(arena.base + counter(1), 1)
    assert not streams.drain(0.05), "nothing is released before the abort"
    arena.view(ABORT, np.int64, 1)[0] = 1
    assert streams.drain(30)
    assert counter_value(arena.base + counter(0)) == 7
    watchdog.close()
    streams.close()


def test_the_watchdog_ends_what_takes_too_long(driver: RecordingDriver, arena: Arena) -> None:
    streams = open_streams(driver, arena)
    watchdog = Watchdog(streams)
    stream = streams.open()

    def wait_too_long() -> None:
        with watchdog.limit(0.05):
            stream.wait_counter(arena.base + counter(0), 1)
            assert streams.drain(30)

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        wait_too_long()
    with watchdog.limit(30):
        stream.write_counter(arena.base + counter(1), 1)
        assert streams.drain(30)
    watchdog.close()
    streams.close()


# -- random programs


@st.composite
def programs(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Per stream, instructions in an order in which all could run one by one: what each waits for.

    Instruction k of stream s retires counter s with k + 1; it waits for one earlier instruction of
    another stream, or for none (itself).
    """
    num_streams = draw(st.integers(2, 4))
    program: list[list[tuple[int, int]]] = [[] for _ in range(num_streams)]
    for _ in range(draw(st.integers(4, 24))):
        stream = draw(st.integers(0, num_streams - 1))
        other = draw(st.integers(0, num_streams - 1))
        value = draw(st.integers(0, len(program[other])))
        program[stream].append((other, value))
    return program


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    program=programs(),
    has_memops=st.booleans(),
    delay_us=st.integers(0, 300),
    dies=st.booleans(),
)
def test_random_programs_end_and_keep_their_order(
    program: list[list[tuple[int, int]]], has_memops: bool, delay_us: int, dies: bool
) -> None:
    """Each instruction writes a number after its wait; nobody sees a value it did not wait for.

    `dies`: one stream's work is never given, as if its lane were dead; the others must still end
    when they are abandoned.
    """
    arena = Arena.create(NBYTES)
    driver = RecordingDriver(has_memops=has_memops)
    driver.set_device(0)
    driver.delays["kernel"] = delay_us * 1e-6
    streams = open_streams(driver, arena)
    lines = [streams.open() for _ in program]
    retired = [0] * len(program)
    wrong: list[str] = []

    def instruction(number: int, ordinal: int, other: int, value: int) -> None:
        if retired[other] < value:
            wrong.append(f"{number}.{ordinal} ran at {retired[other]} of {other}; wants {value}")
        retired[number] = ordinal + 1

    for number, instructions in enumerate(program):
        if dies and number == 0:
            continue
        for ordinal, (other, value) in enumerate(instructions):
            lines[number].wait_counter(arena.base + counter(other), value)
            lines[number].submit(
                lambda handle, run=(number, ordinal, other, value): driver.launch(
                    handle, lambda: instruction(*run)
                )
            )
            lines[number].write_counter(arena.base + counter(number), ordinal + 1)
    if dies:
        assert streams.abandon(30)
    else:
        assert streams.drain(30)
        assert retired == [len(each) for each in program]
        assert wrong == []
    streams.close()
    assert driver.hazards == []
    driver.shut_down()
    arena.close()


# -- two processes

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[2])
from recording_driver import RecordingDriver
from shadowlane.actors.arena import Arena, ArenaHandle
from shadowlane.actors.card_copier import CardCopier, Regions
from shadowlane.actors.cuda.memory import CardMemoryHandle
given = json.loads(sys.argv[1])
driver = RecordingDriver(**given["driver"])
arena = Arena.attach(ArenaHandle(**given["arena"]))
regions = Regions((0, given["control"]), (given["control"], given["weights"]), 0, 4096)
handle = CardMemoryHandle(bytes.fromhex(given["blob"]), given["nbytes"], given["uuid"])
copier = CardCopier(
    driver, arena, regions, handle, chunk_nbytes=8192, least_staging_nbytes=4096
)
for copy in given["copies"]:
    copier.wait(*copy["wait"])
    copier.copy(*copy["copy"])
assert copier.streams.drain(60)
copier.close()
assert "torch" not in sys.modules, "a copying process needs no torch"
left = driver.left()
assert not any(left.values()), left
assert driver.hazards == [] and driver.num_pageable == 0
"""


def run_child(
    arena: Arena, handle: CardMemoryHandle, copies: list[dict[str, object]], **driver: object
) -> subprocess.Popen[bytes]:
    given = {
        "driver": driver,
        "arena": {**asdict(arena.handle), "pid": os.getpid()},
        "control": CONTROL,
        "weights": NBYTES - CONTROL,
        "blob": handle.blob.hex(),
        "nbytes": handle.nbytes,
        "uuid": handle.uuid,
        "copies": copies,
    }
    command = [sys.executable, "-c", CHILD, json.dumps(given), str(Path(__file__).parent)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.mark.parametrize("pin_limit", [1 << 30, CONTROL + 8 * PAGE])
def test_a_process_of_its_own_copies_into_the_card_of_another(
    driver: RecordingDriver, arena: Arena, pin_limit: int
) -> None:
    """The GPU actor's stream waits for what the transfer actor's stream has brought."""
    (device,) = find_devices(driver)
    card = CardMemory.allocate(driver, 64 * PAGE)
    data = np.random.default_rng(4).integers(0, 255, 20 * PAGE, np.uint8)
    arena.memory[CONTROL:][: 20 * PAGE] = data
    streams = open_streams(driver, arena)
    compute = streams.open()
    compute.wait_counter(arena.base + counter(0), 1)
    compute.copy_d2h(arena.base + CONTROL + 40 * PAGE, card.at(5, 20 * PAGE), 20 * PAGE)
    compute.write_counter(arena.base + counter(1), 1)
    copies = [
        {
            "wait": (counter(2), 1),
            "copy": (CONTROL, 5, 20 * PAGE, counter(0), 1),
        },
        {
            "wait": (counter(1), 1),  # the GPU actor has read what is now brought back
            "copy": (5 + PAGE, CONTROL + 80 * PAGE, 19 * PAGE, counter(0), 2, "d2h"),
        },
    ]
    child = run_child(arena, card.export(device.uuid), copies, pin_limit=pin_limit)
    assert counter_value(arena.base + counter(0)) == 0
    publish(arena.base + counter(2), 1)
    at = arena.base + counter(0)
    state = wait_counter(at, 2, arena.base + ABORT, 0, PATIENCE_NS)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors.decode()
    assert state == WAIT_OK
    assert (arena.memory[CONTROL + 40 * PAGE :][: 20 * PAGE] == data).all()
    assert (arena.memory[CONTROL + 80 * PAGE :][: 19 * PAGE] == data[PAGE:]).all()
    streams.close()
    card.close()


def test_a_refused_sharing_is_one_line(driver: RecordingDriver, arena: Arena) -> None:
    (device,) = find_devices(driver)
    card = CardMemory.allocate(driver, PAGE)
    child = run_child(arena, card.export(device.uuid), [], has_ipc=False)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert last.endswith("CudaError: import_memory: cudaErrorMapBufferObjectFailed")


def test_a_failed_opening_gives_everything_back(arena: Arena) -> None:
    """Whatever call fails, nothing is left pinned, open or running."""
    owner = RecordingDriver()
    owner.set_device(0)
    card = CardMemory.allocate(owner, PAGE)
    handle = card.export(find_devices(owner)[0].uuid)
    for call in ("import_memory", "allocate_host", "create_event", "create_stream"):
        driver = Elsewhere(pin_limit=CONTROL + 8 * PAGE)
        driver.failures[call] = "cudaErrorUnknown"
        with pytest.raises(CudaError, match="cudaErrorUnknown"):
            CardCopier(driver, arena, REGIONS, handle, chunk_nbytes=PAGE, least_staging_nbytes=PAGE)
        assert not any(driver.left().values()), (call, driver.left())
    card.close()


class Elsewhere(RecordingDriver):
    """As if it were in another process than the one that exported."""

    def import_memory(self, blob: bytes) -> int:
        self._record("import_memory")
        address = self.allocate(PAGE)
        self._imported.add(address)
        return address


def test_a_card_that_this_process_does_not_see(driver: RecordingDriver) -> None:
    assert ordinal_of(driver, find_devices(driver)[0].uuid) == 0
    with pytest.raises(CudaError, match="this process does not see GPU-0"):
        ordinal_of(driver, "GPU-0")


# -- the other way: a thread beside the card, fed by a ring


def test_a_thread_serves_the_ring_on_a_stream(driver: RecordingDriver, arena: Arena) -> None:
    streams = open_streams(driver, arena)
    card = CardMemory.allocate(driver, 64 * PAGE)
    copier = StreamCopier(streams.open(), arena, card, ABORT, chunk_nbytes=8 * PAGE)
    thread = CopyThread(CopyRing(arena, RING, ABORT, 16), copier, lambda: driver.set_device(0))
    ours = RingCopier(CopyRing(arena, RING, ABORT, 16))
    arena.memory[CONTROL:][: 20 * PAGE] = 3
    course = Course(CONTROL, 0, 20 * PAGE, counter(0), ABORT, small_nbytes=PAGE)

    def measure() -> CopyTimes:
        return time_copies(ours, arena, course, num_small=3, num_large=2)

    choice = choose(measure, refuse, card_nbytes=8 << 30)
    assert choice.submitter == "thread"
    assert choice.thread is not None
    assert choice.thread.bytes_per_s > 0
    ours.close()
    assert thread.join(30)
    assert thread.error is None
    host = driver.host_address(card.address, 20 * PAGE)
    assert ctypes.string_at(host, 20 * PAGE) == b"\3" * (20 * PAGE)
    copies = [arguments[2] for _, name, arguments in driver.done if name == "copy"]
    assert set(copies) == {PAGE, 8 * PAGE, 4 * PAGE}
    streams.close()
    card.close()
    assert driver.hazards == []


def refuse() -> CopyTimes:
    raise CudaError("import_memory", "cudaErrorMapBufferObjectFailed")


def test_a_card_that_fails_is_heard_of_by_the_producer(
    driver: RecordingDriver, arena: Arena
) -> None:
    streams = open_streams(driver, arena)
    card = CardMemory.allocate(driver, 64 * PAGE)
    copier = StreamCopier(streams.open(), arena, card, ABORT)
    thread = CopyThread(CopyRing(arena, RING, ABORT, 16), copier, lambda: driver.set_device(0))
    ours = RingCopier(CopyRing(arena, RING, ABORT, 16))
    driver.failures["copy"] = "cudaErrorLaunchFailure"
    ours.copy(CONTROL, 0, PAGE, counter(0), 1)
    assert thread.join(30)
    assert thread.error == "copy: cudaErrorLaunchFailure"
    with pytest.raises(RuntimeError, match="copy: cudaErrorLaunchFailure"):
        ours.copy(CONTROL, 0, PAGE, counter(0), 1)
    del driver.failures["copy"]
    streams.close()
    card.close()
