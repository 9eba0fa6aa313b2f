"""Rotary frequencies against transformers' own functions, in units of the last place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shadowlane.ops.decoder_config import read_rope
from shadowlane.ops.rope import RopeConfig, inv_freq

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn"}
CASES = [
    (64, 10_000.0, 4096, {"rope_type": "default"}),
    (128, 1_000_000.0, 32768, {"rope_type": "default"}),
    (96, 12_345.678, 2048, {"rope_type": "default"}),
    (16, 10_000.0, 64, {"rope_type": "linear", "factor": 3.0}),
    (128, 500_000.0, 4096, {"rope_type": "linear", "factor": 2.5}),
    (16, 10_000.0, 64, {"rope_type": "dynamic", "factor": 2.0}),
    (4, 10_000.0, 32, {"rope_type": "dynamic", "factor": 1.7}),
    (128, 10_000.0, 2048, {"rope_type": "dynamic", "factor": 4.0}),
    (128, 500_000.0, 131072, LLAMA3),
    (64, 500_000.0, 131072, {**LLAMA3, "factor": 32.0}),
    (80, 10_000.0, 2048, {**LLAMA3, "factor": 3.0, "original_max_position_embeddings": 512}),
    (128, 1_000_000.0, 32768, {**YARN, "factor": 4.0}),
    (64, 10_000.0, 8192, {**YARN, "factor": 2.0, "attention_factor": 0.7}),
    (16, 10_000.0, 128, {**YARN, "factor": 4.0, "beta_fast": 16, "beta_slow": 2}),
    (64, 10_000.0, 8192, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
    (64, 10_000.0, 8192, {**YARN, "factor": 8.0, "truncate": False}),
    (64, 10_000.0, 8192, {**YARN, "factor": None, "original_max_position_embeddings": 1024}),
]  # fmt: skip


def assert_close_in_units(ours: np.ndarray, reference: np.ndarray, most: int) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == reference.shape
    units = ours.view(np.int32).astype(np.int64) - reference.view(np.int32)
    assert np.abs(units).max() <= most, f"{np.abs(units).max()} units apart"


def both(dim: int, theta: float, max_position: int, scaling: dict, newer: bool):
    """Our configuration, read from config.json keys, and transformers' rotary module."""
    values = {"max_position_embeddings": max_position}
    parameters = dict(scaling)
    if newer:
        values["rope_parameters"] = {**parameters, "rope_theta": theta}
    else:
        parameters["type"] = parameters.pop("rope_type")
        values |= {"rope_theta": theta, "rope_scaling": parameters}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=dim * 2,
            num_attention_heads=2,
            max_position_embeddings=max_position,
            rope_parameters={**scaling, "rope_theta": theta},
        )
    )
    return read_rope(values, dim), reference


@pytest.mark.parametrize("newer", [True, False], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("dim", "theta", "max_position", "scaling"), CASES)
def test_equals_transformers(dim, theta, max_position, scaling, newer):
    rope, reference = both(dim, theta, max_position, scaling, newer)
    frequencies, attention_scaling = inv_freq(rope, 1)
    assert_close_in_units(frequencies, reference.inv_freq.numpy(), most=1)
    assert attention_scaling == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(("dim", "theta", "max_position", "scaling"), CASES[5:8])
def test_dynamic_follows_a_growing_sequence(dim, theta, max_position, scaling):
    rope, reference = both(dim, theta, max_position, scaling, True)
    assert rope.depends_on_length
    unscaled = inv_freq(rope, 1)[0]
    rows = torch.zeros(1)
    for seq_len in (1, max_position // 2, max_position, max_position + 1, 2 * max_position, 9999):
        reference(rows, torch.tensor([[seq_len - 1]]))
        frequencies, attention_scaling = inv_freq(rope, seq_len)
        # torch rounds this power less exactly, and the reciprocal can double a unit.
        assert_close_in_units(frequencies, reference.inv_freq.numpy(), most=2)
        assert attention_scaling == 1.0
        assert np.array_equal(frequencies, unscaled) == (seq_len <= max_position)


def test_only_dynamic_depends_on_length():
    for dim, theta, max_position, scaling in CASES:
        rope, _ = both(dim, theta, max_position, scaling, True)
        same = np.array_equal(inv_freq(rope, 1)[0], inv_freq(rope, 10 * max_position)[0])
        assert same != rope.depends_on_length


def test_factors_divide_the_frequencies():
    factors = (1.0, 2.0, 4.0, 8.0)
    plain = RopeConfig(theta=10_000.0, dim=8, max_position=64)
    scaled = RopeConfig(theta=10_000.0, dim=8, max_position=64, factors=factors)
    expected = inv_freq(plain, 1)[0] / np.array(factors, dtype=np.float32)
    np.testing.assert_array_equal(inv_freq(scaled, 1)[0], expected)


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="seq_len must be positive; got 0"):
        inv_freq(RopeConfig(theta=10_000.0, dim=8, max_position=64), 0)
