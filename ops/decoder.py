"""One description of a decoder that covers Llama, Mistral, Qwen2, Qwen3 and their mixtures.

The families differ in a handful of switches (biases, a norm on q and k, sliding windows, experts),
so a configuration is read into one `DecoderConfig`, and everything else (which tensors there must
be, which groups a step runs) follows from it. What the description cannot express is refused by
name: a model that would run with a wrong result is worse than one that does not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from shadowlane.ops.decoder_config import DecoderConfig, DType, read_config
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expert_matrices import (
    Expert,
    ExpertMatrix,
    check_experts,
    check_no_more_experts,
    check_not_fused,
    expert_bias_names,
    read_experts,
)
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.scattered_experts import check_scattered_experts, has_scattered_experts

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles, TensorSource

__all__ = [
    "DecoderConfig",
    "Expert",
    "ExpertMatrix",
    "GroupDescription",
    "GroupPart",
    "check_tensors",
    "describe_groups",
    "expected_tensors",
    "read_config",
    "read_decoder",
    "read_experts",
]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

GroupKind = Literal["embed", "qkv", "attn", "o", "gate_up", "down", "router", "experts", "lm_head"]

# A bias or a norm that the files hold takes part in the sums of the model they were made for;
# leaving it out because the configuration does not mention it would change the result.
_TAKES_PART = re.compile(r"(model|lm_head)\b.*(\.bias|norm\.weight)")
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.")
_MLP_TENSOR = re.compile(r"model\.layers\.\d+\.mlp\..+")


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One matrix of a group: `rows` outputs, `cols` inputs, as it lies in the file [rows, cols]."""

    tensor: str
    rows: int
    cols: int
    bias: str | None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    name: str  # "embed", "12.qkv", "12.experts", "12.shared_down", ..., "lm_head"
    kind: GroupKind
    layer: int | None
    parts: tuple[GroupPart, ...]
    norm: str | None = None  # weight of the RMS norm applied to the group's input
    # attn only: RMS norm over each head of q (or its whole width), before the rotation
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None  # attn only: one logit for each head [num_heads]
    # experts only: stacked biases of gate, up and down, [num_experts, rows] each
    expert_biases: tuple[str, ...] = ()


def read_decoder(files: ModelFiles) -> DecoderConfig:
    """The decoder in `files`, its tensors checked. Raises ModelError for what cannot be run."""
    factors = files.rope_factors
    rope_factors = None
    if factors is not None:
        count = factors.nbytes // 4  # GGUF keeps them as float32
        rope_factors = np.fromfile(factors.path, "<f4", count, offset=factors.offset).tolist()
    cfg = read_config(
        files.config, rope_factors=rope_factors, default_dtype=_dtype_of(files.tensors)
    )
    check_tensors(cfg, files.tensors)
    return cfg


def _dtype_of(tensors: Mapping[str, TensorSource]) -> DType:
    """The type of the embedding stands in where a config names none, as published GPT-OSS."""
    names: dict[str, DType] = {"bf16": "bfloat16", "f16": "float16"}
    source = tensors.get(EMBEDDING)
    return names.get(source.layout, "float32") if source is not None else "float32"


def describe_groups(cfg: DecoderConfig) -> tuple[GroupDescription, ...]:
    """The groups of one step in execution order: embed, those of each layer, lm_head.

    A layer is qkv, attn, o, and then gate_up and down; or, with experts, router, shared_gate_up,
    experts and shared_down (the second and the last only where an expert is shared). The router's
    parts are its matrix [num_experts, hidden] and the shared expert's gate [1, hidden]; the group
    of experts has no parts, `read_experts` has their matrices.

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
    hidden = cfg.hidden_size

    def norm(module: str) -> str | None:
        return f"{prefix}.self_attn.{module}.weight" if cfg.qk_norm else None

    qkv = (
        _part(f"{prefix}.self_attn.q_proj", q_rows, hidden, cfg.qkv_bias),
        _part(f"{prefix}.self_attn.k_proj", kv_rows, hidden, cfg.qkv_bias),
        _part(f"{prefix}.self_attn.v_proj", kv_rows, hidden, cfg.qkv_bias),
    )
    output = (_part(f"{prefix}.self_attn.o_proj", hidden, q_rows, cfg.o_bias),)
    is_sparse = cfg.moe is not None and layer in cfg.moe.sparse_layers
    return (
        GroupDescription(
            f"{layer}.qkv", "qkv", layer, qkv, norm=f"{prefix}.input_layernorm.weight"
        ),
        GroupDescription(
            f"{layer}.attn",
            "attn",
            layer,
            (),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            sinks=f"{prefix}.self_attn.sinks" if cfg.attention_sinks else None,
        ),
        GroupDescription(f"{layer}.o", "o", layer, output),
        *(_sparse_groups(cfg, layer) if is_sparse else _dense_groups(cfg, layer)),
    )


def _part(module: str, rows: int, cols: int, has_bias: bool) -> GroupPart:
    return GroupPart(f"{module}.weight", rows, cols, f"{module}.bias" if has_bias else None)


def _mlp_groups(
    cfg: DecoderConfig, layer: int, name: str, module: str, inner: int, has_bias: bool
) -> tuple[GroupDescription, GroupDescription]:
    """The two groups of an MLP that every token goes through."""
    hidden = cfg.hidden_size
    gate_up = (
        _part(f"{module}.gate_proj", inner, hidden, has_bias),
        _part(f"{module}.up_proj", inner, hidden, has_bias),
    )
    down = (_part(f"{module}.down_proj", hidden, inner, has_bias),)
    norm = _mlp_norm(layer)
    return (
        GroupDescription(f"{layer}.{name}gate_up", "gate_up", layer, gate_up, norm=norm),
        GroupDescription(f"{layer}.{name}down", "down", layer, down),
    )


def _mlp_norm(layer: int) -> str:
    return f"model.layers.{layer}.post_attention_layernorm.weight"


def _dense_groups(cfg: DecoderConfig, layer: int) -> tuple[GroupDescription, ...]:
    module = f"model.layers.{layer}.mlp"
    return _mlp_groups(cfg, layer, "", module, cfg.intermediate_size, cfg.mlp_bias)


def _sparse_groups(cfg: DecoderConfig, layer: int) -> tuple[GroupDescription, ...]:
    moe, prefix = cfg.moe, f"model.layers.{layer}.mlp"
    assert moe is not None
    router = f"{prefix}.router" if cfg.family == "gpt_oss" else f"{prefix}.gate"
    choosing = [_part(router, moe.num_experts, cfg.hidden_size, moe.router_bias)]
    if moe.has_shared_gate:
        choosing.append(_part(f"{prefix}.shared_expert_gate", 1, cfg.hidden_size, False))
    before: tuple[GroupDescription, ...] = ()
    after: tuple[GroupDescription, ...] = ()
    if moe.shared_inner:
        gate_up, down = _mlp_groups(
            cfg, layer, "shared_", f"{prefix}.shared_expert", moe.shared_inner, False
        )
        before, after = (gate_up,), (down,)
    norm = _mlp_norm(layer)
    return (
        GroupDescription(f"{layer}.router", "router", layer, tuple(choosing), norm=norm),
        *before,
        GroupDescription(
            f"{layer}.experts",
            "experts",
            layer,
            (),
            norm=norm,
            expert_biases=expert_bias_names(cfg, layer),
        ),
        *after,
    )


def expected_tensors(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the architecture needs: name -> shape, in the order a step meets them.

    The matrices of experts are not among them: how they are named and stacked differs from file to
    file, see `read_experts`.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (cfg.vocab_size, cfg.hidden_size)}
    for group in describe_groups(cfg):
        if group.norm is not None:
            shapes[group.norm] = (cfg.hidden_size,)
        for part in group.parts:
            shapes[part.tensor] = (part.rows, part.cols)
            if part.bias is not None:
                shapes[part.bias] = (part.rows,)
        for name, num_heads in (
            (group.q_norm, cfg.num_heads),
            (group.k_norm, cfg.num_kv_heads),
        ):
            if name is not None:
                width = num_heads if cfg.full_width_qk_norm else 1
                shapes[name] = (width * cfg.head_dim,)
        if group.sinks is not None:
            shapes[group.sinks] = (cfg.num_heads,)
        if group.expert_biases:
            assert cfg.moe is not None
            gate, up, down = group.expert_biases
            shapes[gate] = shapes[up] = (cfg.moe.num_experts, cfg.moe.inner)
            shapes[down] = (cfg.moe.num_experts, cfg.hidden_size)
    return shapes


def check_tensors(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> list[str]:
    """Hold the files against the configuration; returns the names that no part of it uses.

    Old files carry `rotary_emb.inv_freq` buffers, which are computed, and a tied model may carry a
    second copy of its embedding as `lm_head.weight`; neither is reported.

    Raises ModelError, one line, for missing or mis-shaped tensors, for rows that are no whole
    number of packed blocks, and for tensors whose absence from the sums would change the result.
    """
    check_not_fused(cfg, tensors)
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
        is_vector = len(shape) == 1 or name.endswith("_bias")
        if is_vector and layout.block_elements != 1:
            raise ModelError(f"{name}: a vector must be f32, f16 or bf16; got {layout.name}")
    if has_scattered_experts(cfg, tensors):
        expert_names = check_scattered_experts(cfg, tensors)
    else:
        expert_names = check_experts(cfg, tensors)
    return _unexpected(
        cfg, [name for name in tensors if name not in expected and name not in expert_names]
    )


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
        check_no_more_experts(cfg, name)
        takes_part = _TAKES_PART.fullmatch(name)
        if takes_part or (cfg.moe is not None and _MLP_TENSOR.fullmatch(name)):
            raise ModelError(
                f"{name}: present in the files, but the {cfg.family} config has no use for it"
            )
        unused.append(name)
    return unused


def _listed(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(items[:4])
    return shown if len(items) <= 4 else f"{shown} and {len(items) - 4} more"
