"""Cards' lanes that die at any moment, while plans change: the next request has the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
from cards import OPTIONS, drawn, machine_with, on_cards
from inprocess import InProcess, by_one_thread, collect, running
from mortal import MortalScripted, collect_after_recovery, end_of, hear
from test_card_experts import drawn_on
from test_experts_run import MANY
from tiny import tiny_tokens

from shadowlane.actors.engine import EngineError
from shadowlane.actors.spec import Emulated

PROMPT = tiny_tokens(41)
CARDS = 2


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> list[int]:
    return by_one_thread(model, OPTIONS, PROMPT, max_tokens=24)


def remote(engine: InProcess, name: str) -> object:
    return next(lane for lane in engine.engine.crew.all_lanes if lane.name == name)


@pytest.mark.parametrize("lane", ["gpu:0", "gpu:1", "h2d:0", "h2d:1", "cpu:0"])
@pytest.mark.parametrize("heard", [0, 3])
def test_death_fails_the_running_and_spares_the_next(
    model: Path,
    expected: list[int],
    lane: str,
    heard: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inprocess, "ScriptedHost", MortalScripted)
    with on_cards(
        model, drawn(1, CARDS), CARDS, emulated=Emulated(machine_with(CARDS), slowed=1.0)
    ) as engine:
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, heard)
        remote(engine, lane).kill()  # type: ignore[attr-defined]
        output = end_of(request)
        assert output.error == f"{lane}: its process died"
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert remote(engine, lane).is_dead is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(("slots", "reads"), [(None, False), (9, False), (9, True)])
def test_deaths_while_experts_move(
    tiny_model: Callable[..., Path],
    slots: int | None,
    reads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is held in RAM, or was to be copied there, is nobody's any more: slots are not lost.
    Nor is what the disk reads for links."""
    mixture = tiny_model(MANY)
    tokens = by_one_thread(mixture, OPTIONS, PROMPT, max_tokens=24)
    monkeypatch.setattr(inprocess, "ScriptedHost", MortalScripted)
    draw = random.Random(3)
    with running(mixture, options=OPTIONS, **drawn_on(1, CARDS, slots, reads=reads)) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn in range(1, 8):
            again = drawn(1 + turn, CARDS, slots, reads=reads)(now.blueprint.catalog, now.request)
            planner.script.append((12 * turn, replace(again, placement_id=turn)))
        for _ in range(8):
            request = engine.submit(PROMPT, max_tokens=30)
            hear(request, draw.randrange(12))
            remote(engine, draw.choice(["gpu:0", "h2d:0", "h2d:1", "disk:0"])).kill()  # type: ignore[attr-defined]
            error = end_of(request).error
            assert error is None or error.endswith("its process died")
            collect_after_recovery(engine, PROMPT, tokens)
        assert now.error is None
        assert len(planner.announced) > 1, "plans have changed between the deaths"
        assert engine.generate(PROMPT, max_tokens=24) == tokens


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_deaths_at_any_moment_while_plans_change(
    model: Path, expected: list[int], seed: int, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "ScriptedHost", MortalScripted)
    draw = random.Random(seed)
    with on_cards(
        model,
        drawn(seed, CARDS, streams=streams),
        CARDS,
        emulated=Emulated(machine_with(CARDS), seed=seed, slowed=1.0),
    ) as engine:
        planner, running_now = engine.planner, engine.engine
        assert planner is not None
        for turn in range(1, 6):
            again = drawn(100 * seed + turn, CARDS, streams=streams)(
                running_now.blueprint.catalog, running_now.request
            )
            planner.script.append((20 * turn, replace(again, placement_id=turn)))
        for _ in range(8):
            request = engine.submit(PROMPT, max_tokens=30)
            hear(request, draw.randrange(12))
            remote(engine, draw.choice(["gpu:0", "gpu:1", "h2d:0", "h2d:1", "disk:0"])).kill()  # type: ignore[attr-defined]
            error = end_of(request).error
            assert error is None or error.endswith("its process died")
            collect_after_recovery(engine, PROMPT, expected)
        assert running_now.error is None
        assert len(planner.announced) > 1, "plans have changed between the deaths"


def test_experts_that_have_lost_their_slots_are_not_brought_out_of_them(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that are started again are not given a placement that counts on these."""
    monkeypatch.setattr(inprocess, "ScriptedHost", MortalScripted)
    with running(tiny_model(MANY), options=OPTIONS, **drawn_on(4, 1, brings=True)) as engine:
        now = engine.engine
        assert now.crew.mover.brought_experts(now.placement)
        monkeypatch.setattr(now.crew.mover, "keep_sources", lambda placement: False)
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 3)
        remote(engine, "gpu:0").kill()  # type: ignore[attr-defined]
        assert end_of(request).error == "gpu:0: its process died"
        with pytest.raises((EngineError, AssertionError), match="must have slots in RAM"):
            collect(engine.submit(PROMPT, max_tokens=4))
