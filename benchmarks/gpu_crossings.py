"""What it costs to go from the host to the card and back, in every way that a lane could use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from gpu_rig import (
    OUR_HOPS,
    PEER_HOPS,
    SMALL,
    SMALL_NBYTES,
    Feeder,
    Peer,
    Rig,
    Row,
    note,
    row,
)
from hops import PING, PONG
from numba import types

from shadowlane.actors.cuda.driver import CudaError
from shadowlane.ops.atomics import WAIT_OK, publish, wait_counter, write_i32
from shadowlane.ops.compiled import cfunc

BATCH = 100  # round trips that are queued at a time; launch queues are finite
SLOW_BATCH = 10  # where each may take many milliseconds, and the watchdog looks at them all
CHUNKS_MIB = (1, 2, 4, 8, 16, 32, 64)
BUSY_S = 5e-3
MOST_QUEUED = 20_000
STUCK_S = 0.2
MOST_STREAMS = 32
ALIAS_S = 0.05


@cfunc(types.void(types.int64))
def set_word(address):  # type: ignore[no-untyped-def]
    """What a host function does here: it sets the word that the host looks at."""
    write_i32(address, types.int32(1))


def _nothing() -> None:
    """Nothing between wait and write."""


def _by_copies(rig: Rig) -> Callable[[], None]:
    there, here, back = _places(rig)

    def work() -> None:
        rig.main.copy_h2d(there, here, SMALL_NBYTES)
        rig.main.copy_d2h(back, there, SMALL_NBYTES)

    return work


def _by_kernels(rig: Rig) -> Callable[[], None]:
    there, here, back = _places(rig)

    def work() -> None:
        rig.main.copy_small(there, here, SMALL_NBYTES)
        rig.main.copy_small(back, there, SMALL_NBYTES)

    return work


def _places(rig: Rig) -> tuple[int, int, int]:
    here = rig.arena.base + SMALL
    return rig.card.at(rig.nbytes - SMALL_NBYTES, SMALL_NBYTES), here, here + SMALL_NBYTES


def _round_trips(
    rig: Rig, work: Callable[[], None], count: int, most_queued: int = BATCH
) -> tuple[list[float], float]:
    """(us of each round trip, us of the calls that queued one), waits and writes queued ahead."""
    samples: list[float] = []
    queued_s = 0.0
    while len(samples) < count:
        batch = min(most_queued, count - len(samples))
        base = rig.reset_hops(OUR_HOPS)
        with rig.limit():
            began = time.perf_counter()
            for value in range(1, batch + 1):
                rig.main.wait_counter(base + PING, value)
                work()
                rig.main.write_counter(base + PONG, value)
            queued_s += time.perf_counter() - began
            samples += rig.hop_us(OUR_HOPS, batch)
            rig.finish(rig.main)
    return samples, 1e6 * queued_s / count


def crossings(rig: Rig) -> Iterator[Row]:
    """Round trips on an idle card."""
    for name, work in (
        ("crossing", _nothing),
        ("crossing with 16 KiB both ways, copy engine", _by_copies(rig)),
        ("crossing with 16 KiB both ways, zero-copy kernel", _by_kernels(rig)),
    ):
        with rig.limit():
            work()  # a first kernel loads its module, which must not happen behind a wait
            rig.finish(rig.main)
        samples, queued_us = _round_trips(rig, work, rig.repeats)
        yield row(name, samples, "us", counters=rig.streams.mode, queued_us=queued_us)
    yield row("event, recorded and asked for", list(_events_us(rig)), "us")
    yield row("host function", list(_host_functions_us(rig)), "us")


def _events_us(rig: Rig) -> Iterator[float]:
    event = rig.driver.create_event()
    try:
        for _ in range(rig.repeats):
            began = time.perf_counter()
            rig.driver.record_event(event, rig.main.handle)
            while not rig.driver.is_event_done(event):
                pass
            yield 1e6 * (time.perf_counter() - began)
    finally:
        rig.driver.destroy_event(event)


def _host_functions_us(rig: Rig) -> Iterator[float]:
    word = rig.counter(1)
    abort = rig.reset_hops(OUR_HOPS) + 2 * PONG
    for _ in range(rig.repeats):
        publish(word, 0)
        with rig.limit():
            began = time.perf_counter()
            rig.driver.call_host(rig.main.handle, set_word.address, word)
            if wait_counter(word, 1, abort, 100_000_000, 1_000_000_000) != WAIT_OK:
                raise TimeoutError("a host function was not called within 1 s")
            yield 1e6 * (time.perf_counter() - began)


def under_weights(rig: Rig) -> Iterator[Row]:
    """The same round trips while weights stream to the card in chunks of several sizes."""
    count = max(5, rig.repeats // 4)
    for mib in CHUNKS_MIB:
        if mib << 20 > rig.nbytes:
            continue
        for name, work in (
            ("copy engine", _by_copies(rig)),
            ("zero-copy kernel", _by_kernels(rig)),
        ):
            feeder = Feeder(rig, rig.second, mib << 20)
            try:
                samples, _ = _round_trips(rig, work, count, SLOW_BATCH)
            finally:
                rate = feeder.stop()
            title = f"crossing with 16 KiB both ways, {name}, beside chunks of {mib} MiB"
            yield row(title, samples, "us", copied_gb_per_s=rate / 1e9)


def behind_kernels(rig: Rig) -> Iterator[Row]:
    """How long waits and writes of another process are held up by kernels of this one."""
    count = min(BATCH, rig.repeats)
    for name, busy_s in (("idle", 0.0), ("5 ms kernels", BUSY_S)):
        rig.reset_hops(PEER_HOPS)
        with Peer(rig, "memops", count=count) as peer:
            mode = peer.answer()["mode"]
            with rig.limit(10.0):
                stop = threading.Event()
                busy = threading.Thread(target=_keep_busy, args=(rig, busy_s, stop))
                busy.start()
                try:
                    samples = rig.hop_us(PEER_HOPS, count)
                finally:
                    stop.set()
                    busy.join()
                rig.finish(rig.main)
        yield row(f"crossing of another process, this one {name}", samples, "us", counters=mode)


def _keep_busy(rig: Rig, seconds: float, stop: threading.Event) -> None:
    """Kernels back to back on the main stream, two in flight."""
    rig.driver.set_device(rig.device.ordinal)
    events: list[int] = []
    while seconds > 0 and not stop.is_set():
        rig.main.submit(lambda handle: rig.kernels.busy(handle, seconds))
        event = rig.driver.create_event()
        rig.driver.record_event(event, rig.main.handle)
        events.append(event)
        while len(events) > 1 and not stop.is_set():
            if rig.driver.is_event_done(events[0]):
                rig.driver.destroy_event(events.pop(0))
            else:
                time.sleep(0)
    for event in events:
        rig.driver.destroy_event(event)


def queue_depth(rig: Rig) -> Iterator[Row]:
    """How much a stream that waits takes before a call blocks; at most MOST_QUEUED."""
    if rig.streams.mode != "memops":
        yield note("queue depth", skipped="streams do not wait here")
        return
    queued = 0
    done = threading.Event()
    failures: list[CudaError] = []

    def fill() -> None:
        nonlocal queued
        rig.driver.set_device(rig.device.ordinal)
        try:
            while queued < MOST_QUEUED and not done.is_set():
                rig.main.write_counter(rig.counter(3), queued)
                queued += 1
        except CudaError as error:
            failures.append(error)

    publish(rig.counter(2), 0)
    rig.main.wait_counter(rig.counter(2), 1)
    filler = threading.Thread(target=fill)
    filler.start()
    before, changed = -1, time.monotonic()
    while filler.is_alive() and time.monotonic() - changed < STUCK_S:
        if queued != before:
            before, changed = queued, time.monotonic()
        time.sleep(0.01)
    depth = queued
    done.set()
    publish(rig.counter(2), 1)
    filler.join()
    with rig.limit():
        rig.finish(rig.main)
    if failures:
        raise failures[0]
    yield row("queue depth", [float(depth)], "operations", is_bounded=depth < MOST_QUEUED)


def stream_aliasing(rig: Rig) -> Iterator[Row]:
    """How many streams can be open before one that waits holds up another."""
    if rig.streams.mode != "memops":
        yield note("streams without false dependences", skipped="streams do not wait here")
        return
    driver, pinned = rig.driver, rig.pinned
    publish(rig.counter(4), 0)
    blocked = driver.create_stream()
    driver.wait_value(blocked, pinned.mapped(rig.counter(4)), 1)
    others: list[int] = []
    num_free = 0
    try:
        for number in range(1, MOST_STREAMS):
            others.append(driver.create_stream())
            publish(rig.counter(5), 0)
            driver.write_value(others[-1], pinned.mapped(rig.counter(5)), number)
            until = time.monotonic() + ALIAS_S
            while not driver.is_stream_idle(others[-1]) and time.monotonic() < until:
                time.sleep(0)
            if not driver.is_stream_idle(others[-1]):
                break
            num_free = number
    finally:
        publish(rig.counter(4), 1)
        with rig.limit():
            while not all(driver.is_stream_idle(each) for each in [blocked, *others]):
                time.sleep(0)
        for stream in [blocked, *others]:
            driver.destroy_stream(stream)
    is_bounded = num_free + 1 < MOST_STREAMS
    yield row(
        "streams without false dependences", [num_free + 1.0], "streams", is_bounded=is_bounded
    )
