"""The disk lane's part in a route, compiled: slots for what is missing, and the reads.

`follow_requests` runs in one thread, `read_missing` in a few; neither holds the GIL. They share a
`Board` under one mutex. Which experts may go is decided beforehand, in Python, as lists of victims
with the words they had; a word that has changed since is of an expert that was used, and is passed
over. Where a list has come to its end, what was used longest ago goes. `routes.py` says how the
words are shared with the workers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    add32,
    compare_swap64,
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
from shadowlane.ops.file_reads import read_range
from shadowlane.ops.routes import SLOT_MASK, route_at, word_at

LOOK_UP_NS = 50_000_000  # a sleeper looks again after this, whether or not it was woken
STARVED_NS = 20_000_000

# state[...]
(
    MUTEX,
    READERS,  # beds, two int32 each: of threads without a job,
    POLICY,  # and of the thread that makes the lists of victims
    IS_OVER,
    ASKED,  # value of REQUEST_COUNTER that has been looked at
    SERVED,  # newest route whose missing experts have slots
    SEEN,  # newest route whose guess has been judged
    TOLD,  # newest route when the policy was last woken
    TELL_EVERY,  # routes
    NUM_FREE,
    CERTAIN_HEAD,  # jobs taken and put, of each queue
    CERTAIN_TAIL,
    LIKELY_HEAD,
    LIKELY_TAIL,
    IN_FLIGHT,  # reads
    BUSY_SINCE,
    FAILED,  # the extent that could not be read
    RIGHT,  # what guesses were worth, see `LookAhead.note`
    WRONG,
    NAMED,
    CHOSEN,
    WITHDRAWN,
    PASSED,  # routes without a guess
    NUM_OLDEST,  # victims that no list had
    LIST_LENGTH,
    STATE_FIELDS,
) = range(26)

# extents[i, ...]: adjacent matrices of an expert
DESCRIPTOR, START, WANTED, HELD, HOME, NBYTES, IS_DIRECT, EXTENT_COLUMNS = range(8)

# fetches[slot, ...]: the expert that is on its way to a slot
KEY, STEP, MARK, IS_CERTAIN, LEFT, IS_SUBMITTED, FETCH_COLUMNS = range(7)

# statistics[...] of the disk lane that are kept here; see `actors/disk_lane.py`
BUSY_NS, NUM_READS, NUM_SPANS, READ_NBYTES, STATISTICS_FIELDS = range(5)


class Board(NamedTuple):
    """What the threads share. All int64; L = sparse layers, K = experts of all of them."""

    state: np.ndarray  # [STATE_FIELDS]
    extents: np.ndarray  # [extents, EXTENT_COLUMNS]
    first_extent: np.ndarray  # [K + 1]
    free: np.ndarray  # [slots], of which NUM_FREE count
    flights: np.ndarray  # [K] slot + 1 of an expert on its way, 0
    fetches: np.ndarray  # [slots, FETCH_COLUMNS]
    certain: np.ndarray  # rings of jobs [n, 2]: slot, extent; a slot of -1: withdrawn
    likely: np.ndarray
    victims: np.ndarray  # [L, n] keys of each list, least useful first; -1: taken, or none
    victim_words: np.ndarray  # [L, n]
    victim_list: np.ndarray  # [L] the list that each layer takes from
    victim_next: np.ndarray  # [L] of each list
    ready: np.ndarray  # [L] experts in the order of the newest route that missed any
    guess_number: np.ndarray  # [L] the route that a guess is about, 0: none is open
    guess_ids: np.ndarray  # [L, top k]
    guess_slots: np.ndarray  # [L, top k] of those that are read for it; -1
    statistics: np.ndarray  # [...] in the arena
    statistics_at: np.ndarray  # [STATISTICS_FIELDS] places in it
    spans: np.ndarray  # [n, 5] in the arena: step, number, start, end, bytes
    span_base: np.ndarray  # [1] number of key 0 in a span


@njit
def state_at(board: Any, field: int) -> int:
    return board.state.ctypes.data + 8 * field


@njit
def end_reads(base: int, geometry: Any, board: Any) -> None:
    """Let every thread return."""
    lock(state_at(board, MUTEX))
    board.state[IS_OVER] = 1
    unlock(state_at(board, MUTEX))
    for bed in (READERS, POLICY):
        wake_bed(state_at(board, bed))
    wake_bed(starved_bed(base, geometry))


@njit
def starved_bed(base: int, geometry: Any) -> int:
    return base + geometry[t.ROUTE_NUMBER] + 8 * t.STARVED


# -- slots


@njit
def is_named(board: Any, layer: int, key: int, experts: int) -> bool:
    """Whether the open guess of a layer names this expert."""
    if key // experts != layer:
        return False
    for place in range(board.guess_ids.shape[1]):
        if board.guess_ids[layer, place] == key % experts:
            return True
    return False


@njit
def listed_slot(base: int, geometry: Any, board: Any, layer: int, number: int, spares: bool) -> int:
    """The slot of a victim of the list that `layer` takes from, emptied; -1: there is none."""
    experts = geometry[t.NUM_EXPERTS]
    number_of_list = board.victim_list[layer]
    keys, words = board.victims[number_of_list], board.victim_words[number_of_list]
    place = board.victim_next[number_of_list]
    is_first = True
    while place < len(keys):
        key = keys[place]
        if key >= 0 and spares and is_named(board, layer, key, experts):
            is_first = False
            place += 1
            continue
        slot = -1
        if key >= 0 and words[place] >> t.SLOT_BITS < number:
            word = word_at(base, geometry, 0, key)
            if compare_swap64(word, words[place], 0) != 0:
                slot = (words[place] & SLOT_MASK) - 1
        keys[place] = -1
        place += 1
        if is_first:
            board.victim_next[number_of_list] = place
        if slot >= 0:
            return slot
    return -1


@njit
def oldest_slot(base: int, geometry: Any, board: Any, number: int) -> int:
    """The slot of the expert that was used longest ago, emptied; -1: all are in use."""
    while True:
        oldest, held = -1, np.int64(0)
        for key in range(len(board.flights)):
            word = load64(word_at(base, geometry, 0, key))
            mark = word >> t.SLOT_BITS
            if word & SLOT_MASK == 0 or mark >= number:
                continue
            if oldest < 0 or mark < held >> t.SLOT_BITS:
                oldest, held = key, word
        if oldest < 0:
            return -1
        if compare_swap64(word_at(base, geometry, 0, oldest), held, 0) != 0:
            board.state[NUM_OLDEST] += 1
            return (held & SLOT_MASK) - 1


@njit
def find_slot(base: int, geometry: Any, board: Any, layer: int, number: int) -> int:
    """A slot for a certain read; -1: all are in use. number: what this route uses stays."""
    if board.state[NUM_FREE] > 0:
        board.state[NUM_FREE] -= 1
        return board.free[board.state[NUM_FREE]]
    slot = listed_slot(base, geometry, board, layer, number, False)
    return slot if slot >= 0 else oldest_slot(base, geometry, board, number)


@njit
def take_slot(base: int, geometry: Any, board: Any, layer: int, number: int) -> int:
    """`find_slot`, as soon as there is one; -1: the lane is over. Gives the mutex away to wait."""
    bed = starved_bed(base, geometry)
    while True:
        slot = find_slot(base, geometry, board, layer, number)
        if slot >= 0 or board.state[IS_OVER] != 0:
            return slot
        add32(bed, np.int32(1))
        wakes = load32(bed + 4)
        slot = find_slot(base, geometry, board, layer, number)
        if slot < 0:
            unlock(state_at(board, MUTEX))
            wake_bed(state_at(board, READERS))
            if load32(base + geometry[t.ABORT]) == 0:
                sleep_in(bed, wakes, STARVED_NS)
            lock(state_at(board, MUTEX))
            if load32(base + geometry[t.ABORT]) != 0:
                board.state[IS_OVER] = 1
        add32(bed, np.int32(-1))
        if slot >= 0:
            return slot


# -- requests and guesses


@njit
def queue(board: Any, jobs: Any, tail: int, key: int, slot: int) -> None:
    """Put the extents of an expert into a queue, whose TAIL is a field of the state."""
    for extent in range(board.first_extent[key], board.first_extent[key + 1]):
        place = board.state[tail] % len(jobs)
        jobs[place, 0] = slot
        jobs[place, 1] = extent
        board.state[tail] += 1


@njit
def fetch(board: Any, key: int, slot: int, step: int, mark: int, is_certain: int) -> None:
    row = board.fetches[slot]
    row[KEY], row[STEP], row[MARK], row[IS_CERTAIN] = key, step, mark, is_certain
    row[LEFT] = board.first_extent[key + 1] - board.first_extent[key]
    row[IS_SUBMITTED] = 0
    board.flights[key] = slot + 1
    if is_certain != 0:
        queue(board, board.certain, CERTAIN_TAIL, key, slot)
    else:
        queue(board, board.likely, LIKELY_TAIL, key, slot)


@njit
def take_back(board: Any, slot: int, promotes: bool) -> None:
    """Take the jobs of a slot out of the likely queue; `promotes`: they are certain now."""
    for number in range(board.state[LIKELY_HEAD], board.state[LIKELY_TAIL]):
        job = board.likely[number % len(board.likely)]
        if job[0] != slot:
            continue
        if promotes:
            place = board.state[CERTAIN_TAIL] % len(board.certain)
            board.certain[place, 0], board.certain[place, 1] = slot, job[1]
            board.state[CERTAIN_TAIL] += 1
        job[0] = -1


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
        is_right = is_about_it and read_i32(starts + 4 * expert) != read_i32(
            starts + 4 * expert + 4
        )
        if is_about_it:
            state[NAMED] += 1 if is_right else 0
        if slot < 0:
            continue
        key = layer * geometry[t.NUM_EXPERTS] + expert
        is_waiting = board.flights[key] == slot + 1 and board.fetches[slot, IS_SUBMITTED] == 0
        if not is_waiting:
            if is_about_it:
                state[RIGHT if is_right else WRONG] += 1
        elif not is_right:
            take_back(board, slot, False)
            board.flights[key] = 0
            board.free[state[NUM_FREE]] = slot
            state[NUM_FREE] += 1
            if is_about_it:
                state[WITHDRAWN] += 1
    if is_about_it:
        for expert in range(geometry[t.NUM_EXPERTS]):
            state[CHOSEN] += 1 if is_chosen(starts, expert) else 0


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
        judge_guesses(base, geometry, board)
        newest = read_i64(numbers + 8 * t.NEWEST_REQUEST)
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


# -- reads


@njit
def take_job(board: Any) -> int:
    """The job to read next, as slot * 2**32 + extent; -1: there is none."""
    state = board.state
    while state[CERTAIN_HEAD] < state[CERTAIN_TAIL]:
        job = board.certain[state[CERTAIN_HEAD] % len(board.certain)]
        state[CERTAIN_HEAD] += 1
        return (job[0] << 32) | job[1]
    while state[LIKELY_HEAD] < state[LIKELY_TAIL]:
        job = board.likely[state[LIKELY_HEAD] % len(board.likely)]
        state[LIKELY_HEAD] += 1
        if job[0] >= 0:
            return (job[0] << 32) | job[1]
    return -1


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
def read_missing(base: int, geometry: Any, board: Any) -> int:
    """Read extents until the lane is over, what is certain first.

    Returns 0, or what `read_range` said of the extent in FAILED.
    """
    state, mutex, bed = board.state, state_at(board, MUTEX), state_at(board, READERS)
    lock(mutex)
    while True:
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
            unlock(mutex)
            return 0
        slot, extent = job >> 32, job & 0xFFFFFFFF
        board.fetches[slot, IS_SUBMITTED] = 1
        started = now_ns()
        if state[IN_FLIGHT] == 0:
            state[BUSY_SINCE] = started
        state[IN_FLIGHT] += 1
        unlock(mutex)
        row = board.extents[extent]
        home = base + geometry[t.EXPERT_SLOTS] + slot * geometry[t.EXPERT_NBYTES] + row[HOME]
        failed = read_range(
            row[DESCRIPTOR], row[START], row[WANTED], row[HELD], home, row[IS_DIRECT]
        )
        lock(mutex)
        state[IN_FLIGHT] -= 1
        note_read(board, slot, extent, started, now_ns())
        if failed != 0:
            state[FAILED] = extent
            unlock(mutex)
            return failed
        board.fetches[slot, LEFT] -= 1
        if board.fetches[slot, LEFT] == 0:
            arrive(base, geometry, board, slot)


# -- for the policy, which is Python


@njit
def sleep_until_told(board: Any, timeout_ns: int) -> None:
    """Sleep until new lists of victims are wanted, the lane is over, or for `timeout_ns`."""
    bed = state_at(board, POLICY)
    add32(bed, np.int32(1))
    wakes = load32(bed + 4)
    if board.state[IS_OVER] == 0:
        sleep_in(bed, wakes, timeout_ns)
    add32(bed, np.int32(-1))


@njit
def look_at_slots(base: int, geometry: Any, board: Any, words: Any, is_held: Any) -> None:
    """A consistent copy of all words [K], and whether each expert has a slot or will have [K]."""
    lock(state_at(board, MUTEX))
    for key in range(len(words)):
        words[key] = load64(word_at(base, geometry, 0, key))
        is_held[key] = words[key] & SLOT_MASK != 0 or board.flights[key] != 0
    unlock(state_at(board, MUTEX))


@njit
def set_victims(board: Any, keys: Any, words: Any, lists: Any) -> None:
    """Put new lists in force. keys: [lists, n]; words: [K]; lists: [L] the list of each layer."""
    lock(state_at(board, MUTEX))
    board.victims[:] = -1
    board.victim_next[:] = 0
    board.state[LIST_LENGTH] = keys.shape[1]
    for number in range(keys.shape[0]):
        for place in range(keys.shape[1]):
            key = keys[number, place]
            board.victims[number, place] = key
            board.victim_words[number, place] = words[key] if key >= 0 else 0
    board.victim_list[:] = lists
    unlock(state_at(board, MUTEX))


@njit
def take_counts(board: Any, counts: Any) -> None:
    """Move what was counted of guesses, RIGHT to PASSED, to `counts`."""
    lock(state_at(board, MUTEX))
    for field in range(RIGHT, PASSED + 1):
        counts[field - RIGHT] = board.state[field]
        board.state[field] = 0
    unlock(state_at(board, MUTEX))
