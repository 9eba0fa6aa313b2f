"""Reads what a mixture's `config.json` says about its experts and its router.

Five families share one description. Settings that only other families have (groups of experts,
scores by a sigmoid, scaled sums) are refused by name, since leaving them out would route wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shadowlane.ops.config_values import (
    read_boolean,
    read_integer,
    read_positive_int,
    read_positive_number,
)
from shadowlane.ops.errors import ModelError

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")

# Keys of other families' routers, with the values that change nothing.
_NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0),
    "n_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
    "moe_layer_freq": (None, 1),
    "clip_qkv": (None,),
}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a model and how a router chooses and weighs them."""

    num_experts: int
    top_k: int  # experts that one token goes through in each layer
    inner: int  # width of one expert
    sparse_layers: tuple[int, ...]  # the layers that have experts, rising
    # The weights are a softmax over all logits, of the chosen ones; True: divided by their sum.
    norm_topk: bool
    softmax_chosen: bool  # True: a softmax over the chosen logits alone, which needs no division
    router_bias: bool
    shared_inner: int  # width of the expert every token goes through; 0: there is none
    has_shared_gate: bool  # the shared expert's output is scaled by a sigmoid of its own
    expert_bias: bool = False
    # Above 0: the clamped SwiGLU, (up + 1) * gate * sigmoid(alpha * gate), with gate clamped from
    # above and up on both sides to the limit.
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0


def read_moe(config: Mapping[str, Any], family: str, num_layers: int) -> MoeConfig | None:
    """The experts of a mixture; None where no layer has any. Raises ModelError."""
    for key, neutral in _NEUTRAL_KEYS.items():
        if config.get(key) not in neutral:
            raise ModelError(
                f"{key} must be absent or {neutral[-1]} for {family}; got {config[key]!r}"
            )
    layers = _sparse_layers(config, family, num_layers)
    if not layers:
        return None
    num_experts = _num_experts(config)
    top_k = read_positive_int(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"num_experts_per_tok must be at most the number of experts ({num_experts}); "
            f"got {top_k}"
        )
    has_shared = family == "qwen2_moe"
    is_gpt_oss = family == "gpt_oss"
    key = "moe_intermediate_size" if family in ("qwen2_moe", "qwen3_moe") else "intermediate_size"
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        inner=read_positive_int(config, key),
        sparse_layers=layers,
        norm_topk=_norm_topk(config, family),
        softmax_chosen=is_gpt_oss,
        router_bias=is_gpt_oss,
        shared_inner=_shared_inner(config, family, has_shared),
        has_shared_gate=has_shared,
        expert_bias=is_gpt_oss,
        swiglu_limit=_number(config, "swiglu_limit", 7.0) if is_gpt_oss else 0.0,
        swiglu_alpha=_number(config, "swiglu_alpha", 1.702) if is_gpt_oss else 0.0,
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    """Both spellings are in use, also within one family; where both stand they must agree."""
    spellings = [key for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    counts = [read_positive_int(config, key) for key in spellings]
    if not counts:
        raise ModelError("num_experts (or num_local_experts) is missing from the config")
    if counts[0] != counts[-1]:
        raise ModelError(
            f"num_local_experts must be the same as num_experts ({counts[0]}); got {counts[-1]}"
        )
    return counts[0]


def _sparse_layers(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    """Qwen: each `decoder_sparse_step`-th layer, without `mlp_only_layers`; others: all of them."""
    step = read_positive_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, Sequence) or any(type(layer) is not int for layer in dense):
        raise ModelError(f"mlp_only_layers must be a list of layer numbers; got {dense!r}")
    if family not in ("qwen2_moe", "qwen3_moe") and (step != 1 or dense):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise ModelError(f"{key} must be absent for {family}; got {config[key]!r}")
    return tuple(
        layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense
    )


def _norm_topk(config: Mapping[str, Any], family: str) -> bool:
    always = {"mixtral": True, "gpt_oss": False}  # a part of these families, not a setting
    if family not in always:
        return read_boolean(config, "norm_topk_prob", False)
    if family == "mixtral" and not read_boolean(config, "norm_topk_prob", True):
        raise ModelError("norm_topk_prob must be true for mixtral; got False")
    return always[family]


def _shared_inner(config: Mapping[str, Any], family: str, has_shared: bool) -> int:
    key = "shared_expert_intermediate_size"
    if has_shared:
        return read_positive_int(config, key)
    if config.get(key) is not None and read_integer(config, key) != 0:
        raise ModelError(f"{key} must be absent for {family}; got {config[key]}")
    return 0


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    return default if config.get(key) is None else read_positive_number(config, key)
