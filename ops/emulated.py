"""The law of an emulated lane: how long each instruction would take on a machine that is not here.

The real operator runs, by the compiled kernels of the processor, and so gives the same bits; then
the instruction is held until the modelled time is over. What a lane reaches is written in the arena
by whoever emulates, and may change at any moment. All of it is slowed down by one factor, so that
this machine's kernels stay below.

It is not the planner's model: small matrices reach less of a rate than large ones, a card pays for
launches once per layer, processor and links share the DRAM port as they go, and everything
scatters.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    load32,
    now_ns,
    read_f64,
    read_i32,
    read_i64,
    sleep_in,
    write_f64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.micro_batch import rows_of
from shadowlane.ops.routes import route_at

# the law of one lane, float64
SLOWED: Final = 0  # seconds here for one emulated second
BYTES_PER_S: Final = 1  # of large matrices
FLOPS_PER_S: Final = 2
LAUNCH_S: Final = 3
FIRST_LAUNCHES: Final = 4  # launches that the first instruction of a layer pays, and each other
OTHER_LAUNCHES: Final = 5
CROSSING_S: Final = 6
CROSSING_BYTES_PER_S: Final = 7
PORT_BYTES_PER_S: Final = 8  # of DRAM, that links share; 0: this lane reads memory of its own
TAKEN: Final = 9  # part of the cores that others take, some milliseconds at a time
JITTER: Final = 10  # standard deviation of each duration, as a part of it
SEED: Final = 11
ROW_NBYTES: Final = 12  # of a row of activations that crosses
SMALL_NBYTES: Final = 13  # a matrix of this size reaches half of a rate
OVERRUN_S: Final = 14  # written by the lane: what its kernels took beyond the modelled time
BUSY_S: Final = 15  # written by the lane: inside instructions, by the clock of this machine
ENDED_NS: Final = 16  # written by the lane: when its newest instruction of experts ended
CROSSED_S: Final = 17  # written by the lane: emulated, in which its inputs crossed to it
CROSSED: Final = 18  # ... over so many links
LAW_FIELDS: Final = 24
LAW_NBYTES: Final = LAW_FIELDS * 8

# What all emulated lanes of a machine see, float64 at the front: bytes per second that each link is
# taking from the DRAM port at this moment, then the disk.
LOADS: Final = t.MAX_CARDS + 1
LOADS_NBYTES: Final = 128

FIRST_OF_LAYER: Final = 3.0  # launches that a card pays for at once, when a layer begins
REST_OF_LAYER: Final = 0.5  # ... and for each group after that
CHUNK_S: Final = 2e-6  # what each copy of a link costs beside its bytes
LEAST_PART: Final = 0.15  # of the DRAM port that cores get, however busy it is
CORE_OFF_S: Final = 4e-3  # how long a core is taken away at a time
LAST_PART: Final = 0.25  # of an instruction that is left when the last of its weights has come
LOOK_UP_NS: Final = 20_000_000
SPIN_NS: Final = 60_000  # before an end, where a sleep would come too late


@njit
def bent_s(nbytes: float, rate: float, small: float) -> float:
    """Seconds of reading a matrix; one of `small` bytes reaches half of the rate."""
    if nbytes <= 0.0:
        return 0.0
    return (nbytes + small) / rate


@njit
def chance(seed: int, step: int, number: int) -> float:
    """Uniform in [0, 1), the same for the same three (SplitMix64, Steele et al. 2014)."""
    mixed = np.uint64(seed) + np.uint64(step) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(number + 1) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) / 9007199254740992.0


@njit
def scatter(deviation: float, seed: int, step: int, number: int) -> float:
    """A factor of mean 1: the sum of four uniform numbers is close to a normal one."""
    total = 0.0
    for turn in range(4):
        total += chance(seed, step, 4 * number + turn) - 0.5
    return max(0.5, 1.0 + deviation * total * 1.7320508)


@njit
def off_s(seconds: float, taken: float, seed: int, step: int, number: int) -> float:
    """How long cores are taken away while they want to work for `seconds`: some whole off times."""
    if taken <= 0.0:
        return 0.0
    expected = seconds * taken / (1.0 - taken)
    whole = int(expected / CORE_OFF_S)
    rest = expected - whole * CORE_OFF_S
    more = 1 if chance(seed, step, number) * CORE_OFF_S < rest else 0
    return CORE_OFF_S * (whole + more)


@njit
def law_f64(law: int, field: int) -> float:
    return read_f64(law + 8 * field)


@njit
def memory_rate(law: int, loads: int) -> float:
    """What a lane's memory gives now: its own rate, or what links leave it of the DRAM port."""
    rate = law_f64(law, BYTES_PER_S)
    port = law_f64(law, PORT_BYTES_PER_S)
    if port <= 0.0:
        return rate
    left = port
    for number in range(LOADS):
        left -= read_f64(loads + 8 * number)
    return min(rate, max(left, port * LEAST_PART))


@njit
def count_rows(row: Any, record: int) -> int:
    """Rows that an instruction computes in this step."""
    decode, first, last = rows_of(row, record)
    return decode + last - first


@njit
def tokens_attended(geometry: Any, row: Any, record: int) -> tuple[int, int]:
    """(tokens whose keys and values are read, tokens attended over all rows) by an instruction of
    attention in this step."""
    window = row[t.WINDOW]
    decode, first, last = rows_of(row, record)
    prefill = last - first
    begin = read_i64(record + 8 * t.NUM_DECODE) + first - decode  # of its rows in the step
    same = read_i64(record + 8 * t.SAME_SEQUENCE) != 0
    read, attended = 0, 0
    positions = record + geometry[t.RECORD_POSITIONS] + 4 * begin
    for index in range(decode + prefill):
        seen = read_i32(positions + 4 * index) + 1
        if window > 0:
            seen = min(seen, window)
        attended += seen
        if index < decode:
            read = max(read, seen) if same else read + seen
    if prefill > 0:
        end = read_i32(positions + 4 * (decode + prefill - 1)) + 1
        read += min(end, window + prefill - 1) if window > 0 else end
    return read, attended


@njit
def count_experts(base: int, geometry: Any, row: Any, items: Any) -> tuple[int, int]:
    """(experts that an instruction computes, rows that go to them) in this step."""
    route = route_at(base, geometry, row[t.SPARSE_LAYER])
    listed = read_i64(route + 8 * t.NUM_CHOSEN)
    if geometry[t.THIS_CARD] >= 0:
        listed = row[t.TILE_COUNT]
    chosen, pairs = 0, 0
    for place in range(listed):
        if geometry[t.THIS_CARD] >= 0:
            expert = items[row[t.TILE_START] + place, t.EXPERT]
        else:
            expert = np.int64(read_i32(route + geometry[t.ROUTE_ORDER] + 4 * place))
        starts = route + geometry[t.ROUTE_STARTS] + 4 * expert
        count = read_i32(starts + 4) - read_i32(starts)
        chosen += count > 0
        pairs += count
    return chosen, pairs


@njit
def work_s(
    base: int, geometry: Any, row: Any, items: Any, record: int, law: int, loads: int
) -> float:
    """Emulated seconds of one instruction, launches apart, without scatter."""
    rows = count_rows(row, record)
    if row[t.KIND] == t.LM_HEAD:
        rows = read_i64(record + 8 * t.NUM_LOGITS)
    nbytes = float(row[t.READS_NBYTES])
    flops = float(row[t.FLOPS]) * rows
    if row[t.KIND] == t.ATTENTION:
        read, attended = tokens_attended(geometry, row, record)
        nbytes = float(row[t.READS_KV]) * read
        flops = float(row[t.FLOPS]) * attended
    elif row[t.KIND] == t.EXPERTS:
        chosen, pairs = count_experts(base, geometry, row, items)
        nbytes *= chosen
        flops = float(row[t.FLOPS]) * pairs
    reading = bent_s(nbytes, memory_rate(law, loads), law_f64(law, SMALL_NBYTES))
    return max(reading, flops / law_f64(law, FLOPS_PER_S))


@njit
def crossing_s(row: Any, record: int, law: int, crossings: int) -> float:
    """Until an activation that another side has made is here."""
    if crossings == 0:
        return 0.0
    rows = count_rows(row, record)
    copying = rows * law_f64(law, ROW_NBYTES) / law_f64(law, CROSSING_BYTES_PER_S)
    return crossings * (law_f64(law, CROSSING_S) + copying)


@njit
def joined_ns(geometry: Any, row: Any, record: int, law: int) -> int:
    """When the last is here that others give who compute experts of the layer; 0: nobody does.

    It crosses once between processor and card, twice from card to card.
    """
    last = 0
    if row[t.JOINS] > 0:
        slowed = law_f64(law, SLOWED) * 1e9
        for lane in range(t.MAX_LANES):
            if row[t.JOIN_WAIT + lane] >= 0:
                other = law + (lane - geometry[t.LANE]) * LAW_NBYTES
                crossings = 0
                for side in (law, other):
                    crossings += 1 if law_f64(side, PORT_BYTES_PER_S) <= 0.0 else 0
                crossing_ns = int(crossing_s(row, record, law, crossings) * slowed)
                last = max(last, int(law_f64(other, ENDED_NS)) + crossing_ns)
    return last


@njit
def hold(
    base: int, geometry: Any, row: Any, items: Any, record: int, ready_ns: int, late_ns: int
) -> tuple[int, int]:
    """Wait until an instruction would have ended that could begin at `ready_ns`.

    late_ns: when the last of its streamed weights came, 0: they were all there. Returns when its
    work began, after its input had crossed, and how long it worked; (`ready_ns`, -1) on a lane that
    is not emulated.
    """
    if geometry[t.EMULATION] < 0:
        return ready_ns, -1
    loads = base + geometry[t.EMULATED_LOADS]
    law = base + geometry[t.EMULATION]
    step = read_i64(record + 8 * t.STEP)
    number = row[t.ORDINAL]
    seed = int(law_f64(law, SEED))
    slowed = law_f64(law, SLOWED) * 1e9
    jitter = law_f64(law, JITTER)
    working = work_s(base, geometry, row, items, record, law, loads)
    working *= scatter(jitter, seed, step, number)
    launches = law_f64(law, FIRST_LAUNCHES if row[t.IS_FIRST] != 0 else OTHER_LAUNCHES)
    working += launches * law_f64(law, LAUNCH_S)
    working += off_s(working, law_f64(law, TAKEN), seed, step, 1_000_003 + number)
    crossing = crossing_s(row, record, law, row[t.CROSSINGS]) * scatter(
        jitter, seed, step, 500_009 + number
    )
    write_f64(law + 8 * CROSSED_S, law_f64(law, CROSSED_S) + crossing)
    write_f64(law + 8 * CROSSED, law_f64(law, CROSSED) + row[t.CROSSINGS])
    begin_ns = ready_ns + int(crossing * slowed)
    end_ns = begin_ns + int(working * slowed)
    if late_ns > 0:
        end_ns = max(end_ns, late_ns + int(working * LAST_PART * slowed))
    own_ns = end_ns
    end_ns = max(end_ns, joined_ns(geometry, row, record, law))
    over_ns = now_ns() - end_ns
    if over_ns > 0:
        write_f64(law + 8 * OVERRUN_S, law_f64(law, OVERRUN_S) + over_ns * 1e-9)
    else:
        sleep_until(end_ns, law, base + geometry[t.ABORT])
    ended_ns = now_ns()
    if row[t.KIND] == t.EXPERTS:
        write_f64(law + 8 * ENDED_NS, float(ended_ns))
    busy_ns = ended_ns - max(begin_ns, late_ns) - (end_ns - own_ns)
    if late_ns > 0:  # what was there could be worked on while the rest was on its way
        busy_ns = max(busy_ns, int(working * slowed))
    write_f64(law + 8 * BUSY_S, law_f64(law, BUSY_S) + busy_ns * 1e-9)
    return begin_ns, busy_ns


@njit
def sleep_until(end_ns: int, law: int, abort: int) -> None:
    """Sleep, and spin at the very end; not at all once the abort word is set."""
    bed = law + 8 * (LAW_FIELDS - 1)  # never woken: only its timeout ends a sleep
    while load32(abort) == 0:
        left = end_ns - now_ns()
        if left <= 0:
            return
        if left > SPIN_NS:
            sleep_in(bed, 0, min(left - SPIN_NS, LOOK_UP_NS))
