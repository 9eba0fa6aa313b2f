"""Choosing on a device: the tokens that the processor's sampler chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowlane.ops.card.sampling import CardSampler
from shadowlane.ops.sampling import Sampler, SamplingParams

VOCAB = 500


def rows(count: int) -> np.ndarray:
    return 3 * np.random.default_rng(2).standard_normal((count, VOCAB)).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeat_penalty": 1.4},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.2},
        {"temperature": 2.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_the_tokens_of_a_seed_are_the_same(options: dict) -> None:
    params = SamplingParams(seed=5, **options)
    prompt = [3, 4, VOCAB + 20]
    theirs, ours = Sampler(params, prompt), CardSampler(params, prompt, VOCAB, "cpu")
    found = []
    for logits in rows(200):
        found.append(theirs.sample(logits))
        assert ours.sample(torch.from_numpy(logits)) == found[-1]
    assert len(set(found)) > 50


def test_of_equal_logits_the_first_is_taken() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 7, 300]] = 2.0
    assert CardSampler(SamplingParams(), [], VOCAB, "cpu").sample(logits) == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_refused(value: float, temperature: float) -> None:
    logits = torch.zeros(VOCAB)
    logits[9] = value
    sampler = CardSampler(SamplingParams(temperature=temperature, seed=1), [], VOCAB, "cpu")
    with pytest.raises(FloatingPointError, match="logits must be finite"):
        sampler.sample(logits)
