"""Which cards there are, and what matters of each to a plan and to its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.sizes import format_size

# attributes, as the driver numbers them
MULTIPROCESSORS = 16
INTEGRATED = 18
COPY_ENGINES = 40
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
HOST_REGISTER_SUPPORTED = 99


@dataclass(frozen=True, slots=True)
class Device:
    """One card as the driver describes it; nothing here needs a context on it."""

    ordinal: int
    name: str
    uuid: str  # "GPU-..." as nvidia-smi prints it; the ordinal differs between processes
    capability: tuple[int, int]
    nbytes: int
    copy_engines: int  # 1: what goes up waits for what comes down
    multiprocessors: int
    is_integrated: bool  # its memory is the computer's
    can_register_host: bool
    is_wsl2: bool  # pinned memory is capped there, and sharing may not work

    def __str__(self) -> str:
        engines = "1 copy engine" if self.copy_engines == 1 else f"{self.copy_engines} copy engines"
        capability = f"{self.capability[0]}.{self.capability[1]}"
        return f"{self.name}, {format_size(self.nbytes)}, capability {capability}, {engines}"


@cache
def is_wsl2() -> bool:
    """Whether this Linux runs inside Windows."""
    try:
        return "microsoft" in Path("/proc/sys/kernel/osrelease").read_text().lower()
    except OSError:
        return False


def uuid_text(uuid: bytes) -> str:
    """16 bytes as `nvidia-smi -L` prints them."""
    digits = uuid.hex()
    return "GPU-" + "-".join(
        digits[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    )


def find_devices(driver: Driver) -> list[Device]:
    """All cards in the driver's order. Raises CudaError if there is none, or no driver."""
    count = driver.device_count()
    if count == 0:
        raise CudaError("cudaGetDeviceCount", "no CUDA card")
    return [_describe(driver, ordinal) for ordinal in range(count)]


def _describe(driver: Driver, ordinal: int) -> Device:
    def attribute(number: int) -> int:
        return driver.device_attribute(ordinal, number)

    return Device(
        ordinal=ordinal,
        name=driver.device_name(ordinal),
        uuid=uuid_text(driver.device_uuid(ordinal)),
        capability=(attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR)),
        nbytes=driver.device_nbytes(ordinal),
        copy_engines=attribute(COPY_ENGINES),
        multiprocessors=attribute(MULTIPROCESSORS),
        is_integrated=bool(attribute(INTEGRATED)),
        can_register_host=bool(attribute(HOST_REGISTER_SUPPORTED)),
        is_wsl2=is_wsl2(),
    )


def free_nbytes(driver: Driver, ordinal: int) -> int:
    """Free memory of a card as this process may ask for it.

    Makes this thread's device the current one and so creates a context on it, which takes a few
    hundred MiB itself: ask where the lane of the card lives.
    """
    driver.set_device(ordinal)
    free, _ = driver.memory_info()
    return free
