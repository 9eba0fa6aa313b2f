"""Lanes of CUDA cards over a recorded driver: logits and tokens as processors compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cards import drawn, machine_with
from fake_card import fake_cards
from inprocess import AMPLE, ONE_THREAD, running, small_blocks
from tiny import tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.spec import CardSettings

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)
TOLERANCE = 2e-4  # float32, in another order of addition


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(4096):
        yield


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama-biases", hidden_size=96, intermediate_size=200, head_dim=24)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[int], np.ndarray]:
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        return engine.generate(PROMPT), engine.logits(PROMPT)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_any_placement_gives_the_same_tokens(
    model: Path,
    expected: tuple[list[int], np.ndarray],
    seed: int,
    cards: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, logits = expected
    with (
        fake_cards(monkeypatch, cards),
        running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            first=drawn(seed, cards),
            cards=(CardSettings(1 << 30),) * cards,
            machine=machine_with(cards),
        ) as engine,
    ):
        assert engine.generate(PROMPT) == tokens
        assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
        assert engine.generate(PROMPT) == tokens
