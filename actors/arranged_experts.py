"""How an expert whose rows lie scattered in the files comes into its slot: through a buffer.

What the file has is read in pieces of whole rows into a buffer in the arena, and arranged from
there (`ops/arrange.py`). So in its slot an expert lies as one that is read in place, without the
ends of pages around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.file_range import FileRange
from shadowlane.ops.scattered_experts import ScatteredExpert, ScatteredTensor
from shadowlane.planner.placement import PAGE_NBYTES, whole_pages

PIECE_NBYTES = 2 << 20  # of a file that are in a buffer at a time; a disk's full speed begins here
ALIGNMENT = 64  # of a matrix in its slot


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file's tensor on their way into a slot."""

    ranges: tuple[FileRange, ...]  # of the rows, and of their scales where these lie apart
    home: int  # where in the slot the matrices of the tensor begin
    tensor: ScatteredTensor
    first: int  # row of the file's tensor
    count: int

    @property
    def path(self) -> str:
        return self.ranges[0].path

    @property
    def offset(self) -> int:
        return self.ranges[0].offset

    @property
    def held_nbytes(self) -> int:
        return sum(each.held_nbytes for each in self.ranges)

    def arrange(self, memory: np.ndarray, buffer: int, home: int) -> None:
        """From `memory[buffer:]`, where the ranges are one after another, to `memory[home:]`."""
        from shadowlane.ops.arrange import arrange

        starts, at = [], buffer
        for each in self.ranges:
            starts.append(at + each.skew)
            at += each.held_nbytes
        arrange(self.tensor, self.first, self.count, memory, starts[0], starts[-1], home)


@dataclass(frozen=True, slots=True)
class ArrangedExpert:
    """One expert; the same questions as to `PlainExpert`."""

    expert: ScatteredExpert

    @property
    def extents(self) -> tuple[Piece, ...]:
        return tuple(
            piece
            for tensor, home in zip(self._tensors, (0, self._down), strict=True)
            for piece in _pieces(tensor, home)
        )

    @property
    def places(self) -> tuple[int, int, int]:
        return 0, self.expert.gate_up.matrix_nbytes, self._down

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def held_nbytes(self) -> int:
        """What reading it costs."""
        return sum(piece.held_nbytes for piece in self.extents)

    @property
    def slot_nbytes(self) -> int:
        return whole_pages(self._down + self.expert.down.nbytes)

    @property
    def paths(self) -> set[str]:
        return {path for each in self._tensors for path in (each.path, each.scales_path)}

    @property
    def _tensors(self) -> tuple[ScatteredTensor, ScatteredTensor]:
        return self.expert.gate_up, self.expert.down

    @property
    def _down(self) -> int:
        return -(-self.expert.gate_up.nbytes // ALIGNMENT) * ALIGNMENT


def _piece_rows(tensor: ScatteredTensor) -> int:
    return min(tensor.file_rows, max(1, PIECE_NBYTES // tensor.file_row_nbytes))


def _pieces(tensor: ScatteredTensor, home: int) -> Iterable[Piece]:
    height = _piece_rows(tensor)
    for first in range(0, tensor.file_rows, height):
        count = min(height, tensor.file_rows - first)
        nbytes = tensor.file_row_nbytes
        ranges = [FileRange(tensor.path, tensor.offset + first * nbytes, count * nbytes)]
        if tensor.scales_offset is not None:
            nbytes = tensor.scales_row_nbytes
            offset = tensor.scales_offset + first * nbytes
            ranges.append(FileRange(tensor.scales_path, offset, count * nbytes))
        yield Piece(tuple(ranges), home, tensor, first, count)


def buffer_nbytes(expert: ScatteredExpert) -> int:
    """Room for any piece of experts of this shape, wherever it begins in its file."""
    return max(
        sum(
            whole_pages(_piece_rows(tensor) * nbytes) + PAGE_NBYTES
            for nbytes in (tensor.file_row_nbytes, tensor.scales_row_nbytes)
            if nbytes
        )
        for tensor in (expert.gate_up, expert.down)
    )
