"""The memory of a card that is not there, and the calls about it and about host memory.

Card memory is an anonymous file, so that another process can open it by its handle. Addresses that
only a card may use are marked and never valid on the host, and the other way round: mixing them up
fails. See `recording_driver.py` for what tests set and look at.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from shadowlane.actors.cuda.devices import (
    CAPABILITY_MAJOR,
    CAPABILITY_MINOR,
    COPY_ENGINES,
    HOST_REGISTER_SUPPORTED,
    MULTIPROCESSORS,
)
from shadowlane.actors.cuda.driver import CudaError

CARD = 1 << 62  # in an address: memory of the card
MAPPED = 1 << 61  # host memory as the card sees it


class Memory:
    """Memory of the card: a mapped anonymous file."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        self.host = ctypes.addressof(ctypes.c_uint8.from_buffer(self.mapping))


class RecordingMemory:
    """The part of a recording driver that knows no streams."""

    def __init__(
        self,
        *,
        num_devices: int = 1,
        card_nbytes: int = 64 << 20,
        pin_limit: int = 1 << 40,
        has_ipc: bool = True,
        stands_apart: bool = False,
        num_copy_engines: int = 2,
    ) -> None:
        """stands_apart: it is another process's, though a test has it in this one."""
        self.stands_apart = stands_apart
        self.num_devices = num_devices
        self.card_nbytes = card_nbytes
        self.pin_limit = pin_limit
        self.has_ipc = has_ipc
        self.failures: dict[str, str] = {}
        self.calls: list[tuple[str, tuple]] = []  # as they came, from all threads
        self.hazards: list[str] = []
        self.last_error: str | None = None
        self._attributes = {
            COPY_ENGINES: num_copy_engines,
            CAPABILITY_MAJOR: 8,
            CAPABILITY_MINOR: 6,
            MULTIPROCESSORS: 30,
            HOST_REGISTER_SUPPORTED: 1,
        }
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._devices: dict[int, int] = {}  # thread -> ordinal
        self._cards: dict[int, Memory] = {}
        self._imported: set[int] = set()
        self._pinned: dict[int, int] = {}
        self._allocated_host: dict[int, mmap.mmap] = {}
        self._next_card = CARD

    def holding(self) -> list[int]:
        """Streams that wait for a counter."""
        return []

    def host_address(self, address: int, nbytes: int) -> int:
        """Where the bytes of an address of the card really lie."""
        if address & CARD:
            for base, memory in list(self._cards.items()):
                if base <= address and address + nbytes <= base + memory.nbytes:
                    return memory.host + (address - base)
        elif address & MAPPED:
            host = address & ~MAPPED
            if self._registration(host, nbytes) is not None:
                return host
        raise CudaError("kernel", "CUDA_ERROR_ILLEGAL_ADDRESS")

    # -- devices

    def set_device(self, ordinal: int) -> None:
        self._record("set_device", ordinal)
        if not 0 <= ordinal < self.num_devices:
            raise self._error("set_device", "cudaErrorInvalidDevice")
        self._devices[threading.get_ident()] = ordinal

    def device_count(self) -> int:
        return self.num_devices

    def device_name(self, ordinal: int) -> str:
        return "recording card"

    def device_uuid(self, ordinal: int) -> bytes:
        return bytes([ordinal + 1]) * 16

    def device_nbytes(self, ordinal: int) -> int:
        return self.card_nbytes

    def device_attribute(self, ordinal: int, attribute: int) -> int:
        return self._attributes.get(attribute, 0)

    def memory_info(self) -> tuple[int, int]:
        used = sum(each.nbytes for base, each in self._cards.items() if base not in self._imported)
        return self.card_nbytes - used, self.card_nbytes

    def clear_error(self) -> None:
        self._record("clear_error")
        self.last_error = None

    # -- memory of the card

    def allocate(self, nbytes: int) -> int:
        self._record("allocate", nbytes)
        self._check_hazard("allocate")
        if nbytes > self.memory_info()[0]:
            raise self._error("allocate", "cudaErrorMemoryAllocation")
        descriptor = os.memfd_create("recording card")
        os.ftruncate(descriptor, nbytes)
        return self._add_memory(Memory(descriptor, nbytes))

    def _add_memory(self, memory: Memory) -> int:
        with self._lock:
            address = self._next_card
            self._next_card += -(-memory.nbytes // (2 << 20)) * (2 << 20) + (2 << 20)
            self._cards[address] = memory
        return address

    def free(self, address: int) -> None:
        self._record("free", address)
        self._check_hazard("free")
        if address not in self._cards or address in self._imported:
            raise self._error("free", "cudaErrorInvalidValue")
        os.close(self._cards.pop(address).descriptor)

    def export_memory(self, address: int) -> bytes:
        self._record("export_memory", address)
        if not self.has_ipc:
            raise self._error("export_memory", "cudaErrorNotSupported")
        memory = self._cards[address]
        return f"{os.getpid()} {memory.descriptor} {memory.nbytes}".encode().ljust(64, b"\0")

    def import_memory(self, blob: bytes) -> int:
        self._record("import_memory")
        pid, number, nbytes = (int(each) for each in blob.rstrip(b"\0").split())
        if not self.has_ipc or (pid == os.getpid() and not self.stands_apart):
            raise self._error("import_memory", "cudaErrorMapBufferObjectFailed")
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError:
            raise self._error("import_memory", "cudaErrorMapBufferObjectFailed") from None
        address = self._add_memory(Memory(descriptor, nbytes))
        self._imported.add(address)
        return address

    def close_imported(self, address: int) -> None:
        self._record("close_imported", address)
        self._imported.remove(address)
        os.close(self._cards.pop(address).descriptor)

    # -- memory of the host

    def register_host(self, address: int, nbytes: int) -> None:
        self._record("register_host", address, nbytes)
        self._check_hazard("register_host")
        overlaps = any(
            start < address + nbytes and address < start + length
            for start, length in self._pinned.items()
        )
        if overlaps:
            raise self._error("register_host", "cudaErrorHostMemoryAlreadyRegistered")
        self._check_pins("register_host", nbytes)
        self._pinned[address] = nbytes

    def _check_pins(self, call: str, nbytes: int) -> None:
        used = sum(self._pinned.values()) + sum(len(each) for each in self._allocated_host.values())
        if used + nbytes > self.pin_limit:
            raise self._error(call, "cudaErrorMemoryAllocation")

    def unregister_host(self, address: int) -> None:
        self._record("unregister_host", address)
        del self._pinned[address]

    def mapped_address(self, address: int) -> int:
        self._record("mapped_address", address)
        if self._registration(address, 1) is None:
            raise self._error("mapped_address", "cudaErrorInvalidValue")
        return address | MAPPED

    def allocate_host(self, nbytes: int) -> int:
        self._record("allocate_host", nbytes)
        self._check_hazard("allocate_host")
        self._check_pins("allocate_host", nbytes)
        mapping = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))
        self._allocated_host[address] = mapping
        return address

    def free_host(self, address: int) -> None:
        self._record("free_host", address)
        self._check_hazard("free_host")
        del self._allocated_host[address]

    def _registration(self, address: int, nbytes: int) -> int | None:
        """The start of the one registration that holds a range, None if there is none."""
        ranges = [*self._pinned.items()]
        ranges += [(start, len(each)) for start, each in self._allocated_host.items()]
        for start, length in ranges:
            if start <= address and address + nbytes <= start + length:
                return start
        return None

    # -- inside

    def _record(self, name: str, *arguments: object) -> None:
        with self._lock:
            self.calls.append((name, arguments))
        if name not in ("set_device", "clear_error") and (
            threading.get_ident() not in self._devices
        ):
            self.hazards.append(f"{name} before set_device in {threading.current_thread().name}")
        self._fail(name)

    def _fail(self, name: str) -> None:
        if name in self.failures:
            raise self._error(name, self.failures[name])

    def _error(self, call: str, name: str) -> CudaError:
        self.last_error = name
        return CudaError(call, name)

    def _check_hazard(self, name: str) -> None:
        """What a real driver may do only when the card is idle, and so never ends if it waits."""
        if holding := self.holding():
            self.hazards.append(f"{name} while stream {holding[0]} waits for a counter")
