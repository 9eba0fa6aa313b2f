"""What the threads of a disk lane share that read missing experts, and where slots come from.

All under one mutex, in compiled code without the GIL; `missing_experts.py` has the threads' loops.
Which experts may go is decided beforehand, in Python, as lists of victims with the words they had;
a word that has changed since is of an expert that was used, and is passed over. Where a list has
come to its end, what was used longest ago goes. `routes.py` says how words are shared with workers.
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
    read_i64,
    sleep_in,
    unlock,
    wake_bed,
    write_i64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.routes import SLOT_MASK, word_at

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
    EARLY_HITS,
    PASSED,  # routes without a guess
    NUM_OLDEST,  # victims that no list had
    LIST_LENGTH,
    STATE_FIELDS,
) = range(27)

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
    holds: np.ndarray  # [K] how many copies need it where it is: it keeps its slot
    reserved: np.ndarray  # [K] slot + 1 that waits for a copy out of a card's memory, 0
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
def starved_bed(base: int, geometry: Any) -> int:
    return base + geometry[t.ROUTE_NUMBER] + 8 * t.STARVED


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
        if key >= 0 and board.holds[key] == 0 and words[place] >> t.SLOT_BITS < number:
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
            if word & SLOT_MASK == 0 or mark >= number or board.holds[key] != 0:
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


@njit
def hold_slots(base: int, geometry: Any, board: Any, keys: Any, most: int, slots: Any) -> None:
    """Experts that have a slot keep it until `release_slots`. slots: [len(keys)], -1: it has none.

    most: experts that may be held at a time; what is beyond that counts as without a slot.
    """
    lock(state_at(board, MUTEX))
    held = 0
    for key in range(len(board.holds)):
        held += 1 if board.holds[key] != 0 or board.reserved[key] != 0 else 0
    for place in range(len(keys)):
        key = keys[place]
        slots[place] = (load64(word_at(base, geometry, 0, key)) & SLOT_MASK) - 1
        if slots[place] < 0:
            continue
        if board.holds[key] == 0:
            if held >= most:
                slots[place] = -1
                continue
            held += 1
        board.holds[key] += 1
    unlock(state_at(board, MUTEX))


@njit
def release_slots(base: int, geometry: Any, board: Any, keys: Any) -> None:
    """End one hold of each. What is not held (the lane has begun anew since) is passed over."""
    lock(state_at(board, MUTEX))
    for key in keys:
        board.holds[key] = max(0, board.holds[key] - 1)
    unlock(state_at(board, MUTEX))
    wake_bed(starved_bed(base, geometry))


@njit
def reserve_slots(
    base: int, geometry: Any, board: Any, keys: Any, useless: Any, most: int, slots: Any
) -> None:
    """A slot for each expert that has none: a free one, or that of a `useless` expert.

    Nobody may ask for these experts before `settle_slots`. slots: [len(keys)], -1: it has one
    already, or there was none. most: slots that may be held or waiting at a time.
    """
    lock(state_at(board, MUTEX))
    next_useless, pinned = 0, 0
    for key in range(len(board.holds)):
        pinned += 1 if board.holds[key] != 0 or board.reserved[key] != 0 else 0
    for place in range(len(keys)):
        key, slot = keys[place], -1
        slots[place] = -1
        is_there = load64(word_at(base, geometry, 0, key)) & SLOT_MASK != 0
        if is_there or board.flights[key] != 0 or board.reserved[key] != 0 or pinned >= most:
            continue
        if board.state[NUM_FREE] > 0:
            board.state[NUM_FREE] -= 1
            slot = board.free[board.state[NUM_FREE]]
        while slot < 0 and next_useless < len(useless):
            other = useless[next_useless]
            next_useless += 1
            word = word_at(base, geometry, 0, other)
            held = load64(word)
            if held & SLOT_MASK == 0 or board.holds[other] != 0:
                continue
            if compare_swap64(word, held, 0) != 0:
                slot = (held & SLOT_MASK) - 1
        if slot >= 0:
            board.reserved[key] = board.flights[key] = slot + 1
            pinned += 1
        slots[place] = slot
    unlock(state_at(board, MUTEX))


@njit
def settle_slots(base: int, geometry: Any, board: Any, keys: Any, is_there: bool) -> None:
    """What was copied to the slots that were reserved is there and held; or they are free again."""
    lock(state_at(board, MUTEX))
    newest = read_i64(base + geometry[t.ROUTE_NUMBER])
    for key in keys:
        slot = board.reserved[key] - 1
        if slot < 0:
            continue
        board.reserved[key] = board.flights[key] = 0
        if is_there:
            write_i64(word_at(base, geometry, 0, key), (newest << t.SLOT_BITS) | (slot + 1))
            board.holds[key] += 1
        else:
            board.free[board.state[NUM_FREE]] = slot
            board.state[NUM_FREE] += 1
    unlock(state_at(board, MUTEX))
    wake_bed(starved_bed(base, geometry))
