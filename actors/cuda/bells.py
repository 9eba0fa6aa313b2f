"""Waking those who sleep at counters that a card writes.

A card sets the word of a counter and wakes nobody; a sleeper would see it only when it looks again
by itself, which is after 20 ms. One thread looks at all such counters of a process every few tens
of microseconds and wakes the beds of the values that were reached. Who must know at once spins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types

from shadowlane.ops.atomics import (
    BED_NBYTES,
    BEDS,
    LOOK_BACK,
    add32,
    load32,
    sleep_in,
    wake_bed,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.table import NUM_BEDS

LOOK_NS = 30_000


@njit
def ring_bells(counters: Any, seen: Any, quit_word: int, look_ns: int) -> None:
    """Look at `counters` (int64 addresses) until the word is set. seen: int32, what each held."""
    bed = quit_word + BEDS  # nobody rings it; its owner sleeps there between two looks
    while load32(quit_word) == 0:
        for number in range(counters.shape[0]):
            counter = counters[number]
            value = load32(counter)
            passed = types.int64(types.int32(value - seen[number]))
            if passed == 0:
                continue
            seen[number] = value
            reach = passed + LOOK_BACK
            if passed < 0 or reach > NUM_BEDS:  # set anew, or by so much that all are meant
                reach = NUM_BEDS
            for back in range(reach):
                value_bed = types.int64(value - back) & (NUM_BEDS - 1)
                wake_bed(counter + BEDS + value_bed * BED_NBYTES)
        add32(bed, types.int32(1))
        sleep_in(bed, load32(bed + 4), look_ns)
        add32(bed, types.int32(-1))


class Bells:
    """Rings for the counters at these addresses, all written by streams, until it is closed."""

    def __init__(self, counters: Iterable[int], look_ns: int = LOOK_NS) -> None:
        addresses = np.array(list(counters), np.int64)
        self._word = np.zeros((BEDS + NUM_BEDS * BED_NBYTES) // 4, np.int32)
        quit_word = int(self._word.ctypes.data)
        seen = np.zeros(len(addresses), np.int32)
        self._thread = threading.Thread(
            target=ring_bells, args=(addresses, seen, quit_word, look_ns), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._word[0] = 1
        self._thread.join()
