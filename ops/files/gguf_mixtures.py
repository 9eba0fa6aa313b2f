"""Mixtures in GGUF: what llama.cpp calls their tensors and settings, in Hugging Face's words.

The matrices of all experts of a layer stand in one tensor, [experts, rows, cols], which
`ops/expert_matrices.py` cuts. How a router weighs its choice is no field of the file but part of
the architecture.
"""

from __future__ import annotations

import re
from typing import Any

from shadowlane.ops.files.gguf_fields import GgufFields

_FAMILY_OF_ARCHITECTURE = {
    "llama": "mixtral",  # where it has experts
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "gpt-oss": "gpt_oss",
}
_NORM_TOPK = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False}

_STACKS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_gate_up_exps": "gate_up_proj",
    "ffn_down_exps": "down_proj",
}
_SHARED = {
    "ffn_gate_shexp": "gate_proj",
    "ffn_up_shexp": "up_proj",
    "ffn_down_shexp": "down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
# Files of 2023 have each expert's matrices apart.
_SINGLE_EXPERT = re.compile(
    r"blk\.(0|[1-9][0-9]{0,5})\.ffn_(gate|up|down)\.(0|[1-9][0-9]{0,5})\.weight"
)

# Settings of other mixtures' routers, with the values that change nothing.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "experts_per_group": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
}
_SOFTMAX, _SOFTMAX_OF_THE_CHOSEN = 1, 3  # llama.cpp's numbers of ways to score; 0: not said


def mixture_family(fields: GgufFields) -> str | None:
    """The model_type of a mixture, None for a dense model. Raises ModelError."""
    architecture = fields.architecture
    family = _FAMILY_OF_ARCHITECTURE.get(architecture)
    num_experts = fields.of_architecture("expert_count")
    if architecture == "llama" and num_experts in (None, 0):
        return None
    if family is None and num_experts not in (None, 0):
        raise fields.refuse(
            f"{architecture}.expert_count", "absent or 0 to be supported", num_experts
        )
    return family


def mixture_name(name: str, family: str) -> str | None:
    """Hugging Face's name of a tensor that only mixtures have; None for any other tensor."""
    if match := _SINGLE_EXPERT.fullmatch(name):
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    prefix = f"model.layers.{layer}"
    if module in _STACKS:
        suffix = "_bias" if kind == "bias" else ""
        return f"{prefix}.mlp.experts.{_STACKS[module]}{suffix}"
    if module in _SHARED:
        return f"{prefix}.mlp.shared_expert.{_SHARED[module]}.{kind}"
    if module == "ffn_gate_inp":
        return f"{prefix}.mlp.{'router' if family == 'gpt_oss' else 'gate'}.{kind}"
    if module == "ffn_gate_inp_shexp":
        return f"{prefix}.mlp.shared_expert_gate.{kind}"
    if family == "gpt_oss" and module == "post_attention_norm":
        return f"{prefix}.post_attention_layernorm.{kind}"
    if family == "gpt_oss" and module == "attn_sinks" and kind == "weight":
        return f"{prefix}.self_attn.sinks"
    return None


def mixture_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The gate of a shared expert is a vector in GGUF and a matrix of one row elsewhere."""
    is_gate = name.endswith(".mlp.shared_expert_gate.weight")
    return (1, *shape) if is_gate and len(shape) == 1 else shape


def mixture_config(fields: GgufFields, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json has beside a dense model's settings, `config`. Raises ModelError."""
    _refuse_other_routers(fields, family)
    top_k = fields.count("expert_used_count")
    inner = fields.count(
        "expert_feed_forward_length",
        # what llama.cpp takes where older files do not say
        config["intermediate_size"] // top_k
        if family in ("qwen2_moe", "qwen3_moe")
        else config["intermediate_size"],
    )
    settings: dict[str, Any] = {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": top_k,
    }
    if family in ("qwen2_moe", "qwen3_moe"):
        settings["moe_intermediate_size"] = inner
    else:
        settings["intermediate_size"] = inner
    if family in _NORM_TOPK:
        settings["norm_topk_prob"] = _NORM_TOPK[family]
    if family == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = fields.count(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        )
        settings["qkv_bias"] = config["attention_bias"]
    if family == "gpt_oss":
        scaling = config["rope_scaling"]
        settings["sliding_window"] = fields.count("attention.sliding_window")
        # the correction range of this family's frequencies is not rounded to whole dimensions
        settings["rope_scaling"] = (
            {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}
        )
    return settings


def _refuse_other_routers(fields: GgufFields, family: str) -> None:
    neutral = dict(_NEUTRAL_FIELDS)
    scoring = _SOFTMAX_OF_THE_CHOSEN if family == "gpt_oss" else _SOFTMAX
    neutral["expert_gating_func"] = (0, scoring)
    if family in _NORM_TOPK:
        neutral["expert_weights_norm"] = (_NORM_TOPK[family],)
    for key, values in neutral.items():
        value = fields.of_architecture(key)
        if value is not None and value not in values:
            name = f"{fields.architecture}.{key}"
            raise fields.refuse(name, f"absent or one of {values} to be supported", value)
