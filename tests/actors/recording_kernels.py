"""Kernels for `benchmarks/gpu.py` over the recording driver: they do what they say, no faster."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from recording_driver import RecordingDriver


class RecordingKernels:
    def __init__(self, driver: RecordingDriver) -> None:
        self._driver = driver

    def copy_small(self, stream: int, target: int, source: int, nbytes: int) -> None:
        def kernel() -> None:
            places = [self._driver.host_address(each, nbytes) for each in (target, source)]
            ctypes.memmove(*places, nbytes)

        self._driver.launch(stream, kernel, "copy_small", nbytes)

    def matvec(self, layout: str, rows: int, cols: int) -> tuple[Callable[[int], None], int]:
        if layout == "int4":
            raise NotImplementedError("no int4 on this card")
        nbytes = rows * cols * (2 if layout == "bf16" else 1)
        return lambda stream: self._driver.launch(stream, lambda: None, "matvec"), nbytes

    def busy(self, stream: int, seconds: float) -> None:
        self._driver.launch(stream, lambda: time.sleep(seconds), "busy")
