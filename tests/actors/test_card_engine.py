"""Lanes of CUDA cards over a recorded driver: logits and tokens as processors compute them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from cards import OPTIONS, drawn, on_cards
from fake_card import FakeDriver, FakeRuntime, fake_cards
from inprocess import ONE_THREAD, collect, running
from mortal import Mortal, MortalScripted, end_of, hear
from recording_memory import MAPPED
from tiny import tiny_tokens

from shadowlane.actors import cards_here as here
from shadowlane.actors import engine as engines
from shadowlane.actors.card_crew import answer_of
from shadowlane.actors.hosts import LaneDied, _LocalRemote
from shadowlane.actors.spec import CardSettings
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import Placement, Request, whole_pages

PROMPT = tiny_tokens(41)
TOLERANCE = 2e-4  # float32, in another order of addition


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> tuple[list[int], np.ndarray]:
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        return engine.generate(PROMPT), engine.logits(PROMPT)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_any_placement_gives_the_same_tokens(
    model: Path,
    expected: tuple[list[int], np.ndarray],
    seed: int,
    cards: int,
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, logits = expected
    first = drawn(seed, cards, streams=streams)
    with fake_cards(monkeypatch, cards), on_cards(model, first, cards) as engine:
        assert engine.generate(PROMPT) == tokens
        assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("abilities", "mode", "is_staged"),
    [
        ({"has_memops": False}, "events", False),
        ({"pin_limit": 48 << 20}, "memops", True),
    ],
)
def test_without_memory_operations_or_without_pinned_weights(
    model: Path,
    expected: tuple[list[int], np.ndarray],
    abilities: dict[str, Any],
    mode: str,
    is_staged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = drawn(2, 1, streams=True)
    with fake_cards(monkeypatch, **abilities), on_cards(model, first) as engine:
        (part,) = engine.engine.placement.cards
        assert set(part.decode_sweep).intersection(engine.engine.placement.sweep)
        lane = engine.engine.crew.cards[0]._target._lane  # type: ignore[attr-defined]
        assert lane.streams.mode == mode
        assert (lane.access.staging is not None) == is_staged
        assert engine.generate(PROMPT) == expected[0]


def test_waits_and_writes_of_a_stream_are_in_order(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter of the lane rises, as far as anybody waits for, after the kernels of each."""
    with fake_cards(monkeypatch) as (driver,):
        with on_cards(model, drawn(0, 1)) as engine:
            engine.generate(PROMPT)
            lane = engine.engine.crew.cards[0]._target._lane  # type: ignore[attr-defined]
            counter = lane._address(lane.number) | MAPPED
            stream = lane._stream.handle
            retired = engine.engine.crew.lane_bases[lane.number]
        done = [(name, arguments) for number, name, arguments in driver.done if number == stream]
        written = [arguments[1] for name, arguments in done if name == "write_value"]
        assert {arguments[0] for name, arguments in done if name == "write_value"} == {counter}
        assert written == sorted(set(written))
        assert len(written) < written[-1] == retired, "some have nobody who waits for them"
        assert "copy" not in [name for name, _ in done], "activations pass no copy engine"


@pytest.mark.parametrize("lane", ["gpu:0", "h2d:0", "cpu:0"])
def test_death_fails_the_running_and_spares_the_next(
    model: Path,
    expected: tuple[list[int], np.ndarray],
    lane: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        fake_cards(monkeypatch, base=MortalScripted),
        on_cards(model, drawn(2, 1)) as engine,
    ):
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 3)
        next(each for each in engine.engine.crew.all_lanes if each.name == lane).kill()
        assert end_of(request).error == f"{lane}: its process died"
        assert engine.generate(PROMPT) == expected[0]


def test_what_a_card_had_cached_goes_with_its_lane(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the card are gone, so a later turn goes through all of its prompt."""
    with (
        fake_cards(monkeypatch, base=MortalScripted),
        on_cards(model, drawn(2, 1), options=replace(OPTIONS, max_batch=2)) as engine,
    ):
        lane = engine.engine.crew.cards[0].target._lane  # type: ignore[attr-defined]
        later = [*PROMPT, *engine.generate(PROMPT), 7, 8]
        assert lane._computer.operators.cache.layers
        request = engine.submit(PROMPT[::-1], max_tokens=60)  # in the other slot
        hear(request, 3)
        engine.engine.crew.links[0].kill()
        assert end_of(request).error == "h2d:0: its process died"
        again = engine.submit(later, reuses_cache=True)
        assert collect(again) == engine.generate(later)
        assert again.timing.cached_tokens == 0


def test_all_that_is_pinned_has_been_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for blocks that may come to RAM later is pinned at the start, and so is taken then."""

    def lean(catalog: Catalog, request: Request) -> Placement:
        first = drawn(2, 1)(catalog, request)
        kept = itertools.compress(catalog.blocks, first.resident)
        return replace(first, weights_nbytes=whole_pages(sum(each.held_nbytes for each in kept)))

    asked: list[int] = []
    monkeypatch.setattr(engines, "check_room", asked.append)
    with fake_cards(monkeypatch), on_cards(model, lean) as engine:
        layout, now = engine.engine.layout, engine.engine.placement
        on_cards_nbytes = sum(card.kv_nbytes for card in now.cards)
        assert layout.num_slots > now.num_slots, "a later plan may read through a ring"
        assert asked == [layout.nbytes - on_cards_nbytes]


def test_a_card_that_cannot_be_loaded_is_told_of_in_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has begun, so nobody else would notice that the copies have ended."""
    with fake_cards(monkeypatch) as (driver,):
        driver.failures["copy"] = "cudaErrorInvalidValue"
        words = "gpu:0: nothing can be copied to it: .*copy: cudaErrorInvalidValue"
        with pytest.raises(ValueError, match=words), on_cards(model, drawn(2, 1)):
            pass
        del driver.failures["copy"]


@pytest.mark.parametrize(
    ("abilities", "error", "words"),
    [
        ({"card_nbytes": 1 << 20}, MemoryError, "gpu:0: .* of its budget: .* are free"),
        ({"pin_limit": 1 << 20}, MemoryError, "gpu:0: RAM cannot be pinned: .*MemoryAllocation"),
    ],
)
def test_a_card_that_cannot_be_opened_is_told_of_in_a_line(
    model: Path,
    abilities: dict[str, Any],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        fake_cards(monkeypatch, **abilities),
        pytest.raises(error, match=words),
        on_cards(model, drawn(0, 1)),
    ):
        pass


def test_who_waits_for_a_card_hears_that_it_died() -> None:
    """A link that copies to it would wait for ever, and so would who asked for the copies."""
    with ThreadPoolExecutor(1) as pool:
        link = Mortal(_LocalRemote("h2d:0", Event(), pool))
        card = Mortal(_LocalRemote("gpu:0", Event(), pool))
        call = link.call("wait")
        card.is_dead = True
        with pytest.raises(LaneDied, match="gpu:0: its process died"):
            answer_of(call, [card])
        link.target.set()
        assert answer_of(call, [card]) is True


def test_a_card_that_has_no_memory_for_kernels_is_told_of_before_any_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: FakeRuntime, stream: int, work: Callable[[], None]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FakeRuntime, "launch", launch)
    with (
        fake_cards(monkeypatch),
        pytest.raises(MemoryError, match=r"gpu:0: out of memory of a step beside .* are free"),
        on_cards(model, drawn(0, 1)),
    ):
        pass


def test_budgets_and_rates_of_cards_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHADOWLANE_CACHE", str(tmp_path))
    driver = FakeDriver()
    measure = partial(here.measure_rates, matrix=(64, 64), copy_nbytes=1 << 20)
    monkeypatch.setattr(here, "measure_rates", measure)
    (found,) = here.measure_all(lambda ordinal: FakeRuntime(driver))
    assert (found.nbytes, found.free_nbytes) == (driver.card_nbytes, driver.card_nbytes)
    monkeypatch.setattr(here, "measure_rates", None)  # rates come from the cache now
    assert here.measure_all(lambda ordinal: FakeRuntime(driver)) == [found]
    weights = tmp_path / "model.gguf"
    weights.write_bytes(bytes(1 << 20))
    budgets, machine = here.cards_here("auto", weights, lambda: [found])
    assert budgets == (CardSettings(driver.card_nbytes - here.HEADROOM_NBYTES, found.uuid),)
    assert machine.cards[0].vram_bytes_per_s > 0
    assert here.cards_here("1GiB", weights, lambda: [found])[0][0].memory == 1 << 30
    with pytest.raises(ValueError, match=r"at most the 4\.00 GiB of recording card; got 9\.00 GiB"):
        here.cards_here("9GiB", weights, lambda: [found])
    assert not any(driver.left().values()), driver.left()
    driver.shut_down()
