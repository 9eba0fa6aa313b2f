"""How the rows of a chunk are cut for attention."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shadowlane.ops.chunk_walker import count_parts, part_rows
from shadowlane.ops.table import QUERY_ROWS


def cuts(rows: int, together: int) -> list[tuple[int, int]]:
    return [part_rows(part, rows, together) for part in range(count_parts(rows, together))]


@settings(deadline=None)  # the first call compiles
@given(st.integers(1, 5000), st.integers(1, 2000))
def test_a_sub_chunk_is_cut_as_it_would_be_alone(rows: int, together: int) -> None:
    expected = [
        (begin + first, begin + last)
        for begin in range(0, rows, together)
        for first, last in cuts(min(together, rows - begin), together)
    ]
    assert cuts(rows, together) == expected
    assert [first for first, _ in expected] == [0, *(last for _, last in expected)][:-1]
    assert expected[-1][1] == rows
    assert all(0 < last - first <= QUERY_ROWS for first, last in expected)
