"""Reads a model's `config.json` into a `DecoderConfig`, refusing by name what cannot be run.

Defaults are those of transformers 5.24 for each family. transformers itself is not imported: it
takes seconds, and the command line has to answer before that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from shadowlane.ops.errors import ModelError
from shadowlane.ops.rope import ROPE_TYPES, RopeConfig, RopeType

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    family: str  # "llama", "mistral", "qwen2", "qwen3"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # Per layer: how many positions a query sees, its own included, or None for all before it.
    windows: tuple[int | None, ...]
    max_context: int  # positions the model is made for, scaling included
    dtype: DType  # what the config says the weights are
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    qkv_bias: bool  # biases that are always there, whatever the config says
    has_attention_bias: bool  # attention_bias adds biases to q, k, v and o
    has_mlp_bias: bool
    qk_norm: bool
    default_head_dim: int | None  # None: hidden_size // num_attention_heads
    needs_kv_heads: bool  # num_key_value_heads must be stated; its default fits one size only
    windows: Literal["never", "all_layers", "some_layers"]


FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", False, True, True, False, None, False, "never"),
    "mistral": _Family("MistralForCausalLM", False, False, False, False, None, True, "all_layers"),
    "qwen2": _Family("Qwen2ForCausalLM", True, False, False, False, None, True, "some_layers"),
    "qwen3": _Family("Qwen3ForCausalLM", False, True, False, True, 128, True, "some_layers"),
}


def read_config(
    config: Mapping[str, Any],
    *,
    rope_factors: Sequence[float] | None = None,
    default_dtype: DType = "float32",
) -> DecoderConfig:
    """The decoder that `config` (the contents of a config.json) describes.

    `rope_factors` [head_dim / 2] divide the rotary frequencies (GGUF's `rope_freqs`).
    `default_dtype` stands in where the config names no data type.

    Raises ModelError naming the key, the rule and the value.
    """
    family, traits = _read_family(config)
    hidden_size = _positive_int(config, "hidden_size")
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _read_kv_heads(config, traits, num_heads)
    head_dim = _read_head_dim(config, traits, hidden_size, num_heads)
    num_layers = _positive_int(config, "num_hidden_layers")
    # Where q, k and v have biases anyway, configs may or may not say so; o has none.
    is_modelled = traits.has_attention_bias or traits.qkv_bias
    attention_bias = _read_bias(config, "attention_bias", family, is_modelled)
    mlp_bias = _read_bias(config, "mlp_bias", family, traits.has_mlp_bias)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act must be silu; got {activation!r}")
    rope = read_rope(config, head_dim, rope_factors)
    return DecoderConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive_int(config, "vocab_size"),
        norm_eps=_positive_number(config, "rms_norm_eps"),
        rope=rope,
        tied_embeddings=_boolean(config, "tie_word_embeddings", False),
        qkv_bias=traits.qkv_bias or attention_bias,
        o_bias=attention_bias and traits.has_attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=traits.qk_norm,
        windows=_read_windows(config, family, traits, num_layers),
        max_context=_max_context(rope),
        dtype=_read_dtype(config, default_dtype),
        eos_token_ids=read_token_ids(config, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(config, "bos_token_id")), None),
    )


def _read_family(config: Mapping[str, Any]) -> tuple[str, _Family]:
    family = config.get("model_type")
    traits = FAMILIES.get(family) if isinstance(family, str) else None
    if traits is None:
        raise ModelError(f"model_type must be one of {', '.join(FAMILIES)}; got {family!r}")
    architectures = config.get("architectures") or [traits.architecture]
    if [str(name).lower() for name in architectures] != [traits.architecture.lower()]:
        raise ModelError(f"architectures must be [{traits.architecture}]; got {architectures}")
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ModelError(
            f"quantization_config must be absent (packed weights come as GGUF); got {method!r}"
        )
    return str(family), traits


def _read_kv_heads(config: Mapping[str, Any], traits: _Family, num_heads: int) -> int:
    key = "num_key_value_heads"
    if key not in config and traits.needs_kv_heads:
        raise ModelError(f"{key} is missing from the config")
    num_kv_heads = num_heads if config.get(key) is None else _positive_int(config, key)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads must be a multiple of {key} ({num_kv_heads}); got {num_heads}"
        )
    return num_kv_heads


def _read_head_dim(
    config: Mapping[str, Any], traits: _Family, hidden_size: int, num_heads: int
) -> int:
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim")
    elif traits.default_head_dim is not None:
        head_dim = traits.default_head_dim
    elif hidden_size % num_heads:
        raise ModelError(
            f"hidden_size must be a multiple of num_attention_heads ({num_heads}) where head_dim "
            f"is not given; got {hidden_size}"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"head_dim must be even; got {head_dim}")
    return head_dim


def _read_bias(config: Mapping[str, Any], key: str, family: str, is_modelled: bool) -> bool:
    value = _boolean(config, key, False)
    if value and not is_modelled:
        raise ModelError(f"{key} must be false for {family}; got true")
    return value


def _read_windows(
    config: Mapping[str, Any], family: str, traits: _Family, num_layers: int
) -> tuple[int | None, ...]:
    layer_types = _read_layer_types(config, num_layers)
    if traits.windows == "some_layers":
        return _some_windows(config, layer_types, num_layers)
    if traits.windows == "never":
        if config.get("sliding_window") is not None:
            raise ModelError(
                f"sliding_window must be absent for {family}; got {config['sliding_window']}"
            )
        window = None
    else:
        window = _window(config)
    kind = "full_attention" if window is None else "sliding_attention"
    if layer_types is not None and any(layer_type != kind for layer_type in layer_types):
        raise ModelError(f"layer_types must all be {kind} for this {family}; got {layer_types}")
    return (window,) * num_layers


def _some_windows(
    config: Mapping[str, Any], layer_types: Sequence[str] | None, num_layers: int
) -> tuple[int | None, ...]:
    """Qwen: layers from `max_window_layers` on slide, unless `layer_types` says which do."""
    window = _window(config) if _boolean(config, "use_sliding_window", False) else None
    if layer_types is None:
        first = _integer(config, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise ModelError(
            "use_sliding_window and sliding_window must be set where layer_types has "
            f"sliding_attention; got {config.get('use_sliding_window')} and "
            f"{config.get('sliding_window')}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _window(config: Mapping[str, Any]) -> int | None:
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return _positive_int(config, "sliding_window", 4096)


def _read_layer_types(config: Mapping[str, Any], num_layers: int) -> Sequence[str] | None:
    layer_types = config.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, Sequence) or len(layer_types) != num_layers:
        raise ModelError(f"layer_types must have {num_layers} entries; got {layer_types!r}")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer_types must be full_attention or sliding_attention; got {layer_type!r}"
            )
    return layer_types


def read_rope(
    config: Mapping[str, Any], head_dim: int, factors: Sequence[float] | None = None
) -> RopeConfig:
    """The rotary settings, from `rope_parameters` or the older `rope_theta` + `rope_scaling`."""
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
    max_position = _positive_int(config, "max_position_embeddings")
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = 10_000.0
    if rope_type == "dynamic" and head_dim <= 2:
        raise ModelError(f"head_dim must be above 2 for rope_type dynamic; got {head_dim}")
    rope = RopeConfig(
        theta=_positive_number(merged, "rope_theta"),
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
        return {"factor": _positive_number(rope, "factor")}
    original = max_position
    for source in (rope, config):  # transformers: the config's own key wins
        if source.get("original_max_position_embeddings") is not None:
            original = _positive_int(source, "original_max_position_embeddings")
    if rope_type == "llama3":
        low = _positive_number(rope, "low_freq_factor")
        high = _positive_number(rope, "high_freq_factor")
        if high <= low:
            raise ModelError(f"high_freq_factor must be above low_freq_factor ({low}); got {high}")
        return {
            "factor": _positive_number(rope, "factor"),
            "original_max_position": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    has_factor = "factor" not in rope or rope["factor"] is not None
    factor = _positive_number(rope, "factor") if has_factor else max_position / original
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": _optional_number(rope, "beta_fast") or 32.0,
        "beta_slow": _optional_number(rope, "beta_slow") or 1.0,
        "mscale": _optional_number(rope, "mscale"),
        "mscale_all_dim": _optional_number(rope, "mscale_all_dim"),
        "attention_factor": _optional_number(rope, "attention_factor"),
        "truncate": _boolean(rope, "truncate", True),
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


def _max_context(rope: RopeConfig) -> int:
    """Positions the model is made for. llama3 configs state the scaled length, others do not."""
    if rope.rope_type in ("linear", "dynamic"):
        return max(rope.max_position, int(rope.max_position * rope.factor))
    if rope.rope_type == "yarn" and rope.original_max_position is not None:
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position


def _read_dtype(config: Mapping[str, Any], default: DType) -> DType:
    value = config.get("dtype") or config.get("torch_dtype") or default
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"dtype must be float32, bfloat16 or float16; got {value!r}")
    return cast(DType, name)


def read_token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as configs write them, as a tuple."""
    value = config.get(key)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{key} must be a token id or a list of them; got {value!r}")
    return ids


_REQUIRED = object()


def _read(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if value is _REQUIRED:
        raise ModelError(f"{key} is missing from the config")
    return value


def _integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    value = _read(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} must be an integer; got {value!r}")
    return value


def _positive_int(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    value = _integer(config, key, default)
    if value <= 0:
        raise ModelError(f"{key} must be positive; got {value}")
    return value


def _positive_number(config: Mapping[str, Any], key: str) -> float:
    value = _read(config, key, _REQUIRED)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"{key} must be a positive number; got {value!r}")
    return float(value)


def _optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _positive_number(config, key)


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false; got {value!r}")
    return value
