"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

from shadowlane.cli.stages import Stages

SCRIPT = """
from shadowlane.cli.stages import Stages
with Stages() as stages:
    stages("starting Ray", None)
    stages("loading [weights]", 0.5)
    stages("loading [weights]", 1.0)
    stages.stop()
    print("text", flush=True)
    stages("too late", 0.5)
"""


def test_elsewhere_each_stage_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages() as stages:
        stages("starting Ray")
        for step in range(5):
            stages("loading [weights]", step / 4)
        stages("planning")
        stages.stop()
        stages("too late")
    output = capsys.readouterr()
    assert output.err == "starting Ray ...\nloading [weights] ...\nplanning ...\n"
    assert output.out == ""


def test_on_a_terminal_it_is_a_bar_that_goes_away_before_the_text() -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                return
            if not part:
                return
            seen.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment, timeout=60
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    shown = seen.decode()
    assert done.returncode == 0, shown
    assert "loading [weights]" in shown
    assert "50 %" in shown or "100 %" in shown
    bar, _, after = shown.rpartition("text")
    assert bar.rstrip("\r\n ").endswith("\x1b[2K") or "\x1b[2K" in bar  # the line was cleared
    assert "too late" not in shown
    assert "loading" not in after
