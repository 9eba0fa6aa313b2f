"""Tests on a real card. Without one they are skipped and say why."""

from __future__ import annotations

import pytest

from shadowlane.actors.cuda.devices import find_devices
from shadowlane.actors.cuda.driver import CudaDriver, CudaError


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    try:
        driver = CudaDriver()
        find_devices(driver)
    except CudaError as error:
        pytest.skip(f"no CUDA card: {error}")
    driver.set_device(0)
    return driver
