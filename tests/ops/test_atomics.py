"""Counters, tickets and sleepers, hammered by threads (compiled code runs without the GIL)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
import pytest

from shadowlane.ops.atomics import (
    BEDS,
    WAIT_ABORTED,
    WAIT_OK,
    WAIT_TIMED_OUT,
    claim,
    complete,
    now_ns,
    publish,
    reached,
    wait_counter,
    wake_all,
    write_i64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.table import COUNTER_NBYTES, NUM_BEDS

PATIENCE_NS = 60 * 10**9


class Words:
    """Addresses of a few words, each with room for the beds of a counter."""

    def __init__(self, count: int = 8) -> None:
        self.memory = np.zeros((count + 1) * COUNTER_NBYTES // 8, np.int64)
        self._start = -(-self.memory.ctypes.data // 64) * 64

    def __getitem__(self, number: int) -> int:
        return self._start + COUNTER_NBYTES * number

    def store(self, number: int, value: int) -> None:
        """Write a word and wake nobody."""
        self.memory.view(np.int32)[(self[number] - self.memory.ctypes.data) // 4] = value

    def _beds(self, number: int) -> np.ndarray:
        first = (self[number] + BEDS - self.memory.ctypes.data) // 4
        return self.memory.view(np.int32)[first : first + 2 * NUM_BEDS].reshape(NUM_BEDS, 2)

    def sleepers(self, number: int) -> int:
        return int(self._beds(number)[:, 0].sum())

    def wake_ups(self, number: int) -> int:
        return int(self._beds(number)[:, 1].sum())


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


def wait_until(condition: Callable[[], bool]) -> None:
    ended = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < ended, "what was waited for did not happen"
        time.sleep(0)


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


@numba.njit(nogil=True)
def write_long_pause(address: int, value: int) -> None:
    """In the place of both writes of the timespec (0 s, 20 ms): longer than any test may take."""
    write_i64(address, 3600 if value == 0 else 0)


# A sleeper looks again after 20 ms by itself, which hides lost wake-ups. This one trusts them.
patient_wait = numba.njit(nogil=True, error_model="numpy")(
    FunctionType(
        wait_counter.py_func.__code__,
        {**wait_counter.py_func.__globals__, "write_i64": write_long_pause},
    )
)
ROUNDS = 200
BEFORE_THE_WRAP = 2**32 - ROUNDS // 2
HAMMER_S = 1.5  # so many rounds as a busy machine may take for that long
GIVE_UP_NS = 10 * 10**9


@numba.njit(nogil=True)
def bounce(
    mine: int, theirs: int, abort: int, start: int, rounds: int, spin_ns: int, leads: int
) -> int:
    """Each round: publish mine, wait for theirs (the other way round for the one who follows)."""
    for number in range(1, rounds + 1):
        if leads != 0:
            publish(mine, start + number)
        if patient_wait(theirs, start + number, abort, spin_ns, GIVE_UP_NS) != 0:
            return number
        if leads == 0:
            publish(mine, start + number)
    return 0


@numba.njit(nogil=True)
def take_turns(
    counter: int, seen: int, abort: int, start: int, rounds: int, first: int, every: int
) -> int:
    """One of two workers who publish the same counter in turn; they wait for who watches it."""
    for number in range(first, rounds + 1, 2):
        if patient_wait(counter, start + number - 1, abort, 0, GIVE_UP_NS) != 0:
            return number
        asks = number % every == 1 and number > every
        if asks and patient_wait(seen, start + number - 1, abort, 0, GIVE_UP_NS) != 0:
            return -number
        publish(counter, start + number)
    return 0


@numba.njit(nogil=True)
def watch(counter: int, seen: int, abort: int, start: int, rounds: int, every: int) -> int:
    """Wait for every so many values, and say so."""
    for number in range(every, rounds + 1, every):
        if patient_wait(counter, start + number, abort, 0, GIVE_UP_NS) != 0:
            return number
        publish(seen, start + number)
    return 0


def hammer(words: Words, *functions: Callable[[int], int]) -> None:
    """Run functions of a first value side by side, again and again, always over the wrap."""
    ended = time.monotonic() + HAMMER_S
    while time.monotonic() < ended:
        for number in range(3):
            publish(words[number], BEFORE_THE_WRAP)
        results = run_threads(
            *(lambda function=function: function(BEFORE_THE_WRAP) for function in functions)
        )
        assert results == [0] * len(functions)
        assert all(words.sleepers(number) == 0 for number in range(3))


@pytest.mark.parametrize("spin_ns", [0, 3_000])
def test_no_wake_up_is_lost_between_two(words: Words, spin_ns: int) -> None:
    one, other, abort = words[0], words[1], words[ABORT]
    hammer(
        words,
        lambda start: bounce(one, other, abort, start, ROUNDS, spin_ns, 1),
        lambda start: bounce(other, one, abort, start, ROUNDS, spin_ns, 0),
    )


@pytest.mark.parametrize("every", [2, 5])
def test_no_wake_up_is_lost_where_sleepers_want_different_values(words: Words, every: int) -> None:
    """As in a step: workers wait for the next instruction, and others for one further on."""
    counter, seen, other, abort = words[0], words[1], words[2], words[ABORT]
    hammer(
        words,
        lambda start: take_turns(counter, seen, abort, start, ROUNDS, 1, every),
        lambda start: take_turns(counter, seen, abort, start, ROUNDS, 2, every),
        lambda start: watch(counter, seen, abort, start, ROUNDS, every),
        lambda start: watch(counter, other, abort, start, ROUNDS, 3),
    )


def test_only_who_waits_for_a_value_is_woken(words: Words) -> None:
    def publish_up_to_it() -> None:
        wait_until(lambda: words.sleepers(0) == 2)
        for value in range(1, 40):
            publish(words[0], value)
        assert (words.wake_ups(0), words.sleepers(0)) == (0, 2)
        publish(words[0], 40)
        assert words.wake_ups(0) == 1
        wait_until(lambda: words.sleepers(0) == 1)
        publish(words[0], 50)

    def sleep_until(value: int) -> Callable[[], int]:
        return lambda: int(patient_wait(words[0], value, words[ABORT], 0, GIVE_UP_NS))

    assert run_threads(sleep_until(40), sleep_until(50), publish_up_to_it)[:2] == [WAIT_OK] * 2
    assert words.wake_ups(0) == 2


def test_a_publisher_wakes_for_one_who_was_held_up(words: Words) -> None:
    """One has stored its value and was taken off its core before it looked who sleeps."""

    def publish_the_next() -> None:
        wait_until(lambda: words.sleepers(0) == 1)
        words.store(0, 7)  # the first half of the publisher of 7
        publish(words[0], 8)

    def sleep() -> int:
        return int(patient_wait(words[0], 7, words[ABORT], 0, GIVE_UP_NS))

    assert run_threads(sleep, publish_the_next) == [WAIT_OK, None]


@pytest.mark.parametrize("leap", [3, NUM_BEDS, 10**6])
def test_a_leap_wakes_all_whom_it_passes(words: Words, leap: int) -> None:
    def jump() -> None:
        wait_until(lambda: words.sleepers(0) == 3)
        publish(words[0], leap)

    def sleep_until(value: int) -> Callable[[], int]:
        return lambda: int(patient_wait(words[0], value, words[ABORT], 0, GIVE_UP_NS))

    statuses = run_threads(*(sleep_until(value) for value in (1, 2, leap)), jump)
    assert statuses == [WAIT_OK] * 3 + [None]
    assert words.sleepers(0) == 0


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
