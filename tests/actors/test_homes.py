"""Homes of resident blocks: never on top of each other, and all space comes back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shadowlane.actors.blueprint import PAGE
from shadowlane.actors.homes import Homes

START = 7 * PAGE


def sizes(pages: list[int]) -> list[int]:
    """Of blocks that hold so many pages each."""
    return [count * PAGE for count in pages]


def test_blocks_lie_one_behind_the_other() -> None:
    homes = Homes(START, 6 * PAGE, sizes([1, 2, 3]))
    assert homes.take([0, 1, 2]) == {0: START, 1: START + PAGE, 2: START + 3 * PAGE}
    assert homes.offsets == {0: START, 1: START + PAGE, 2: START + 3 * PAGE}
    assert homes.take([0, 1]) == {}  # they have one


def test_all_or_nothing() -> None:
    homes = Homes(START, 4 * PAGE, sizes([1, 2, 3]))
    assert homes.take([0, 1, 2]) == {}
    assert homes.offsets == {}
    assert homes.take([1, 0]) == {1: START, 0: START + 2 * PAGE}


def test_what_is_dropped_can_be_taken() -> None:
    homes = Homes(START, 6 * PAGE, sizes([2, 2, 2, 4]))
    homes.take([0, 1, 2])
    assert homes.drop([1]) == [(START + 2 * PAGE, 2 * PAGE)]
    assert homes.take([3]) == {}  # two pages are free
    assert homes.drop([0]) == [(START, 2 * PAGE)]
    assert homes.take([3]) == {3: START}  # neighbours have become one


def test_no_space_at_all() -> None:
    assert Homes(START, 0, sizes([1])).take([0]) == {}


@given(
    pages=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    room=st.integers(0, 30),
    moves=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 11), max_size=6)), max_size=30),
)
def test_any_moves(pages: list[int], room: int, moves: list[tuple[bool, set[int]]]) -> None:
    blocks = sizes(pages)
    homes = Homes(START, room * PAGE, blocks)
    for takes, wanted in moves:
        chosen = sorted(block for block in wanted if block < len(pages))
        if takes:
            before = dict(homes.offsets)
            taken = homes.take(chosen)
            new = set(chosen) - set(before)
            assert set(taken) in (new, set())
            assert homes.offsets == {**before, **taken}
        else:
            homes.drop([block for block in chosen if block in homes.offsets])
        spans = sorted((offset, offset + blocks[block]) for block, offset in homes.offsets.items())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert all(first >= START and last <= START + room * PAGE for first, last in spans)
        assert all(offset % PAGE == 0 for offset, _ in spans)
    homes.drop(list(homes.offsets))
    if sum(pages) <= room:
        assert len(homes.take(range(len(pages)))) == len(pages)  # nothing was lost
