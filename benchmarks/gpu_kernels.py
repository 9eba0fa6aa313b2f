"""The kernels that `gpu.py` runs on a card, from torch, and how fast they read weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu_rig import Rig, Row, note, row

from shadowlane.actors.cuda.driver import Driver
from shadowlane.actors.cuda.small_copy import TorchSmallCopy

GROUP = 128  # weights that share a scale, of int4
SHAPES = ((2048, 2048), (4096, 4096), (11008, 4096), (4096, 11008))
LAYOUTS = ("bf16", "int8", "int4")
SLEEP_CYCLES = 10_000_000


class TorchKernels:
    """Everything on the stream that is asked for, in tensors that are made beforehand."""

    def __init__(self, driver: Driver) -> None:
        import torch

        self._torch: Any = torch
        self._streams: dict[int, Any] = {}
        self.copy_small = TorchSmallCopy()
        self._cycles_per_s: float | None = None

    def _on(self, stream: int) -> Any:
        torch = self._torch
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream)
        return torch.cuda.stream(self._streams[stream])

    def matvec(self, layout: str, rows: int, cols: int) -> tuple[Callable[[int], None], int]:
        torch = self._torch
        bf16 = torch.bfloat16
        vector = torch.randn(1, cols, dtype=bf16, device="cuda")
        result = torch.empty(rows, dtype=bf16, device="cuda")
        if layout == "bf16":
            weight = torch.randn(rows, cols, dtype=bf16, device="cuda")

            def multiply() -> None:
                torch.mv(weight, vector[0], out=result)

            nbytes = 2 * rows * cols
        elif layout == "int8":
            weight = torch.randint(-127, 127, (rows, cols), dtype=torch.int8, device="cuda")
            scales = torch.ones(rows, dtype=bf16, device="cuda")

            def multiply() -> None:
                torch._weight_int8pack_mm(vector, weight, scales)

            nbytes = rows * cols + 2 * rows
        elif layout == "int4":
            packed = torch.randint(0, 255, (rows, cols // 2), dtype=torch.uint8, device="cuda")
            weight = torch._convert_weight_to_int4pack(packed, 8)
            scales = torch.ones(cols // GROUP, rows, 2, dtype=bf16, device="cuda")

            def multiply() -> None:
                torch._weight_int4pack_mm(vector, weight, GROUP, scales)

            nbytes = rows * cols // 2 + 4 * rows * cols // GROUP
        else:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout}")
        torch.cuda.synchronize()  # what was made on torch's stream is read on another

        def run(stream: int) -> None:
            with self._on(stream):
                multiply()

        return run, nbytes

    def busy(self, stream: int, seconds: float) -> None:
        torch = self._torch
        if self._cycles_per_s is None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self._on(stream):
                torch.cuda._sleep(SLEEP_CYCLES)  # loads the kernel
                start.record()
                torch.cuda._sleep(SLEEP_CYCLES)
                end.record()
            end.synchronize()
            self._cycles_per_s = SLEEP_CYCLES / (start.elapsed_time(end) / 1e3)
        with self._on(stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))


def matvecs(rig: Rig) -> Iterator[Row]:
    """Bytes of weights per second of a product with one vector, by layout and shape.

    Small matrices may stay in the card's cache from one run to the next, as they do in no model:
    their size is in the row.
    """
    for layout in LAYOUTS:
        for rows, cols in SHAPES:
            name = f"matvec {layout} {rows} x {cols}"
            try:
                run, nbytes = rig.kernels.matvec(layout, rows, cols)
                with rig.limit(10.0):
                    rig.main.submit(run)
                    rig.finish(rig.main)
                with rig.limit():
                    seconds = [
                        rig.timed(rig.main, partial(rig.main.submit, run))
                        for _ in range(min(50, rig.repeats))
                    ]
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                yield note(name, error=" ".join(str(error).split())[:300])
                continue
            yield row(name, [nbytes / each / 1e9 for each in seconds], "GB/s", nbytes=nbytes)
