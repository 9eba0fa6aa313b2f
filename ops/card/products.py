"""Inputs times blocks of weights, by whatever is fastest on the device.

Rows of decode: direct layouts by torch's product in the type of the weights, packed ones by the
Triton kernels that read them as they are, with float32 inputs. Rows of a chunk: direct or expanded
weights in the compute type by torch's product. Sums are float32 throughout. Without Triton, packed
weights are expanded in decode too.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on a card with Triton installed, or interpreted."""
    try:
        import triton
    except ImportError:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def join_blocks(blocks: Iterable[CardBlock]) -> list[CardBlock]:
    """Blocks that lie one behind the other, in memory and in their matrix, as one.

    A product is a kernel or more per block, so a lane joins what it holds whenever that changes.
    """
    joined: list[CardBlock] = []
    for block in sorted(blocks, key=lambda each: (each.part, each.output_row)):
        last = joined[-1] if joined else None
        if last is None or not _follows(last, block):
            joined.append(block)
            continue
        nbytes = last.data.numel() + block.data.numel()
        data = last.data.as_strided((nbytes,), (1,))
        rows = last.num_rows + block.num_rows
        joined[-1] = CardBlock(last.layout, data, rows, last.output_row, last.part)
    return joined


def _follows(last: CardBlock, block: CardBlock) -> bool:
    is_next = (last.part, last.output_row + last.num_rows) == (block.part, block.output_row)
    return (
        is_next
        and last.layout == block.layout
        and last.data.untyped_storage().data_ptr() == block.data.untyped_storage().data_ptr()
        and last.data.data_ptr() + last.data.numel() == block.data.data_ptr()
    )


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
            found = inputs.new_empty((len(inputs), last - first))
            self.write_few(inputs, block, first, last, found, None, False)
            return found
        return inputs @ expand(block.layout, block.rows(first, last), block.cols).t()

    def write_few(
        self,
        inputs: torch.Tensor,
        block: CardBlock,
        first: int,
        last: int,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        adds: bool,
    ) -> None:
        """As `few`, into `out` [rows, last - first] (+ bias) (+ what is there, if `adds`)."""
        if self.uses_triton and block.layout not in DIRECT:
            from shadowlane.ops.card.kernels_triton import multiply

            multiply(block.layout, block.rows(first, last), inputs, out, bias, adds)
            return
        found = self.few(inputs, block, first, last)
        if bias is not None:
            found = found + bias
        if adds:
            out += found
        else:
            out.copy_(found)

    def gate_up_few(
        self,
        inputs: torch.Tensor,
        gate: tuple[CardBlock, int, int],
        up: tuple[CardBlock, int, int],
        out: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
        clamp: tuple[float, float] | None,
    ) -> None:
        """The activation of gate, times up, for the same rows of two packed blocks, by Triton.

        gate, up: a block, and the first and the end of its rows; out: [rows, their number].
        """
        from shadowlane.ops.card.kernels_triton import gate_up

        gate_bias, up_bias = biases
        both = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        packed = (gate[0].rows(*gate[1:]), up[0].rows(*up[1:]))
        gate_up((gate[0].layout, up[0].layout), packed, inputs, out, both, clamp)

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
