"""The rotary settings of a model's configuration, refusing by name what cannot be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shadowlane.ops.config_values import (
    read_boolean,
    read_optional_number,
    read_positive_int,
    read_positive_number,
)
from shadowlane.ops.errors import ModelError
from shadowlane.ops.rope import ROPE_TYPES, RopeConfig, RopeType


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    factors: Sequence[float] | None = None,
    default_theta: float = 10_000.0,
) -> RopeConfig:
    """The rotary settings, from `rope_parameters` or the older `rope_theta` + `rope_scaling`.

    `factors` [head_dim / 2] divide the frequencies; `default_theta` stands in where none is given.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope_parameters must be an object; got {given!r}")
    nested = [key for key in ("full_attention", "sliding_attention") if key in given]
    if nested:
        raise ModelError(
            f"rope_parameters must be the same for all layers; got {', '.join(nested)}"
        )
    # What stands in rope_parameters wins over the same key beside it.
    merged: dict[str, Any] = {
        key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config
    }
    merged.update(given)
    rope_type = merged.get("rope_type") or merged.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"rope_type must be one of {', '.join(ROPE_TYPES)}; got {rope_type!r}")
    partial = merged.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor must be 1; got {partial}")
    max_position = read_positive_int(config, "max_position_embeddings")
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = default_theta
    if rope_type == "dynamic" and head_dim <= 2:
        raise ModelError(f"head_dim must be above 2 for rope_type dynamic; got {head_dim}")
    rope = RopeConfig(
        theta=read_positive_number(merged, "rope_theta"),
        dim=head_dim,
        max_position=max_position,
        rope_type=cast(RopeType, rope_type),
        factors=_read_factors(factors, head_dim),
        **_scaling(config, merged, str(rope_type), max_position),
    )
    if rope_type == "yarn" and rope.theta == 1.0:
        raise ModelError("rope_theta must not be 1 for rope_type yarn; got 1")
    return rope


def _scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any], rope_type: str, max_position: int
) -> dict[str, Any]:
    if rope_type == "default":
        return {}
    if rope_type in ("linear", "dynamic"):
        return {"factor": read_positive_number(rope, "factor")}
    original = max_position
    for source in (rope, config):  # transformers: the config's own key wins
        if source.get("original_max_position_embeddings") is not None:
            original = read_positive_int(source, "original_max_position_embeddings")
    if rope_type == "llama3":
        low = read_positive_number(rope, "low_freq_factor")
        high = read_positive_number(rope, "high_freq_factor")
        if high <= low:
            raise ModelError(f"high_freq_factor must be above low_freq_factor ({low}); got {high}")
        return {
            "factor": read_positive_number(rope, "factor"),
            "original_max_position": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    has_factor = "factor" not in rope or rope["factor"] is not None
    factor = read_positive_number(rope, "factor") if has_factor else max_position / original
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": read_optional_number(rope, "beta_fast") or 32.0,
        "beta_slow": read_optional_number(rope, "beta_slow") or 1.0,
        "mscale": read_optional_number(rope, "mscale"),
        "mscale_all_dim": read_optional_number(rope, "mscale_all_dim"),
        "attention_factor": read_optional_number(rope, "attention_factor"),
        "truncate": read_boolean(rope, "truncate", True),
    }


def _read_factors(factors: Sequence[float] | None, head_dim: int) -> tuple[float, ...] | None:
    if factors is None:
        return None
    values = tuple(float(factor) for factor in factors)
    if len(values) != head_dim // 2:
        raise ModelError(f"rope_freqs must have {head_dim // 2} values; got {len(values)}")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"rope_freqs must be positive; got {min(values)}")
    return values


def max_context(rope: RopeConfig) -> int:
    """Positions the model is made for. llama3 configs state the scaled length, others do not."""
    if rope.rope_type in ("linear", "dynamic"):
        return max(rope.max_position, int(rope.max_position * rope.factor))
    if rope.rope_type == "yarn" and rope.original_max_position is not None:
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position
