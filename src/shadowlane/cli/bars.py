"""How busy each lane is, on the last line of the terminal, while text appears above it.

The last line is taken out of the scrolling part of the screen for as long as the bars are shown,
so text and bars never meet. Nothing is drawn where standard output is no terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowlane.llm import LLM

PERIOD_S = 0.25
FULL, EMPTY = "█", "░"
HEIGHTS = "▁▂▃▄▅▆▇█"  # a bar of one character
# (characters of a bar, whether percent and GB/s are shown, blanks between lanes), fullest first:
# what all lanes have room for on one line is shown.
FORMS = (
    (10, True, True, 3),
    (10, True, False, 3),
    (4, True, False, 2),
    (1, True, False, 1),
    (1, False, False, 1),
)

Use = tuple[float, Mapping[str, tuple[float, int]]]  # (monotonic s, lane -> (busy s, bytes))


def bar_line(before: Use, after: Use, columns: int) -> str:
    """One line: per lane its name, a bar of its busy part of the time between, and GB/s moved.

    Many lanes have shorter bars and no GB/s; at last a bar of one character each.
    """
    elapsed = max(1e-9, after[0] - before[0])
    use: list[tuple[str, float, float]] = []
    for name, (busy_s, nbytes) in after[1].items():
        old_busy_s, old_nbytes = before[1].get(name, (0.0, 0))
        part = min(1.0, max(0.0, (busy_s - old_busy_s) / elapsed))
        use.append((name, part, (nbytes - old_nbytes) / elapsed / 1e9))
    # By the widest figures, so that the form is the same all the time.
    widest = [(name, 1.0, 99.9) for name, _, _ in use]
    form = next((each for each in FORMS if len(_line(widest, *each)) <= columns), FORMS[-1])
    return _line(use, *form)[:columns]


def _line(
    use: Sequence[tuple[str, float, float]], width: int, percent: bool, speeds: bool, blanks: int
) -> str:
    parts = []
    for name, part, speed in use:
        text = f"{name} {_bar(part, width)}"
        if percent:
            text += f" {100 * part:3.0f}{' ' if width > 1 else ''}%"
        parts.append(text + (f" {speed:4.1f} GB/s" if speeds else ""))
    return (" " * blanks).join(parts)


def _bar(part: float, width: int) -> str:
    if width == 1:
        return HEIGHTS[round(part * (len(HEIGHTS) - 1))]
    filled = round(part * width)
    return FULL * filled + EMPTY * (width - filled)


class LaneBars:
    """A context manager; `write` puts text above the bars."""

    def __init__(self, llm: LLM, *, is_emulated: bool = False) -> None:
        self._llm = llm
        self._label = "emulated: " if is_emulated else ""
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
                room = shutil.get_terminal_size().columns - 1 - len(self._label)
                line = self._label + bar_line(before, after, room)
                self._put(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[2m{line}\x1b[0m\x1b8")
            before = after
