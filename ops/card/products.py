"""Inputs times blocks of weights, by whatever is fastest on the device.

Rows of decode: direct layouts by torch's product in the type of the weights, packed ones by the
Triton kernels that read them as they are, with float32 inputs. Rows of a chunk: direct or expanded
weights in the compute type by torch's product. Sums are float32 throughout. Without Triton, packed
weights are expanded in decode too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shadowlane.ops.card.packed_torch import DIRECT, direct_rows, expand
from shadowlane.ops.layouts import LAYOUTS


@dataclass(frozen=True, slots=True)
class CardBlock:
    """A block of weights on the card, as it lies in its file."""

    layout: str
    data: torch.Tensor  # uint8 [rows * row bytes] on the device, at any address
    num_rows: int
    output_row: int = 0  # of the group's output that its first row computes; see `BlockSource`
    part: int = 0  # index of its tensor in the group

    @property
    def cols(self) -> int:
        layout = LAYOUTS[self.layout]
        return self.data.numel() // self.num_rows // layout.block_nbytes * layout.block_elements

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Bytes of some of its rows, uint8 [rows, row bytes]."""
        return self.data.view(self.num_rows, -1)[first:last]


class Products:
    """Products on one device. `uses_triton`: packed weights of decode rows go through Triton."""

    def __init__(self, device: torch.device, dtype: torch.dtype, uses_triton: bool) -> None:
        self._device, self.dtype, self.uses_triton = device, dtype, uses_triton

    def few(self, inputs: torch.Tensor, block: CardBlock, first: int, last: int) -> torch.Tensor:
        """Decode rows, float32 [rows, cols], times rows first..last of a block: float32."""
        if block.layout in DIRECT:
            weights = direct_rows(block.layout, block.rows(first, last))
            return self._multiply(inputs.to(weights.dtype), weights)
        if self.uses_triton:
            from shadowlane.ops.card.kernels_triton import multiply

            return multiply(block.layout, block.rows(first, last), inputs)
        return inputs @ expand(block.layout, block.rows(first, last), block.cols).t()

    def many(self, inputs: torch.Tensor, block: CardBlock, first: int, last: int) -> torch.Tensor:
        """A chunk's rows, compute type [rows, cols], times rows first..last of a block: float32."""
        return self._multiply(inputs, self.expanded(block, first, last))

    def expanded(self, block: CardBlock, first: int, last: int) -> torch.Tensor:
        """Rows first..last of a block in the compute type, [rows, cols]."""
        rows = block.rows(first, last)
        if block.layout in DIRECT:
            return direct_rows(block.layout, rows).to(self.dtype)
        return expand(block.layout, rows, block.cols).to(self.dtype)

    def _multiply(self, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if inputs.dtype == torch.float32:
            return inputs @ weights.t()
        if self._device.type == "cuda":
            return torch.mm(inputs, weights.t(), out_dtype=torch.float32)
        # the processor rounds its result where the card does not
        return inputs.float() @ weights.float().t()
