"""Which rows of a step an instruction computes: those of one micro-batch.

The sub-chunks of a chunk are shared out evenly, the first micro-batches having one more where that
does not come out; one that has none is retired and not done. Rows of other sequences, which decode,
go with the first.
"""

from __future__ import annotations

from typing import Any

from shadowlane.ops import table as t
from shadowlane.ops.atomics import read_i64
from shadowlane.ops.compiled import njit


@njit
def chunk_part(number: int, count: int, num_prefill: int, together: int) -> tuple[int, int]:
    """First row and end of micro-batch `number` of `count`, in a chunk of sub-chunks of `together`
    rows, of which the last may have fewer."""
    parts = -(-num_prefill // together)
    first = -(-number * parts // count) * together
    last = -(-(number + 1) * parts // count) * together
    return min(num_prefill, first), min(num_prefill, last)


@njit
def rows_of(row: Any, record: int) -> tuple[int, int, int]:
    """(decode rows, first row of the chunk, end of those) of an instruction in this step.

    In the step they lie one behind the other: decode rows go with the beginning of the chunk.
    """
    num_prefill = read_i64(record + 8 * t.NUM_PREFILL)
    together = read_i64(record + 8 * t.SUBCHUNK_ROWS)
    number = row[t.MICRO_BATCH]
    first, last = chunk_part(number, row[t.MICRO_BATCHES], num_prefill, together)
    return read_i64(record + 8 * t.NUM_DECODE) if number == 0 else 0, first, last
