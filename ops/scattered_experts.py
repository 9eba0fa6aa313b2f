"""Experts whose rows do not lie in one piece each: GPT-OSS as Hugging Face has it.

Other experts are read straight from their files into RAM and multiplied as they lie. Here a row is
in two places, or in thousands, so an expert is *arranged* on its way into RAM (`arrange.py`): into
rows that lie as in every other file, which are then what all operators know. Per layer there are
two tensors, `gate_up_proj` (gate 0, up 0, gate 1, up 1, ...) and `down_proj`, each in one of two
ways:

- MXFP4, as published: `_blocks`, uint8 [experts, rows, groups, 16], with the element 2 i of a
  group in the low half of byte i and 2 i + 1 in its high half; and `_scales`, uint8 [experts, rows,
  groups], a power of two for each 32 elements.
- Not packed, as transformers writes them: [experts, cols, rows], that is, transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowlane.ops.decoder_config import DecoderConfig
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import RAW
from shadowlane.ops.files.gpt_oss import TRANSPOSED
from shadowlane.ops.layouts import LAYOUTS

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles, TensorSource

PACKED = "mxfp4"
_STACKS = (("gate_up_proj", 2), ("down_proj", 1))  # name, matrices whose rows come in turn


@dataclass(frozen=True, slots=True)
class ScatteredTensor:
    """A tensor of one expert as it lies in its file, and the matrices it is arranged into."""

    path: str
    offset: int
    scales_path: str  # as `path` where there are no scales
    scales_offset: int | None  # None: the tensor is transposed, and not packed
    layout: str  # key of LAYOUTS: of the arranged rows
    num_matrices: int
    rows: int  # of each matrix
    cols: int

    @property
    def row_nbytes(self) -> int:
        """Of an arranged row."""
        return LAYOUTS[self.layout].row_nbytes(self.cols)

    @property
    def matrix_nbytes(self) -> int:
        return self.rows * self.row_nbytes

    @property
    def nbytes(self) -> int:
        """Of the matrices, which are arranged one after another."""
        return self.num_matrices * self.matrix_nbytes

    @property
    def is_transposed(self) -> bool:
        return self.scales_offset is None

    @property
    def file_rows(self) -> int:
        return self.cols if self.is_transposed else self.num_matrices * self.rows

    @property
    def file_row_nbytes(self) -> int:
        if self.is_transposed:
            return LAYOUTS[self.layout].row_nbytes(self.num_matrices * self.rows)
        return self.cols // 2

    @property
    def scales_row_nbytes(self) -> int:
        return 0 if self.is_transposed else self.cols // LAYOUTS[PACKED].block_elements


@dataclass(frozen=True, slots=True)
class ScatteredExpert:
    gate_up: ScatteredTensor
    down: ScatteredTensor


def has_scattered_experts(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> bool:
    """Whether the experts are those of a directory of GPT-OSS."""
    if cfg.moe is None or cfg.family != "gpt_oss":
        return False
    return any(
        f"{_prefix(layer)}.{stack}{end}" in tensors
        for layer in cfg.moe.sparse_layers
        for stack, _ in _STACKS
        for end in (TRANSPOSED, "_blocks", "_scales")
    )


def check_scattered_experts(cfg: DecoderConfig, tensors: Mapping[str, TensorSource]) -> set[str]:
    """Hold the experts in the files against the configuration; returns the tensors' names."""
    assert cfg.moe is not None
    names: set[str] = set()
    for layer in cfg.moe.sparse_layers:
        expected = _expected(cfg, tensors, layer)
        for name, shape in expected.items():
            _check(cfg, tensors, name, shape)
        names.update(expected)
    return names


def read_scattered_experts(
    cfg: DecoderConfig, files: ModelFiles
) -> tuple[tuple[ScatteredExpert, ...], ...]:
    """Every expert, [sparse layer][expert]. Raises ModelError like `check_scattered_experts`."""
    assert cfg.moe is not None
    check_scattered_experts(cfg, files.tensors)
    return tuple(
        tuple(
            ScatteredExpert(
                *(_tensor(cfg, files.tensors, layer, expert, stack) for stack, _ in _STACKS)
            )
            for expert in range(cfg.moe.num_experts)
        )
        for layer in cfg.moe.sparse_layers
    )


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def _shape(cfg: DecoderConfig, stack: str) -> tuple[int, int]:
    """(rows, cols) of each matrix of a stack's experts."""
    assert cfg.moe is not None
    inner, hidden = cfg.moe.inner, cfg.hidden_size
    return (hidden, inner) if stack == "down_proj" else (inner, hidden)


def _expected(
    cfg: DecoderConfig, tensors: Mapping[str, TensorSource], layer: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's expert tensors, in the way that the files have them."""
    assert cfg.moe is not None
    count, group = cfg.moe.num_experts, LAYOUTS[PACKED].block_elements
    shapes: dict[str, tuple[int, ...]] = {}
    for stack, num_matrices in _STACKS:
        name = f"{_prefix(layer)}.{stack}"
        rows, cols = _shape(cfg, stack)
        if name + TRANSPOSED in tensors:
            shapes[name + TRANSPOSED] = (count, cols, num_matrices * rows)
            continue
        if cols % group:
            raise ModelError(
                f"{name}_blocks: rows in {PACKED} must hold a multiple of {group} elements; "
                f"got {cols}"
            )
        shapes[f"{name}_blocks"] = (count, num_matrices * rows, cols // group, group // 2)
        shapes[f"{name}_scales"] = (count, num_matrices * rows, cols // group)
    return shapes


def _check(
    cfg: DecoderConfig, tensors: Mapping[str, TensorSource], name: str, shape: tuple[int, ...]
) -> None:
    assert cfg.moe is not None
    source, shown = tensors.get(name), name.removesuffix(TRANSPOSED)
    if source is None:
        raise ModelError(
            f"a {cfg.family} model with {cfg.moe.num_experts} experts must have {shown}; "
            "not in its files"
        )
    if tuple(source.shape) != shape:
        raise ModelError(f"{shown} must be {list(shape)}, got {list(source.shape)}")
    is_raw = source.layout == RAW
    if is_raw == name.endswith(TRANSPOSED):
        wanted = "F32, F16 or BF16" if is_raw else "U8"
        raise ModelError(f"{shown}: dtype must be {wanted}; got {source.layout.upper()}")


def _tensor(
    cfg: DecoderConfig, tensors: Mapping[str, TensorSource], layer: int, expert: int, stack: str
) -> ScatteredTensor:
    """One expert's part of a stack; all its shapes have been checked."""
    assert cfg.moe is not None
    count = cfg.moe.num_experts
    name, num_matrices = f"{_prefix(layer)}.{stack}", dict(_STACKS)[stack]
    rows, cols = _shape(cfg, stack)
    values = tensors.get(name + TRANSPOSED) or tensors[f"{name}_blocks"]
    scales = tensors[f"{name}_scales"] if values.layout == RAW else None
    return ScatteredTensor(
        path=values.path,
        offset=values.offset + expert * (values.nbytes // count),
        scales_path=values.path if scales is None else scales.path,
        scales_offset=None if scales is None else scales.offset + expert * (scales.nbytes // count),
        layout=values.layout if scales is None else PACKED,
        num_matrices=num_matrices,
        rows=rows,
        cols=cols,
    )
