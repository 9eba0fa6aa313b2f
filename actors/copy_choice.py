"""Who submits a card's copies: a start-up test that times both ways and chooses.

A thread inside the GPU actor needs no second context on the card and no second pinned ring. The
transfer actor itself, with the card's memory opened through CUDA's sharing, does not compete with
the GPU actor's Python. Which is faster depends on system and driver, so both are tried where both
work, with the copies that a model would need; the thread stays unless the process wins clearly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from shadowlane.actors.arena import Arena
from shadowlane.actors.copier import Copier
from shadowlane.actors.link_statistics import TRIAL
from shadowlane.ops.atomics import WAIT_OK, counter_value, wait_counter
from shadowlane.sizes import format_size

Submitter = Literal["thread", "process"]

COURSE_NBYTES = 16 << 20
NUM_SMALL = 64
NUM_LARGE = 8
SPIN_NS = 20_000_000  # what a card writes wakes nobody, so the test looks itself
TIMEOUT_NS = 10_000_000_000
LOOK_NS = 100_000_000  # between two looks whether copies have failed
WINS_BY = 1.05
SCARCE_NBYTES = 12 << 30  # on cards up to here a second context is dear
WINS_BY_WHEN_SCARCE = 1.10


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """What a copier reached: its rate with copies queued, and the time of one alone."""

    bytes_per_s: float
    alone_us: float  # median, from the call until the counter was seen

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.2f} GB/s, {self.alone_us:.0f} us for one small copy"


@dataclass(frozen=True, slots=True)
class Choice:
    submitter: Submitter
    reason: str  # one line, for people
    thread: CopyTimes | None = None
    process: CopyTimes | None = None

    def told(self, lane: str) -> str:
        """The line for people; lane: the card's."""
        who = {
            "thread": "a thread of its lane",
            "process": "the process of its transfer lane",
        }[self.submitter]
        return f"{who} copies to {lane}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Course:
    """Where a test may copy: nothing in these ranges is in use, counters and ranges in the arena.

    nbytes: of a large copy, at `source` and at `target`; a small one is its first `small_nbytes`.
    """

    source: int
    target: int
    nbytes: int
    counter: int
    abort: int
    small_nbytes: int = 64 << 10


def time_copies(
    copier: Copier,
    arena: Arena,
    course: Course,
    *,
    num_small: int = NUM_SMALL,
    num_large: int = NUM_LARGE,
) -> CopyTimes:
    """Time a copier from host to card. Raises what it raises, or TimeoutError if it hangs."""
    at, abort = arena.base + course.counter, arena.base + course.abort
    value = counter_value(at)

    def copy(nbytes: int) -> None:
        nonlocal value
        value += 1
        about = (0, TRIAL)
        copier.copy(course.source, course.target, nbytes, course.counter, value, about=about)

    def finish() -> None:
        until = time.monotonic() + TIMEOUT_NS / 1e9
        while wait_counter(at, value, abort, SPIN_NS, LOOK_NS) != WAIT_OK:
            copier.look()
            if time.monotonic() > until or counter_value(abort):
                raise TimeoutError(f"a copy must end within {TIMEOUT_NS / 1e9:g} s; it did not")

    copy(course.nbytes)  # the first one sets things up
    finish()
    alone = []
    for _ in range(num_small):
        began = time.perf_counter()
        copy(course.small_nbytes)
        finish()
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(num_large):
        copy(course.nbytes)
    finish()
    rate = num_large * course.nbytes / (time.perf_counter() - began)
    return CopyTimes(rate, 1e6 * statistics.median(alone))


def choose(
    thread: Callable[[], CopyTimes],
    process: Callable[[], CopyTimes],
    *,
    card_nbytes: Callable[[], int],
    is_wsl2: bool = False,
) -> Choice:
    """Time both and choose. Each is called once and raises RuntimeError or OSError if it cannot.

    card_nbytes: of the card's memory; asked for once both have been timed.
    Raises what the thread raised if the process cannot either: nothing is left then.
    """
    try:
        of_thread = thread()
    except (RuntimeError, OSError) as error:
        with suppress(RuntimeError, OSError):
            return Choice("process", f"no copy thread: {error}", None, process())
        raise
    try:
        of_process = process()
    except (RuntimeError, OSError) as error:
        return Choice("thread", f"no sharing of the card's memory: {error}", of_thread)
    nbytes = card_nbytes()
    is_scarce = is_wsl2 or nbytes <= SCARCE_NBYTES
    needed = WINS_BY_WHEN_SCARCE if is_scarce else WINS_BY
    won = of_process.bytes_per_s / of_thread.bytes_per_s
    submitter: Submitter = "process" if won >= needed else "thread"
    reason = (
        f"a process of its own copies at {won:.2f} times the rate of a thread ({of_process}; "
        f"{of_thread}); it must reach {needed:.2f} times, for it takes a second context on a card "
        f"of {format_size(nbytes)}"
    )
    return Choice(submitter, reason, of_thread, of_process)
