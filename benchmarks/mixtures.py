"""Random mixtures of experts, shaped like Qwen3-MoE, of any size: for `synthesize.py --moe`.

The directory has each expert's matrices apart, the GGUF has all experts of a layer in one tensor,
as the two kinds of files are met. Packed blocks are drawn, not quantised: any nibbles and scales
are a valid block, with factors that make weights scatter around 0 by about 1/sqrt(cols).
Everything is written from pools that are read round and round, so memory stays at their size.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_random import POOL_BLOCKS, block_pool
from shapes import TensorSpec, check_dimensions
from synthesize import Progress, WeightPool, check_room

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.gguf_writer import NewTensor, write_gguf
from shadowlane.ops.layouts import LAYOUTS

TYPES = {"Q4_K": "q4_K", "Q6_K": "q6_K", "Q4_0": "q4_0", "Q8_0": "q8_0", "BF16": "bf16"}
# Embeddings and output have more bits where the type has few, as llama.cpp's quantiser does it.
_ENDS = {"q4_K": "q6_K", "q6_K": "q6_K", "q4_0": "q8_0", "q8_0": "q8_0", "bf16": "bf16"}
_FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_K": 15, "q6_K": 18, "bf16": 32}  # llama.cpp's numbers
_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The dimensions of a Qwen3-MoE decoder; field names are those of its config.json.

    The defaults are those of Qwen3-30B-A3B.
    """

    hidden_size: int = 2048
    num_hidden_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 151936
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    intermediate_size: int = 6144  # of layers without experts, of which there are none
    tie_word_embeddings: bool = False
    norm_topk_prob: bool = True
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_dimensions(self)
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most num_experts ({self.num_experts}); "
                f"got {self.num_experts_per_tok}"
            )

    def config(self) -> dict[str, object]:
        """What config.json says."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def expert_specs(self, layer: int, matrix: str) -> Iterator[TensorSpec]:
        """One matrix of every expert of a layer: gate and up [inner, hidden], down the other way"""
        inner, hidden = self.moe_intermediate_size, self.hidden_size
        shape = (hidden, inner) if matrix == "down" else (inner, hidden)
        for expert in range(self.num_experts):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
            yield TensorSpec(name, shape)

    def dense_specs(self, layer: int) -> Iterator[TensorSpec]:
        """What every token reads of a layer."""
        hidden, prefix = self.hidden_size, f"model.layers.{layer}."
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        yield TensorSpec(prefix + "input_layernorm.weight", (hidden,))
        yield TensorSpec(prefix + "self_attn.q_proj.weight", (queries, hidden))
        yield TensorSpec(prefix + "self_attn.k_proj.weight", (keys, hidden))
        yield TensorSpec(prefix + "self_attn.v_proj.weight", (keys, hidden))
        yield TensorSpec(prefix + "self_attn.o_proj.weight", (hidden, queries))
        yield TensorSpec(prefix + "self_attn.q_norm.weight", (self.head_dim,))
        yield TensorSpec(prefix + "self_attn.k_norm.weight", (self.head_dim,))
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,))
        yield TensorSpec(prefix + "mlp.gate.weight", (self.num_experts, hidden))

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors, an expert's three matrices side by side."""
        yield TensorSpec("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        for layer in range(self.num_hidden_layers):
            yield from self.dense_specs(layer)
            of_each = zip(*(self.expert_specs(layer, name) for name in _MATRICES), strict=True)
            for matrices in of_each:
                yield from matrices
        yield TensorSpec("model.norm.weight", (self.hidden_size,))
        if not self.tie_word_embeddings:
            yield TensorSpec("lm_head.weight", (self.vocab_size, self.hidden_size))

    @property
    def num_parameters(self) -> int:
        return sum(spec.count for spec in self.tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return 2 * self.num_parameters


_GGUF_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


class _Packer:
    """The bytes of any tensor in any layout: the same seed and name give the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._weights = WeightPool(seed)
        self._blocks: dict[tuple[str, int], np.ndarray] = {}  # (layout, cols) -> packed blocks

    def pieces(self, specs: list[TensorSpec], layout: str) -> Iterator[memoryview]:
        """`specs` one after another: the values of the directory where no block is packed."""
        for spec in specs:
            if layout in ("f32", "bf16"):
                for values in self._weights.pieces(spec):
                    if layout == "f32":
                        values = (values.astype(np.uint32) << 16).view(np.float32)
                    yield memoryview(values).cast("B")
            else:
                yield from self._packed(spec, layout)

    def _packed(self, spec: TensorSpec, layout: str) -> Iterator[memoryview]:
        pool = self._pool(layout, spec.shape[1])
        offset = zlib.crc32(f"{self._seed} {spec.name}".encode()) % len(pool)
        left = spec.count // LAYOUTS[layout].block_elements
        while left:
            piece = pool[offset : offset + left]
            yield memoryview(piece).cast("B")
            left -= len(piece)
            offset = 0

    def _pool(self, layout: str, cols: int) -> np.ndarray:
        key = (layout, cols)
        if key not in self._blocks:
            if layout in ("q4_K", "q6_K"):
                kind = gguf.GGMLQuantizationType[layout.replace("q", "Q")]
                self._blocks[key] = block_pool(kind, cols, self._seed)
            else:
                self._blocks[key] = _simple_pool(layout, cols, self._seed)
        return self._blocks[key]


def _simple_pool(layout: str, cols: int, seed: int) -> np.ndarray:
    """Blocks of one float16 factor and integers: uint8 [POOL_BLOCKS, block bytes]."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, (POOL_BLOCKS, LAYOUTS[layout].block_nbytes), dtype=np.uint8)
    root_mean_square = 74 if layout == "q8_0" else 4.6  # of the integers
    pool[:, 0:2] = np.array([cols**-0.5 / root_mean_square], np.float16).view(np.uint8)
    return pool


def write_moe_gguf(shape: MoeShape, out: Path, layout: str, seed: int = 0) -> None:
    """Write a random mixture as GGUF, matrices in `layout`, router and norms in float32.

    Raises ValueError where rows are no whole number of blocks or the disk has no room.
    """
    packer, ends = _Packer(seed), _ENDS[layout]
    tensors: list[NewTensor] = []

    def add(name: str, specs: list[TensorSpec], kind: str) -> None:
        shape_of_one = specs[0].shape
        block = LAYOUTS[kind].block_elements
        if len(shape_of_one) > 1 and shape_of_one[-1] % block:
            raise ValueError(
                f"{name} must have a multiple of {block} columns in {kind}; got {shape_of_one[-1]}"
            )
        stacked = shape_of_one if len(specs) == 1 else (len(specs), *shape_of_one)
        if "_exps" in name:
            stacked = (len(specs), *shape_of_one)
        tensors.append(NewTensor(name, stacked, kind, partial(packer.pieces, specs, kind)))

    vocabulary = (shape.vocab_size, shape.hidden_size)
    add("token_embd.weight", [TensorSpec("model.embed_tokens.weight", vocabulary)], ends)
    for layer in range(shape.num_hidden_layers):
        for spec in shape.dense_specs(layer):
            module = spec.name.split(".", 3)[3].removesuffix(".weight")
            kind = "f32" if len(spec.shape) == 1 or module == "mlp.gate" else layout
            add(f"blk.{layer}.{_GGUF_MODULES[module]}.weight", [spec], kind)
        for matrix in _MATRICES:
            specs = list(shape.expert_specs(layer, matrix))
            add(f"blk.{layer}.ffn_{matrix}_exps.weight", specs, layout)
    add("output_norm.weight", [TensorSpec("model.norm.weight", (shape.hidden_size,))], "f32")
    if not shape.tie_word_embeddings:
        add("output.weight", [TensorSpec("lm_head.weight", vocabulary)], ends)

    total = sum(tensor.nbytes for tensor in tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out, total)
    bar, shown = Progress(total, out.name), 0

    def progress(written: int, _: int) -> None:
        nonlocal shown
        # the header and what pads the tensors is not counted
        bar.add(min(written, total) - shown)
        shown = min(written, total)

    try:
        write_gguf(out, _fields(shape, out.stem, layout), tensors, progress)
    except ModelError as error:
        raise ValueError(str(error)) from error


def _fields(shape: MoeShape, title: str, layout: str) -> dict[str, Any]:
    architecture = "qwen3moe"
    settings: dict[str, Any] = {
        "block_count": shape.num_hidden_layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_key_value_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "expert_count": shape.num_experts,
        "expert_used_count": shape.num_experts_per_tok,
        "expert_feed_forward_length": shape.moe_intermediate_size,
    }
    return {
        "general.architecture": architecture,
        "general.name": title,
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[layout],
        **{f"{architecture}.{key}": value for key, value in settings.items()},
        "tokenizer.ggml.model": "none",
    }


def moe_shape_from(arguments: argparse.Namespace) -> MoeShape:
    """Qwen3-30B-A3B, with each dimension that was given in its place."""
    given = {
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "vocab_size": arguments.vocab,
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.top_k,
        "moe_intermediate_size": arguments.inner,
        "tie_word_embeddings": arguments.tied,
        "rope_theta": arguments.rope_theta,
        "max_position_embeddings": arguments.context,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(MoeShape(), **changes)
