"""The law of emulated lanes: what an instruction is taken to read and compute."""

from __future__ import annotations

import numpy as np
import pytest

from shadowlane.ops import emulated as law
from shadowlane.ops import table as t


@pytest.mark.parametrize(
    ("positions", "num_decode", "window", "expected"),
    [
        ([999], 1, 0, (1000, 1000)),
        ([999], 1, 128, (128, 128)),  # no more than its window
        ([63], 1, 128, (64, 64)),  # nor than there is
        ([999, 199], 2, 128, (256, 256)),  # two sequences
        ([200, 201, 202, 203], 0, 0, (204, 201 + 202 + 203 + 204)),  # a chunk
        ([200, 201, 202, 203], 0, 128, (131, 4 * 128)),  # its rows' windows overlap
    ],
)
def test_attention_reads_and_computes_what_windows_leave(
    positions: list[int], num_decode: int, window: int, expected: tuple[int, int]
) -> None:
    geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
    geometry[t.RECORD_POSITIONS] = t.RECORD_HEADER_FIELDS * 8
    record = np.zeros(t.RECORD_HEADER_FIELDS + 16, np.int64)
    record[t.NUM_DECODE] = num_decode
    record[t.NUM_PREFILL] = len(positions) - num_decode
    record[t.SUBCHUNK_ROWS] = 4
    record[t.RECORD_HEADER_FIELDS :].view(np.int32)[: len(positions)] = positions
    row = np.zeros(t.INSTRUCTION_COLUMNS, np.int64)
    row[t.WINDOW], row[t.MICRO_BATCHES] = window, 1
    assert law.tokens_attended(geometry, row, record.ctypes.data) == expected


def test_a_micro_batch_is_so_many_rows() -> None:
    """Of a decode row and three sub-chunks of two rows, at 7 and from 100 on."""
    geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
    geometry[t.RECORD_POSITIONS] = t.RECORD_HEADER_FIELDS * 8
    record = np.zeros(t.RECORD_HEADER_FIELDS + 16, np.int64)
    record[t.NUM_DECODE], record[t.NUM_PREFILL], record[t.SUBCHUNK_ROWS] = 1, 5, 2
    positions = [7, 100, 101, 102, 103, 104]
    record[t.RECORD_HEADER_FIELDS :].view(np.int32)[: len(positions)] = positions
    row = np.zeros(t.INSTRUCTION_COLUMNS, np.int64)
    row[t.MICRO_BATCHES] = 2
    found = []
    for number in range(2):
        row[t.MICRO_BATCH] = number
        at = record.ctypes.data
        found.append((law.count_rows(row, at), law.tokens_attended(geometry, row, at)))
    assert found == [(5, (8 + 104, 8 + 101 + 102 + 103 + 104)), (1, (105, 105))]
