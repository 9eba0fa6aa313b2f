"""Planning below the memory monitor of a cluster that somebody else started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadowlane.actors.ray_memory import (
    DEFAULT_THRESHOLD,
    PROCESSES_NBYTES,
    MemoryMonitor,
    fit_below,
    read_monitor,
)
from shadowlane.actors.spec import EngineSettings, Options, ServiceSpec
from shadowlane.sizes import GIB, FreeRam

TOTAL = 64 * GIB
FREE = FreeRam(20 * GIB, 2 * GIB, "MemAvailable")


def spec_of(ram: int) -> ServiceSpec:
    return ServiceSpec(Path("/model"), Options(), EngineSettings(ram, ((0,),)))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, MemoryMonitor(DEFAULT_THRESHOLD)),
        ({"RAY_memory_monitor_refresh_ms": "0"}, None),
        ({"RAY_memory_monitor_refresh_ms": "250"}, MemoryMonitor(DEFAULT_THRESHOLD)),
        ({"RAY_memory_usage_threshold": "0.8"}, MemoryMonitor(0.8)),
        ({"RAY_memory_usage_threshold": "most"}, MemoryMonitor(DEFAULT_THRESHOLD)),
    ],
)
def test_read_from_the_environment_of_the_node(
    environment: dict[str, str], expected: MemoryMonitor | None
) -> None:
    assert read_monitor(environment) == expected


def test_a_budget_below_is_left_alone() -> None:
    spec = spec_of(GIB)
    assert fit_below(MemoryMonitor(0.95), spec, False, FREE, TOTAL) == spec


@pytest.mark.parametrize("threshold", [0.75, 0.8, 0.95])
def test_a_default_budget_keeps_the_node_below_the_threshold(threshold: float) -> None:
    fitted = fit_below(MemoryMonitor(threshold), spec_of(FREE.budget_nbytes), False, FREE, TOTAL)
    used = TOTAL - FREE.free_nbytes
    assert used + fitted.settings.ram + PROCESSES_NBYTES <= threshold * TOTAL + 1
    assert fitted.settings.ram > 0
    assert [note for note in fitted.notes if f"{threshold:.0%}" in note]


def test_a_budget_that_was_asked_for_is_kept_with_a_note() -> None:
    fitted = fit_below(MemoryMonitor(0.8), spec_of(19 * GIB), True, FREE, TOTAL)
    assert fitted.settings.ram == 19 * GIB
    assert len(fitted.notes) == 1


def test_a_node_above_the_threshold_already_gets_a_note_and_no_negative_budget() -> None:
    fitted = fit_below(MemoryMonitor(0.5), spec_of(GIB), False, FREE, TOTAL)
    assert fitted.settings.ram == GIB
    assert "0 B are left" in fitted.notes[0]
