"""Figures and tables as all reports show them. What is missing is a dash, never a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from shadowlane.sizes import format_size

Json = Mapping[str, Any]


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tok/s" if value < 100 else f"{value:.0f} tok/s"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-4:
        return f"{value * 1e6:.1f} us"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def table(*columns: tuple[str, str]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, justify in columns:
        made.add_column(title, justify=justify)  # type: ignore[arg-type]
    return made


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    made = Table.grid(padding=(0, 2))
    for name, value in rows:
        made.add_row(Text(name, style="dim"), Text(value))
    return made
