"""Tiny random models of every family and option, and transformers' logits for them.

All weights are random and large enough that a bias, a norm or a window left out changes the logits
clearly. A model is a pure function of its options, so tests may share the directories.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 320
SEED = 20_240_917

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name of a case -> model_type and what differs from `_base_options`.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama2-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama2-ungrouped": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_parameters": {"rope_theta": 500_000.0}},
    "llama3.1": {"model_type": "llama", "rope_parameters": _LLAMA3_SCALING},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    },
    "llama-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 128,
        },
    },
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 32},
    "llama-bfloat16": {"model_type": "llama", "dtype": "bfloat16"},
    "llama-float16": {"model_type": "llama", "dtype": "float16"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 11},
    "mistral-head-dim": {"model_type": "mistral", "sliding_window": 7, "head_dim": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1_000_000.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2-bfloat16": {"model_type": "qwen2", "tie_word_embeddings": True, "dtype": "bfloat16"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen3-biases": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-bfloat16": {"model_type": "qwen3", "head_dim": 32, "dtype": "bfloat16"},
}

_QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
_QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 128,
    **_QWEN_MOE,
}
_QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 32, **_QWEN_MOE}
_OLMOE = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "head_dim": 16,
    "sliding_window": 9,
    # low enough to be reached by activations of a tiny model
    "swiglu_limit": 1.5,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}

# The same for mixtures of experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5},
    "mixtral-window": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "sliding_window": 11,
    },
    "mixtral-bfloat16": {"model_type": "mixtral", "num_local_experts": 4, "dtype": "bfloat16"},
    "qwen2-moe": _QWEN2_MOE,
    "qwen2-moe-norm": {**_QWEN2_MOE, "norm_topk_prob": True},
    "qwen2-moe-plain": {**_QWEN2_MOE, "qkv_bias": False, "tie_word_embeddings": True},
    "qwen2-moe-mixed": {**_QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen2-moe-window": {
        **_QWEN2_MOE,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-norm": {**_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-moe-mixed": {**_QWEN3_MOE, "mlp_only_layers": [0], "attention_bias": True},
    "qwen3-moe-window": {**_QWEN3_MOE, "use_sliding_window": True, "sliding_window": 10},
    "qwen3-moe-bfloat16": {**_QWEN3_MOE, "norm_topk_prob": True, "dtype": "bfloat16"},
    "olmoe": _OLMOE,
    "olmoe-norm": {**_OLMOE, "norm_topk_prob": True, "attention_bias": True},
    "olmoe-ungrouped": {**_OLMOE, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gpt-oss": _GPT_OSS,
    "gpt-oss-plain": {**_GPT_OSS, "attention_bias": False, "swiglu_limit": 7.0},
    "gpt-oss-bfloat16": {**_GPT_OSS, "dtype": "bfloat16"},
}


def _base_options() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def write_tiny_model(directory: Path, family: str, **options: Any) -> Path:
    """Writes a random model (config.json and safetensors, no tokenizer) and returns `directory`.

    `family` is a name of FAMILIES or MIXTURES, or a bare model_type; `options` override the config
    of either, e.g. `hidden_size=256`, `dtype="bfloat16"`. `max_shard_size="20KB"` splits the
    weights into shards with an index.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = Path(directory)
    max_shard_size = options.pop("max_shard_size", "5GB")
    values = {**_base_options(), **_case(family), **options}
    dtype = getattr(torch, values["dtype"])
    # transformers completes the rope settings in place; ours must stay as they are.
    values = {
        key: dict(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _randomize(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    _cached_model.cache_clear()
    return directory


def _case(name: str) -> dict[str, Any]:
    return FAMILIES.get(name) or MIXTURES.get(name) or {"model_type": name}


def _randomize(model: Any) -> None:
    """Every parameter anew, in the order of names: matrices, biases and norms all matter."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if name.endswith("norm.weight"):
                values = 1.0 + 0.3 * values
            elif name.endswith("bias"):
                values = 0.5 * values
            elif "embed_tokens" in name or "lm_head" in name:
                values = values / parameter.shape[-1] ** 0.5
            else:
                # Somewhat above the scale that keeps the width: attention becomes selective.
                # Much above it, transformers' own rounding would pass the tests' tolerance.
                values = 1.3 * values / parameter.shape[-1] ** 0.5
            parameter.copy_(values)


@cache
def _cached_model(directory: Path, dtype: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    chosen = "auto" if dtype is None else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=chosen,
        attn_implementation="eager",
        local_files_only=True,
        **expanding(directory),
    )
    return model.eval()


def expanding(directory: Path) -> dict[str, Any]:
    """What makes transformers expand packed weights when it loads them."""
    from transformers import Mxfp4Config

    if "quantization_config" not in json.loads((directory / "config.json").read_text()):
        return {}
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def reference_logits(
    directory: Path,
    token_ids: Sequence[int],
    chunks: Sequence[int] | None = None,
    dtype: str | None = None,
) -> np.ndarray:
    """transformers' logits, float32 [len(token_ids), vocab]: one row per position.

    `chunks` are the lengths of the forward passes that share one cache (all ones: decode); without
    it one pass takes everything. `dtype` computes in that type instead of the stored one.
    """
    import torch

    chunks = [len(token_ids)] if chunks is None else list(chunks)
    if sum(chunks) != len(token_ids):
        raise ValueError(f"chunks must add up to {len(token_ids)} tokens; got {sum(chunks)}")
    model = _cached_model(Path(directory), dtype)
    _forget_length(model)
    past, start, rows = None, 0, []
    with torch.no_grad():
        for length in chunks:
            ids = torch.tensor([list(token_ids[start : start + length])])
            positions = torch.arange(start, start + length)[None]
            output = model(input_ids=ids, position_ids=positions, use_cache=True, cache=past)
            past = output.cache
            rows.append(output.logits[0].float().numpy())
            start += length
    return np.concatenate(rows)


def _forget_length(model: Any) -> None:
    """A dynamic rotary module remembers the longest sequence; a new one starts afresh."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq.clone()
    rotary.max_seq_len_cached = rotary.original_max_seq_len


def tiny_tokens(length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """A fixed pseudo-random sequence; a prefix of a longer one is the shorter one."""
    return np.random.default_rng(7).integers(0, vocab_size, size=4096)[:length].tolist()
