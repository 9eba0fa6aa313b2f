"""Streams with counters, in both modes, on a card that is not there."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from recording_driver import RecordingDriver

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE
from shadowlane.actors.cuda.bells import Bells
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.cuda.memory import CardMemory
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.streams import MAX_STREAMS, SMALL_NBYTES, CardStreams
from shadowlane.ops.atomics import counter_value, publish, wait_counter, wake_all
from shadowlane.ops.table import COUNTER_NBYTES

DATA = 16 * PAGE
ARENA_NBYTES = 64 * PAGE
PATIENCE_NS = 30 * 10**9


def wait_until(condition: Callable[[], bool]) -> None:
    ended = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ended, "what was waited for did not happen"
        time.sleep(0)


@dataclass
class Rig:
    """An arena, card memory and streams over a recording driver."""

    driver: RecordingDriver
    arena: Arena
    pinned: PinnedMemory
    card: CardMemory
    streams: CardStreams

    @staticmethod
    def make(driver: RecordingDriver, *, chunk_nbytes: int = 8 * PAGE) -> Rig:
        driver.set_device(0)
        arena = Arena.create(ARENA_NBYTES)
        pinned = PinnedMemory(driver, chunk_nbytes)
        pinned.register(arena.base, ARENA_NBYTES)
        card = CardMemory.allocate(driver, ARENA_NBYTES)

        def small_copy(stream: int, target: int, source: int, nbytes: int) -> None:
            def kernel() -> None:
                ctypes.memmove(
                    driver.host_address(target, nbytes), driver.host_address(source, nbytes), nbytes
                )

            driver.launch(stream, kernel, "small_copy", nbytes)

        streams = CardStreams(driver, 0, pinned, arena.base, arena.base + PAGE, small_copy)
        return Rig(driver, arena, pinned, card, streams)

    def counter(self, number: int) -> int:
        return self.arena.base + 2 * PAGE + number * COUNTER_NBYTES

    def data(self, offset: int) -> int:
        return self.arena.base + DATA + offset

    def abort(self) -> None:
        self.arena.view(0, np.int64, 1)[0] = 1

    def close(self) -> None:
        self.streams.close()
        self.card.close()
        self.pinned.close()
        assert not any(self.driver.left().values()), self.driver.left()
        assert self.driver.hazards == []
        assert self.driver.num_pageable == 0
        self.arena.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Rigs whose threads end with the test, also where it fails."""
    made: list[Rig] = []

    def make(driver: RecordingDriver) -> Rig:
        made.append(Rig.make(driver))
        return made[-1]

    yield make
    for rig in made:
        rig.driver.shut_down()


@pytest.fixture(params=["memops", "events"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Iterator[Rig]:
    rig = make_rig(RecordingDriver(has_memops=request.param == "memops"))
    assert rig.streams.mode == request.param
    yield rig
    rig.close()


def test_a_copy_waits_for_its_counter_and_tells_when_it_is_done(rig: Rig) -> None:
    rig.arena.memory[DATA : DATA + PAGE] = 7
    up = rig.streams.open()
    up.wait_counter(rig.counter(0), 5)
    up.copy_h2d(rig.card.address, rig.data(0), PAGE)
    up.write_counter(rig.counter(1), 1)
    up.copy_d2h(rig.data(PAGE), rig.card.address, PAGE)
    up.write_counter(rig.counter(1), 2)
    assert not rig.streams.is_idle()
    publish(rig.counter(0), 4)
    assert counter_value(rig.counter(1)) == 0
    assert "copy" not in rig.driver.names(up.handle)
    publish(rig.counter(0), 5)
    assert wait_counter(rig.counter(1), 2, rig.arena.base, 0, PATIENCE_NS) == 0
    assert (rig.arena.memory[DATA + PAGE : DATA + 2 * PAGE] == 7).all()
    assert rig.streams.drain(30)


def test_streams_join_through_counters(rig: Rig) -> None:
    """Two streams and this thread pass a value round; each adds nothing and loses nothing."""
    up, down = rig.streams.open(), rig.streams.open()
    for step in range(1, 51):
        up.wait_counter(rig.counter(0), step)
        up.copy_h2d(rig.card.address, rig.data(0), 8)
        up.write_counter(rig.counter(1), step)
        down.wait_counter(rig.counter(1), step)
        down.copy_d2h(rig.data(PAGE), rig.card.address, 8)
        down.write_counter(rig.counter(2), step)
    for step in range(1, 51):
        rig.arena.view(DATA, np.int64, 1)[0] = step * 1000
        publish(rig.counter(0), step)
        assert wait_counter(rig.counter(2), step, rig.arena.base, 50_000, PATIENCE_NS) == 0
        assert rig.arena.view(DATA + PAGE, np.int64, 1)[0] == step * 1000
    assert rig.streams.drain(30)


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, -2])
def test_counters_wrap(rig: Rig, start: int) -> None:
    publish(rig.counter(0), start)
    stream = rig.streams.open()
    for ahead in range(1, 5):
        stream.wait_counter(rig.counter(0), start + ahead)
        stream.write_counter(rig.counter(1), start + ahead)
    for ahead in range(1, 5):
        publish(rig.counter(0), start + ahead)
    assert rig.streams.drain(30)
    assert counter_value(rig.counter(1)) == (start + 4 + 2**31) % 2**32 - 2**31


def test_a_copy_is_cut_where_registrations_meet(rig: Rig) -> None:
    border = 8 * PAGE - DATA % (8 * PAGE)
    rig.arena.memory[DATA:] = np.arange(ARENA_NBYTES - DATA, dtype=np.uint32).astype(np.uint8)
    stream = rig.streams.open()
    stream.copy_h2d(rig.card.at(100, 2 * PAGE), rig.data(border - PAGE), 2 * PAGE)
    stream.copy_d2h(rig.data(border + 16 * PAGE - 50), rig.card.at(100, 2 * PAGE), 2 * PAGE)
    assert rig.streams.drain(30)
    sizes = [arguments[2] for _, name, arguments in rig.driver.done if name == "copy"]
    assert sizes == [PAGE, PAGE, 50, 2 * PAGE - 50]
    sent = rig.arena.memory[DATA + border - PAGE :][: 2 * PAGE]
    assert (rig.arena.memory[DATA + border + 16 * PAGE - 50 :][: 2 * PAGE] == sent).all()


def test_small_copies_go_by_a_kernel_and_not_behind_weights(rig: Rig) -> None:
    rig.driver.delays["copy"] = 0.2
    weights, compute = rig.streams.open(), rig.streams.open()
    rig.arena.memory[DATA : DATA + 64] = 9
    for _ in range(5):
        weights.copy_h2d(rig.card.at(PAGE, PAGE), rig.data(PAGE), PAGE)
    compute.copy_small(rig.card.address, rig.data(0), 64)
    compute.copy_small(rig.data(8 * PAGE), rig.card.address, 64)
    compute.write_counter(rig.counter(0), 1)
    assert wait_counter(rig.counter(0), 1, rig.arena.base, 0, PATIENCE_NS) == 0
    assert not weights.is_idle()
    assert (rig.arena.memory[DATA + 8 * PAGE :][:64] == 9).all()
    assert rig.driver.names(compute.handle).count("small_copy") == 2
    assert "copy" not in rig.driver.names(compute.handle)
    with pytest.raises(ValueError, match="at most 65536 bytes; got 65537"):
        compute.copy_small(rig.card.address, rig.data(0), SMALL_NBYTES + 1)
    assert rig.streams.drain(30)


def test_graphs_replay_between_eager_waits(rig: Rig) -> None:
    stream = rig.streams.open()
    ran: list[int] = []
    graph = stream.capture(
        lambda handle: rig.driver.launch(handle, lambda: ran.append(len(ran)), "matvec")
    )
    assert ran == []
    for step in range(1, 4):
        stream.wait_counter(rig.counter(0), step)
        stream.replay(graph)
        stream.write_counter(rig.counter(1), step)
    publish(rig.counter(0), 2)
    assert wait_counter(rig.counter(1), 2, rig.arena.base, 0, PATIENCE_NS) == 0
    assert ran == [0, 1]
    publish(rig.counter(0), 3)
    assert rig.streams.drain(30)
    assert ran == [0, 1, 2]
    rig.driver.destroy_graph(graph)


def test_nothing_is_left_waiting_when_streams_are_abandoned(rig: Rig) -> None:
    """A ring of streams that nobody ever starts: each waits for the one before it."""
    streams = [rig.streams.open() for _ in range(4)]
    for step in range(1, 6):
        for number, stream in enumerate(streams):
            stream.wait_counter(rig.counter(number), step)
            stream.write_counter(rig.counter((number + 1) % 4), step)
    assert not rig.streams.drain(0.05)
    assert rig.streams.abandon(30)
    assert rig.streams.is_idle()
    for number in range(4):
        assert counter_value(rig.counter(number)) >= 5


def test_released_counters_are_named(rig: Rig) -> None:
    stream = rig.streams.open()
    stream.wait_counter(rig.counter(0), 3)
    stream.wait_counter(rig.counter(0), 8)
    stream.wait_counter(rig.counter(1), 2)
    publish(rig.counter(1), 2)
    assert rig.streams.release_waits() == {rig.counter(0): 8}
    assert rig.streams.release_waits() == {}
    assert rig.streams.drain(30)


def test_values_and_writes_are_assigned_under_one_lock(rig: Rig) -> None:
    """Two threads retire on one stream; no value is overtaken."""
    stream = rig.streams.open()
    value = 0
    seen: list[int] = []

    def retire() -> None:
        nonlocal value
        rig.driver.set_device(0)
        for _ in range(100):
            with stream.lock:
                value += 1
                stream.write_counter(rig.counter(0), value)
                stream.submit(
                    lambda handle: rig.driver.launch(
                        handle, lambda: seen.append(counter_value(rig.counter(0)))
                    )
                )

    threads = [threading.Thread(target=retire) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.streams.drain(30)
    assert counter_value(rig.counter(0)) == 200
    assert seen == sorted(seen)


def test_the_driver_has_no_room_for_more_streams(rig: Rig) -> None:
    for _ in range(MAX_STREAMS):
        rig.streams.open()
    with pytest.raises(ValueError, match="at most 8 streams"):
        rig.streams.open()


def test_host_memory_must_be_pinned(rig: Rig) -> None:
    stream = rig.streams.open()
    with pytest.raises(ValueError, match="must be pinned"):
        stream.copy_h2d(rig.card.address, rig.arena.base + ARENA_NBYTES - 8, 16)


def test_an_abort_lets_streams_with_events_go(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(RecordingDriver(has_memops=False))
    stream = rig.streams.open()
    stream.wait_counter(rig.counter(0), 1)
    stream.write_counter(rig.counter(1), 1)
    rig.abort()
    wake_all(rig.counter(0))
    assert rig.streams.drain(30)
    assert counter_value(rig.counter(0)) == 0
    rig.close()


def test_events_wake_sleepers(make_rig: Callable[..., Rig]) -> None:
    """Without memory operations a thread publishes, so nobody has to look again."""
    rig = make_rig(RecordingDriver(has_memops=False))
    woken: list[int] = []
    sleeper = threading.Thread(
        target=lambda: woken.append(wait_counter(rig.counter(0), 1, rig.arena.base, 0, PATIENCE_NS))
    )
    sleeper.start()
    stream = rig.streams.open()
    stream.write_counter(rig.counter(0), 1)
    sleeper.join(30)
    assert woken == [0]
    rig.close()


def test_a_failure_in_a_thread_comes_out_at_the_next_call(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(RecordingDriver(has_memops=False))
    stream = rig.streams.open()
    rig.driver.failures["record_event"] = "cudaErrorLaunchFailure"
    stream.write_counter(rig.counter(0), 1)

    def fails() -> bool:
        try:
            stream.is_idle()
        except CudaError as error:
            return error.name == "cudaErrorLaunchFailure"
        return False

    wait_until(fails)
    with pytest.raises(CudaError, match="cudaErrorLaunchFailure"):
        stream.copy_h2d(rig.card.address, rig.data(0), 8)
    rig.streams._engine.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RecordingDriver(has_memops=False), "CUDA_ERROR_NOT_SUPPORTED"),
        (lambda: Deaf(), "does not wait"),
    ],
)
def test_the_probe_says_why_there_are_no_memory_operations(
    make: Callable[[], RecordingDriver], reason: str, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(make())
    assert rig.streams.mode == "events"
    assert reason in rig.streams.reason
    rig.close()


class Deaf(RecordingDriver):
    """Accepts waits and does not wait, as some systems do."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._word("wait_value", stream, address)


def test_counters_out_of_reach_of_the_card_mean_events() -> None:
    driver = RecordingDriver()
    driver.set_device(0)
    arena = Arena.create(ARENA_NBYTES)
    streams = CardStreams(driver, 0, PinnedMemory(driver), arena.base, None)
    assert streams.mode == "events"
    assert streams.reason == "counters are not pinned"
    streams.close()
    arena.close()


def test_bells_wake_those_who_sleep_at_a_counter_of_a_card(make_rig: Callable[..., Rig]) -> None:
    """Sleepers look by themselves only after 20 ms; so many are woken in far less."""
    rig = make_rig(RecordingDriver())
    bells = Bells([rig.counter(0), rig.counter(1)])
    stream = rig.streams.open()
    woken_ms: list[float] = []

    def sleep() -> None:
        for value in range(1, 41):
            publish(rig.counter(1), value)
            began = time.monotonic()
            assert wait_counter(rig.counter(0), value, rig.arena.base, 0, PATIENCE_NS) == 0
            woken_ms.append(1e3 * (time.monotonic() - began))

    for value in range(1, 41):
        stream.wait_counter(rig.counter(1), value)
        stream.write_counter(rig.counter(0), value)
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    sleeper.join(30)
    assert len(woken_ms) == 40
    assert sorted(woken_ms)[10] < 15, "nobody was woken"
    bells.close()
    rig.close()
