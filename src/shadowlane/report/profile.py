"""What was measured of a machine with a model, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shadowlane.report.figures import Json, rate, seconds, size, table


def _figure(key: str, value: Any) -> str:
    """A value with the unit that its name ends in."""
    if value is None:
        return "unmeasured"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if key.endswith("tok_per_s"):
        return rate(value)
    if key.endswith("nbytes"):
        return size(int(value))
    if key.endswith("_s"):
        return seconds(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tree(values: Json) -> RenderableType:
    """A measured profile, or anything nested: one row per figure, its path as the name."""
    shown = table(("figure", "left"), ("value", "right"))
    for name, value in _leaves("", values):
        shown.add_row(Text(name), Text(_figure(name, value)))
    return shown


def group_figures(figures: Sequence[Json]) -> RenderableType:
    """What was measured of each kind of group: one row per shape, one column per kind of step."""
    columns = sorted({(each["phase"], each["rows"]) for each in figures})
    shown = table(
        ("group", "left"),
        ("weights", "left"),
        ("units", "right"),
        ("columns", "right"),
        ("context", "right"),
        *((f"{phase} of {rows}", "right") for phase, rows in columns),
    )
    found: dict[tuple[Any, ...], dict[tuple[str, int], float]] = {}
    for each in figures:
        shape = (each["units"], each["cols"] or "", each["context"] or "")
        row = (each["kind"], each["layout"], *shape)
        found.setdefault(row, {})[each["phase"], each["rows"]] = each["seconds"]
    for names, times in found.items():
        cells = (seconds(times[each]) if each in times else "" for each in columns)
        shown.add_row(*(Text(str(name)) for name in names), *(Text(each) for each in cells))
    return shown


def _leaves(prefix: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        items: Any = values.items()
    elif isinstance(values, list | tuple):
        items = enumerate(values)
    else:
        return [(prefix, values)]
    return [
        leaf
        for name, value in items
        for leaf in _leaves(f"{prefix}.{name}" if prefix else str(name), value)
    ]
