"""Where the experts of a mixture lie in their files, and how each is read into a slot.

An expert is three matrices, which may lie apart or side by side. What is adjacent is read in one
request. Reads are direct, so each brings the whole 4 KiB pages around what is wanted, and where in
its slot a matrix begins depends on the expert. Experts that cannot be read in place go another way:
`arranged_experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shadowlane.actors.arranged_experts import ArrangedExpert, Piece, buffer_nbytes
from shadowlane.actors.file_range import FileRange
from shadowlane.ops.decoder_config import DecoderConfig, MoeConfig
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expert_matrices import Expert, ExpertMatrix, read_experts
from shadowlane.ops.files import ModelFiles
from shadowlane.ops.scattered_experts import (
    ScatteredExpert,
    ScatteredTensor,
    has_scattered_experts,
    read_scattered_experts,
)
from shadowlane.planner.catalog import Experts
from shadowlane.planner.placement import PAGE_NBYTES as PAGE


@dataclass(frozen=True, slots=True)
class PlainExtent(FileRange):
    """Adjacent matrices of an expert, read as they lie."""

    home: int  # where in the slot the enclosing range begins


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """One expert: what is read, and where gate, up and down are in its slot then."""

    extents: tuple[PlainExtent, ...]
    places: tuple[int, int, int]
    nbytes: int  # of the weights

    @property
    def held_nbytes(self) -> int:
        return sum(extent.held_nbytes for extent in self.extents)

    @property
    def slot_nbytes(self) -> int:
        return self.held_nbytes

    @property
    def paths(self) -> set[str]:
        return {extent.path for extent in self.extents}


Extent = PlainExtent | Piece
ExpertSource = PlainExpert | ArrangedExpert


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """What the operators need to know of a matrix, alike for all experts of a layer."""

    layout: str
    rows: int
    row_nbytes: int  # from one row to the next


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """All experts of a model, by key: number of the sparse layer * experts per layer + expert."""

    sources: tuple[ExpertSource, ...]
    formats: tuple[tuple[MatrixFormat, MatrixFormat, MatrixFormat], ...]  # by sparse layer
    catalog: Experts
    buffer_nbytes: int = 0  # what a thread needs to arrange experts; 0: they are read in place


def plan_experts(config: DecoderConfig, files: ModelFiles) -> ExpertPlan | None:
    """None for a dense model. Raises ModelError for experts that do not fit together."""
    moe = config.moe
    if moe is None:
        return None
    if has_scattered_experts(config, files.tensors):
        scattered = read_scattered_experts(config, files)
        arranged = tuple(ArrangedExpert(expert) for layer in scattered for expert in layer)
        formats = tuple(_arranged_formats(layer[0]) for layer in scattered)
        catalog = _catalog(len(scattered), moe, arranged)
        room = max(buffer_nbytes(layer[0]) for layer in scattered)
        return ExpertPlan(arranged, formats, catalog, room)
    layers = read_experts(config, files)
    for number, layer in zip(moe.sparse_layers, layers, strict=True):
        _check_alike(number, layer)
    sources = tuple(_source(expert) for layer in layers for expert in layer)
    formats = tuple(_formats(layer[0]) for layer in layers)
    return ExpertPlan(sources, formats, _catalog(len(layers), moe, sources))


def _catalog(num_layers: int, moe: MoeConfig, sources: Sequence[ExpertSource]) -> Experts:
    return Experts(
        num_layers=num_layers,
        per_layer=moe.num_experts,
        top_k=moe.top_k,
        nbytes=sum(source.nbytes for source in sources) // len(sources),
        held_nbytes=sum(source.held_nbytes for source in sources) // len(sources),
        slot_nbytes=max(source.slot_nbytes for source in sources),
    )


def _check_alike(number: int, layer: Sequence[Expert]) -> None:
    """The experts of a layer are multiplied by the same operators."""
    first = layer[0]
    for index, expert in enumerate(layer):
        for name in ("gate", "up", "down"):
            mine, other = _format(getattr(expert, name)), _format(getattr(first, name))
            if mine != other:
                raise ModelError(
                    f"layer {number}: all experts must have the same types; {name} of expert 0 is "
                    f"{other.layout}, of expert {index} {mine.layout}"
                )


def _format(matrix: ExpertMatrix) -> MatrixFormat:
    return MatrixFormat(matrix.layout, matrix.rows, matrix.row_stride)


def _formats(expert: Expert) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
    return _format(expert.gate), _format(expert.up), _format(expert.down)


def _arranged_formats(
    expert: ScatteredExpert,
) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
    def one(tensor: ScatteredTensor) -> MatrixFormat:
        return MatrixFormat(tensor.layout, tensor.rows, tensor.row_nbytes)

    return one(expert.gate_up), one(expert.gate_up), one(expert.down)


def _source(expert: Expert) -> PlainExpert:
    matrices = (expert.gate, expert.up, expert.down)
    order = sorted(range(3), key=lambda index: (matrices[index].path, matrices[index].offset))
    groups: list[list[int]] = []
    for index in order:
        matrix = matrices[index]
        if groups:
            last = matrices[groups[-1][-1]]
            if last.path == matrix.path and matrix.offset - (last.offset + _span(last)) < PAGE:
                groups[-1].append(index)
                continue
        groups.append([index])
    extents: list[PlainExtent] = []
    places = [0, 0, 0]
    home = 0
    for group in groups:
        first = matrices[group[0]]
        end = max(matrices[index].offset + _span(matrices[index]) for index in group)
        extent = PlainExtent(first.path, first.offset, end - first.offset, home)
        for index in group:
            places[index] = home + extent.skew + matrices[index].offset - first.offset
        extents.append(extent)
        home += extent.held_nbytes
    nbytes = sum(matrix.nbytes for matrix in matrices)
    return PlainExpert(tuple(extents), (places[0], places[1], places[2]), nbytes)


def _span(matrix: ExpertMatrix) -> int:
    """Bytes from the first of a matrix to its last."""
    return (matrix.rows - 1) * matrix.row_stride + matrix.row_nbytes


def layouts_of(formats: Sequence[tuple[MatrixFormat, MatrixFormat, MatrixFormat]]) -> set[str]:
    return {matrix.layout for layer in formats for matrix in layer}
