"""Longer chunks of a prompt over cards: the same tokens, and what is brought comes less often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cards import OPTIONS, drawn, machine_with, on_cards
from fake_card import fake_cards
from inprocess import ONE_THREAD, running
from tiny import tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.spec import Emulated

LONG: Options = replace(OPTIONS, context=256, dtype="float32")
PROMPT = tiny_tokens(130)  # five sub-chunks of 24 rows, and ten
TOLERANCE = 2e-4  # of cards that are here: float32, in another order of addition
COUNTS = (2, 4, 8)

pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["llama-biases", "qwen3-moe"])
def test_emulated_cards_give_the_same_bits(
    tiny_model: Callable[..., Path], family: str, seed: int
) -> None:
    model = tiny_model(family)
    with running(model, options=LONG, cores=ONE_THREAD) as engine:
        logits, tokens = engine.logits(PROMPT), engine.generate(PROMPT, 8)
    emulated = Emulated(machine_with(2), slowed=1.0)
    for count in COUNTS:
        first = drawn(seed, 2, brings=family == "qwen3-moe")
        with on_cards(model, first, 2, emulated=emulated, options=LONG, subchunks=count) as engine:
            assert engine.engine.placement.subchunks == count
            assert np.array_equal(engine.logits(PROMPT), logits)
            assert engine.generate(PROMPT, 8) == tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["llama-biases", "qwen3-moe"])
def test_cards_that_are_here_give_the_same_tokens(
    tiny_model: Callable[..., Path], family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    with running(model, options=LONG, cores=ONE_THREAD) as engine:
        logits, tokens = engine.logits(PROMPT), engine.generate(PROMPT, 8)
    for count in COUNTS:
        with (
            fake_cards(monkeypatch, 2),
            on_cards(model, drawn(seed, 2), 2, options=LONG, subchunks=count) as engine,
        ):
            assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
            assert engine.generate(PROMPT, 8) == tokens
