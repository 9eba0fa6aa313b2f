"""Mixtures for tests of cards, and what an engine makes of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cards import OPTIONS
from inprocess import ONE_THREAD, InProcess, cut
from test_experts_run import MANY
from tiny import tiny_tokens

from shadowlane.actors.card_activations import Activations
from shadowlane.actors.card_lane import CardLane
from shadowlane.ops.card.buffers import StepRows
from shadowlane.planner.search import SPARE_EXPERTS

PROMPT = tiny_tokens(41)
TOLERANCE = 3e-4  # float32, in another order of addition
PACKED_TOLERANCE = 0.1  # of packed weights; processors round inputs to bytes
FAMILIES = ["mixtral", MANY, "qwen2-moe", "gpt-oss", "published"]


def lane_of(engine: InProcess, card: int = 0) -> CardLane:
    lane: CardLane = engine.engine.crew.cards[card]._target._lane  # type: ignore[attr-defined]
    return lane


def few_slots(model: Path) -> int:
    """Of experts in RAM: as few as a mixture can run with."""
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    return experts.top_k + SPARE_EXPERTS


def choices_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many rows the host has to know what a router chose, from now on, in turn."""
    asked: list[int] = []
    choice = Activations.choice

    def noted(self: Activations, layer: int, rows: StepRows) -> np.ndarray:
        asked.append(rows.num_rows)
        return choice(self, layer, rows)

    monkeypatch.setattr(Activations, "choice", noted)
    return asked


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of a family, and what processors alone make of it."""

    path: Path
    is_packed: bool
    tokens: list[int]
    logits: np.ndarray

    def agrees(self, engine: InProcess) -> bool:
        """Whether an engine says the same, and again; of packed weights nearly."""
        found = [engine.generate(PROMPT, len(self.tokens)) for _ in range(2)]
        off = np.abs(engine.logits(PROMPT) - self.logits).max()
        if self.is_packed:
            return bool(off <= PACKED_TOLERANCE)
        return found == [self.tokens] * 2 and bool(off <= TOLERANCE)
