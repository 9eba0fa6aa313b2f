"""Notes in the width of a terminal, and whole lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from shadowlane.cli.notes import say, say_notes

LONG = "what is worth knowing takes many words, with /a/path/that-is/not/cut-at-hyphens in it " * 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_on_a_terminal_lines_end_between_words(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    say_notes([LONG])
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert " ".join(lines) == f"note: {LONG.strip()}"


def test_elsewhere_a_note_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    say(LONG)
    assert capsys.readouterr().err == LONG + "\n"


def test_the_width_is_that_of_standard_error() -> None:
    """Standard output may go to a file meanwhile."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    script = (
        "import fcntl, struct, termios\n"
        "fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 50, 0, 0))\n"
        f"from shadowlane.cli.notes import say\nsay({LONG!r})"
    )
    command = [sys.executable, "-c", script]
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, timeout=60, check=True
    )
    lines = os.read(ours, 1 << 16).decode().splitlines()
    for end in (ours, theirs):
        os.close(end)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 50
