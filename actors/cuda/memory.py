"""The memory of a card that a lane owns: one allocation, shared between processes by handle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.sizes import format_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CardMemoryHandle:
    """What another process needs to open a card's memory. It holds while the owner lives."""

    blob: bytes
    nbytes: int
    uuid: str  # of the card; ordinals differ between processes


class CardMemory:
    """`nbytes` at `address` in the memory of a card; offsets are relative to it.

    It comes from cudaMalloc and never from a memory pool, which could not be exported. The owner
    must outlive those who opened it: what they see of freed memory is undefined.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int, *, is_owner: bool) -> None:
        self._driver = driver
        self._is_owner = is_owner
        self._is_open = True
        self.address = address
        self.nbytes = nbytes

    @classmethod
    def allocate(cls, driver: Driver, nbytes: int) -> CardMemory:
        """Take so much of this thread's device. CudaError says how much was free if it fails."""
        if nbytes <= 0:
            raise ValueError(f"memory of a card must be positive; got {nbytes}")
        try:
            address = driver.allocate(nbytes)
        except CudaError as error:
            driver.clear_error()
            if not error.is_out_of_memory:
                raise
            free, total = driver.memory_info()
            left = f"{format_size(free)} of {format_size(total)} are free"
            raise CudaError(error.call, error.name, left) from None
        return cls(driver, address, nbytes, is_owner=True)

    @classmethod
    def open(cls, driver: Driver, handle: CardMemoryHandle) -> CardMemory:
        """Map the memory of another process. CudaError where the system refuses that."""
        try:
            address = driver.import_memory(handle.blob)
        except CudaError:
            driver.clear_error()
            raise
        return cls(driver, address, handle.nbytes, is_owner=False)

    def export(self, uuid: str) -> CardMemoryHandle:
        """A handle for one other process. CudaError where the system refuses that."""
        try:
            return CardMemoryHandle(self._driver.export_memory(self.address), self.nbytes, uuid)
        except CudaError:
            self._driver.clear_error()
            raise

    def at(self, offset: int, nbytes: int) -> int:
        """The address of a range. Raises ValueError if it leaves the memory."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"a range must lie within {self.nbytes} bytes; got {offset}+{nbytes}")
        return self.address + offset

    def array(self, offset: int, nbytes: int) -> ArrayOnCard:
        """A range as an object that array libraries understand; it keeps this memory alive."""
        return ArrayOnCard(self.at(offset, nbytes), nbytes, self)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A range as a uint8 tensor, without a copy; `.view(dtype)` makes it what it is."""
        import torch

        return torch.as_tensor(self.array(offset, nbytes), device="cuda")

    def close(self) -> None:
        """Free it, or close the mapping. No stream may use it any more, or wait for anything."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_owner:
            self._driver.free(self.address)
        else:
            self._driver.close_imported(self.address)


@dataclass(frozen=True, slots=True)
class ArrayOnCard:
    """`nbytes` bytes that the card sees at `address`; tensors made from it hold it, it `owner`."""

    address: int
    nbytes: int
    owner: object = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
