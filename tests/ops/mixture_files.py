"""Tiny mixtures as the files that are met: GGUF as llama.cpp has it, and stacked safetensors.

Made from transformers' own model of a directory, so that the readers are held against names and
shapes that they had no part in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from filemaking import add_field
from tiny import expanding

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
}
_GATING_OF_GPT_OSS = 3
_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

F32 = gguf.GGMLQuantizationType.F32


def load_model(directory: Path, dtype: torch.dtype | str = "auto") -> Any:
    """transformers' model of a directory, in the data type that is stored where none is named."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, **expanding(directory)
    )


def expert_stacks(model: Any, layer: int) -> dict[str, torch.Tensor]:
    """gate and up [experts, inner, hidden], down [experts, hidden, inner], and GPT-OSS's biases."""
    experts = model.model.layers[layer].mlp.experts
    parameters = dict(experts.named_parameters())
    fused, down = parameters["gate_up_proj"].detach(), parameters["down_proj"].detach()
    if "gate_up_proj_bias" not in parameters:
        gate, up = fused.chunk(2, dim=1)
        return {"gate": gate, "up": up, "down": down}
    biases = parameters["gate_up_proj_bias"].detach()
    return {
        "gate": fused[:, :, 0::2].swapaxes(1, 2),
        "up": fused[:, :, 1::2].swapaxes(1, 2),
        "down": down.swapaxes(1, 2),
        "gate_bias": biases[:, 0::2],
        "up_bias": biases[:, 1::2],
        "down_bias": parameters["down_proj_bias"].detach(),
    }


def write_stacked(directory: Path, out: Path, *, is_fused: bool = True) -> Path:
    """The same model with all experts of a layer in one tensor, as transformers has them in memory.

    Without `is_fused`, gate and up are tensors of their own.
    """
    out.mkdir()
    (out / "config.json").write_text((directory / "config.json").read_text())
    model = load_model(directory)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if not is_fused:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for layer in range(model.config.num_hidden_layers):
            for matrix, stack in expert_stacks(model, layer).items():
                name = matrix.replace("_bias", "_proj_bias") if "_" in matrix else f"{matrix}_proj"
                tensors[f"model.layers.{layer}.mlp.experts.{name}"] = stack.contiguous().clone()
    safetensors.torch.save_file(tensors, out / "model.safetensors")
    return out


def round_experts(directory: Path, out: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The same model, with every expert's weights rounded to what `kind` can hold exactly."""
    model = load_model(directory)
    with torch.no_grad():
        for layer in range(model.config.num_hidden_layers):
            for name, stack in expert_stacks(model, layer).items():
                if not name.endswith("_bias"):  # the stacks are views: writing goes to the model
                    stack.copy_(torch.from_numpy(_dequantized(_packed(stack, kind), kind)))
    model.save_pretrained(out)
    return out


def write_published_gpt_oss(directory: Path, out: Path, *, max_shard_size: str = "5GB") -> Path:
    """The GPT-OSS model of `directory` as it is published: experts in MXFP4, in two parts.

    Packed with ggml's reference code, whose blocks are then put into the published order.
    """
    from huggingface_hub import save_torch_state_dict

    model = load_model(directory)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not re.fullmatch(r".+\.experts\.(gate_up|down)_proj", name):
            tensors[name] = tensor.clone()
            continue
        blocks = _packed(tensor.swapaxes(1, 2), gguf.GGMLQuantizationType.MXFP4)
        blocks = blocks.reshape(*blocks.shape[:2], -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        neighbours = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = torch.from_numpy(neighbours)
        tensors[f"{name}_scales"] = torch.from_numpy(blocks[..., 0].copy())
    out.mkdir()
    save_torch_state_dict(tensors, out, max_shard_size=max_shard_size)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def _packed(values: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quantize(values.float().contiguous().numpy(), kind)


def _dequantized(packed: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.dequantize(packed, kind).astype(np.float32)


def write_mixture_gguf(
    directory: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    fields: dict[str, Any] | None = None,
    is_apart: bool = False,
) -> Path:
    """Write the mixture of `directory` with its experts as `kind`, everything else in float32.

    `fields` replaces or adds metadata of the architecture (None leaves a field out); `is_apart`
    writes each expert's matrices as tensors of their own, as files of 2023 have them.
    """
    model = load_model(directory)
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_fields(config), **(fields or {})}.items():
        add_field(writer, f"{architecture}.{key}", value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in model.state_dict().items():
        if ".experts." in name or (name == "lm_head.weight" and config["tie_word_embeddings"]):
            continue
        values = tensor.float()
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            halves = values.reshape(heads[module], 2, -1, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("shared_expert_gate.weight"):
            values = values.reshape(-1)
        writer.add_tensor(_gguf_name(name, architecture), values.contiguous().numpy())
    for layer in range(config["num_hidden_layers"]):
        for name, stack in expert_stacks(model, layer).items():
            matrix, _, bias = name.partition("_")
            if bias:
                stem = f"blk.{layer}.ffn_{matrix}_exps.bias"
                writer.add_tensor(stem, stack.float().contiguous().numpy())
            elif is_apart:
                for expert, values in enumerate(stack):
                    stem = f"blk.{layer}.ffn_{matrix}.{expert}.weight"
                    writer.add_tensor(stem, _packed(values, kind), raw_dtype=kind)
            else:
                stem = f"blk.{layer}.ffn_{matrix}_exps.weight"
                writer.add_tensor(stem, _packed(stack, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, architecture: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    if rest == "self_attn.sinks":
        rest += ".weight"
    module, _, suffix = rest.rpartition(".")
    if module == "post_attention_layernorm":
        theirs = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
    else:
        theirs = _MODULES[module]
    return f"blk.{layer}.{theirs}.{suffix}"


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes it."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    if config["model_type"] not in ("mixtral", "olmoe"):
        fields["expert_feed_forward_length"] = inner
    if config["model_type"] == "qwen2_moe":
        fields["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if config["model_type"] == "gpt_oss":
        fields["attention.sliding_window"] = config["sliding_window"]
        fields["rope.scaling.type"] = "yarn"
        fields["rope.scaling.factor"] = rope["factor"]
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields["expert_gating_func"] = _GATING_OF_GPT_OSS
    return fields


def model_of_family(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> Path:
    """A small mixture; "published" is GPT-OSS as it is published, in MXFP4."""
    if family == "published":
        return write_published_gpt_oss(tiny_model("gpt-oss"), tmp_path / family)
    return tiny_model(family)
