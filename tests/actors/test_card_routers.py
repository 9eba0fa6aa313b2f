"""Routers on CUDA cards over a recorded driver: whoever chooses, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cards import OPTIONS, drawn, on_cards
from fake_card import fake_cards
from inprocess import ONE_THREAD, InProcess, running
from mixture_files import model_of_family
from test_card_mixtures import FAMILIES, PACKED_TOLERANCE, PROMPT, TOLERANCE, few_slots
from test_experts_run import MANY

from shadowlane.planner.placement import Placement

pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


def choosers(placement: Placement) -> list[str]:
    """By layer with experts, the lane that computes its router."""
    return [
        share.lane
        for name, shares in placement.shares.items()
        if name.endswith(".router")
        for share in shares
    ]


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_router_on_a_card_gives_the_same_tokens(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    family: str,
    cards: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside experts that are there, that come, and that are read; whoever adds them up."""
    model = model_of_family(tiny_model, tmp_path, family)
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        tokens, logits = engine.generate(PROMPT, 8), engine.logits(PROMPT)
    tolerance = PACKED_TOLERANCE if family == "published" else TOLERANCE
    seen: set[str] = set()
    few = few_slots(model)
    for seed, slots, brings in ((0, None, False), (1, few, False), (2, None, True)):
        first = drawn(seed, cards, slots, brings=brings, routes=True)
        with fake_cards(monkeypatch, cards), on_cards(model, first, cards) as engine:
            seen |= set(choosers(engine.engine.placement))
            for _ in range(2):
                assert engine.generate(PROMPT, 8) == tokens or family == "published"
            assert np.abs(engine.logits(PROMPT) - logits).max() <= tolerance
    assert any(each.startswith("gpu:") for each in seen)
