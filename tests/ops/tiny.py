"""Tiny random models of every family and option, and transformers' logits for them.

All weights are random and large enough that a bias, a norm or a window left out changes the logits
clearly. A model is a pure function of its options, so tests may share the directories.
"""

from __future__ import annotations

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

    `family` is a name of FAMILIES or a bare model_type; `options` override the config of either,
    e.g. `hidden_size=256`, `dtype="bfloat16"`. `max_shard_size="20KB"` splits the weights into
    shards with an index.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = Path(directory)
    max_shard_size = options.pop("max_shard_size", "5GB")
    values = {**_base_options(), **FAMILIES.get(family, {"model_type": family}), **options}
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
        directory, dtype=chosen, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


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
