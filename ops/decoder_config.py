"""Reads a model's `config.json` into a `DecoderConfig`, refusing by name what cannot be run.

Defaults are those of transformers 5.24 for each family. transformers itself is not imported: it
takes seconds, and the command line has to answer before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from shadowlane.ops.config_values import (
    read_boolean,
    read_integer,
    read_positive_int,
    read_positive_number,
)
from shadowlane.ops.errors import ModelError
from shadowlane.ops.moe_config import MIXTURES, MoeConfig, read_moe
from shadowlane.ops.rope import RopeConfig
from shadowlane.ops.rope_config import max_context, read_rope

__all__ = ["DType", "DecoderConfig", "MoeConfig", "read_config", "read_rope", "read_token_ids"]

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    family: str  # a key of FAMILIES
    num_layers: int
    hidden_size: int
    intermediate_size: int  # width of the MLP of the layers without experts
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
    dtype: DType  # of the weights, as the config says
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoeConfig | None = None
    # The norms of q and k go over their whole width, before the split into heads.
    full_width_qk_norm: bool = False
    attention_sinks: bool = False  # each head has a logit of its own that takes part in the softmax


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    # Which layers look back a limited way: none, all where sliding_window is set, all where
    # use_sliding_window is set too, or those that layer_types names.
    windows: Literal["never", "all_layers", "all_layers_if_used", "some_layers"]
    qkv_bias: bool = False  # q, k and v have biases unless qkv_bias says no
    has_attention_bias: bool = False  # attention_bias adds biases to q, k, v and o
    default_attention_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: bool = False
    full_width_qk_norm: bool = False
    attention_sinks: bool = False
    default_head_dim: int | None = None  # None: hidden_size // num_attention_heads
    needs_kv_heads: bool = True  # num_key_value_heads must be stated; its default fits one size
    default_window: int | None = 4096
    default_theta: float = 10_000.0
    quantization: str | None = None  # the one quant_method that quantization_config may name


FAMILIES: dict[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM",
        "never",
        has_attention_bias=True,
        has_mlp_bias=True,
        needs_kv_heads=False,
    ),
    "mistral": _Family("MistralForCausalLM", "all_layers"),
    "qwen2": _Family("Qwen2ForCausalLM", "some_layers", qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        "some_layers",
        has_attention_bias=True,
        qk_norm=True,
        default_head_dim=128,
    ),
    "mixtral": _Family(
        "MixtralForCausalLM", "all_layers", default_window=None, default_theta=1_000_000.0
    ),
    "qwen2_moe": _Family("Qwen2MoeForCausalLM", "some_layers", qkv_bias=True),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", "all_layers_if_used", has_attention_bias=True, qk_norm=True
    ),
    "olmoe": _Family(
        "OlmoeForCausalLM",
        "never",
        has_attention_bias=True,
        qk_norm=True,
        full_width_qk_norm=True,
        needs_kv_heads=False,
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        "some_layers",
        has_attention_bias=True,
        default_attention_bias=True,
        attention_sinks=True,
        default_head_dim=64,
        default_window=128,
        default_theta=150_000.0,
        quantization="mxfp4",
    ),
}
# What GPT-OSS scales its rotary frequencies by where its config does not say.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
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
    hidden_size = read_positive_int(config, "hidden_size")
    num_heads = read_positive_int(config, "num_attention_heads")
    num_kv_heads = _read_kv_heads(config, traits, num_heads)
    head_dim = _read_head_dim(config, traits, hidden_size, num_heads)
    num_layers = read_positive_int(config, "num_hidden_layers")
    # Where q, k and v have biases anyway, configs may or may not say so; o has none.
    is_modelled = traits.has_attention_bias or traits.qkv_bias
    attention_bias = _read_bias(
        config, "attention_bias", family, is_modelled, traits.default_attention_bias
    )
    qkv_bias = traits.qkv_bias or attention_bias
    if family == "qwen2_moe":
        qkv_bias = read_boolean(config, "qkv_bias", True)
    mlp_bias = _read_bias(config, "mlp_bias", family, traits.has_mlp_bias)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act must be silu; got {activation!r}")
    if family == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _GPT_OSS_ROPE}
    rope = read_rope(config, head_dim, rope_factors, traits.default_theta)
    return DecoderConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=read_positive_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=read_positive_int(config, "vocab_size"),
        norm_eps=read_positive_number(config, "rms_norm_eps"),
        rope=rope,
        tied_embeddings=read_boolean(config, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=attention_bias and traits.has_attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=traits.qk_norm,
        windows=_read_windows(config, family, traits, num_layers),
        max_context=max_context(rope),
        dtype=_read_dtype(config, default_dtype),
        eos_token_ids=read_token_ids(config, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(config, "bos_token_id")), None),
        moe=read_moe(config, family, num_layers) if family in MIXTURES else None,
        full_width_qk_norm=traits.full_width_qk_norm,
        attention_sinks=traits.attention_sinks,
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
        if method is None or method != traits.quantization:
            allowed = f"absent or {traits.quantization}" if traits.quantization else "absent"
            raise ModelError(
                f"quantization_config must be {allowed} (packed weights come as GGUF); "
                f"got {method!r}"
            )
    return str(family), traits


def _read_kv_heads(config: Mapping[str, Any], traits: _Family, num_heads: int) -> int:
    key = "num_key_value_heads"
    if key not in config and traits.needs_kv_heads:
        raise ModelError(f"{key} is missing from the config")
    num_kv_heads = num_heads if config.get(key) is None else read_positive_int(config, key)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads must be a multiple of {key} ({num_kv_heads}); got {num_heads}"
        )
    return num_kv_heads


def _read_head_dim(
    config: Mapping[str, Any], traits: _Family, hidden_size: int, num_heads: int
) -> int:
    if config.get("head_dim") is not None:
        head_dim = read_positive_int(config, "head_dim")
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


def _read_bias(
    config: Mapping[str, Any], key: str, family: str, is_modelled: bool, default: bool = False
) -> bool:
    value = read_boolean(config, key, default)
    if value and not is_modelled:
        raise ModelError(f"{key} must be false for {family}; got true")
    return value


def _read_windows(
    config: Mapping[str, Any], family: str, traits: _Family, num_layers: int
) -> tuple[int | None, ...]:
    layer_types = _read_layer_types(config, num_layers)
    if traits.windows == "some_layers":
        return _some_windows(config, family, traits, layer_types, num_layers)
    if traits.windows == "never":
        if config.get("sliding_window") is not None:
            raise ModelError(
                f"sliding_window must be absent for {family}; got {config['sliding_window']}"
            )
        window = None
    elif traits.windows == "all_layers_if_used" and not read_boolean(
        config, "use_sliding_window", False
    ):
        window = None
    else:
        window = _window(config, traits)
    kind = "full_attention" if window is None else "sliding_attention"
    if layer_types is not None and any(layer_type != kind for layer_type in layer_types):
        raise ModelError(f"layer_types must all be {kind} for this {family}; got {layer_types}")
    return (window,) * num_layers


def _some_windows(
    config: Mapping[str, Any],
    family: str,
    traits: _Family,
    layer_types: Sequence[str] | None,
    num_layers: int,
) -> tuple[int | None, ...]:
    """Where `layer_types` does not say which layers slide, each family has a rule of its own.

    Qwen2 and Qwen3: from `max_window_layers` on; Qwen2-MoE: every other one *before* it, as
    transformers has it; GPT-OSS: every other one.
    """
    is_used = family == "gpt_oss" or read_boolean(config, "use_sliding_window", False)
    window = _window(config, traits) if is_used else None
    if layer_types is None:
        limit = num_layers
        if family != "gpt_oss":
            limit = read_integer(config, "max_window_layers", 28)
        if family in ("qwen2", "qwen3"):
            slides = [layer >= limit for layer in range(num_layers)]
        else:
            slides = [layer % 2 == 0 and layer < limit for layer in range(num_layers)]
    else:
        slides = [kind == "sliding_attention" for kind in layer_types]
    if window is None and any(slides) and family == "gpt_oss":
        raise ModelError("sliding_window must be set for gpt_oss; got None")
    if window is None and layer_types is not None and any(slides):
        raise ModelError(
            "use_sliding_window and sliding_window must be set where layer_types has "
            f"sliding_attention; got {config.get('use_sliding_window')} and "
            f"{config.get('sliding_window')}"
        )
    return tuple(window if slide else None for slide in slides)


def _window(config: Mapping[str, Any], traits: _Family) -> int | None:
    if config.get("sliding_window", traits.default_window) is None:
        return None
    return read_positive_int(config, "sliding_window", traits.default_window)


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
