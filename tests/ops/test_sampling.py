"""Sampling against transformers' logits processors, on random logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shadowlane.ops.sampling import Sampler, SamplingParams

VOCAB = 4000


def random_logits(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def reference_scores(params: SamplingParams, ids: list[int], logits: np.ndarray) -> np.ndarray:
    """transformers' processors in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if params.repeat_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repeat_penalty))
    if params.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0].numpy()


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 9999},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 0.2, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repeat_penalty": 1.3},
    {"temperature": 1.0, "repeat_penalty": 0.8},
    {"temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distribution_equals_transformers(options):
    params = SamplingParams(**options)
    ids = np.random.default_rng(1).integers(0, VOCAB, size=300).tolist()
    for seed in range(5):
        logits = random_logits(seed)
        scores = reference_scores(params, ids, logits)
        token_ids, probabilities = Sampler(params, ids).distribution(logits)
        np.testing.assert_array_equal(token_ids, np.flatnonzero(np.isfinite(scores)))
        reference = torch.from_numpy(scores).softmax(-1).numpy()[token_ids]
        np.testing.assert_allclose(probabilities, reference, rtol=3e-6, atol=1e-9)


def test_the_penalty_counts_what_was_drawn():
    params = SamplingParams(repeat_penalty=1.4)
    sampler, ids = Sampler(params, [3, 5, 5]), [3, 5, 5]
    logits = random_logits(0)
    drawn = []
    for _ in range(6):  # the same logits again: each choice pushes its own token down
        expected = int(reference_scores(params, ids, logits).argmax())
        drawn.append(sampler.sample(logits))
        assert drawn[-1] == expected
        ids.append(expected)
    assert len(set(drawn)) > 1
    np.testing.assert_array_equal(logits, random_logits(0))


def test_ids_beyond_the_head_are_no_matter():
    logits = random_logits(0, vocab=100)
    sampler = Sampler(SamplingParams(repeat_penalty=1.2), [7, 100, 4711])
    assert sampler.sample(logits) == int(
        reference_scores(SamplingParams(repeat_penalty=1.2), [7], logits).argmax()
    )


def test_greedy_takes_the_first_of_equal_ones():
    logits = random_logits(2)
    logits[[900, 17, 3999]] = 50.0
    sampler = Sampler(SamplingParams(top_k=5, top_p=0.5), [])
    assert [sampler.sample(logits) for _ in range(3)] == [17, 17, 17]
    assert sampler.distribution(logits)[0].tolist() == [17]


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=11), [])
    counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=4)
    # Four standard deviations of a binomial of 4000.
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.032)


def test_a_seed_reproduces():
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.sample(random_logits(step)) for step in range(20)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(temperature, value):
    logits = random_logits(0)
    logits[1234] = value
    sampler = Sampler(SamplingParams(temperature=temperature), [])
    with pytest.raises(FloatingPointError, match=rf"must be finite; got {value} for token 1234"):
        sampler.sample(logits)


def test_masked_logits_are_never_drawn():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[4, 9]] = 1.0
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=10, top_p=0.99, min_p=0.1, seed=0), [])
    assert {sampler.sample(logits) for _ in range(50)} == {4, 9}


def test_stop_is_normalised():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must not be negative; got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number; got nan"),
        ({"temperature": "hot"}, "temperature must be a finite number; got 'hot'"),
        ({"top_k": -1}, "top_k must not be negative; got -1"),
        ({"top_k": 1.5}, "top_k must be an integer; got 1.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1; got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1; got 1.1"),
        ({"min_p": 2}, "min_p must be between 0 and 1; got 2"),
        ({"repeat_penalty": 0}, "repeat_penalty must be positive; got 0"),
        ({"seed": -3}, "seed must not be negative; got -3"),
        ({"seed": True}, "seed must be an integer; got True"),
        ({"max_tokens": 0}, "max_tokens must be positive; got 0"),
        ({"stop": ["a", ""]}, "stop must not hold an empty text"),
        ({"stop": [1]}, "stop must be a text or a list of texts"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false; got 1"),
    ],
)
def test_refuses_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)
