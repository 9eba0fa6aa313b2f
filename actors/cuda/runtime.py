"""A card as the code of operators sees it: kernels on a stream of ours, memory as tensors.

The only place where torch and the driver meet. Tests put another runtime in its place, whose
kernels run on the processor in the order of a recorded stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from shadowlane.actors.cuda.driver import Driver
from shadowlane.actors.cuda.memory import ArrayOnCard

if TYPE_CHECKING:
    import torch


class CardRuntime(Protocol):
    """What a lane of a card is made of."""

    driver: Driver
    device: torch.device
    uses_triton: bool | None  # None: where it runs

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """Start the kernels of `work` on this stream of the driver's."""
        ...

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Memory that the card sees at an address, uint8 [nbytes]; it keeps `owner` alive."""
        ...

    def give_back(self) -> None:
        """Let the card have all memory that no tensor holds any more."""
        ...


class CudaRuntime:
    """Torch on one CUDA card. Its ordinal is this process's, as CUDA_VISIBLE_DEVICES has it."""

    uses_triton: bool | None = None

    def __init__(self, ordinal: int) -> None:
        """Raises CudaError where there is no card, or no driver."""
        # Before the first context of the process: more work queues, so that streams do not wait
        # for each other; kernels loaded at the start, since loading may wait for all streams.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        from shadowlane.actors.cuda.driver import CudaDriver

        self.driver: Driver = CudaDriver()
        self.driver.set_device(ordinal)
        import torch

        torch.cuda.set_device(ordinal)
        self.device = torch.device("cuda", ordinal)
        self._streams: dict[int, Any] = {}

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        import torch

        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream, device=self.device)
        with torch.inference_mode(), torch.cuda.stream(self._streams[stream]):
            work()

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        import torch

        return torch.as_tensor(ArrayOnCard(address, nbytes, owner), device=self.device)

    def give_back(self) -> None:
        import torch

        torch.cuda.empty_cache()
