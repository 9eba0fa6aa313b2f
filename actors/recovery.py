"""What happens when a lane fails: who it was and why, and how all lanes are set going again.

The arena belongs to the engine, so a lane that died took nothing along but its own place: every
lane maps the arena again, what was resident still is, and what was in flight is read again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from shadowlane.actors.arena import (
    DISK_COUNTER,
    GATHER_COUNTER,
    LINK_COUNTER,
    NUM_COUNTERS,
    STEP_COUNTER,
    Arena,
    ArenaLayout,
)
from shadowlane.actors.card_full import CardFull, LaneFull
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.hosts import LaneDied, LaneFailed, Pending
from shadowlane.ops.atomics import wake_all
from shadowlane.ops.errors import ModelError

REASON_S = 2.0  # how long a failed lane may take to say why, after its abort has ended the others
PARK_S = 15.0  # longer than a card takes to close; who is not parked by then is started again


def find_failure(runs: Mapping[str, Pending], is_aborted: bool) -> LaneDied | None:
    """Why a lane's loop has ended; None while all are running.

    A lane that fails sets the abort word, and so ends the others: the reason is the one of the lane
    that has one.
    """
    if not any(run.is_done() for run in runs.values()):
        return None
    patience_s = REASON_S if is_aborted else 0.0
    ended: LaneDied | None = None
    for name, run in runs.items():
        if not is_aborted and not run.is_done():
            continue
        failure = _failure_of(name, run, patience_s)
        if failure is not None and not isinstance(failure, _Ended):
            return failure
        ended = ended or failure
    return ended


class _Ended(LaneFailed):
    """A loop that ended without a reason of its own."""


def _failure_of(name: str, run: Pending, patience_s: float) -> LaneDied | None:
    try:
        reason = run.result(patience_s)
    except TimeoutError:
        return None
    except LaneDied as error:
        return error
    except CardFull as full:
        return LaneFull(full)
    except (ModelError, ValueError, OSError) as error:  # these say in a line what is wrong
        reason = f"{name}: {error}"
    except Exception as error:  # whatever the lane raised is the reason we pass on
        reason = f"{name}: {type(error).__name__}: {error}"
    if reason is None:
        return _Ended(f"{name}: its loop ended")
    return LaneFailed(" ".join(str(reason).split()))


def set_abort(arena: Arena, layout: ArenaLayout, is_set: bool) -> None:
    """Set or clear the abort word; setting it wakes every sleeper, so that all of them see it."""
    arena.view(layout.abort, np.int32, 1)[0] = int(is_set)
    if is_set:
        for number in range(NUM_COUNTERS):
            wake_all(arena.base + layout.counter(number))


def wait_until_parked(runs: Mapping[str, Pending]) -> list[str]:
    """Wait until the loop of every lane has ended. Returns the lanes that must be started again:
    those whose process is gone, or has lost its card, and those that would not park."""
    lost = []
    deadline = time.monotonic() + PARK_S
    for name, run in runs.items():
        try:
            run.result(max(0.0, deadline - time.monotonic()))
        except (LaneDied, CudaError):
            lost.append(name)
        except TimeoutError:
            if not run.is_done():
                lost.append(name)
        except Exception:  # why the loop ended is known by now; that it has is what matters
            continue
    return lost


def settle_counters(
    arena: Arena,
    layout: ArenaLayout,
    step: int,
    lane_bases: Sequence[int],
    link_bases: Sequence[int] = (),
) -> None:
    """Make all counters agree with the engine's bases.

    A lane's counter may stand anywhere in the step that failed, or hold what a dead lane wrote; a
    new disk lane counts from 0. Only while every lane is parked. Tickets need no such thing, they
    go by the number of the step. Who died asleep stays counted in its bed, which costs a system
    call whenever a value of that bed is published; a process on its way out may still count itself
    out, so the beds are not ours to clear.
    """
    values = dict(enumerate(lane_bases))
    values |= {LINK_COUNTER + card: base for card, base in enumerate(link_bases)}
    values |= {
        DISK_COUNTER: 0,
        GATHER_COUNTER: step,
        STEP_COUNTER: step,
    }
    for number in range(NUM_COUNTERS):
        word = arena.view(layout.counter(number), np.uint32, 1)
        word[0] = values.get(number, 0) & 0xFFFFFFFF


def kill_quietly(remotes: Sequence[object]) -> None:
    """Stop processes that may be gone already."""
    for remote in remotes:
        with suppress(Exception):  # it is gone, which is what is wanted
            remote.kill()  # type: ignore[attr-defined]
