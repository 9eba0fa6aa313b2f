"""A whole engine on a card: logits agree with the processor's, tokens in practice are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cards import OPTIONS, all_on_a_card, drawn, on_cards
from inprocess import ONE_THREAD, running, small_blocks
from tiny import tiny_tokens

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
        with on_cards(model, drawn(seed, 1)) as engine:
            assert engine.generate(PROMPT) == tokens
            assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe-norm", "gpt-oss"])
def test_experts_and_embeddings_on_a_card(tiny_model: Callable[..., Path], family: str) -> None:
    """Hits on the card, misses on the processor; decode steps from captured pieces."""
    model = tiny_model(family)
    with small_blocks(4096):
        with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
            tokens, logits = engine.generate(PROMPT), engine.logits(PROMPT)
        with on_cards(model, drawn(3, 1, embeds=True)) as engine:
            assert engine.engine.placement.experts_on_cards
            assert engine.generate(PROMPT) == tokens
            assert engine.generate(PROMPT) == tokens
            assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
            graphs = engine.engine.crew.cards[0]._target._lane._graphs  # type: ignore[attr-defined]
            assert graphs.why_not is None
            assert any(graphs._graphs.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_routers_on_a_card(tiny_model: Callable[..., Path], family: str) -> None:
    """Beside experts of the processor, and with nobody else: then a step is one captured piece."""
    model = tiny_model(family)
    with small_blocks(4096):
        with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
            tokens, logits = engine.generate(PROMPT), engine.logits(PROMPT)
        for first in (drawn(1, 1, routes=True), drawn(2, 1, routes=True), all_on_a_card):
            with on_cards(model, first) as engine:
                assert engine.generate(PROMPT) == tokens
                assert engine.generate(PROMPT) == tokens
                assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
                graphs = engine.engine.crew.cards[0]._target._lane._graphs  # type: ignore[attr-defined]
                assert graphs.why_not is None
                if first is all_on_a_card:
                    assert engine.engine.gauges.expert_use().on_cards > 0
                    assert [len(pieces) for pieces in graphs._graphs.values()] == [1]


def test_heads_move_and_times_are_told(tiny_model: Callable[..., Path]) -> None:
    """Placements at random one after the other, within answers."""
    model = tiny_model("llama2")
    with small_blocks(4096):
        with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
            tokens = engine.generate(PROMPT, max_tokens=60)
        with on_cards(model, drawn(0, 1)) as engine:
            planner, now = engine.planner, engine.engine
            assert planner is not None
            for turn in range(1, 5):
                again = drawn(turn, 1)(now.blueprint.catalog, now.request)
                planner.script.append((8 * turn, replace(again, placement_id=turn)))
            for _ in range(10):
                assert engine.generate(PROMPT, max_tokens=60) == tokens
                if len(planner.announced) == 5:
                    break
            assert len(planner.announced) == 5
            assert any("copies to gpu:0" in each for each in now.notes)
            number = now.placement.number_of("gpu:0")
            spans = now.gauges.worker_spans(number, 0)
        assert len(spans) > 100
        took = spans[:, 3] - spans[:, 2]
        assert (took >= 0).all()
        assert (took > 0).any()
        assert (spans[1:, 2] >= spans[:-1, 3]).all()
