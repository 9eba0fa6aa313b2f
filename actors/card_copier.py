"""A transfer lane's own way to a card: everything that copying takes, opened and closed together.

For the process that submits its copies itself. It maps the arena, pins it, opens the memory that
the GPU actor exported, and makes one stream. It runs no kernels, for those of two processes never
overlap, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from shadowlane.actors.arena import Arena
from shadowlane.actors.card_clock import StreamClock
from shadowlane.actors.copier import CHUNK_NBYTES, About, CopyTimes, StreamCopier, Way
from shadowlane.actors.cuda.devices import find_devices
from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.actors.cuda.memory import CardMemory, CardMemoryHandle
from shadowlane.actors.cuda.pinned import (
    LEAST_STAGING_NBYTES,
    MOST_STAGING_NBYTES,
    HostAccess,
    pin_arena,
)
from shadowlane.actors.cuda.streams import CardStreams


@dataclass(frozen=True, slots=True)
class Regions:
    """The parts of an arena that matter to a card: offsets, whole pages.

    control: (offset, nbytes) of counters, abort word and activations. weights: of what is streamed.
    abort: offset of the abort word. words: offset of two counters in `control` that nobody uses.
    """

    control: tuple[int, int]
    weights: tuple[int, int]
    abort: int
    words: int

    def pin(
        self,
        driver: Driver,
        arena: Arena,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        most_staging_nbytes: int = MOST_STAGING_NBYTES,
        least_staging_nbytes: int = LEAST_STAGING_NBYTES,
    ) -> HostAccess:
        """Pin them in this process, as far as it goes."""
        return pin_arena(
            driver,
            (arena.base + self.control[0], self.control[1]),
            (arena.base + self.weights[0], self.weights[1]),
            chunk_nbytes,
            most_staging_nbytes=most_staging_nbytes,
            least_staging_nbytes=least_staging_nbytes,
        )


def ordinal_of(driver: Driver, uuid: str) -> int:
    """The number that this process has for a card. Raises CudaError if it does not see it."""
    for device in find_devices(driver):
        if device.uuid == uuid:
            return device.ordinal
    raise CudaError("finding a card", f"this process does not see {uuid}")


class CardCopier:
    """A `StreamCopier` over the memory of a card that another process owns."""

    def __init__(
        self,
        driver: Driver,
        arena: Arena,
        regions: Regions,
        handle: CardMemoryHandle,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        most_staging_nbytes: int = MOST_STAGING_NBYTES,
        least_staging_nbytes: int = LEAST_STAGING_NBYTES,
        times: Callable[[StreamClock], CopyTimes] | None = None,
    ) -> None:
        """times: what notes when copies happen, by a clock on the stream that they go to.

        Raises CudaError where memory of a card cannot be shared, or no host memory pinned.
        """
        self._clock: StreamClock | None = None
        with ExitStack() as closing:
            self._driver, self._ordinal = driver, ordinal_of(driver, handle.uuid)
            ordinal = self._ordinal
            self.enter()
            card = CardMemory.open(driver, handle)
            closing.callback(card.close)
            self.access = regions.pin(
                driver,
                arena,
                chunk_nbytes=chunk_nbytes,
                most_staging_nbytes=most_staging_nbytes,
                least_staging_nbytes=least_staging_nbytes,
            )
            closing.callback(self.access.close)
            abort, words = arena.base + regions.abort, arena.base + regions.words
            closing.callback(self._close_clock)  # after the streams
            self.streams = CardStreams(driver, ordinal, self.access.pinned, abort, words)
            closing.callback(self.streams.close)
            stream = self.streams.open()
            self._clock = StreamClock(driver, stream) if times is not None else None
            self._copier = StreamCopier(
                stream,
                arena,
                card,
                regions.abort,
                staging=self.access.staging,
                chunk_nbytes=chunk_nbytes,
                times=None if times is None or self._clock is None else times(self._clock),
            )
            self._closing = closing.pop_all()

    def enter(self) -> None:
        """Of each thread that is to call this, the first call."""
        self._driver.set_device(self._ordinal)

    def _close_clock(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def wait(self, counter: int, value: int) -> None:
        self._copier.wait(counter, value)

    def copy(
        self,
        source: int,
        target: int,
        nbytes: int,
        counter: int,
        value: int,
        way: Way = "h2d",
        about: About = (0, 0),
    ) -> None:
        self._copier.copy(source, target, nbytes, counter, value, way, about)

    def look(self) -> bool:
        return self._copier.look()

    def close(self) -> None:
        """Release what waits, and give all back; the owner of the memory must still be there."""
        self._closing.close()
