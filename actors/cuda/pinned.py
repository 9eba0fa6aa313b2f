"""Host memory that a card can reach by itself: ranges of the arena, or a small ring for staging.

Registered ("pinned") memory is copied by the card's engines without a thread, and can be read and
written by streams and kernels at its *mapped* address. How much may be pinned differs: all of RAM
on most Linux machines, half of it or less than 1 GiB under WSL2. So the arena is pinned whole where
that goes, and otherwise weights pass through a ring that is as large as the system allows. Nothing
is pinned in part: plans would have to know two speeds of one tier.
"""

from __future__ import annotations

import bisect
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.sizes import format_size

PAGE = 4096
CHUNK_NBYTES = 1 << 30  # of one registration: drivers refuse very large ones, kernels cap at 2 GB
MOST_STAGING_NBYTES = 256 << 20
LEAST_STAGING_NBYTES = 8 << 20
MADV_POPULATE_WRITE = 23
POLL_S = 20e-6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Registration:
    """One pinned piece of host memory, and where the card sees it."""

    address: int
    nbytes: int
    mapped: int


class PinnedMemory:
    """The host memory that this process has registered with a card, in pieces of about 1 GiB.

    NOTE: pinned pages of an arena must not be given back to the system (`Arena.release`): the
    processes would get new pages there, and the card keep the old ones.
    """

    def __init__(self, driver: Driver, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        if chunk_nbytes < PAGE or chunk_nbytes % PAGE:
            raise ValueError(f"a registration must be whole pages; got {chunk_nbytes}")
        self._driver = driver
        self._chunk_nbytes = chunk_nbytes
        self._pieces: list[Registration] = []  # by address
        self._starts: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._pieces)

    def register(self, address: int, nbytes: int) -> None:
        """Pin a range, whole pages, all of it or none: raises CudaError if a piece is refused.

        Slow (0.1-0.5 s per GiB) and with locks of the driver: do it before serving.
        """
        if address % PAGE or nbytes % PAGE or nbytes <= 0:
            raise ValueError(f"a pinned range must be whole pages; got {nbytes} at {address:#x}")
        touch(address, nbytes)
        done: list[Registration] = []
        for start in range(address, address + nbytes, self._chunk_nbytes):
            part = min(self._chunk_nbytes, address + nbytes - start)
            try:
                self._driver.register_host(start, part)
                done.append(Registration(start, part, 0))
                done[-1] = Registration(start, part, self._driver.mapped_address(start))
            except CudaError as error:
                self._driver.clear_error()
                for each in done:
                    self._driver.unregister_host(each.address)
                pinned = format_size(sum(each.nbytes for each in done))
                raise CudaError(error.call, error.name, f"{pinned} went before") from None
        self._pieces = sorted([*self._pieces, *done], key=lambda each: each.address)
        self._starts = [each.address for each in self._pieces]

    def _piece(self, address: int) -> Registration:
        number = bisect.bisect_right(self._starts, address) - 1
        if number >= 0:
            piece = self._pieces[number]
            if address < piece.address + piece.nbytes:
                return piece
        raise ValueError(f"host memory must be pinned; got {address:#x}")

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of a range is pinned."""
        try:
            self.split(address, nbytes)
        except ValueError:
            return False
        return True

    def split(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """The range as (address, nbytes) within one registration each, as copies have to be."""
        parts = []
        while nbytes > 0:
            piece = self._piece(address)
            part = min(nbytes, piece.address + piece.nbytes - address)
            parts.append((address, part))
            address += part
            nbytes -= part
        return parts

    def mapped(self, address: int) -> int:
        """Where the card sees this byte. Raises ValueError if it is not pinned."""
        piece = self._piece(address)
        return piece.mapped + (address - piece.address)

    def close(self) -> None:
        """Unregister all; no copy may be under way."""
        for piece in self._pieces:
            self._driver.unregister_host(piece.address)
        self._pieces, self._starts = [], []


def touch(address: int, nbytes: int) -> None:
    """Have the system find pages for a range of shared memory, so that pinning only locks them."""
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return
    # An older kernel. Reading is enough: a hole in shared memory gets its page then.
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    np.frombuffer(memoryview(memory), np.uint8)[::PAGE].max()


class Submits(Protocol):
    """A stream, for what a staging ring does with it."""

    def submit(self, work: Callable[[int], None]) -> None: ...


class StagingRing:
    """A few slots of pinned memory of the driver's own, used in turn by one thread.

    `slot` is where the next piece goes; `pass_on` says that the stream has been given all that
    reads or writes it: the slot is free again when the stream has got there.
    """

    def __init__(self, driver: Driver, address: int, num_slots: int, slot_nbytes: int) -> None:
        self._driver = driver
        self._address = address
        self._events = [driver.create_event() for _ in range(num_slots)]
        self._is_used = [False] * num_slots
        self._is_recorded = [False] * num_slots  # an event that was never recorded counts as done
        self._next = 0
        self.slot_nbytes = slot_nbytes

    @classmethod
    def largest(
        cls,
        driver: Driver,
        slot_nbytes: int,
        most_nbytes: int = MOST_STAGING_NBYTES,
        least_nbytes: int = LEAST_STAGING_NBYTES,
    ) -> StagingRing:
        """As large a ring as the system allows, trying half of what was refused each time.

        Raises the last CudaError if not even the smallest one goes.
        """
        least_nbytes = max(least_nbytes, 2 * slot_nbytes)
        wanted = max(most_nbytes, least_nbytes)
        while True:
            num_slots = wanted // slot_nbytes
            try:
                address = driver.allocate_host(num_slots * slot_nbytes)
                break
            except CudaError:
                driver.clear_error()
                if wanted <= least_nbytes:
                    raise
            wanted = max(wanted // 2, least_nbytes)
        try:
            return cls(driver, address, num_slots, slot_nbytes)
        except CudaError:
            driver.free_host(address)
            raise

    @property
    def nbytes(self) -> int:
        return len(self._events) * self.slot_nbytes

    def slot(self, is_aborted: Callable[[], bool]) -> int | None:
        """The address of the next slot, once it is free; None if the wait is aborted."""
        if not self.wait_for(self._next, is_aborted):
            return None
        return self._address + self._next * self.slot_nbytes

    def pass_on(self, stream: Submits) -> int:
        """The slot is in the stream's hands; returns its number, for `wait_for`."""
        number = self._next
        self._is_used[number], self._is_recorded[number] = True, False
        self._next = (number + 1) % len(self._events)

        def record(handle: int) -> None:
            self._driver.record_event(self._events[number], handle)
            self._is_recorded[number] = True

        stream.submit(record)
        return number

    def wait_for(self, number: int, is_aborted: Callable[[], bool]) -> bool:
        """Wait until the stream has passed this slot; False if the wait is aborted."""
        while self._is_used[number]:
            if self._is_recorded[number] and self._driver.is_event_done(self._events[number]):
                self._is_used[number] = False
                return True
            if is_aborted():
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        self._events = []
        self._driver.free_host(self._address)


@dataclass(frozen=True, slots=True)
class HostAccess:
    """How a process gets at the arena from a card: what is pinned, and a ring where it is not."""

    pinned: PinnedMemory
    staging: StagingRing | None
    reason: str  # what was refused, for people; "" where the whole arena is pinned

    def close(self) -> None:
        """Give all back; no copy may be under way."""
        if self.staging is not None:
            self.staging.close()
        self.pinned.close()


def pin_arena(
    driver: Driver,
    control: tuple[int, int],
    weights: tuple[int, int],
    slot_nbytes: int,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    most_staging_nbytes: int = MOST_STAGING_NBYTES,
    least_staging_nbytes: int = LEAST_STAGING_NBYTES,
) -> HostAccess:
    """Pin an arena as far as it goes. control, weights: (address, nbytes), whole pages.

    The control region holds counters and activations. It is small and comes first; where it cannot
    be registered, streams cannot reach counters and fall back to events. Raises CudaError only if
    not even a staging ring can be had.
    """
    pinned = PinnedMemory(driver, chunk_nbytes)
    reason = ""
    for region in (control, weights):
        try:
            pinned.register(*region)
        except CudaError as error:
            reason = reason or str(error)
    if not reason or pinned.holds(*weights):
        return HostAccess(pinned, None, reason)
    try:
        staging = StagingRing.largest(
            driver, slot_nbytes, most_staging_nbytes, least_staging_nbytes
        )
    except CudaError:
        pinned.close()
        raise
    return HostAccess(pinned, staging, f"{reason}; staging {format_size(staging.nbytes)}")
