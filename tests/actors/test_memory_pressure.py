"""Memory that other programs take: what is read of it, and an engine that gives way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from inprocess import ONE_THREAD, cut, running, weights_nbytes
from tiny import tiny_tokens

from shadowlane.actors import shadow_link
from shadowlane.actors.blueprint import Options
from shadowlane.actors.memory_pressure import read_ram, stalled_percent
from shadowlane.planner.ram_watch import CALM_S, WAIT_S, RamRead

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)
MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def pressure(avg10: float) -> str:
    return (
        f"some avg10={avg10:.2f} avg60=0.10 avg300=0.00 total=62998147\n"
        "full avg10=99.00 avg60=0.00 avg300=0.00 total=54273897\n"
    )


def test_the_control_group_that_waits_most_counts(tmp_path: Path) -> None:
    assert stalled_percent(tmp_path) == 0.0, "a kernel that does not say"
    write(tmp_path / "proc/pressure/memory", pressure(1.5))
    assert stalled_percent(tmp_path) == 1.5
    write(tmp_path / "proc/self/cgroup", "4:memory:/old\n0::/user/app\n")
    write(tmp_path / "sys/fs/cgroup/user/memory.pressure", pressure(12.25))
    write(tmp_path / "sys/fs/cgroup/user/app/memory.pressure", pressure(3.0))
    assert stalled_percent(tmp_path) == 12.25
    write(tmp_path / "proc/pressure/memory", "none of this\n")
    assert stalled_percent(tmp_path) == 12.25


def test_what_is_free_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/app\n")
    group = tmp_path / "sys/fs/cgroup/app"
    write(group / "memory.max", "max\n")
    write(group / "memory.current", f"{1000 << 10}\n")
    assert read_ram(tmp_path).free_nbytes == 8000 << 10
    write(group / "memory.high", f"{3000 << 10}\n")
    assert read_ram(tmp_path).free_nbytes == 2000 << 10
    write(group / "memory.max", f"{2500 << 10}\n")
    assert read_ram(tmp_path).free_nbytes == 1500 << 10


def test_this_machine_can_be_read() -> None:
    found = read_ram()
    assert found.free_nbytes > 0
    assert 0.0 <= found.stalled <= 100.0


@pytest.mark.usefixtures("blocks_of_a_page")
def test_an_engine_gives_pages_back_when_ram_is_short_and_takes_them_again(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama-biases", hidden_size=192, intermediate_size=512, head_dim=48)
    ram = 64 * MIB + 2 * weights_nbytes(cut(model, OPTIONS, ONE_THREAD))
    free = [1 << 40]
    looks = itertools.count()

    def read() -> RamRead:  # a clock that runs fast
        return RamRead(next(looks) * (WAIT_S + CALM_S) / 4, free[0])

    monkeypatch.setattr(shadow_link, "read_ram", read)
    monkeypatch.setattr(shadow_link, "RAM_PERIOD_S", 0.0)
    monkeypatch.setattr(shadow_link, "CALM_PERIODS", 1)
    with running(model, ram=ram, options=OPTIONS, cores=ONE_THREAD, headroom=8 * MIB) as engine:
        inner = engine.engine
        expected = engine.generate(PROMPT)
        first = inner.placement
        assert not first.sweep
        free[0] = 0

        def until(is_so: Callable[[], bool]) -> None:
            for _ in range(300):
                if is_so():
                    return
                assert engine.generate(PROMPT) == expected
            raise AssertionError(f"{list(inner.shadow.decisions)} {inner.shadow.notes}")

        until(lambda: bool(inner.placement.sweep))
        assert inner.placement.total_nbytes < first.total_nbytes
        assert set(inner.crew.mover.homes.offsets) == {
            block for block, kept in enumerate(inner.placement.resident) if kept
        }, "what is not kept has no pages"
        assert any("RAM is short (0 B free)" in each for each in inner.shadow.decisions)
        free[0] = 1 << 40
        until(lambda: not inner.placement.sweep)
        assert any("free again" in each for each in inner.shadow.decisions)
        assert engine.generate(PROMPT) == expected
        assert inner.shadow.is_open, inner.shadow.notes
