"""All groups of every family through the operators of a card: transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from card_model import CardRun, load_model
from tiny import FAMILIES, MIXTURES, reference_logits, tiny_tokens

CASES = {**FAMILIES, **MIXTURES}
FLOAT32 = [name for name, options in CASES.items() if "dtype" not in options]
SHORT = [name for name, options in CASES.items() if "dtype" in options]
TOLERANCE = 1e-4
# of logits that are about 4 at most: weights are the same, activations round before each product
TOLERANCE_OF = {"bfloat16": 0.2, "float16": 0.03}
CHUNKS = [21, 1, 1, 9, 1, 1, 1, 1]


def logits(run: CardRun, tokens: list[int], subchunk_rows: int = 0) -> np.ndarray:
    """A chunk, single tokens as decode rows, and so on."""
    rows, start = [], 0
    for length in CHUNKS:
        part = tokens[start : start + length]
        if length == 1:
            rows.append(run.step(decode=[(0, part[0])]))
        else:
            rows.append(run.step(chunk=part, subchunk_rows=subchunk_rows))
        start += length
    return np.concatenate(rows)


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    worst = np.abs(ours - theirs).max(axis=1)
    assert worst.max() <= tolerance, f"row {worst.argmax()} is off by {worst.max()}"


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FLOAT32)
def test_prefill_and_decode_equal_those_of_transformers(
    tiny_model: Callable[..., Path], family: str, cards: int
) -> None:
    """One card has whole groups; two have half of the units, KV heads and experts each."""
    path = tiny_model(family)
    tokens = tiny_tokens(sum(CHUNKS))
    run = CardRun(load_model(path), "float32", cards)
    assert_close(logits(run, tokens), reference_logits(path, tokens, CHUNKS))
