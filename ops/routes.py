"""Which experts a layer's rows go to, and which of these are in RAM: the choice itself.

Whoever finishes a layer's router logits runs `route`, once, before any expert of the layer is
computed. A card that is here chooses itself, with the same bits, and leaves what it chose; the
processor that computes other experts of the layer does the rest, `mark_chosen`, as it begins.

What lives on cards, as the placement says, is listed for each of them. Of the others, two processes
share the residency without a lock. Each expert has a word: its slot, and the number of the route
that used it last. `mark_chosen` marks those of its route with its own number, by compare-and-swap;
the disk lane empties, by compare-and-swap too, only words whose mark is older than the newest
route. So nothing is evicted between being chosen and being computed, and where both want the same
word one of them sees that and turns to another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    compare_swap64,
    load32,
    load64,
    publish,
    publish_next,
    read_f32,
    read_i32,
    read_i64,
    relax,
    rest,
    swap64,
    write_f32,
    write_i32,
    write_i64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.exponential import ONE, exponential, in_units, sigmoid

SLOT_MASK = (1 << t.SLOT_BITS) - 1
LOWEST = np.float32(-np.inf)  # of a logit that has been chosen
FLOOR = np.float32(-3.4e38)
SPINS_BEFORE_REST = 2000  # looks at a peer's progress before the core is offered to others


@njit
def spin(base: int, geometry: Any, spins: int) -> int:
    """Before another look at a peer's progress. Returns looks since the core was offered to others.

    spins: what the last call returned, 0 at first. -1: aborted.
    """
    relax()
    if spins < SPINS_BEFORE_REST:
        return spins + 1
    rest()
    return 0 if load32(base + geometry[t.ABORT]) == 0 else -1


@njit
def route_at(base: int, geometry: Any, sparse_layer: int) -> int:
    """Address of the route of a layer."""
    return base + geometry[t.ROUTES] + sparse_layer * geometry[t.ROUTE_NBYTES]


@njit
def word_at(base: int, geometry: Any, sparse_layer: int, expert: int) -> int:
    """Address of an expert's word."""
    key = sparse_layer * geometry[t.NUM_EXPERTS] + expert
    return base + geometry[t.EXPERT_WORDS] + 8 * key


@njit
def choose(logits: int, count: int, top_k: int, normalises: int, ids: int, weights: int) -> None:
    """The `top_k` largest of float32 logits [count], by falling value; the first of equals.

    ids: int32 [top_k]; weights: float32 [top_k], a softmax over all logits, or, where `normalises`,
    over the chosen ones. The chosen logits are overwritten. `choose` of `card/choices.py` gives the
    same bits.
    """
    largest = FLOOR
    for index in range(count):
        value = read_f32(logits + 4 * index)
        if not value > LOWEST:  # not a number, from a broken row: still `top_k` different experts
            write_f32(logits + 4 * index, FLOOR)
        elif value > largest:
            largest = value
    units = 0
    if normalises == 0:
        for index in range(count):
            units += in_units(exponential(read_f32(logits + 4 * index) - largest))
    for rank in range(top_k):
        best, found = LOWEST, 0
        for index in range(count):
            value = read_f32(logits + 4 * index)
            if value > best:
                best, found = value, index
        write_f32(logits + 4 * found, LOWEST)
        write_i32(ids + 4 * rank, np.int32(found))
        write_f32(weights + 4 * rank, np.float32(best - largest))
        if normalises != 0:
            units += in_units(exponential(best - largest))
    for rank in range(top_k):
        part = exponential(read_f32(weights + 4 * rank))
        write_f32(weights + 4 * rank, np.float32(part * ONE / units))


@njit
def sort_pairs(geometry: Any, route: int, first: int, last: int) -> None:
    """Fill `starts` and `pairs` from `ids` of rows first..last: for each expert its pairs, by
    rising row."""
    experts, top_k = geometry[t.NUM_EXPERTS], geometry[t.TOP_K]
    ids, pairs = route + geometry[t.ROUTE_IDS], route + geometry[t.ROUTE_PAIRS]
    starts, cursors = route + geometry[t.ROUTE_STARTS], route + geometry[t.ROUTE_ORDER]
    for expert in range(experts + 1):
        write_i32(starts + 4 * expert, np.int32(0))
    for pair in range(first * top_k, last * top_k):
        at = starts + 4 * (read_i32(ids + 4 * pair) + 1)
        write_i32(at, read_i32(at) + np.int32(1))
    for expert in range(experts):
        write_i32(cursors + 4 * expert, read_i32(starts + 4 * expert))
        at = starts + 4 * (expert + 1)
        write_i32(at, read_i32(at) + read_i32(starts + 4 * expert))
    for pair in range(first * top_k, last * top_k):
        cursor = cursors + 4 * read_i32(ids + 4 * pair)
        place = read_i32(cursor)
        write_i32(pairs + 4 * place, np.int32(pair))
        write_i32(cursor, place + np.int32(1))


@njit
def mark_used(word: int, number: int) -> bool:
    """Mark a resident expert as used by route `number`; False if it is not resident."""
    while True:
        held = load64(word)
        slot = held & SLOT_MASK
        if slot == 0:
            return False
        if compare_swap64(word, held, (number << t.SLOT_BITS) | slot):
            return True


@njit
def share_out(
    base: int, geometry: Any, row: Any, items: Any, here: int, chosen: int, is_decode: int
) -> int:
    """List what each card computes, behind the `chosen` experts that the processor does.

    Returns how many experts the list has then. A card that computes none may still add up, and
    must not find what an older route has listed for it.
    """
    cards = row[t.CARD_EXPERTS]
    starts, order = here + geometry[t.ROUTE_STARTS], here + geometry[t.ROUTE_ORDER]
    place = chosen
    for card in range(t.MAX_CARDS):
        write_i64(here + 8 * (t.CARD_PLACES + card), place)
        for expert in range(geometry[t.NUM_EXPERTS]):
            if cards < 0 or items[cards + expert, t.CARD] != card:
                continue
            if read_i32(starts + 4 * expert + 4) != read_i32(starts + 4 * expert):
                write_i32(order + 4 * place, np.int32(expert))
                place += 1
    write_i64(here + 8 * (t.CARD_PLACES + t.MAX_CARDS), place)
    if is_decode != 0:
        at = here + 8 * t.ALL_ON_CARDS
        write_i64(at, read_i64(at) + place - chosen)
    return place


@njit
def route(
    base: int, geometry: Any, row: Any, items: Any, step: int, num_rows: int, is_decode: int
) -> bool:
    """Choose for every row, mark what is in RAM, and make the request for the rest.

    True: there is one. `call_disk_lane` comes when the instruction has retired: whoever wakes the
    disk lane may lose its core to it, and its peers have experts to compute.

    row: of a ROUTER.
    """
    choose_rows(base, geometry, row, 0, num_rows)
    return mark_chosen(base, geometry, row, items, step, num_rows, is_decode)


@njit
def route_part(base: int, geometry: Any, row: Any, step: int, first: int, last: int) -> None:
    """Choose for rows first..last, of a micro-batch, where all experts are this card's.

    `starts` and `pairs` are of these rows until the next are routed. The rest of the route, for
    those who count or watch, the engine does for all rows at the end of the step: `mark_all`.
    """
    choose_rows(base, geometry, row, first, last)
    here = route_at(base, geometry, row[t.SPARSE_LAYER])
    sort_pairs(geometry, here, first, last)
    swap64(here + 8 * t.ROUTE_STEP, np.int64(step))


@njit
def choose_rows(base: int, geometry: Any, row: Any, first: int, last: int) -> None:
    """`choose` for rows first..last of a ROUTER, or weigh what the engine has chosen for them.

    Its output is float32 [rows, ROUTER_STRIDE]: a logit per expert, then, where the layer has a
    shared expert with a gate, the gate's, which becomes its factor here.
    """
    experts, top_k = geometry[t.NUM_EXPERTS], geometry[t.TOP_K]
    here = route_at(base, geometry, row[t.SPARSE_LAYER])
    stride = 4 * geometry[t.ROUTER_STRIDE]
    is_forced = read_i64(base + geometry[t.ROUTE_NUMBER] + 8 * t.ROUTE_FORCED) != 0
    for index in range(first, last):
        logits = base + row[t.OUTPUT] + index * stride
        for extra in range(experts, geometry[t.ROUTER_STRIDE]):
            gate = logits + 4 * extra
            write_f32(gate, np.float32(sigmoid(read_f32(gate))))
        weights = here + geometry[t.ROUTE_WEIGHTS] + 4 * index * top_k
        if is_forced:
            for rank in range(top_k):
                write_f32(weights + 4 * rank, np.float32(1.0 / top_k))
            continue
        ids = here + geometry[t.ROUTE_IDS] + 4 * index * top_k
        choose(logits, experts, top_k, geometry[t.NORMALISES_TOP_K], ids, weights)


@njit
def mark_chosen(
    base: int, geometry: Any, row: Any, items: Any, step: int, num_rows: int, is_decode: int
) -> bool:
    """All of `route` but the choice: `ids` and `weights` are those of so many rows.

    row: of the layer's ROUTER or EXPERTS. Written last of what workers read: ROUTE_STEP.
    """
    experts, layer = geometry[t.NUM_EXPERTS], row[t.SPARSE_LAYER]
    here = route_at(base, geometry, layer)
    sort_pairs(geometry, here, 0, num_rows)
    numbers = base + geometry[t.ROUTE_NUMBER]
    number = read_i64(numbers) + 1
    starts = here + geometry[t.ROUTE_STARTS]
    order, missing = here + geometry[t.ROUTE_ORDER], here + geometry[t.ROUTE_MISSING]
    num_resident, num_missing = 0, 0
    cards = row[t.CARD_EXPERTS]
    # NOTE: known before any is marked: the disk lane may empty what an older route has used.
    write_i64(numbers, number)
    write_i64(numbers + 8 + 8 * (number % t.ROUTE_RING), layer)
    for expert in range(experts):
        if read_i32(starts + 4 * expert + 4) == read_i32(starts + 4 * expert):
            continue
        if cards >= 0 and items[cards + expert, t.CARD] >= 0:
            continue
        if mark_used(word_at(base, geometry, layer, expert), number):
            write_i32(order + 4 * num_resident, np.int32(expert))
            num_resident += 1
        else:
            write_i32(missing + 4 * num_missing, np.int32(expert))
            num_missing += 1
    chosen = num_resident + num_missing
    num_listed = share_out(base, geometry, row, items, here, chosen, is_decode)
    for place in range(num_listed):
        write_i32(here + geometry[t.ROUTE_HALVES] + 4 * place, np.int32(0))
        write_i32(here + geometry[t.ROUTE_WHOLES] + 4 * place, np.int32(0))
    counters = base + geometry[t.COUNTERS]
    ready = counters + geometry[t.READY_COUNTER] * t.COUNTER_NBYTES
    before = load32(ready)
    write_i64(here + 8 * t.ROUTE_SEQUENCE, number)
    write_i64(here + 8 * t.NUM_CHOSEN, chosen)
    write_i64(here + 8 * t.NUM_RESIDENT, num_resident)
    write_i64(here + 8 * t.READY_BASE, np.int64(before))
    write_i64(here + 8 * t.NUM_FINISHED, 0)
    write_i64(here + 8 * t.IS_DECODE, is_decode)
    if is_decode != 0:
        for field, more in ((t.ALL_RESIDENT, num_resident), (t.ALL_CHOSEN, chosen)):
            write_i64(here + 8 * field, read_i64(here + 8 * field) + more)
    publish(ready, np.int32(before + num_resident))
    if chosen == 0:  # nobody will finish the last of them
        publish(counters + geometry[t.SUMMED_COUNTER] * t.COUNTER_NBYTES, np.int32(number))
    swap64(here + 8 * t.ROUTE_STEP, np.int64(step))
    if num_missing > 0:
        write_i64(numbers + 8 * t.NEWEST_REQUEST, number)
    return num_missing > 0


@njit
def take_route(
    base: int, geometry: Any, row: Any, items: Any, record: int, step: int, item: int,
    num_rows: int, is_decode: int,
) -> bool:  # fmt: skip
    """Before an item of an EXPERTS whose layer a card has routed. False: aborted.

    Who has the first item makes a route of what the card has left, and calls the disk lane for what
    is missing; the others wait for that. Of a void step nothing may have been left: then the route
    stays one of another step.
    """
    said = route_at(base, geometry, row[t.SPARSE_LAYER]) + 8 * t.ROUTE_STEP
    if item == 0:
        if load64(record + 8 * t.IS_VOID) != 0:
            swap64(said, np.int64(~step))
        elif mark_chosen(base, geometry, row, items, step, num_rows, is_decode):
            call_disk_lane(base, geometry)
        return True
    spins = 0
    while load64(said) != step and load64(said) != ~step:
        spins = spin(base, geometry, spins)
        if spins < 0:
            return False
    return True


@njit
def mark_all(
    base: int, geometry: Any, rows: Any, items: Any, step: int, num_rows: int, is_decode: int
) -> None:
    """`mark_chosen` of the layers of `rows`, of which no processor computes an expert."""
    for number in range(rows.shape[0]):
        mark_chosen(base, geometry, rows[number], items, step, num_rows, is_decode)


@njit
def call_disk_lane(base: int, geometry: Any) -> None:
    """Wake the disk lane's reader of experts: there is a request, or a guess."""
    publish_next(base + geometry[t.COUNTERS] + geometry[t.REQUEST_COUNTER] * t.COUNTER_NBYTES)
