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
    record[t.RECORD_HEADER_FIELDS :].view(np.int32)[: len(positions)] = positions
    assert law.tokens_attended(geometry, record.ctypes.data, window) == expected
