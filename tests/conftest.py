"""What holds for all tests."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

# A test runner that was started in the background may have Ctrl-C ignored, and would hand that on
# to every program that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where there is no card, Triton's kernels are interpreted. Triton has to know before it is loaded,
# whoever loads it. The devices are those of NVIDIA's driver, under Linux and under WSL2.
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny models gain nothing by more threads of torch, which wait for each other spinning: on cores
# that others use too, three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    leave_to_stay()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            leave_to_stay()


def leave_to_stay() -> None:
    """What there is between the tests of two files is there to stay: libraries, compiled code.

    The collector of cycles needs a quarter of a second to look through all that, and comes often.
    """
    gc.collect()
    gc.freeze()
