"""GGUF files as Hugging Face would have them: tensor names and a config.json from the metadata.

Architectures llama (Llama, Mistral and Mixtral), qwen2, qwen3 and the mixtures of
`gguf_mixtures.py`. What the metadata leaves out has the default that llama.cpp gives it; what would
change the mathematics and is not supported is refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import ModelFiles, TensorSource, make_fingerprint
from shadowlane.ops.files.gguf_container import GgufTensor, read_container
from shadowlane.ops.files.gguf_fields import GgufFields
from shadowlane.ops.files.gguf_mixtures import (
    mixture_config,
    mixture_family,
    mixture_name,
    mixture_shape,
)

_ROPE_PAIRING: dict[str, Literal["half", "interleaved"]] = {
    # converters to GGUF reorder the rows of q and k of this architecture, so that the two numbers
    # of a rotary pair are neighbours
    "llama": "interleaved",
    "qwen2": "half",
    "qwen3": "half",
    "qwen2moe": "half",
    "qwen3moe": "half",
    "olmoe": "half",
    "gpt-oss": "half",
}
_ARCHITECTURE_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_THEIR_NAMES = {ours: theirs for theirs, ours in (_WHOLE_NAMES | _LAYER_NAMES).items()}
_OUR_LAYER_TENSOR = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"blk\.[0-9]+\.attn_rot_embd(\.weight)?")  # a table old files carry

# Fields of an architecture that change the mathematics, with the values that change nothing.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def open_gguf(path: Path) -> ModelFiles:
    """Open a GGUF file. Raises ModelError for what is damaged or not supported."""
    container = read_container(path)
    fields = GgufFields(path, container.metadata)
    architecture = fields.text("general.architecture")
    if architecture not in _ROPE_PAIRING:
        raise ModelError(
            f"{path}: the architecture must be one of {', '.join(_ROPE_PAIRING)}; "
            f"got {architecture!r:.60}"
        )
    fields.architecture = architecture
    if fields.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path}: a GGUF model must be one file; this is one part of "
            f"{fields.metadata['split.count']!r:.60}: join them with llama-gguf-split --merge"
        )
    mixture = mixture_family(fields)
    tensors: dict[str, TensorSource] = {}
    rope_factors = None
    for tensor in container.tensors.values():
        if tensor.name == _ROPE_FACTORS:
            rope_factors = _source(path, tensor, tensor.name)
        elif not _IGNORED.fullmatch(tensor.name):
            name = _hugging_face_name(path, tensor.name, architecture, mixture)
            if name in tensors:
                raise ModelError(f"{path}: a tensor must be there once; {name} is there twice")
            tensors[name] = _source(path, tensor, name)
    config = _config(fields, tensors, mixture)
    if rope_factors is not None:
        _check_rope_factors(path, rope_factors, config["head_dim"])
    return ModelFiles(
        root=path,
        kind="gguf",
        tensors=tensors,
        config=config,
        rope_pairing=_ROPE_PAIRING[architecture],
        rope_factors=rope_factors,
        gguf_metadata=container.metadata,
        fingerprint=make_fingerprint([container.stamp], [container.header]),
        stamps=(container.stamp,),
    )


def _source(path: Path, tensor: GgufTensor, name: str) -> TensorSource:
    return TensorSource(
        name=name,
        path=str(path),
        offset=tensor.offset,
        nbytes=tensor.nbytes,
        shape=mixture_shape(name, tensor.shape),
        layout=tensor.layout,
    )


def _hugging_face_name(path: Path, name: str, architecture: str, mixture: str | None) -> str:
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    if mixture is not None and (found := mixture_name(name, mixture)) is not None:
        return found
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    raise ModelError(
        f"{path}: every tensor must have a place in the architecture {architecture}; "
        f"{name!r:.100} has none"
    )


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`. KeyError for one it has none for."""
    match = _OUR_LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _THEIR_NAMES[name]
    return f"blk.{match[1]}.{_THEIR_NAMES[match[2]]}.{match[3]}"


def _check_rope_factors(path: Path, factors: TensorSource, head_dim: int) -> None:
    if factors.layout != "f32" or factors.shape != (head_dim // 2,):
        raise ModelError(
            f"{path}: {_ROPE_FACTORS} must be f32 of shape ({head_dim // 2},); "
            f"got {factors.layout} of shape {factors.shape}"
        )


def _config(
    fields: GgufFields, tensors: dict[str, TensorSource], mixture: str | None
) -> dict[str, Any]:
    """The metadata in the words of config.json."""
    for key, neutral in _NEUTRAL_FIELDS.items():
        value = fields.of_architecture(key)
        if value is not None and value not in neutral:
            name = f"{fields.architecture}.{key}"
            raise fields.refuse(name, f"absent or one of {neutral} to be supported", value)
    hidden_size = fields.count("embedding_length")
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise fields.refuse(
                f"{fields.architecture}.{key}",
                f"the head dimension {head_dim} to be supported",
                fields.of_architecture(key),
            )
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        found = None if embedding is None else embedding.shape
        raise fields.refuse("token_embd.weight", "a tensor of two dimensions", found)
    model_type = mixture or fields.architecture
    sliding_window = None
    if model_type in ("llama", "mixtral") and fields.of_architecture("attention.sliding_window"):
        # the ones of the architecture whose attention may look back a limited way
        model_type = mixture or "mistral"
        sliding_window = fields.count("attention.sliding_window")
    config = {
        "architectures": [_ARCHITECTURE_CLASS[model_type]],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "max_position_embeddings": fields.count("context_length"),
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensors,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": _data_type(tensors),
        **_special_tokens(fields),
    }
    if mixture is not None:
        config.update(mixture_config(fields, mixture, config))
    return config


def _rope_scaling(fields: GgufFields) -> dict[str, Any] | None:
    factor_key = "rope.scaling.factor"
    if not fields.of_architecture(factor_key):
        factor_key = "rope.scale_linear"  # what older files call it
    has_factor = bool(fields.of_architecture(factor_key))
    factor = fields.number(factor_key) if has_factor else 1.0
    type_key = f"{fields.architecture}.rope.scaling.type"
    kind = fields.text(type_key, "linear" if has_factor else "none")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise fields.refuse(type_key, "none, linear or yarn", kind)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = fields.count("context_length")
        scaling["original_max_position_embeddings"] = fields.count(
            "rope.scaling.original_context_length", context
        )
        for key in ("beta_fast", "beta_slow"):
            if fields.of_architecture(f"rope.scaling.yarn_{key}"):
                scaling[key] = fields.number(f"rope.scaling.yarn_{key}")
        attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
        attention_factor *= fields.number("rope.scaling.yarn_attn_factor", 1.0)
        if attention_factor != 1.0:
            # llama.cpp multiplies its own factor by this one; config.json holds the product
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    return scaling


def _special_tokens(fields: GgufFields) -> dict[str, Any]:
    """Ids that begin, end and pad; several that end a text are a list, as in config.json."""
    ends = (fields.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    distinct = list(dict.fromkeys(token for token in ends if token is not None))
    return {
        "bos_token_id": fields.token_id("tokenizer.ggml.bos_token_id"),
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct or None,
        "pad_token_id": fields.token_id("tokenizer.ggml.padding_token_id"),
    }


def _data_type(tensors: dict[str, TensorSource]) -> str:
    """The type most matrix bytes have; packed formats expand to float32, and say so."""
    nbytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            nbytes[tensor.layout] += tensor.nbytes
    layout, _ = nbytes.most_common(1)[0]
    return {"f16": "float16", "bf16": "bfloat16"}.get(layout, "float32")
