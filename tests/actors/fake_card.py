"""Cards that are not there: lanes of cards over the recording driver, operators on the processor.

Kernels are torch on the processor, run in the order of the recorded stream, over the plain memory
that stands for that of the card.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import inprocess
import pytest
import torch
from recording_driver import RecordingDriver

from shadowlane.actors import card_lane
from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.actors.cuda.runtime import CardRuntime
from shadowlane.actors.hosts import CardLaneHost, Remote, TransferLaneHost, _LocalRemote

CARD_NBYTES = 4 << 30  # of which only what is touched is really taken


# Triton's interpreter patches what all threads share: one kernel at a time.
interpreting = threading.Lock()


class FakeRuntime:
    uses_triton = False  # its interpreter is slow

    def __init__(self, driver: RecordingDriver) -> None:
        self.driver = driver
        self.device = torch.device("cpu")

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        self.driver.refuse_launch()

        def kernel() -> None:
            with torch.inference_mode(), interpreting if self.uses_triton else nullcontext():
                try:
                    work()
                except BaseException as error:  # a card would report it at the next call
                    self.driver.failed.append(error)

        self.driver.launch(stream, kernel)

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        host = self.driver.host_address(address, nbytes)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(host), dtype=torch.uint8)

    def close(self) -> None:
        assert not self.driver.stuck()


class FakeDriver(RecordingDriver):
    """A recording driver of one card, and what its kernels failed with."""

    def __init__(self, **abilities: Any) -> None:
        super().__init__(**{"card_nbytes": CARD_NBYTES, **abilities})
        self.failed: list[BaseException] = []
        self.refused_after: list[int] = []  # launches after which one more finds no memory
        self.num_launched = 0

    def refuse_launch(self) -> None:
        """As torch does where its kernels need more memory than there is."""
        self.num_launched += 1
        if self.refused_after and self.num_launched > self.refused_after[0]:
            del self.refused_after[0]
            raise torch.OutOfMemoryError("CUDA out of memory")


class FakeCardHost(CardLaneHost):
    def __init__(self, number: int, card: int, driver: FakeDriver) -> None:
        super().__init__(number, card, 0)
        self._driver = driver

    def make_runtime(self) -> CardRuntime:
        return FakeRuntime(self._driver)


class FakeLinkHost(TransferLaneHost):
    """A transfer lane whose process has a driver of its own."""

    def __init__(self, card: int, driver: FakeDriver | None) -> None:
        super().__init__(card)
        self._driver = driver

    def make_driver(self, uuid: str) -> Driver:
        if self._driver is None:
            raise CudaError("cuInit", "CUDA_ERROR_NO_DEVICE")
        return self._driver


@contextmanager
def fake_cards(
    patch: pytest.MonkeyPatch,
    cards: int = 1,
    base: type = inprocess.ScriptedHost,
    processes: list[FakeDriver] | None = None,
    **abilities: Any,
) -> Iterator[list[FakeDriver]]:
    """Engines that `running` starts get these cards. At the end nothing may be left of them.

    processes: drivers of the transfer lanes' processes; None: these see no card.
    """
    drivers = [FakeDriver(**abilities) for _ in range(cards)]

    class Host(base):
        def start_card(
            self, number: int, card: int, *, is_emulated: bool, uuid: str = ""
        ) -> Remote:
            assert not is_emulated
            lane = FakeCardHost(number, card, drivers[card])
            return self.as_remote(_LocalRemote(f"gpu:{card}", lane, self._pool))

        def start_link(self, card: int) -> Remote:
            link = FakeLinkHost(card, processes[card] if processes else None)
            return self.as_remote(_LocalRemote(f"h2d:{card}", link, self._pool))

        def as_remote(self, remote: Remote) -> Remote:
            wrap = getattr(super(), "as_remote", None)
            return remote if wrap is None else wrap(remote)

    with patch.context() as here:
        here.setattr(inprocess, "ScriptedHost", Host)
        here.setattr(
            card_lane, "MOST_FEW", (1,)
        )  # kernels of a test are torch's: they need no more
        here.setattr(inprocess, "ThreadHost", Host) if base is inprocess.ThreadHost else None
        try:
            yield drivers
        finally:  # the cause, where a test has failed for it
            for driver in drivers:
                assert not driver.failed, driver.failed
    for driver in [*drivers, *(processes or [])]:
        assert driver.stuck() == {}, "no stream may be left waiting"
        assert not any(driver.left().values()), driver.left()
        assert driver.hazards == [], sorted(set(driver.hazards))
        driver.shut_down()
