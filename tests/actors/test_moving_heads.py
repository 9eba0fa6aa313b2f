"""Re-plans that move KV heads between cards and RAM: what is cached comes along."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cards import OPTIONS, drawn, machine_with, on_cards
from fake_card import fake_cards
from inprocess import InProcess, by_one_thread
from mortal import MortalScripted, collect_after_recovery, end_of, hear
from tiny import tiny_tokens

from shadowlane.actors.held_heads import Heads, heads_on, num_moved, page_nbytes
from shadowlane.actors.link_statistics import KEYS_AND_VALUES
from shadowlane.actors.spec import Emulated
from shadowlane.planner.placement import Placement

PROMPT = tiny_tokens(41)
TURNS = 4
TOKENS = 60


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> list[int]:
    return by_one_thread(model, OPTIONS, PROMPT, max_tokens=TOKENS)


def in_turns(engine: InProcess, seed: int, cards: int) -> list[Placement]:
    """Have the planner go through placements at random, all within one answer."""
    planner, now = engine.planner, engine.engine
    assert planner is not None
    turns = [
        replace(drawn(seed + turn, cards)(now.blueprint.catalog, now.request), placement_id=turn)
        for turn in range(1, TURNS + 1)
    ]
    planner.script += [(5 * turn, each) for turn, each in enumerate(turns, 1)]
    return turns


def moves_heads(engine: InProcess, turns: list[Placement], cards: int) -> bool:
    before = [engine.engine.placement, *turns]
    blueprint = engine.engine.blueprint
    return any(
        heads_on(blueprint, old, f"gpu:{card}") != heads_on(blueprint, new, f"gpu:{card}")
        for old, new in zip(before, turns, strict=False)
        for card in range(cards)
    )


def until_switched(engine: InProcess, expected: list[int]) -> None:
    assert engine.planner is not None
    for _ in range(20):
        assert engine.generate(PROMPT, max_tokens=TOKENS) == expected
        if len(engine.planner.announced) == TURNS + 1:
            break
    assert [each for each, _ in engine.planner.announced] == list(range(TURNS + 1))


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_tokens_are_the_same_while_heads_move_on_cards(
    model: Path, expected: list[int], seed: int, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fake_cards(monkeypatch, cards),
        on_cards(model, drawn(seed, cards), cards) as engine,
    ):
        turns = in_turns(engine, seed, cards)
        assert moves_heads(engine, turns, cards)
        until_switched(engine, expected)
        now = engine.engine
        for part, there in zip(now.placement.cards, now.crew.mover.card_homes, strict=True):
            held = heads_on(now.blueprint, now.placement, part.lane)
            assert set(there.offsets) == {*part.resident, *held}, "what nobody needs is dropped"


def test_heads_move_while_nothing_is_cached(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fake_cards(monkeypatch),
        on_cards(model, drawn(10, 1)) as engine,
    ):
        monkeypatch.setattr(engine.engine.crew, "_pages_in_use", lambda *sizes: [])
        engine.generate(PROMPT, max_tokens=1)  # so that nothing of it is needed any more
        planner, now = engine.planner, engine.engine
        assert planner is not None
        again = drawn(11, 1)(now.blueprint.catalog, now.request)
        planner.script.append((2, replace(again, placement_id=1)))
        for _ in range(20):
            engine.generate(PROMPT, max_tokens=1)
            if len(planner.announced) == 2:
                break
        assert [each for each, _ in planner.announced] == [0, 1]
        assert engine.generate(PROMPT, max_tokens=TOKENS) == expected


def test_heads_that_find_no_room_in_one_piece_lie_beside_the_budget(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fake_cards(monkeypatch, base=MortalScripted),
        on_cards(model, drawn(10, 1)) as engine,
    ):
        (there,) = engine.engine.crew.mover.card_homes
        take = there.take

        def no_heads(keys: Any) -> dict[Any, int]:
            keys = list(keys)
            return {} if any(isinstance(each, Heads) for each in keys) else take(keys)

        turns = in_turns(engine, 10, 1)
        assert moves_heads(engine, turns, 1)
        monkeypatch.setattr(there, "take", no_heads)
        until_switched(engine, expected)
        request = engine.submit(PROMPT, max_tokens=TOKENS)
        hear(request, 3)
        engine.engine.crew.links[0].kill()  # a card's lane begins anew, with these heads
        assert end_of(request).error == "h2d:0: its process died"
        assert engine.generate(PROMPT, max_tokens=TOKENS) == expected


def test_heads_of_emulated_cards_take_the_time_of_their_bytes(
    model: Path, expected: list[int]
) -> None:
    emulated = Emulated(machine_with(1), slowed=1.0)
    with on_cards(model, drawn(10, 1), emulated=emulated) as engine:
        now = engine.engine
        turns = in_turns(engine, 10, 1)
        before = [now.placement, *turns]
        until_switched(engine, expected)
        moved = [
            num_moved(*(heads_on(now.blueprint, each, "gpu:0") for each in pair))
            for pair in zip(before, turns, strict=False)
        ]
        spans = now.gauges.link_spans(0)
        spans = spans[spans[:, 1] == KEYS_AND_VALUES]
        one = page_nbytes(now.blueprint)
        rate = now.settings.emulated.hardware.cards[0].h2d_bytes_per_s
    assert any(moved)
    assert len(spans) == sum(map(bool, moved))
    for heads, nbytes in zip([each for each in moved if each], spans[:, 4].tolist(), strict=True):
        pages, rest = divmod(nbytes, heads * one)
        assert rest == 0
        assert 1 <= pages <= 4, "of a context of 128 tokens"
    assert (spans[:, 3] - spans[:, 2] >= 0.5 * 1e9 * spans[:, 4] / rate).all()


@pytest.mark.parametrize("seed", range(2))
def test_deaths_at_any_moment_while_heads_and_blocks_move_on_cards(
    model: Path, expected: list[int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    with (
        fake_cards(monkeypatch, 2, base=MortalScripted),
        on_cards(model, drawn(seed, 2), 2) as engine,
    ):
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn in range(1, 6):
            again = drawn(100 * seed + turn, 2)(now.blueprint.catalog, now.request)
            planner.script.append((20 * turn, replace(again, placement_id=turn)))
        for _ in range(8):
            request = engine.submit(PROMPT, max_tokens=30)
            hear(request, draw.randrange(12))
            name = draw.choice(["gpu:0", "gpu:1", "h2d:0", "h2d:1", "disk:0"])
            next(each for each in now.crew.all_lanes if each.name == name).kill()
            error = end_of(request).error
            assert error is None or error.endswith("its process died"), error
            collect_after_recovery(engine, PROMPT, expected[:24])
        assert now.error is None
        assert len(planner.announced) > 1, "plans have changed between the deaths"
