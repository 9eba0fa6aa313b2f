"""What needs a card: everything here is skipped, and says so, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model

from shadowlane.actors.cuda.devices import find_devices
from shadowlane.actors.cuda.driver import CudaDriver, CudaError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA card; torch finds none")
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    try:
        driver = CudaDriver()
        find_devices(driver)
    except CudaError as error:
        pytest.skip(f"no CUDA card: {error}")
    driver.set_device(0)
    return driver


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As for the tests of `ops`: `tiny_model("qwen2-window")` -> its directory."""
    written: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in written:
            written[family] = write_tiny_model(tmp_path_factory.mktemp(family), family)
        return written[family]

    return write
