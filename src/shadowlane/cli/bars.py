"""How busy each lane is, on the last line of the terminal, while text appears above it.

The last line is taken out of the scrolling part of the screen for as long as the bars are shown,
so text and bars never meet. Nothing is drawn where standard output is no terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowlane.llm import LLM

PERIOD_S = 0.25
WIDTH = 10  # characters of one bar
FULL, EMPTY = "█", "░"

Use = tuple[float, Mapping[str, tuple[float, int]]]  # (monotonic s, lane -> (busy s, bytes))


def bar_line(before: Use, after: Use, columns: int) -> str:
    """One line: per lane its name, a bar of its busy part of the time between, and GB/s moved."""
    elapsed = max(1e-9, after[0] - before[0])
    parts = []
    for name, (busy_s, nbytes) in after[1].items():
        old_busy_s, old_nbytes = before[1].get(name, (0.0, 0))
        part = min(1.0, max(0.0, (busy_s - old_busy_s) / elapsed))
        filled = round(part * WIDTH)
        speed = (nbytes - old_nbytes) / elapsed / 1e9
        bar = FULL * filled + EMPTY * (WIDTH - filled)
        parts.append(f"{name} {bar} {100 * part:3.0f} % {speed:4.1f} GB/s")
    return "   ".join(parts)[:columns]


class LaneBars:
    """A context manager; `write` puts text above the bars."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._is_shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw_often, daemon=True)
        self._rows = 0

    def __enter__(self) -> LaneBars:
        if self._is_shown:
            self._rows = shutil.get_terminal_size().lines
            # a line of room, then the scrolling part without the last line, the cursor as it was
            self._put(f"\n\x1b[1A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_shown:
            self._over.set()
            self._thread.join(timeout=2)
            self._put(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")

    def write(self, text: str) -> None:
        self._put(text)

    def _put(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _draw_often(self) -> None:
        before: Use | None = None
        while not self._over.wait(PERIOD_S):
            try:
                after = self._llm.lane_use()
            except Exception:  # the text's own reader says what is wrong
                return
            if before is not None:
                line = bar_line(before, after, shutil.get_terminal_size().columns - 1)
                self._put(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[2m{line}\x1b[0m\x1b8")
            before = after
