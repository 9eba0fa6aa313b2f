"""A whole engine on a card: logits agree with the processor's, tokens in practice are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cards import drawn, machine_with
from inprocess import AMPLE, ONE_THREAD, running, small_blocks
from tiny import tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.spec import CardSettings

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)
TOLERANCE = 2e-3  # float32 on both sides, with the card's own order of addition


@pytest.mark.parametrize("seed", range(3))
def test_groups_shared_between_processor_and_card(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    model = tiny_model("llama2")
    with small_blocks(4096):
        with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
            tokens, logits = engine.generate(PROMPT), engine.logits(PROMPT)
        with running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            first=drawn(seed, 1),
            cards=(CardSettings(1 << 30),),
            machine=machine_with(1),
        ) as engine:
            assert engine.generate(PROMPT) == tokens
            assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe-norm", "gpt-oss"])
def test_experts_and_embeddings_on_a_card(tiny_model: Callable[..., Path], family: str) -> None:
    """Hits on the card, misses on the processor; decode steps from captured pieces."""
    model = tiny_model(family)
    with small_blocks(4096):
        with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
            tokens, logits = engine.generate(PROMPT), engine.logits(PROMPT)
        with running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            first=drawn(3, 1, embeds=True),
            cards=(CardSettings(1 << 30),),
            machine=machine_with(1),
        ) as engine:
            assert engine.engine.placement.experts_on_cards
            assert engine.generate(PROMPT) == tokens
            assert engine.generate(PROMPT) == tokens
            assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
            graphs = engine.engine.crew.cards[0]._target._lane._graphs  # type: ignore[attr-defined]
            assert graphs.why_not is None
            assert any(graphs._graphs.values())
