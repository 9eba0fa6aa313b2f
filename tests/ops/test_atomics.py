"""Counters, tickets and sleepers, hammered by threads (compiled code runs without the GIL)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shadowlane.ops.atomics import (
    WAIT_ABORTED,
    WAIT_OK,
    WAIT_TIMED_OUT,
    claim,
    complete,
    counter_value,
    now_ns,
    publish,
    reached,
    wait_counter,
    wake_all,
)
from shadowlane.ops.compiled import njit

PATIENCE_NS = 60 * 10**9


class Words:
    """A few words, each on its own cache line; `words[n]` is the address of word n."""

    def __init__(self, count: int = 8) -> None:
        self.memory = np.zeros((count + 1) * 16, np.int64)
        self._start = -(-self.memory.ctypes.data // 128) * 128

    def __getitem__(self, number: int) -> int:
        return self._start + 128 * number

    def sleepers(self, number: int) -> int:
        return counter_value(self[number] + 4)


@pytest.fixture
def words() -> Words:
    return Words()


ABORT = 7


def run_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions side by side; returns their results, raises what they raised."""
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def guarded(number: int, function: Callable[[], Any]) -> None:
        try:
            results[number] = function()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(number, function), daemon=True)
        for number, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    return results


# -- counters


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 3, -3])
def test_counters_compare_cyclically(words: Words, start: int) -> None:
    for ahead in range(6):
        publish(words[0], start + ahead)
        for wanted in range(6):
            expected = WAIT_OK if ahead >= wanted else WAIT_TIMED_OUT
            assert wait_counter(words[0], start + wanted, words[ABORT], 0, 1) == expected
    assert words.sleepers(0) == 0


def test_reached_reaches_half_way_round() -> None:
    for value in (0, 5, 2**31 - 1, -(2**31), -1):
        for ahead in (0, 1, 1000, 2**31 - 1):
            wrapped = (value + ahead + 2**31) % 2**32 - 2**31
            assert reached(np.int32(wrapped), np.int32(value))
            if ahead:
                assert not reached(np.int32(value), np.int32(wrapped))


def test_waits_look_at_the_abort_word(words: Words) -> None:
    publish(words[ABORT], 1)
    assert wait_counter(words[0], 1, words[ABORT], 0, 0) == WAIT_ABORTED
    assert wait_counter(words[0], 1, words[ABORT], 10_000, 0) == WAIT_ABORTED
    # what is there already is taken all the same
    assert wait_counter(words[0], 0, words[ABORT], 0, 0) == WAIT_OK


@pytest.mark.parametrize("spin_ns", [0, 1_000_000])
def test_abort_ends_sleepers_at_once(words: Words, spin_ns: int) -> None:
    ended = []

    def sleep() -> int:
        status = wait_counter(words[0], 1, words[ABORT], spin_ns, PATIENCE_NS)
        ended.append(time.monotonic())
        return int(status)

    def abort() -> float:
        while words.sleepers(0) < 3:
            time.sleep(0)
        began = time.monotonic()
        publish(words[ABORT], 1)
        wake_all(words[0])
        return began

    *statuses, began = run_threads(sleep, sleep, sleep, abort)
    assert statuses == [WAIT_ABORTED] * 3
    assert max(ended) - began < 5
    assert words.sleepers(0) == 0


def test_the_clock_is_the_monotonic_one() -> None:
    before = time.monotonic_ns()
    now = now_ns()
    assert before <= now <= time.monotonic_ns()


@njit
def bounce(
    mine: int, theirs: int, abort: int, start: int, rounds: int, spin_ns: int, leads: int
) -> int:
    """Each round: publish mine, wait for theirs (the other way round for the one who follows)."""
    for number in range(1, rounds + 1):
        if leads != 0:
            publish(mine, start + number)
        if wait_counter(theirs, start + number, abort, spin_ns, 60_000_000_000) != 0:
            return number
        if leads == 0:
            publish(mine, start + number)
    return 0


@pytest.mark.parametrize("spin_ns", [0, 3_000, 50_000])
def test_no_wake_up_is_lost(words: Words, spin_ns: int) -> None:
    """A lost one costs the 2 ms after which a sleeper looks again: 20 000 would take 40 s."""
    rounds, start = 20_000, 2**32 - 10_000  # past the wrap half way
    publish(words[0], start)
    publish(words[1], start)
    began = time.monotonic()
    results = run_threads(
        lambda: bounce(words[0], words[1], words[ABORT], start, rounds, spin_ns, 1),
        lambda: bounce(words[1], words[0], words[ABORT], start, rounds, spin_ns, 0),
    )
    assert results == [0, 0]
    assert time.monotonic() - began < 20
    assert words.sleepers(0) == words.sleepers(1) == 0


def test_one_publisher_wakes_many(words: Words) -> None:
    count = 200

    def follow() -> list[int]:
        return [
            int(wait_counter(words[0], number, words[ABORT], 0, PATIENCE_NS))
            for number in range(1, count + 1)
        ]

    def lead() -> None:
        for number in range(1, count + 1):
            publish(words[0], number)
            time.sleep(0)

    *followed, _ = run_threads(follow, follow, follow, follow, lead)
    assert followed == [[WAIT_OK] * count] * 4


# -- tickets


@njit
def take_all(
    ticket: int, done: int, step: int, num_items: int, taken_by: Any, worker: int, mark: int
) -> int:
    """Take items until none is left; returns how often this worker finished the last one."""
    last = 0
    while True:
        item = claim(ticket, step, num_items)
        if item < 0:
            return last
        taken_by[item] += mark
        if complete(done, step, num_items):
            last += 1


def items_of(num_items: int) -> np.ndarray:
    return np.zeros(num_items, np.int64)


def test_a_ticket_gives_each_item_once(words: Words) -> None:
    taken = items_of(5)
    assert [claim(words[0], 1, 5) for _ in range(7)] == [0, 1, 2, 3, 4, -1, -1]
    assert [bool(complete(words[1], 1, 5)) for _ in range(5)] == [False] * 4 + [True]
    assert take_all(words[0], words[1], 2, 5, taken, 0, 1) == 1
    assert taken.tolist() == [1] * 5


def test_a_worker_a_step_late_takes_nothing(words: Words) -> None:
    for step in (1, 2, 2**31 - 1):
        assert claim(words[0], step, 1) == 0
        before = words.memory.copy()
        for late in (step, step - 1, 0):
            assert claim(words[0], late, 1) == -1
        assert np.array_equal(words.memory, before)


def test_threads_share_every_step_exactly(words: Words) -> None:
    """Workers drift apart by whole steps, as they do where one is kept off its core."""
    steps, num_items = 3000, 7
    taken = np.zeros((steps, num_items), np.int64)
    finished = np.zeros((3, steps), np.int64)

    def work(worker: int) -> Callable[[], None]:
        def loop() -> None:
            for step in range(1, steps + 1):
                # like a lane, go on when the step before is complete, whoever did it
                assert wait_counter(words[2], step - 1, words[ABORT], 0, PATIENCE_NS) == WAIT_OK
                last = take_all(words[0], words[1], step, num_items, taken[step - 1], worker, 1)
                finished[worker, step - 1] = last
                if last:
                    publish(words[2], step)

        return loop

    run_threads(*(work(worker) for worker in range(3)))
    assert (taken == 1).all()
    assert (finished.sum(axis=0) == 1).all()


def test_a_whole_team_may_run_ahead(words: Words) -> None:
    """A new step begins to take before a late worker looks at the old one."""
    assert claim(words[0], 1, 2) == 0
    assert claim(words[0], 1, 2) == 1
    assert claim(words[0], 5, 3) == 0
    assert claim(words[0], 1, 100) == -1  # even if it believes in more items
    assert claim(words[0], 5, 3) == 1
