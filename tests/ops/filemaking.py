"""Weight files for the tests of the readers: sound ones by the formats' own packages, and bytes
with one thing wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40
HEAD_DIM = HIDDEN // HEADS

_LAYER_SHAPES = {  # GGUF name, Hugging Face name, shape
    ("attn_norm", "input_layernorm"): (HIDDEN,),
    ("attn_q", "self_attn.q_proj"): (HIDDEN, HIDDEN),
    ("attn_k", "self_attn.k_proj"): (KV_HEADS * HEAD_DIM, HIDDEN),
    ("attn_v", "self_attn.v_proj"): (KV_HEADS * HEAD_DIM, HIDDEN),
    ("attn_output", "self_attn.o_proj"): (HIDDEN, HIDDEN),
    ("ffn_norm", "post_attention_layernorm"): (HIDDEN,),
    ("ffn_gate", "mlp.gate_proj"): (INTERMEDIATE, HIDDEN),
    ("ffn_up", "mlp.up_proj"): (INTERMEDIATE, HIDDEN),
    ("ffn_down", "mlp.down_proj"): (HIDDEN, INTERMEDIATE),
}


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One field of metadata, of the type that its value has; None: none."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)


def decoder_shapes(num_layers: int = 2) -> dict[tuple[str, str], tuple[int, ...]]:
    """(GGUF name, Hugging Face name) of each tensor of a small decoder -> its shape."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {
        ("token_embd.weight", "model.embed_tokens.weight"): (VOCAB, HIDDEN),
        ("output_norm.weight", "model.norm.weight"): (HIDDEN,),
        ("output.weight", "lm_head.weight"): (VOCAB, HIDDEN),
    }
    for layer in range(num_layers):
        for (theirs, ours), shape in _LAYER_SHAPES.items():
            names = (f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight")
            shapes[names] = shape
    return shapes


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    fields: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    leave_out: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
) -> dict[str, np.ndarray]:
    """Write a small decoder with the `gguf` package; matrices have the type `kind`.

    `fields` replaces or adds metadata of the architecture (None leaves a field out). Returns the
    stored bytes of each tensor by GGUF name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    numbers: dict[str, Any] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **(fields or {}),
    }
    for key, value in numbers.items():
        full_key = key if key.startswith(("general.", "tokenizer.", "split.")) else None
        full_key = full_key or f"{architecture}.{key}"
        add_field(writer, full_key, value)
    if tokens is not None:
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    random = np.random.default_rng(7)
    stored = {}
    for (name, _), shape in decoder_shapes().items():
        if name in leave_out:
            continue
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 2:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            stored[name] = packed
        else:
            writer.add_tensor(name, values)
            stored[name] = values
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
        stored[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_field(key: str, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_tensor(name: str, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One tensor description; extents with the fastest first."""
    count = len(extents)
    return gguf_string(name) + struct.pack(f"<I{count}QIQ", count, *extents, kind, offset)


def gguf_bytes(
    *,
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_fields: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file put together by hand; counts may lie."""
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    header += b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def safetensors_bytes(
    header: object, data: bytes = b"", claimed_nbytes: int | None = None
) -> bytes:
    """A safetensors file put together by hand; `header` is JSON, text or bytes."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    claimed = len(raw) if claimed_nbytes is None else claimed_nbytes
    return struct.pack("<Q", claimed) + raw + data


def write_directory(
    root: Path, shards: dict[str, dict[str, np.ndarray]] | None = None
) -> dict[str, np.ndarray]:
    """Write config.json and one safetensors file, or `shards` with an index; return the tensors."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": HIDDEN}))
    if shards is None:
        tensors = random_tensors()
        safetensors.numpy.save_file(tensors, root / "model.safetensors")
        return tensors
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        safetensors.numpy.save_file(tensors, root / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def random_tensors(seed: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    tensors = {}
    for number, ((_, name), shape) in enumerate(decoder_shapes().items()):
        dtype = np.float16 if number % 3 == 0 else np.float32
        tensors[name] = random.standard_normal(shape).astype(dtype)
    return tensors
