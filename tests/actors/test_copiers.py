"""Copiers: the one without a card, the ring between two processes, and the choice between two."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE
from shadowlane.actors.copier import About, CopyError, MemoryCopier, Way, chunks
from shadowlane.actors.copy_choice import CopyTimes, Course, choose, time_copies
from shadowlane.actors.copy_ring import (
    RECORDS,
    STOP,
    CopyRing,
    CopyThread,
    Record,
    RingCopier,
    ring_nbytes,
    serve,
)
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.table import COUNTER_NBYTES

ABORT = 0
COUNTERS = PAGE
RING = 4 * PAGE
DATA = 16 * PAGE
CARD = 64 * PAGE  # where the memory of the card that is not there begins
NBYTES = 128 * PAGE
DEPTH = 8
PATIENCE_NS = 30 * 10**9


def counter(number: int) -> int:
    return COUNTERS + number * COUNTER_NBYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NBYTES)
    arena.memory[DATA:CARD] = np.random.default_rng(1).integers(0, 255, CARD - DATA, np.uint8)
    yield arena
    arena.close()


def reach(arena: Arena, number: int, value: int) -> None:
    at = arena.base + counter(number)
    assert wait_counter(at, value, arena.base + ABORT, 0, PATIENCE_NS) == WAIT_OK


def test_chunks_cover_a_copy_in_order() -> None:
    assert chunks(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert chunks(4, 4) == [(0, 4)]
    assert chunks(0, 4) == []


def test_copies_within_memory_are_in_order_and_chunked(arena: Arena) -> None:
    held: list[int] = []
    copier = MemoryCopier(
        arena, CARD, ABORT, hold=lambda nbytes, began_ns: held.append(nbytes), chunk_nbytes=PAGE
    )
    copier.copy(DATA, 100, 2 * PAGE + 7, counter(0), 1)
    copier.copy(100, DATA + 8 * PAGE, 2 * PAGE + 7, counter(0), 2, "d2h")
    reach(arena, 0, 2)
    sent = arena.memory[DATA:][: 2 * PAGE + 7]
    assert (arena.memory[CARD + 100 :][: 2 * PAGE + 7] == sent).all()
    assert (arena.memory[DATA + 8 * PAGE :][: 2 * PAGE + 7] == sent).all()
    assert held == 2 * [PAGE, PAGE, 7]
    copier.close()


def test_a_copy_lasts_as_long_as_it_is_held(arena: Arena) -> None:
    go = threading.Event()
    began: list[int] = []

    def hold(nbytes: int, began_ns: int) -> None:
        began.append(began_ns)
        assert go.wait(30)

    copier = MemoryCopier(arena, CARD, ABORT, hold=hold)
    before = time.monotonic_ns()
    copier.copy(DATA, 0, PAGE, counter(0), 1)
    assert wait_counter(arena.base + counter(0), 1, arena.base, 0, 20_000_000) != WAIT_OK
    assert began[0] >= before
    go.set()
    reach(arena, 0, 1)
    copier.close()


def test_a_copy_waits_for_the_counters_before_it(arena: Arena) -> None:
    copier = MemoryCopier(arena, CARD, ABORT)
    copier.wait(counter(1), 3)
    copier.copy(DATA, 0, PAGE, counter(0), 1)
    publish(arena.base + counter(1), 2)
    assert counter_value(arena.base + counter(0)) == 0
    assert not arena.memory[CARD : CARD + PAGE].any()
    publish(arena.base + counter(1), 3)
    reach(arena, 0, 1)
    assert (arena.memory[CARD : CARD + PAGE] == arena.memory[DATA : DATA + PAGE]).all()
    copier.close()


def test_an_abort_ends_a_copier_and_says_so(arena: Arena) -> None:
    copier = MemoryCopier(arena, CARD, ABORT)
    copier.wait(counter(1), 1)
    copier.copy(DATA, 0, PAGE, counter(0), 1)
    arena.view(ABORT, np.int64, 1)[0] = 1
    copier.close()
    assert counter_value(arena.base + counter(0)) == 0
    with pytest.raises(CopyError, match="an abort ended a copy that waited"):
        copier.copy(DATA, 0, PAGE, counter(0), 1)


@pytest.mark.parametrize(("source", "target"), [(NBYTES - 1, 0), (DATA, NBYTES - CARD), (-1, 0)])
def test_copies_stay_within_the_arena(arena: Arena, source: int, target: int) -> None:
    copier = MemoryCopier(arena, CARD, ABORT)
    with pytest.raises(ValueError, match="must stay within"):
        copier.copy(source, target, PAGE, counter(0), 1)
    copier.close()


# -- the ring


class Noting:
    """A copier that notes what it is given, and fails at the copy number `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.given: list[tuple] = []
        self._fails_at = fails_at

    def wait(self, counter: int, value: int) -> None:
        self.given.append(("wait", counter, value))

    def copy(
        self,
        source: int,
        target: int,
        nbytes: int,
        counter: int,
        value: int,
        way: Way = "h2d",
        about: About = (0, 0),
    ) -> None:
        if len(self.given) == self._fails_at:
            raise CopyError("cudaMemcpyAsync of 4 KiB: cudaErrorIllegalAddress")
        self.given.append((way, source, target, nbytes, counter, value))

    def look(self) -> bool:
        return False

    def close(self) -> None: ...


def rings(arena: Arena) -> tuple[CopyRing, CopyRing]:
    """Both ends."""
    return CopyRing(arena, RING, ABORT, DEPTH), CopyRing(arena, RING, ABORT, DEPTH)


def test_a_ring_passes_on_what_was_put_in(arena: Arena) -> None:
    ours, theirs = rings(arena)
    copier, other = RingCopier(ours), Noting()
    thread = CopyThread(theirs, other)
    expected: list[tuple] = []
    for number in range(5 * DEPTH):
        copier.wait(number, number + 1)
        copier.copy(number, 2 * number, 3, 4, -number, "d2h" if number % 3 else "h2d")
        way = "d2h" if number % 3 else "h2d"
        expected += [("wait", number, number + 1), (way, number, 2 * number, 3, 4, -number)]
    copier.close()
    assert thread.join(30)
    assert thread.error is None
    assert other.given == expected


@pytest.mark.parametrize("start", [2**32 - 3, 2**31 - 3, -3])
def test_a_ring_goes_on_when_its_counters_wrap(arena: Arena, start: int) -> None:
    publish(arena.base + RING, start)
    publish(arena.base + RING + COUNTER_NBYTES, start)
    ours, theirs = rings(arena)
    copier, other = RingCopier(ours), Noting()
    thread = CopyThread(theirs, other)
    for number in range(3 * DEPTH):
        copier.wait(number, number)
    copier.close()
    assert thread.join(30)
    assert [each[1] for each in other.given] == list(range(3 * DEPTH))


def test_a_full_ring_holds_its_producer(arena: Arena) -> None:
    ours, theirs = rings(arena)
    put: list[int] = []

    def produce() -> None:
        for number in range(DEPTH + 2):
            ours.put(Record(STOP, value=number))
            put.append(number)

    producer = threading.Thread(target=produce)
    producer.start()
    at = arena.base + RING
    assert wait_counter(at, DEPTH, arena.base, 0, PATIENCE_NS) == WAIT_OK
    assert wait_counter(at, DEPTH + 1, arena.base, 0, 20_000_000) != WAIT_OK
    for number in range(DEPTH + 2):
        record = theirs.next(PATIENCE_NS)
        assert record is not None
        assert record.value == number
        theirs.passed_on()
    producer.join(30)
    assert put == list(range(DEPTH + 2))
    assert theirs.next(1_000_000) is None


def test_the_producer_hears_what_its_copier_failed_with(arena: Arena) -> None:
    ours, theirs = rings(arena)
    copier = RingCopier(ours)
    copier.wait(0, 0)
    copier.copy(0, 0, 1, 0, 1)
    error = serve(theirs, Noting(fails_at=1))
    assert error == "cudaMemcpyAsync of 4 KiB: cudaErrorIllegalAddress"
    with pytest.raises(CopyError, match="cudaErrorIllegalAddress"):
        copier.wait(0, 0)


def test_an_abort_ends_both_ends(arena: Arena) -> None:
    ours, theirs = rings(arena)
    thread = CopyThread(theirs, Noting())
    arena.view(ABORT, np.int64, 1)[0] = 1
    assert thread.join(30)
    assert thread.error == "the step was aborted"
    with pytest.raises(CopyError):
        ours.put(Record(STOP))


def test_whoever_comes_back_finds_where_it_was(arena: Arena) -> None:
    ours, theirs = rings(arena)
    for number in range(3):
        ours.put(Record(STOP, value=number))
    theirs.next()
    theirs.passed_on()
    again, them_again = rings(arena)
    again.put(Record(STOP, value=3))
    values = []
    while (record := them_again.next(1_000_000)) is not None:
        values.append(record.value)
        them_again.passed_on()
    assert values == [1, 2, 3]


@pytest.mark.parametrize("depth", [0, 3, 100])
def test_a_depth_is_a_power_of_two(arena: Arena, depth: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        CopyRing(arena, RING, ABORT, depth)
    assert ring_nbytes(8) == RECORDS + 8 * 64


SERVER = """
import sys
from shadowlane.actors.arena import Arena, ArenaHandle
from shadowlane.actors.copier import MemoryCopier
from shadowlane.actors.copy_ring import CopyRing, serve
pid, descriptor, nbytes, ring, abort, depth, card = (int(each) for each in sys.argv[1:])
arena = Arena.attach(ArenaHandle(pid, descriptor, nbytes))
copier = MemoryCopier(arena, card, abort, chunk_nbytes=4096)
error = serve(CopyRing(arena, ring, abort, depth), copier)
copier.close()
assert "torch" not in sys.modules, "a copying process needs no torch"
sys.exit(error)
"""


def start_server(arena: Arena) -> subprocess.Popen[bytes]:
    handle = arena.handle
    numbers = (os.getpid(), handle.descriptor, handle.nbytes, RING, ABORT, DEPTH, CARD)
    command = [sys.executable, "-c", textwrap.dedent(SERVER), *map(str, numbers)]
    return subprocess.Popen(command, cwd=Path(__file__).parent)


def test_a_ring_between_two_processes(arena: Arena) -> None:
    server = start_server(arena)
    copier = RingCopier(CopyRing(arena, RING, ABORT, DEPTH))
    random = np.random.default_rng(2)
    value = 0
    for _ in range(100):
        nbytes = int(random.integers(1, 8 * PAGE))
        source = DATA + int(random.integers(0, CARD - DATA - nbytes - 16 * PAGE))
        target = int(random.integers(0, 32 * PAGE))
        copier.wait(counter(1), value // 2)
        copier.copy(source, target, nbytes, counter(0), value + 1)
        copier.copy(target, CARD - 8 * PAGE, nbytes, counter(0), value + 2, "d2h")
        expected = arena.memory[source:][:nbytes].copy()
        publish(arena.base + counter(1), value // 2)
        value += 2
        reach(arena, 0, value)
        assert (arena.memory[CARD + target :][:nbytes] == expected).all()
        assert (arena.memory[CARD - 8 * PAGE :][:nbytes] == expected).all()
    copier.close()
    assert server.wait(60) == 0


def test_a_new_process_goes_on_where_a_dead_one_was(arena: Arena) -> None:
    """The first server dies in a wait; what it had not passed on is done by the second."""
    copier = RingCopier(CopyRing(arena, RING, ABORT, DEPTH))
    server = start_server(arena)
    copier.copy(DATA, 0, PAGE, counter(0), 1)
    reach(arena, 0, 1)
    server.kill()
    server.wait()
    copier.copy(DATA + PAGE, PAGE, PAGE, counter(0), 2)
    assert counter_value(arena.base + counter(0)) == 1
    server = start_server(arena)
    copier.close()
    assert server.wait(60) == 0
    assert (arena.memory[CARD:][: 2 * PAGE] == arena.memory[DATA:][: 2 * PAGE]).all()


# -- the choice


def times(gigabytes: float) -> CopyTimes:
    return CopyTimes(gigabytes * 1e9, 20.0)


def refuses(message: str) -> Callable[[], CopyTimes]:
    def refuse() -> CopyTimes:
        raise CopyError(message)

    return refuse


@pytest.mark.parametrize(
    ("process", "card_gib", "is_wsl2", "chosen"),
    [
        (10.4, 24, False, "thread"),
        (10.6, 24, False, "process"),
        (10.6, 8, False, "thread"),
        (10.6, 24, True, "thread"),
        (11.1, 8, False, "process"),
        (9.0, 24, False, "thread"),
    ],
)
def test_the_process_must_win_clearly(
    process: float, card_gib: int, is_wsl2: bool, chosen: str
) -> None:
    choice = choose(
        lambda: times(10.0),
        lambda: times(process),
        card_nbytes=lambda: card_gib << 30,
        is_wsl2=is_wsl2,
    )
    assert choice.submitter == chosen
    assert f"{process / 10:.2f} times the rate" in choice.reason
    assert "\n" not in choice.reason


def test_what_does_not_work_is_not_chosen() -> None:
    choice = choose(lambda: times(1), refuses("no IPC here"), card_nbytes=lambda: 1 << 33)
    assert (choice.submitter, choice.process) == ("thread", None)
    assert choice.reason.endswith("no IPC here")
    choice = choose(refuses("no thread"), lambda: times(1), card_nbytes=lambda: 1 << 33)
    assert (choice.submitter, choice.thread) == ("process", None)
    with pytest.raises(CopyError, match="no thread"):
        choose(refuses("no thread"), refuses("nor a process"), card_nbytes=lambda: 1 << 33)


def test_copies_are_timed_until_their_counter_is_seen(arena: Arena) -> None:
    copier = MemoryCopier(
        arena, CARD, ABORT, hold=lambda nbytes, began_ns: time.sleep(nbytes * 1e-7)
    )
    course = Course(DATA, 0, 32 * PAGE, counter(2), ABORT, small_nbytes=PAGE)
    measured = time_copies(copier, arena, course, num_small=5, num_large=3)
    assert measured.bytes_per_s <= 1e7  # no faster than the held link
    assert measured.alone_us >= PAGE * 0.1
    copier.close()
