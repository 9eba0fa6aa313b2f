"""The cards of this machine as a plan needs them: what is free, and how fast everything is.

Measured in a process of its own, which is over before an engine starts: a context on a card takes
some hundred MiB of it. Rates are kept in the cache by the cards' own numbers; free memory is asked
for every time. Times are of the host's clock around many repetitions, so every figure holds what a
launch costs, as a step does.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shadowlane.actors.cuda.devices import find_devices
from shadowlane.actors.cuda.driver import CudaError, Direction
from shadowlane.actors.spec import CardSettings
from shadowlane.paths import cache_dir
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.sizes import format_size, free_ram, parse_size

if TYPE_CHECKING:
    from shadowlane.actors.cuda.runtime import CardRuntime

HEADROOM_NBYTES = 1 << 30  # context, activations, and a desktop that draws something
REPEATS = 20
COPY_NBYTES = 64 << 20
SMALL_NBYTES = 16 << 10
MATRIX = (8192, 8192)
MANY_ROWS = 512
DRAM_NBYTES = 256 << 20
READ_NBYTES, DISK_NBYTES = 4 << 20, 256 << 20
CPU_LAUNCH_S = 3e-6  # not measured: as in `examples/hardware/`, of an instruction and its barrier
TIMEOUT_S = 120.0
RATES_VERSION = 1


@dataclass(frozen=True, slots=True)
class CardFigures:
    """One card: what it is and reaches. Bytes, seconds."""

    name: str
    uuid: str
    nbytes: int
    free_nbytes: int
    vram_bytes_per_s: float
    flops: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    launch_s: float
    crossing_s: float


def cards_here(
    gpu_memory: str | int,
    model: Path,
    figures: Callable[[], Sequence[CardFigures]] | None = None,
) -> tuple[tuple[CardSettings, ...], Hardware]:
    """Each card with its budget, and the machine for the planner, of which `model` tells the disk.

    gpu_memory: "auto" for what is free less a headroom, a size for each card, or sizes divided by
    commas. Raises ValueError, in one line, without cards or where a budget is larger than its card.
    """
    try:
        found = (figures or read_figures)()
    except (CudaError, OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"gpu_memory must be 0 without a card: {error}") from None
    budgets = _budgets(gpu_memory, found)
    cards = (CardSettings(nbytes, each.uuid) for nbytes, each in zip(budgets, found, strict=True))
    return tuple(cards), machine_of(found, model)


def _budgets(asked: str | int, found: Sequence[CardFigures]) -> tuple[int, ...]:
    if str(asked).strip() == "auto":
        return tuple(max(0, each.free_nbytes - HEADROOM_NBYTES) for each in found)
    parts = str(asked).split(",")
    if len(parts) not in (1, len(found)):
        raise ValueError(f"gpu_memory must be one size or {len(found)} of them; got {asked}")
    sizes = [0 if part.strip() == "0" else parse_size(part, "gpu_memory") for part in parts]
    sizes = sizes * len(found) if len(sizes) == 1 else sizes
    for card, nbytes in zip(found, sizes, strict=True):
        if nbytes > card.nbytes:
            raise ValueError(
                f"gpu_memory must be at most the {format_size(card.nbytes)} of {card.name}; "
                f"got {format_size(nbytes)}"
            )
    return tuple(sizes)


def machine_of(found: Sequence[CardFigures], model: Path) -> Hardware:
    """What the planner is told of this machine; budgets replace its memory.

    All is measured here and now but for one figure, which is that of another machine.
    """
    dram = dram_bytes_per_s()
    cards = tuple(
        Card(
            name=each.name,
            vram_nbytes=float(each.nbytes),
            reserved_nbytes=0.0,
            vram_bytes_per_s=each.vram_bytes_per_s,
            flops=each.flops,
            h2d_bytes_per_s=each.h2d_bytes_per_s,
            d2h_bytes_per_s=each.d2h_bytes_per_s,
            launch_s=each.launch_s,
            crossing_s=each.crossing_s,
        )
        for each in found
    )
    return Hardware(
        name="this machine",
        cards=cards,
        cpu_bytes_per_s=dram,
        cpu_flops=cpu_flops(),
        cpu_launch_s=CPU_LAUNCH_S,
        dram_bytes_per_s=dram,
        ram_nbytes=float(free_ram().budget_nbytes),
        reserved_nbytes=0.0,
        disk_bytes_per_s=disk_bytes_per_s(model),
    )


def disk_bytes_per_s(model: Path) -> float:
    """Of large direct reads of the model's largest file, one after the other.

    Raises OSError where it cannot be read. Where the file system refuses direct reads, what the
    page cache gives.
    """
    files = [each for each in model.rglob("*") if each.is_file()] if model.is_dir() else [model]
    largest = max(files, key=lambda each: each.stat().st_size)
    try:
        descriptor = os.open(largest, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor = os.open(largest, os.O_RDONLY)
    try:
        buffer = mmap.mmap(-1, READ_NBYTES)  # at whole pages, as direct reads want it
        nbytes, began = 0, time.perf_counter()
        while nbytes < DISK_NBYTES:
            got = os.preadv(descriptor, [buffer], nbytes)
            nbytes += got
            if got < READ_NBYTES:
                break
        return max(nbytes, 1) / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def dram_bytes_per_s() -> float:
    """Of one thread that reads; a team of them reaches more, which the planner learns."""
    import numpy as np

    memory = np.ones(DRAM_NBYTES // 8, np.float64)
    took = min(_timed(lambda: memory.sum()) for _ in range(3))
    return DRAM_NBYTES / took


def cpu_flops() -> float:
    import numpy as np

    one = np.ones((1024, 1024), np.float32)
    return float(2 * 1024**3 / min(_timed(lambda: one @ one) for _ in range(3)))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Figures, from the cache or from a process of their own -------------------------------------------


def read_figures() -> list[CardFigures]:
    """Of all cards. Raises CudaError where there is none, or where measuring fails."""
    command = [sys.executable, "-m", "shadowlane.actors.cards_here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CudaError("measuring the cards", lines[-1] if lines else f"exit {done.returncode}")
    return [CardFigures(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def measure_all(make_runtime: Callable[[int], CardRuntime]) -> list[CardFigures]:
    """Measure each card, but for rates that the cache knows."""
    found = []
    first = make_runtime(0)
    for device in find_devices(first.driver):
        runtime = first if device.ordinal == 0 else make_runtime(device.ordinal)
        runtime.driver.set_device(device.ordinal)
        free, _ = runtime.driver.memory_info()
        place = _cache_path(device.uuid)
        try:
            rates = json.loads(place.read_text())
        except (OSError, ValueError):
            rates = measure_rates(runtime)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(rates))
        found.append(CardFigures(device.name, device.uuid, device.nbytes, free, **rates))
    return found


def _cache_path(uuid: str) -> Path:
    key = hashlib.sha256(f"{RATES_VERSION} {uuid}".encode()).hexdigest()[:16]
    return cache_dir() / "cards" / f"{key}.json"


def measure_rates(
    runtime: CardRuntime, matrix: tuple[int, int] = MATRIX, copy_nbytes: int = COPY_NBYTES
) -> dict[str, float]:
    """Rates of the runtime's card, by its own streams. Takes about a second."""
    import torch

    from shadowlane.actors.cuda.memory import CardMemory

    driver = runtime.driver
    stream = driver.create_stream()
    card = CardMemory.allocate(driver, copy_nbytes)
    host = driver.allocate_host(copy_nbytes)
    try:
        weights = torch.ones(matrix, dtype=torch.bfloat16, device=runtime.device)
        few = torch.ones((1, matrix[1]), dtype=torch.bfloat16, device=runtime.device)
        many = torch.ones((MANY_ROWS, matrix[1]), dtype=torch.bfloat16, device=runtime.device)
        small = torch.zeros(16, device=runtime.device)

        def seconds(start: Callable[[], object], repeats: int = REPEATS) -> float:
            """Of one of many that follow each other on the stream."""
            start()
            _settle(runtime, stream)
            began = time.perf_counter()
            for _ in range(repeats):
                start()
            _settle(runtime, stream)
            return (time.perf_counter() - began) / repeats

        def kernel(work: Callable[[], object]) -> Callable[[], None]:
            return lambda: runtime.launch(stream, lambda: work() and None)

        def copy(nbytes: int, direction: Direction) -> Callable[[], None]:
            ends = (card.address, host) if direction == Direction.H2D else (host, card.address)
            return lambda: driver.copy(*ends, nbytes, direction, stream)

        def cross() -> None:
            """An activation there and back, and the host sees it: two crossings."""
            copy(SMALL_NBYTES, Direction.H2D)()
            copy(SMALL_NBYTES, Direction.D2H)()
            _settle(runtime, stream)

        launch_s = seconds(kernel(lambda: small.add_(1) is None), 10 * REPEATS)
        few_s = seconds(kernel(lambda: (few @ weights.t()) is None))
        many_s = seconds(kernel(lambda: (many @ weights.t()) is None))
        return {
            "vram_bytes_per_s": weights.nbytes / few_s,
            "flops": 2 * MANY_ROWS * weights.numel() / many_s,
            "h2d_bytes_per_s": copy_nbytes / seconds(copy(copy_nbytes, Direction.H2D)),
            "d2h_bytes_per_s": copy_nbytes / seconds(copy(copy_nbytes, Direction.D2H)),
            "launch_s": launch_s,
            "crossing_s": seconds(cross) / 2,
        }
    finally:
        _settle(runtime, stream)
        driver.destroy_stream(stream)
        driver.free_host(host)
        card.close()


def _settle(runtime: CardRuntime, stream: int) -> None:
    while not runtime.driver.is_stream_idle(stream):
        pass


def main() -> None:
    from shadowlane.actors.cuda.runtime import CudaRuntime

    try:
        found = measure_all(CudaRuntime)
    except CudaError as error:
        sys.exit(str(error))
    print(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()
