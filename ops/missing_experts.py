"""The disk lane's part in a route, compiled: slots for what is missing, and the reads.

`follow_requests` runs in one thread, `read_missing` in a few; neither holds the GIL. What they
share is in `expert_board.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    add32,
    load32,
    load64,
    lock,
    now_ns,
    publish,
    read_i32,
    read_i64,
    sleep_in,
    unlock,
    wait_counter,
    wake_bed,
    write_i32,
    write_i64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.expert_board import (
    ASKED,
    BUSY_NS,
    BUSY_SINCE,
    CERTAIN_HEAD,
    CERTAIN_TAIL,
    CHOSEN,
    DESCRIPTOR,
    EARLY_HITS,
    FAILED,
    HELD,
    HOME,
    IN_FLIGHT,
    IS_CERTAIN,
    IS_DIRECT,
    IS_OVER,
    IS_SUBMITTED,
    KEY,
    LEFT,
    LIKELY_HEAD,
    LIKELY_TAIL,
    LIST_LENGTH,
    LOOK_UP_NS,
    MARK,
    MUTEX,
    NAMED,
    NBYTES,
    NUM_FREE,
    NUM_READS,
    NUM_SPANS,
    PASSED,
    POLICY,
    READ_NBYTES,
    READERS,
    RIGHT,
    SEEN,
    SERVED,
    START,
    STEP,
    TELL_EVERY,
    TOLD,
    WANTED,
    WITHDRAWN,
    WRONG,
    end_reads,
    fetch,
    listed_slot,
    starved_bed,
    state_at,
    take_back,
    take_job,
    take_slot,
)
from shadowlane.ops.file_reads import read_range
from shadowlane.ops.routes import SLOT_MASK, route_at, word_at


@njit
def tell_ready(base: int, geometry: Any, board: Any, layer: int, expert: int) -> None:
    """Put an expert that has arrived behind those that are ready."""
    route = route_at(base, geometry, layer)
    write_i32(route + geometry[t.ROUTE_ORDER] + 4 * board.ready[layer], np.int32(expert))
    board.ready[layer] += 1
    counter = base + geometry[t.COUNTERS] + geometry[t.READY_COUNTER] * t.COUNTER_NBYTES
    publish(counter, np.int32(read_i64(route + 8 * t.READY_BASE) + board.ready[layer]))


@njit
def serve(base: int, geometry: Any, board: Any, number: int) -> bool:
    """Find slots for what route `number` misses, and queue the reads. False: the lane is over."""
    experts = geometry[t.NUM_EXPERTS]
    numbers = base + geometry[t.ROUTE_NUMBER]
    layer = read_i64(numbers + 8 + 8 * (number % t.ROUTE_RING))
    route = route_at(base, geometry, layer)
    resident = read_i64(route + 8 * t.NUM_RESIDENT)
    count = read_i64(route + 8 * t.NUM_CHOSEN) - resident
    step = read_i64(route + 8 * t.ROUTE_STEP)
    missing = route + geometry[t.ROUTE_MISSING]
    board.ready[layer] = resident
    # What was guessed first, so that none of it gives up its slot to another.
    for place in range(count):
        expert = read_i32(missing + 4 * place)
        key = layer * experts + expert
        slot = board.flights[key] - 1
        word = word_at(base, geometry, layer, expert)
        if slot >= 0:
            board.fetches[slot, IS_CERTAIN] = 1
            board.fetches[slot, MARK] = number
            take_back(board, slot, True)
        elif load64(word) & SLOT_MASK != 0:  # it has arrived since it was found missing
            write_i64(word, (number << t.SLOT_BITS) | (load64(word) & SLOT_MASK))
            tell_ready(base, geometry, board, layer, expert)
        else:
            continue
        write_i32(missing + 4 * place, np.int32(-1))
    for place in range(count):
        expert = read_i32(missing + 4 * place)
        if expert < 0:
            continue
        slot = take_slot(base, geometry, board, layer, number)
        if slot < 0:
            return False
        fetch(board, layer * experts + expert, slot, step, number, 1)
    return True


@njit
def is_chosen(starts: int, expert: int) -> bool:
    """Whether any row goes to an expert. starts: address of that field of a route."""
    return read_i32(starts + 4 * expert) != read_i32(starts + 4 * expert + 4)


@njit
def is_missing(base: int, geometry: Any, layer: int, expert: int) -> bool:
    """Whether a chosen expert was not in RAM when its route came. Before the route is served."""
    route = route_at(base, geometry, layer)
    missing = route + geometry[t.ROUTE_MISSING]
    count = read_i64(route + 8 * t.NUM_CHOSEN) - read_i64(route + 8 * t.NUM_RESIDENT)
    found = False
    for place in range(count):
        found |= read_i32(missing + 4 * place) == expert
    return found


@njit
def judge_guess(base: int, geometry: Any, board: Any, layer: int, number: int) -> None:
    """A route has come: what was its guess worth? What is wrong and not begun is withdrawn."""
    state = board.state
    if board.guess_number[layer] == 0:
        state[PASSED] += 1
        return
    starts = route_at(base, geometry, layer) + geometry[t.ROUTE_STARTS]
    is_about_it = board.guess_number[layer] == number
    board.guess_number[layer] = 0
    for place in range(board.guess_ids.shape[1]):
        expert = board.guess_ids[layer, place]
        slot = board.guess_slots[layer, place]
        if expert < 0:  # it lives on a card
            continue
        is_right = is_about_it and is_chosen(starts, expert)
        if is_about_it:
            state[NAMED] += 1 if is_right else 0
        if slot < 0:
            continue
        key = layer * geometry[t.NUM_EXPERTS] + expert
        is_waiting = board.flights[key] == slot + 1 and board.fetches[slot, IS_SUBMITTED] == 0
        if not is_waiting:
            if is_about_it:
                state[RIGHT if is_right else WRONG] += 1
            if is_right and not is_missing(base, geometry, layer, expert):
                state[EARLY_HITS] += 1
        elif not is_right:
            take_back(board, slot, False)
            board.flights[key] = 0
            board.free[state[NUM_FREE]] = slot
            state[NUM_FREE] += 1
            if is_about_it:
                state[WITHDRAWN] += 1
    if is_about_it:
        state[CHOSEN] += read_i64(route_at(base, geometry, layer) + 8 * t.NUM_CHOSEN)


@njit
def judge_guesses(base: int, geometry: Any, board: Any) -> None:
    """Those of all decode routes since the last look; some may have been overwritten."""
    numbers = base + geometry[t.ROUTE_NUMBER]
    newest = read_i64(numbers)
    for number in range(max(board.state[SEEN], newest - t.ROUTE_RING) + 1, newest + 1):
        layer = read_i64(numbers + 8 + 8 * (number % t.ROUTE_RING))
        route = route_at(base, geometry, layer)
        written = read_i64(route + 8 * t.ROUTE_SEQUENCE)
        if written < number:  # it has its number, and is still being written
            return
        board.state[SEEN] = number
        if written == number and read_i64(route + 8 * t.IS_DECODE) != 0:
            judge_guess(base, geometry, board, layer, number)


@njit
def guess(base: int, geometry: Any, board: Any) -> None:
    """Queue what the next layer is likely to choose and RAM has not, where there is room.

    What the guess names stays, whether it is in RAM or to be read.
    """
    numbers = base + geometry[t.ROUTE_NUMBER]
    layer = read_i64(numbers + 8 * t.NEWEST_GUESS) - 1
    if layer < 0 or board.guess_number[layer] != 0:
        return
    route = route_at(base, geometry, layer)
    number = read_i64(route + 8 * t.GUESS_FOR)
    if number != read_i64(numbers) + 1:
        return  # its route has come
    step = read_i64(route + 8 * t.ROUTE_STEP)
    top_k, experts = geometry[t.TOP_K], geometry[t.NUM_EXPERTS]
    board.guess_number[layer] = number
    for place in range(top_k):
        board.guess_ids[layer, place] = read_i32(route + geometry[t.ROUTE_GUESSES] + 4 * place)
        board.guess_slots[layer, place] = -1
    for place in range(top_k):
        if board.guess_ids[layer, place] < 0:
            continue
        key = layer * experts + board.guess_ids[layer, place]
        if board.flights[key] != 0 or load64(word_at(base, geometry, 0, key)) & SLOT_MASK != 0:
            continue
        used = board.state[LIKELY_TAIL] - board.state[LIKELY_HEAD]
        if used + board.first_extent[key + 1] - board.first_extent[key] > len(board.likely):
            break
        slot = -1
        if board.state[NUM_FREE] > 0:
            board.state[NUM_FREE] -= 1
            slot = board.free[board.state[NUM_FREE]]
        else:
            slot = listed_slot(base, geometry, board, layer, number - 1, True)
        if slot < 0:
            break
        board.guess_slots[layer, place] = slot
        fetch(board, key, slot, step, number - 1, 0)


@njit
def wants_policy(base: int, geometry: Any, board: Any) -> bool:
    """Whether routes enough have passed, or victims been taken, for new lists."""
    state = board.state
    newest = read_i64(base + geometry[t.ROUTE_NUMBER])
    is_low = False
    for layer in range(len(board.victim_next)):
        is_low |= 2 * board.victim_next[layer] > state[LIST_LENGTH]
    if newest - state[TOLD] < state[TELL_EVERY] and not is_low:
        return False
    state[TOLD] = newest
    return True


@njit
def follow_requests(base: int, geometry: Any, board: Any) -> None:
    """Serve requests and guesses until the lane is over."""
    state = board.state
    numbers = base + geometry[t.ROUTE_NUMBER]
    request = base + geometry[t.COUNTERS] + geometry[t.REQUEST_COUNTER] * t.COUNTER_NBYTES
    abort = base + geometry[t.ABORT]
    while True:
        wait_counter(request, state[ASKED] + 1, abort, 0, LOOK_UP_NS)
        state[ASKED] = load32(request)
        lock(state_at(board, MUTEX))
        if state[IS_OVER] != 0 or load32(abort) != 0:
            unlock(state_at(board, MUTEX))
            end_reads(base, geometry, board)
            return
        # NOTE: read first: what is served has been judged then. A guess that is withdrawn later
        # could take the slot of a read that is certain by now.
        newest = load64(numbers + 8 * t.NEWEST_REQUEST)
        judge_guesses(base, geometry, board)
        if newest > state[SERVED]:
            state[SERVED] = newest
            serve(base, geometry, board, newest)
        if read_i64(numbers + 8 * t.LOOKS_AHEAD) != 0:
            guess(base, geometry, board)
        wants = wants_policy(base, geometry, board)
        has_jobs = state[CERTAIN_HEAD] < state[CERTAIN_TAIL]
        has_jobs |= state[LIKELY_HEAD] < state[LIKELY_TAIL]
        unlock(state_at(board, MUTEX))
        if has_jobs:
            wake_bed(state_at(board, READERS))
        if wants:
            wake_bed(state_at(board, POLICY))


@njit
def note_read(board: Any, slot: int, extent: int, started: int, ended: int) -> None:
    """Append a span, and count the read."""
    state, told, at = board.state, board.statistics, board.statistics_at
    told[at[BUSY_NS]] += ended - state[BUSY_SINCE]
    state[BUSY_SINCE] = ended
    nbytes = board.extents[extent, NBYTES]
    span = board.spans[told[at[NUM_SPANS]] % len(board.spans)]
    span[0], span[1] = board.fetches[slot, STEP], board.span_base[0] + board.fetches[slot, KEY]
    span[2], span[3], span[4] = started, ended, nbytes
    told[at[NUM_SPANS]] += 1
    told[at[NUM_READS]] += 1
    told[at[READ_NBYTES]] += nbytes


@njit
def arrive(base: int, geometry: Any, board: Any, slot: int) -> None:
    """Make an expert known that is in its slot now: its word, then its place in the order."""
    row = board.fetches[slot]
    key = row[KEY]
    write_i64(word_at(base, geometry, 0, key), (row[MARK] << t.SLOT_BITS) | (slot + 1))
    board.flights[key] = 0
    if row[IS_CERTAIN] != 0:
        experts = geometry[t.NUM_EXPERTS]
        tell_ready(base, geometry, board, key // experts, key % experts)
    else:
        wake_bed(starved_bed(base, geometry))


@njit
def begin_job(base: int, geometry: Any, board: Any) -> int:
    """The next extent to read, what is certain first, as slot * 2**32 + extent; -1: it is over."""
    state, mutex, bed = board.state, state_at(board, MUTEX), state_at(board, READERS)
    lock(mutex)
    job = take_job(board)
    while job < 0 and state[IS_OVER] == 0:
        add32(bed, np.int32(1))
        wakes = load32(bed + 4)
        unlock(mutex)
        sleep_in(bed, wakes, LOOK_UP_NS)
        add32(bed, np.int32(-1))
        lock(mutex)
        job = take_job(board)
    if state[IS_OVER] != 0:
        job = -1
    else:
        board.fetches[job >> 32, IS_SUBMITTED] = 1
        if state[IN_FLIGHT] == 0:
            state[BUSY_SINCE] = now_ns()
        state[IN_FLIGHT] += 1
    unlock(mutex)
    return job


@njit
def end_job(base: int, geometry: Any, board: Any, job: int, started: int, failed: int) -> None:
    """An extent has been read, or has `failed`. started: 0 where others have counted the read."""
    state, slot, extent = board.state, job >> 32, job & 0xFFFFFFFF
    lock(state_at(board, MUTEX))
    state[IN_FLIGHT] -= 1
    if started != 0:
        note_read(board, slot, extent, started, now_ns())
    if failed != 0:
        state[FAILED] = extent
    else:
        board.fetches[slot, LEFT] -= 1
        if board.fetches[slot, LEFT] == 0:
            arrive(base, geometry, board, slot)
    unlock(state_at(board, MUTEX))


@njit
def read_missing(base: int, geometry: Any, board: Any) -> int:
    """Read extents until the lane is over.

    Returns 0, or what `read_range` said of the extent in FAILED.
    """
    while True:
        job = begin_job(base, geometry, board)
        if job < 0:
            return 0
        row = board.extents[job & 0xFFFFFFFF]
        home = base + geometry[t.EXPERT_SLOTS] + (job >> 32) * geometry[t.EXPERT_NBYTES]
        started = now_ns()
        failed = read_range(
            row[DESCRIPTOR], row[START], row[WANTED], row[HELD], home + row[HOME], row[IS_DIRECT]
        )
        end_job(base, geometry, board, job, started, failed)
        if failed != 0:
            return failed
