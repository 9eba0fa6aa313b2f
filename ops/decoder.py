"""One description of a dense decoder that covers Llama, Mistral, Qwen2 and Qwen3.

The families differ in a handful of switches (biases, a norm on q and k, sliding windows), so a
configuration is read into one `DecoderConfig`, and everything else (which tensors there must be,
which groups a step runs) follows from it. What the description cannot express is refused by name:
a model that would run with a wrong result is worse than one that does not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from shadowlane.ops.decoder_config import DecoderConfig, read_config
from shadowlane.ops.errors import ModelError
from shadowlane.ops.layouts import LAYOUTS

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles, TensorSource

__all__ = [
    "DecoderConfig",
    "GroupDescription",
    "GroupPart",
    "check_tensors",
    "describe_groups",
    "expected_tensors",
    "read_config",
    "read_decoder",
]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

GroupKind = Literal["embed", "qkv", "attn", "o", "gate_up", "down", "lm_head"]

# A bias or a norm that the files hold takes part in the sums of the model they were made for;
# leaving it out because the configuration does not mention it would change the result.
_TAKES_PART = re.compile(r"(model|lm_head)\b.*(\.bias|norm\.weight)")
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One matrix of a group: `rows` outputs, `cols` inputs, as it lies in the file [rows, cols]."""

    tensor: str
    rows: int
    cols: int
    bias: str | None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    name: str  # "embed", "12.qkv", ..., "lm_head"
    kind: GroupKind
    layer: int | None
    parts: tuple[GroupPart, ...]
    norm: str | None = None  # weight of the RMS norm applied to the group's input
    q_norm: str | None = None  # attn only: RMS norm over each head of q, before the rotation
    k_norm: str | None = None


def read_decoder(files: ModelFiles) -> DecoderConfig:
    """The decoder in `files`, its tensors checked. Raises ModelError for what cannot be run."""
    factors = files.rope_factors
    rope_factors = None
    if factors is not None:
        count = factors.nbytes // 4  # GGUF keeps them as float32
        rope_factors = np.fromfile(factors.path, "<f4", count, offset=factors.offset).tolist()
    cfg = read_config(files.config, rope_factors=rope_factors)
    check_tensors(cfg, files.tensors)
    return cfg


def describe_groups(cfg: DecoderConfig) -> tuple[GroupDescription, ...]:
    """The groups of one step in execution order: embed, five per layer, lm_head.

    A tied model has its one matrix in `lm_head`, which streams whole; `embed` then has no parts and
    gathers rows from that matrix.
    """
    embedding = GroupPart(EMBEDDING, cfg.vocab_size, cfg.hidden_size, None)
    groups = [GroupDescription("embed", "embed", None, () if cfg.tied_embeddings else (embedding,))]
    for layer in range(cfg.num_layers):
        groups.extend(_layer_groups(cfg, layer))
    head = (
        embedding
        if cfg.tied_embeddings
        else GroupPart(LM_HEAD, cfg.vocab_size, cfg.hidden_size, None)
    )
    groups.append(GroupDescription("lm_head", "lm_head", None, (head,), norm=FINAL_NORM))
    return tuple(groups)


def _layer_groups(cfg: DecoderConfig, layer: int) -> tuple[GroupDescription, ...]:
    prefix = f"model.layers.{layer}"
    q_rows = cfg.num_heads * cfg.head_dim
    kv_rows = cfg.num_kv_heads * cfg.head_dim

    def part(module: str, rows: int, cols: int, has_bias: bool) -> GroupPart:
        bias = f"{prefix}.{module}.bias" if has_bias else None
        return GroupPart(f"{prefix}.{module}.weight", rows, cols, bias)

    def head_norm(module: str) -> str | None:
        return f"{prefix}.self_attn.{module}.weight" if cfg.qk_norm else None

    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    qkv = (
        part("self_attn.q_proj", q_rows, hidden, cfg.qkv_bias),
        part("self_attn.k_proj", kv_rows, hidden, cfg.qkv_bias),
        part("self_attn.v_proj", kv_rows, hidden, cfg.qkv_bias),
    )
    output = (part("self_attn.o_proj", hidden, q_rows, cfg.o_bias),)
    gate_up = (
        part("mlp.gate_proj", inner, hidden, cfg.mlp_bias),
        part("mlp.up_proj", inner, hidden, cfg.mlp_bias),
    )
    down = (part("mlp.down_proj", hidden, inner, cfg.mlp_bias),)
    return (
        GroupDescription(
            f"{layer}.qkv", "qkv", layer, qkv, norm=f"{prefix}.input_layernorm.weight"
        ),
        GroupDescription(
            f"{layer}.attn",
            "attn",
            layer,
            (),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
        ),
        GroupDescription(f"{layer}.o", "o", layer, output),
        GroupDescription(
            f"{layer}.gate_up",
            "gate_up",
            layer,
            gate_up,
            norm=f"{prefix}.post_attention_layernorm.weight",
        ),
        GroupDescription(f"{layer}.down", "down", layer, down),
    )


def expected_tensors(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the architecture needs: name -> shape, in the order a step meets them."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (cfg.vocab_size, cfg.hidden_size)}
    for group in describe_groups(cfg):
        if group.norm is not None:
            shapes[group.norm] = (cfg.hidden_size,)
        for part in group.parts:
            shapes[part.tensor] = (part.rows, part.cols)
            if part.bias is not None:
                shapes[part.bias] = (part.rows,)
        for name in (group.q_norm, group.k_norm):
            if name is not None:
                shapes[name] = (cfg.head_dim,)
    return shapes


def check_tensors(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> list[str]:
    """Hold the files against the configuration; returns the names that no part of it uses.

    Old files carry `rotary_emb.inv_freq` buffers, which are computed, and a tied model may carry a
    second copy of its embedding as `lm_head.weight`; neither is reported.

    Raises ModelError, one line, for missing or mis-shaped tensors, for rows that are no whole
    number of packed blocks, and for tensors whose absence from the sums would change the result.
    """
    expected = expected_tensors(cfg)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelError(
            f"a {cfg.family} model of {cfg.num_layers} layers must have {_listed(missing)}; "
            "not in its files"
        )
    misshaped = [
        f"{name} must be {list(shape)}, got {list(tensors[name].shape)}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != shape
    ]
    if misshaped:
        raise ModelError(f"tensors do not fit the configuration: {_listed(misshaped, '; ')}")
    for name, shape in expected.items():
        layout = LAYOUTS[tensors[name].layout]
        if shape[-1] % layout.block_elements:
            raise ModelError(
                f"{name}: rows in {layout.name} must hold a multiple of {layout.block_elements} "
                f"elements; got {shape[-1]}"
            )
        if len(shape) == 1 and layout.block_elements != 1:
            raise ModelError(f"{name}: a vector must be f32, f16 or bf16; got {layout.name}")
    return _unexpected(cfg, [name for name in tensors if name not in expected])


def _unexpected(cfg: DecoderConfig, names: list[str]) -> list[str]:
    unused = []
    for name in names:
        if name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and cfg.tied_embeddings):
            continue
        layer = _LAYER_TENSOR.match(name)
        if layer is not None and int(layer[1]) >= cfg.num_layers:
            raise ModelError(
                f"{name}: num_hidden_layers must cover every layer of the files; "
                f"got {cfg.num_layers}"
            )
        if _TAKES_PART.fullmatch(name):
            raise ModelError(
                f"{name}: present in the files, but the {cfg.family} config has no use for it"
            )
        unused.append(name)
    return unused


def _listed(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(items[:4])
    return shown if len(items) <= 4 else f"{shown} and {len(items) - 4} more"
