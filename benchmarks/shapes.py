"""Llama-shaped models by their dimensions alone: configuration, tensor names, parameter counts.

The benchmarks need models of any size without downloading one, and two writers (safetensors and
GGUF) that agree about every tensor. So the list of tensors is made here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint: its Hugging Face name and shape."""

    name: str
    shape: tuple[int, ...]  # [rows, cols] of a matrix, [size] of a norm

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in bfloat16."""
        return 2 * self.count


def check_dimensions(shape: Any) -> None:
    """Of any decoder's shape, a dataclass. Raises ValueError."""
    for field in fields(shape):
        value = getattr(shape, field.name)
        if not isinstance(value, bool) and not value > 0:
            raise ValueError(f"{field.name} must be positive; got {value}")
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads; got "
            f"{shape.num_attention_heads} and {shape.num_key_value_heads}"
        )
    if shape.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions; got {shape.head_dim}")


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama decoder; field names are those of its config.json."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_dimensions(self)

    def config(self) -> dict[str, object]:
        """What config.json says; both spellings of the data type and of the rotary base, so that
        older and newer readers agree."""
        dimensions = asdict(self)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dimensions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors, in the order in which a step reads them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        yield TensorSpec("model.embed_tokens.weight", (self.vocab_size, hidden))
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            yield TensorSpec(prefix + "input_layernorm.weight", (hidden,))
            yield TensorSpec(prefix + "self_attn.q_proj.weight", (queries, hidden))
            yield TensorSpec(prefix + "self_attn.k_proj.weight", (keys, hidden))
            yield TensorSpec(prefix + "self_attn.v_proj.weight", (keys, hidden))
            yield TensorSpec(prefix + "self_attn.o_proj.weight", (hidden, queries))
            yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,))
            yield TensorSpec(prefix + "mlp.gate_proj.weight", (inner, hidden))
            yield TensorSpec(prefix + "mlp.up_proj.weight", (inner, hidden))
            yield TensorSpec(prefix + "mlp.down_proj.weight", (hidden, inner))
        yield TensorSpec("model.norm.weight", (hidden,))
        if not self.tie_word_embeddings:
            yield TensorSpec("lm_head.weight", (self.vocab_size, hidden))

    @property
    def num_parameters(self) -> int:
        return sum(spec.count for spec in self.tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return sum(spec.nbytes for spec in self.tensors())


SHAPES: dict[str, Shape] = {
    "tiny": Shape(128, 3, 384, 4, 2, 32, 512, max_position_embeddings=2048),
    # SmolLM2-135M exactly.
    "135m": Shape(576, 30, 1536, 9, 3, 64, 49152, rope_theta=100000.0),
    "1b": Shape(2048, 16, 8192, 32, 8, 64, 32000, rope_theta=500000.0),
    "1.5b": Shape(1536, 28, 8960, 12, 2, 128, 151936, rope_theta=1000000.0),
    "3b": Shape(3072, 26, 8192, 24, 8, 128, 32000, rope_theta=500000.0),
    "7b": Shape(4096, 32, 11008, 32, 32, 128, 32000, tie_word_embeddings=False),
}
