"""What is read off the lanes' counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from inprocess import cut, plan, smallest_ram

from shadowlane.actors.arena import Arena, plan_layout
from shadowlane.actors.gauges import Gauges, ordered
from shadowlane.actors.spec import Options
from shadowlane.ops import table as t

CORES = ((0,), (1,))


@pytest.fixture
def gauges(tiny_model: Callable[..., Path]) -> Gauges:
    blueprint = cut(tiny_model("llama2"), Options(context=128), CORES)
    placement = plan(blueprint, smallest_ram(blueprint) + (1 << 20), CORES)
    layout = plan_layout(blueprint, placement)
    return Gauges(Arena.create(layout.nbytes), layout, placement.lanes, blueprint.catalog)


def test_delays_are_fractions_also_when_threads_are_new(
    gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    delay = [gauges._workers[lane][0] for lane in (0, 1)]
    delay[0][t.RUN_DELAY_NS] = 5_000_000_000
    assert gauges.run_queue_delays() == []  # nothing to compare with yet
    now[0] += 0.1
    assert gauges.run_queue_delays() == []  # too soon
    now[0] += 0.4
    delay[0][t.RUN_DELAY_NS] = 100_000_000  # the thread is a new one, and was kept waiting 0.1 s
    delay[1][t.RUN_DELAY_NS] = 250_000_000
    fractions = {event.lane: event.fraction for event in gauges.run_queue_delays()}
    assert fractions == pytest.approx({"cpu:0": 0.2, "cpu:1": 0.5})
    now[0] += 60
    assert gauges.run_queue_delays() == []  # the last look is too long ago


def test_a_ring_is_read_from_its_oldest_row() -> None:

    ring = np.array([[4], [1], [2], [3]])
    assert ordered(ring, 5).ravel().tolist() == [1, 2, 3, 4]
    assert ordered(ring, 2).ravel().tolist() == [4, 1]
