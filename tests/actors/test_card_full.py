"""A card that refuses memory: its budget is lowered and all is planned anew, once."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cards import OPTIONS, drawn, on_cards
from fake_card import fake_cards
from inprocess import by_one_thread, collect
from mortal import end_of, hear
from tiny import tiny_tokens

from shadowlane.actors import card_lane
from shadowlane.actors.card_full import CardFull, lowered_budget
from shadowlane.actors.engine import EngineError
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import Placement, Request

PROMPT = tiny_tokens(41)
GIB = 1 << 30
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> list[int]:
    return by_one_thread(model, OPTIONS, PROMPT, max_tokens=30)


class Plans:
    """Plans at random within whatever budget is asked for, and what budgets these were."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def first(self, catalog: Catalog, request: Request) -> Placement:
        self.budgets.append(request.cards[0])
        placement = drawn(len(self.budgets), 1)(catalog, request)
        (part,) = placement.cards
        return replace(placement, cards=(replace(part, budget=request.cards[0]),))


def test_a_budget_that_a_card_has_not_is_lowered(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = Plans()
    with (
        fake_cards(monkeypatch, card_nbytes=700 * MIB),
        on_cards(model, plans.first) as engine,
    ):
        assert plans.budgets == [GIB, 512 * MIB]
        (note,) = [each for each in engine.engine.notes if "planned anew" in each]
        assert "cudaErrorMemoryAllocation" in note
        assert note.endswith("planned anew with 512.0 MiB of it instead of 1.00 GiB"), note
        assert note in engine.engine.shadow.decisions
        assert engine.generate(PROMPT, max_tokens=30) == expected


def test_a_card_that_refuses_twice_is_told_of_in_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = Plans()
    with fake_cards(monkeypatch) as (driver,):
        driver.failures["allocate"] = "cudaErrorMemoryAllocation"
        with (
            pytest.raises(CardFull, match=r"^gpu:0: .* of its budget: .* are free$"),
            on_cards(model, plans.first),
        ):
            pass
        assert len(plans.budgets) == 2


def test_activations_that_find_no_room(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch takes beside the budget is what has to become possible."""
    made: list[int] = []
    make = card_lane.make_operators

    def refuse_first(*where: Any) -> Any:
        made.append(1)
        if len(made) == 1:
            raise card_lane.torch.OutOfMemoryError("CUDA out of memory")
        return make(*where)

    monkeypatch.setattr(card_lane, "make_operators", refuse_first)
    plans = Plans()
    with fake_cards(monkeypatch), on_cards(model, plans.first) as engine:
        assert plans.budgets == [GIB, 512 * MIB]
        assert engine.generate(PROMPT, max_tokens=30) == expected


def test_a_step_that_finds_no_memory_is_begun_anew(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on where it was; what it has said stands."""
    plans = Plans()
    with fake_cards(monkeypatch) as (driver,), on_cards(model, plans.first) as engine:
        request = engine.submit(PROMPT, max_tokens=30)
        heard = []
        for _ in range(5):
            heard += request.outputs.get(timeout=60).token_ids
        driver.refused_after = [driver.num_launched + 20]
        assert heard + collect(request) == expected
        assert plans.budgets == [GIB, 512 * MIB]
        (note,) = [each for each in engine.engine.notes if "planned anew" in each]
        assert "out of memory of a step beside" in note
        assert "planned anew with 512.0 MiB of it instead of 1.00 GiB" in note
        assert sum("copies to gpu:0" in each for each in engine.engine.notes) == 1
        assert engine.generate(PROMPT, max_tokens=30) == expected


def test_steps_that_find_no_memory_twice_end_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cards(monkeypatch) as (driver,), on_cards(model, Plans().first) as engine:
        request = engine.submit(PROMPT, max_tokens=60)
        hear(request, 3)
        driver.refused_after = [driver.num_launched + 10, driver.num_launched + 200]
        error = end_of(request).error
        assert error is not None
        assert error.startswith("gpu:0: out of memory of a step beside")
        assert "\n" not in error
        with pytest.raises(EngineError, match="gpu:0: out of memory"):
            engine.generate(PROMPT)


def test_what_a_lane_raises_comes_from_its_process_as_it_was() -> None:
    there = pickle.loads(pickle.dumps(CardFull("gpu:1: no room", 1, 77)))
    assert (str(there), there.card, there.free_nbytes) == ("gpu:1: no room", 1, 77)


@pytest.mark.parametrize(
    ("budget", "free", "wanted"),
    [
        (8 * GIB, None, 7 * GIB),
        (2 * GIB, None, 1536 * MIB),
        (6 * GIB, 4 * GIB, 3584 * MIB),
        (GIB, 100 * MIB, 75 * MIB),
        (GIB, 0, 0),
    ],
)
def test_what_is_asked_for_after_a_refusal(budget: int, free: int | None, wanted: int) -> None:
    assert lowered_budget(budget, free) == wanted
