"""Rotary position embedding: which angle each pair of a head's dimensions turns by per position.

The formulas are those of transformers' `modeling_rope_utils` (5.24), computed in numpy so that a
lane needs no torch to fill its tables. They agree to the last bit or a unit beside it: powers are
taken in float64 and rounded once, everything after that follows torch's order of float32 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Everything the frequencies depend on. Fields that a type does not use keep their default."""

    theta: float
    dim: int  # rotated dimensions of a head: all of them in the families we run
    max_position: int  # the config's max_position_embeddings
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int | None = None  # llama3, yarn: context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    attention_factor: float | None = None  # yarn: overrides the factor derived from `factor`
    truncate: bool = True  # yarn: round the correction range outward to whole dimensions
    factors: tuple[float, ...] | None = None  # [dim / 2], GGUF's rope_freqs: divide the frequencies

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change while a sequence grows, see `inv_freq`."""
        return self.rope_type == "dynamic"


def inv_freq(rope: RopeConfig, seq_len: int) -> tuple[np.ndarray, float]:
    """Angle per position, float32 [dim / 2], and the factor that multiplies cos and sin.

    `seq_len` is the number of positions of the sequence once the forward pass has run (its last
    position + 1). Only `dynamic` looks at it: up to `max_position` the frequencies are the
    unscaled ones, beyond it they are stretched to `seq_len`. That is what transformers'
    `dynamic_rope_update` does for one sequence that only grows: each pass, a prefill chunk or a
    decoded token, turns its *new* queries and keys by the frequencies of its own end, and keys
    cached by earlier passes stay as they were. So with `dynamic` the logits depend on how a prompt
    is cut into chunks.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be positive; got {seq_len}")
    attention_scaling = 1.0
    match rope.rope_type:
        case "default":
            frequencies = _reciprocal(_powers(rope.theta, rope.dim))
        case "linear":
            frequencies = _reciprocal(_powers(rope.theta, rope.dim)) / np.float32(rope.factor)
        case "dynamic":
            theta = _dynamic_theta(rope, seq_len)
            frequencies = _reciprocal(_powers(theta, rope.dim))
        case "llama3":
            frequencies = _llama3(rope)
        case "yarn":
            frequencies, attention_scaling = _yarn(rope)
    if rope.factors is not None:
        frequencies = frequencies / np.asarray(rope.factors, dtype=np.float32)
    return frequencies, attention_scaling


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta ** (0, 2, 4, ... / dim), float32 [dim / 2]."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _reciprocal(values: np.ndarray) -> np.ndarray:
    return np.float32(1.0) / values


def _dynamic_theta(rope: RopeConfig, seq_len: int) -> float:
    exponent = rope.dim / (rope.dim - 2)
    if seq_len <= rope.max_position:
        ratio = rope.factor * rope.max_position / rope.max_position - (rope.factor - 1)
        return rope.theta * ratio**exponent
    # NOTE: past max_position transformers passes the length as a tensor, so from here on it
    # computes in float32, where it used Python's float64 before.
    stretched = np.float32(rope.factor) * np.float32(seq_len) / np.float32(rope.max_position)
    ratio32 = stretched - np.float32(rope.factor - 1)
    power = np.float32(np.float64(ratio32) ** exponent)
    return float(np.float32(rope.theta) * power)


def _llama3(rope: RopeConfig) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    frequencies = _reciprocal(_powers(rope.theta, rope.dim))
    original = rope.original_max_position
    if original is None:
        raise ValueError("original_max_position must be set for rope_type llama3; got None")
    factor = np.float32(rope.factor)
    # torch evaluates `scalar / tensor` as `reciprocal(tensor) * scalar`; so do we.
    wavelengths = _reciprocal(frequencies) * np.float32(2 * math.pi)
    longest = np.float32(original / rope.low_freq_factor)
    shortest = np.float32(original / rope.high_freq_factor)
    slowed = np.where(wavelengths > longest, frequencies / factor, frequencies)
    smooth = _reciprocal(wavelengths) * np.float32(original) - np.float32(rope.low_freq_factor)
    smooth = smooth / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (np.float32(1.0) - smooth) * slowed / factor + smooth * slowed
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return np.where(is_between, blended, slowed)


def _yarn(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp between them."""
    original = rope.original_max_position
    if original is None:
        raise ValueError("original_max_position must be set for rope_type yarn; got None")
    powers = _powers(rope.theta, rope.dim)
    extrapolated = _reciprocal(powers)
    interpolated = _reciprocal(np.float32(rope.factor) * powers)

    low, high = (
        rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step would divide by zero
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    frequencies = interpolated * (np.float32(1.0) - keep) + extrapolated * keep
    return frequencies, _yarn_attention_scaling(rope)


def _yarn_attention_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
