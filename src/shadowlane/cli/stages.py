"""What is going on before the first token, on standard error, so that no minute is silent."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Stages:
    """Called with a stage and how far it is; a bar on a terminal, a plain line per stage elsewhere.

    A context manager: the bar is gone when it ends, or earlier with `stop()`, before text appears.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stage: str | None = None  # the one shown now
        self._is_stopped = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        if self._is_stopped:
            return
        if not self._is_terminal:
            if stage != self._stage:
                print(f"{stage} ...", file=sys.stderr, flush=True)
            self._stage = stage
            return
        bar = self._started()
        if stage != self._stage:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(stage, total=None)
            self._stage = stage
        if fraction is not None:
            assert self._task is not None
            bar.update(self._task, total=1.0, completed=fraction)

    def stop(self) -> None:
        """Clears the bar for good: what follows belongs to the text."""
        self._is_stopped = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _started(self) -> Progress:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                Task,
                TextColumn,
                TimeElapsedColumn,
            )
            from rich.text import Text

            class Percent(TextColumn):
                def render(self, task: Task) -> Text:
                    return super().render(task) if task.total is not None else Text()

            class Stage(TextColumn):
                def render(self, task: Task) -> Text:
                    return Text(task.description)  # may hold a name: not markup

            self._bar = Progress(
                SpinnerColumn(),
                Stage(""),
                BarColumn(bar_width=24),
                Percent("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self._bar
