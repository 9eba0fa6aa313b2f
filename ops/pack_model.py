"""A Hugging Face directory as one GGUF file with packed weights, for our reader and llama.cpp's.

Matrices get the layout that is asked for, embedding and output q8_0, vectors f32. Weights pass
through in pieces of some megabytes; the rows of q and k of Llama models are put in the order that
GGUF has for them, rotary pairs side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shadowlane.ops.decoder import check_tensors, expected_tensors
from shadowlane.ops.decoder_config import DecoderConfig, read_config
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files.base import ModelFiles, TensorSource
from shadowlane.ops.files.checked import CheckedFile
from shadowlane.ops.files.gguf import gguf_name
from shadowlane.ops.files.gguf_writer import NewTensor, write_gguf
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.pack import PACK_LAYOUTS, PackLayout, pack_rows
from shadowlane.ops.rope import RopeConfig, inv_freq
from shadowlane.ops.tokenizer import load_tokenizer, read_eos_token_ids
from shadowlane.ops.tokenizer_to_gguf import tokenizer_fields

if TYPE_CHECKING:
    from shadowlane.ops.tokenizer import Tokenizer

PIECE_NBYTES = 8 << 20  # of float32 that are packed at a time
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")
_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}  # ggml's numbers of what most matrices have
_END_FIELDS = ("eos", "eot", "eom")  # where GGUF has room for ids that end an answer


@dataclass(frozen=True, slots=True)
class PackedModel:
    path: Path
    nbytes: int
    source_nbytes: int  # of the weights before
    notes: tuple[str, ...]  # what the user should know about the file


def check_packable(files: ModelFiles, layout: str) -> DecoderConfig:
    """Everything that can be known from headers. Raises ModelError or ValueError in one line."""
    if layout not in PACK_LAYOUTS:
        raise ValueError(f"weights must be one of {', '.join(PACK_LAYOUTS)}; got {layout!r}")
    if files.kind != "safetensors":
        raise ModelError(
            f"{files.root}: only a directory of safetensors can be packed; this is GGUF already"
        )
    config = read_config(files.config)
    if config.moe is not None:
        raise ModelError(f"{files.root}: only a dense model can be packed; {config.family} is not")
    check_tensors(config, files.tensors)
    for name in _written(config):
        source = files.tensors[name]
        if len(source.shape) == 2 and source.shape[1] % LAYOUTS[layout].block_elements:
            raise ModelError(
                f"{name}: rows in {layout} must hold a multiple of "
                f"{LAYOUTS[layout].block_elements} elements; got {source.shape[1]}"
            )
    _rope_fields(config.rope)
    if config.family != "mistral" and any(window is not None for window in config.windows):
        raise ModelError(
            f"{files.root}: GGUF has no field for the sliding window of {config.family}"
        )
    return config


def pack_model(
    files: ModelFiles,
    layout: PackLayout,
    path: Path,
    cache_dir: Path,
    progress: Callable[[float], None],
) -> PackedModel:
    """Write `files` as the GGUF file `path`, all of it or none of it.

    `cache_dir` is where converted tokenizers are kept. Raises ModelError for what cannot be packed
    or written, ValueError for an unknown layout.
    """
    config = check_packable(files, layout)
    tokenizer = load_tokenizer(files, cache_dir)
    fields, notes = _fields(files, config, layout, tokenizer)
    tensors = [_tensor(files.tensors[name], name, config, layout) for name in _written(config)]
    factors = _rope_factors(config.rope)
    if factors is not None:
        tensors.insert(
            0,
            NewTensor("rope_freqs.weight", factors.shape, "f32", lambda: iter([factors.tobytes()])),
        )
    nbytes = write_gguf(path, fields, tensors, lambda done, total: progress(done / total))
    files.check_unchanged()
    source_nbytes = sum(files.tensors[name].nbytes for name in _written(config))
    return PackedModel(path, nbytes, source_nbytes, tuple(notes))


def _written(config: DecoderConfig) -> list[str]:
    return list(expected_tensors(config))


# -- tensors


def _tensor(
    source: TensorSource, name: str, config: DecoderConfig, layout: PackLayout
) -> NewTensor:
    kind: str = "f32" if len(source.shape) == 1 else "q8_0" if name in _ENDS else layout
    heads = 0
    if _architecture(config) == "llama" and ".self_attn." in name:
        if ".q_proj." in name:
            heads = config.num_heads
        elif ".k_proj." in name:
            heads = config.num_kv_heads
    head_dim = config.head_dim if heads else 1
    return NewTensor(gguf_name(name), source.shape, kind, partial(_pieces, source, kind, head_dim))


def _pieces(source: TensorSource, kind: str, head_dim: int) -> Iterator[bytes]:
    """The packed bytes; above 1, `head_dim` rows at a time are put from halves into pairs."""
    rows, cols = (source.shape[0], 1) if len(source.shape) == 1 else source.shape
    if kind == "f32":
        rows, cols = 1, rows
    row_nbytes = LAYOUTS[source.layout].row_nbytes(cols)
    height = max(1, PIECE_NBYTES // (4 * cols * head_dim)) * head_dim
    with CheckedFile(Path(source.path)) as file:
        for first in range(0, rows, height):
            count = min(height, rows - first)
            raw = file.read(source.offset + first * row_nbytes, count * row_nbytes)
            if len(raw) != count * row_nbytes:
                raise ModelError(f"{source.path}: a model file must not change while it is used")
            values = expand_rows(source.layout, np.frombuffer(raw, np.uint8), count, cols)
            if kind == "f32":
                yield _paired(values.reshape(-1, 1), head_dim).tobytes()
                continue
            try:
                yield pack_rows(kind, _paired(values, head_dim)).tobytes()  # type: ignore[arg-type]
            except ValueError as error:
                raise ModelError(f"{source.name}: {error}") from error


def _paired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """[n, cols]: row j of each half of a head next to row j of the other."""
    if head_dim == 1:
        return rows
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


# -- metadata


def _architecture(config: DecoderConfig) -> str:
    return "llama" if config.family == "mistral" else config.family


def _fields(
    files: ModelFiles, config: DecoderConfig, layout: str, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], list[str]]:
    architecture = _architecture(config)
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.rope.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
        **_rope_fields(config.rope),
    }
    if config.windows[0] is not None:
        values["attention.sliding_window"] = config.windows[0]
    fields: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": files.root.name,
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[layout],
        **{f"{architecture}.{key}": value for key, value in values.items()},
    }
    found, notes = tokenizer_fields(tokenizer, config.vocab_size)
    fields |= found
    bos = files.config.get("bos_token_id")
    if type(bos) is int and "tokenizer.ggml.bos_token_id" not in fields:
        fields["tokenizer.ggml.bos_token_id"] = bos
    ends = tokenizer.eos_token_ids if tokenizer else read_eos_token_ids(files)
    for name, token_id in zip(_END_FIELDS, ends, strict=False):
        fields[f"tokenizer.ggml.{name}_token_id"] = token_id
    if len(ends) > len(_END_FIELDS):
        lost = ", ".join(str(each) for each in ends[len(_END_FIELDS) :])
        notes.append(f"GGUF has room for three ids that end an answer; {lost} will not end one")
    return fields, notes


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    if rope.rope_type in ("default", "llama3"):  # llama3 becomes a tensor of factors
        return {}
    fields: dict[str, Any] = {
        "rope.scaling.type": rope.rope_type,
        "rope.scaling.factor": float(rope.factor),
    }
    if rope.rope_type == "linear":
        return fields
    if rope.rope_type != "yarn" or not rope.truncate:
        raise ModelError(
            f"rope_type must be default, linear, llama3 or yarn to be written as GGUF; "
            f"got {rope.rope_type}{'' if rope.truncate else ' without truncate'}"
        )
    assert rope.original_max_position is not None
    fields["rope.scaling.original_context_length"] = rope.original_max_position
    fields["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
    fields["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    _, scaling = inv_freq(rope, 1)
    usual = 0.1 * math.log(rope.factor) + 1.0
    if not math.isclose(scaling, usual, rel_tol=1e-6):
        fields["rope.scaling.attn_factor"] = scaling / usual
    return fields


def _rope_factors(rope: RopeConfig) -> np.ndarray | None:
    """What the frequencies of llama3 are divided by, float32 [head_dim / 2]."""
    if rope.rope_type != "llama3":
        return None
    plain, _ = inv_freq(replace(rope, rope_type="default"), 1)
    scaled, _ = inv_freq(rope, 1)
    return (plain / scaled).astype(np.float32)
