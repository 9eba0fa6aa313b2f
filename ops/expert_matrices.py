"""Where each expert's three matrices lie in the files: cut in place, whatever the files' layout.

Two layouts are in use. Apart: `mlp.experts.3.gate_proj.weight` is one matrix of one expert.
Stacked: `mlp.experts.down_proj` holds the matrices of all experts one after another, and gate and
up are stacked either each on its own (GGUF) or as the halves of `mlp.experts.gate_up_proj`
(transformers), where an expert's gate rows come before its up rows. All of them keep the rows of a
matrix together, so an expert is read straight from its file. One family does not, in safetensors:
`scattered_experts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowlane.ops.decoder_config import DecoderConfig, MoeConfig
from shadowlane.ops.errors import ModelError
from shadowlane.ops.layouts import LAYOUTS

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles, TensorSource

MATRICES = ("gate", "up", "down")
_EXPERT = re.compile(r"model\.layers\.([0-9]+)\.mlp\.experts\.([0-9]+)\..+")


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix of one expert, where it lies in a file."""

    path: str  # absolute
    offset: int  # of the first row's first byte
    nbytes: int  # of its rows together
    layout: str  # key of LAYOUTS
    rows: int
    cols: int
    row_nbytes: int
    row_stride: int  # bytes from the start of one row to that of the next in the file


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert of one layer: gate and up [inner, hidden], down [hidden, inner].

    Biases, where a family has them, are small and stay with the dense parts: see
    `expert_bias_names`.
    """

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix


def expert_bias_names(cfg: DecoderConfig, layer: int) -> tuple[str, ...]:
    """Names of the stacked biases of gate, up and down, [num_experts, rows] each, or none."""
    if cfg.moe is None or not cfg.moe.expert_bias:
        return ()
    return tuple(f"{_prefix(layer)}.{matrix}_proj_bias" for matrix in MATRICES)


def read_experts(cfg: DecoderConfig, files: ModelFiles) -> tuple[tuple[Expert, ...], ...]:
    """Every expert, [sparse layer][expert]; empty for a dense model.

    Raises ModelError, one line, for what is missing, mis-shaped or packed in broken rows.
    """
    if cfg.moe is None:
        return ()
    return tuple(_experts_of_layer(cfg, files.tensors, layer) for layer in cfg.moe.sparse_layers)


def check_experts(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> set[str]:
    """Hold the experts in the files against the configuration; returns the tensors' names."""
    if cfg.moe is None:
        return set()
    names: set[str] = set()
    for layer in cfg.moe.sparse_layers:
        expected = _expected(cfg, tensors, layer)
        _check(cfg, tensors, expected)
        names.update(expected)
    return names


def check_not_fused(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> None:
    """GPT-OSS has gate and up of an expert in turn where it has them in one tensor, others not."""
    if cfg.moe is None or cfg.family != "gpt_oss":
        return
    for layer in cfg.moe.sparse_layers:
        name = f"{_prefix(layer)}.gate_up_proj"
        if name in tensors:
            raise ModelError(f"{name}: gate and up of gpt_oss must be tensors of their own in GGUF")


def check_no_more_experts(cfg: DecoderConfig, name: str) -> None:
    """Say what is wrong where a tensor that nobody expects belongs to an expert too many."""
    match = _EXPERT.fullmatch(name)
    if cfg.moe is not None and match is not None and int(match[2]) >= cfg.moe.num_experts:
        raise ModelError(
            f"{name}: num_experts must cover every expert of the files; got {cfg.moe.num_experts}"
        )


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def _shapes(cfg: DecoderConfig, moe: MoeConfig) -> dict[str, tuple[int, int]]:
    """(rows, cols) of each matrix of an expert"""
    wide, narrow = (moe.inner, cfg.hidden_size), (cfg.hidden_size, moe.inner)
    return {"gate": wide, "up": wide, "down": narrow}


def _expected(
    cfg: DecoderConfig, tensors: Mapping[str, TensorSource], layer: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's expert tensors, in the layout that the files have."""
    assert cfg.moe is not None
    prefix, count = _prefix(layer), cfg.moe.num_experts
    shapes = _shapes(cfg, cfg.moe)
    is_fused = f"{prefix}.gate_up_proj" in tensors
    is_stacked = is_fused or any(f"{prefix}.{matrix}_proj" in tensors for matrix in MATRICES)
    if not is_stacked:
        return {
            f"{prefix}.{expert}.{matrix}_proj.weight": shapes[matrix]
            for expert in range(count)
            for matrix in MATRICES
        }
    if not is_fused:
        return {f"{prefix}.{matrix}_proj": (count, *shapes[matrix]) for matrix in MATRICES}
    rows, cols = shapes["gate"]
    return {
        f"{prefix}.gate_up_proj": (count, 2 * rows, cols),
        f"{prefix}.down_proj": (count, *shapes["down"]),
    }


def _check(
    cfg: DecoderConfig,
    tensors: Mapping[str, TensorSource],
    expected: dict[str, tuple[int, ...]],
) -> None:
    assert cfg.moe is not None
    for name, shape in expected.items():
        source = tensors.get(name)
        if source is None:
            raise ModelError(
                f"a {cfg.family} model with {cfg.moe.num_experts} experts must have {name}; "
                "not in its files"
            )
        if tuple(source.shape) != shape:
            raise ModelError(f"{name} must be {list(shape)}, got {list(source.shape)}")
        layout = LAYOUTS[source.layout]
        if shape[-1] % layout.block_elements:
            raise ModelError(
                f"{name}: rows in {layout.name} must hold a multiple of {layout.block_elements} "
                f"elements; got {shape[-1]}"
            )


def _experts_of_layer(
    cfg: DecoderConfig, tensors: Mapping[str, TensorSource], layer: int
) -> tuple[Expert, ...]:
    assert cfg.moe is not None
    expected = _expected(cfg, tensors, layer)
    _check(cfg, tensors, expected)
    prefix = _prefix(layer)
    shapes = _shapes(cfg, cfg.moe)

    def matrix(expert: int, name: str) -> ExpertMatrix:
        rows, cols = shapes[name]
        first_row = 0  # within the tensor
        tensor = f"{prefix}.{expert}.{name}_proj.weight"
        if f"{prefix}.{name}_proj" in expected:
            tensor, first_row = f"{prefix}.{name}_proj", expert * rows
        elif f"{prefix}.gate_up_proj" in expected:
            tensor, first_row = f"{prefix}.gate_up_proj", (2 * expert + (name == "up")) * rows
        source = tensors[tensor]
        row_nbytes = LAYOUTS[source.layout].row_nbytes(cols)
        return ExpertMatrix(
            path=source.path,
            offset=source.offset + first_row * row_nbytes,
            nbytes=rows * row_nbytes,
            layout=source.layout,
            rows=rows,
            cols=cols,
            row_nbytes=row_nbytes,
            row_stride=row_nbytes,
        )

    return tuple(
        Expert(*(matrix(expert, name) for name in MATRICES))
        for expert in range(cfg.moe.num_experts)
    )
