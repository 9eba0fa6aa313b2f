"""The line of busy lanes under the text."""

from __future__ import annotations

import io

import pytest

from shadowlane.cli.bars import EMPTY, FULL, LaneBars, bar_line


class FakeLLM:
    def __init__(self) -> None:
        self.calls = 0

    def lane_use(self) -> tuple[float, dict[str, tuple[float, int]]]:
        self.calls += 1
        return float(self.calls), {"cpu:0": (0.5 * self.calls, 3_000_000_000 * self.calls)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_the_time_between_two_looks() -> None:
    before = (10.0, {"cpu:0": (4.0, 0), "disk:0": (1.0, 10**9)})
    after = (12.0, {"cpu:0": (5.0, 4 * 10**9), "disk:0": (3.5, 2 * 10**9)})
    line = bar_line(before, after, 200)
    assert f"cpu:0 {FULL * 5}{EMPTY * 5}  50 %  2.0 GB/s" in line
    assert f"disk:0 {FULL * 10} 100 %  0.5 GB/s" in line
    assert len(bar_line(before, after, 5)) == 5


@pytest.mark.parametrize(("lanes", "shows"), [(2, "GB/s"), (3, FULL * 10), (4, "%"), (6, "%")])
def test_all_lanes_are_seen_on_eighty_columns(lanes: int, shows: str) -> None:
    names = ("cpu:0", "gpu:0", "h2d:0", "gpu:1", "h2d:1", "disk:0")[:lanes]
    before = (0.0, dict.fromkeys(names, (0.0, 0)))
    busy = (1.0, dict.fromkeys(names, (1.0, 10**9)))
    idle = (1.0, dict.fromkeys(names, (0.0, 0)))
    line = bar_line(before, busy, 79)
    assert len(line) <= 79
    assert all(name in line for name in names)
    assert shows in line
    assert len(bar_line(before, idle, 79)) == len(line), "the form does not jump"


def test_the_lanes_of_four_cards_have_a_bar_of_one_character_each() -> None:
    names = [f"{kind}:{card}" for card in range(4) for kind in ("gpu", "h2d")]
    after = (1.0, {name: (number / 7, 0) for number, name in enumerate(names)})
    line = bar_line((0.0, {}), after, 79)
    assert line.startswith("gpu:0 ▁ h2d:0 ▂ gpu:1 ▃")
    assert line.endswith("h2d:3 █")


def test_nothing_but_the_text_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = FakeLLM()
    with LaneBars(llm) as bars:  # type: ignore[arg-type]
        bars.write("text")
    assert capsys.readouterr().out == "text"
    assert llm.calls == 0


def test_the_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shadowlane.cli.bars.PERIOD_S", 0.001)
    with LaneBars(FakeLLM(), is_emulated=True) as bars:  # type: ignore[arg-type]
        bars.write("text")
        while "GB/s" not in screen.getvalue():
            pass
    shown = screen.getvalue()
    assert "emulated: cpu:0" in shown
    assert "text" in shown
    assert shown.endswith("\x1b[2K\x1b[r\x1b8")  # the line is cleared, the whole screen scrolls
