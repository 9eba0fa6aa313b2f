"""Copies of activations by a kernel of torch, straight from and to pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowlane.actors.cuda.memory import ArrayOnCard

if TYPE_CHECKING:
    import torch

WORD_NBYTES = 4


class TorchSmallCopy:
    """A `SmallCopy`: an element-wise operator, since torch's own copies use the copy engine.

    Addresses are the card's. Tensors over them are made once per address and kept: lanes use the
    same few places in every step.
    """

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, stream: int, target: int, source: int, nbytes: int) -> None:
        import torch

        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream)
        to, of = self._tensor(target, nbytes), self._tensor(source, nbytes)
        if (target | source | nbytes) % WORD_NBYTES == 0:
            to, of = to.view(torch.int32), of.view(torch.int32)
        with torch.cuda.stream(self._streams[stream]):
            torch.bitwise_or(of, 0, out=to)

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        key = (address, nbytes)
        if key not in self._tensors:
            self._tensors[key] = torch.as_tensor(ArrayOnCard(address, nbytes), device="cuda")
        return self._tensors[key]
