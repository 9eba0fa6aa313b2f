"""What a run did and what a plan says, as tables for people and as objects for programs.

Pure formatting: takes the dictionaries that the Python API returns. A figure that is missing is
shown as a dash, never guessed, and an emulated one says so beside the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shadowlane.sizes import format_size

Json = Mapping[str, Any]

#: Order of the object that `run --json` prints; what else the engine reports follows.
RUN_KEYS = (
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "ttft_s",
    "prefill_tok_per_s",
    "decode_tok_per_s",
    "load_s",
    "plan",
    "lanes",
    "bottleneck",
    "emulated",
)


def run_object(text: str, token_ids: Sequence[int], stats: Json) -> dict[str, Any]:
    """The one object of `run --json`. Raises KeyError if `stats` lacks a key it promises."""
    found = {"text": text, "token_ids": list(token_ids), **stats}
    return {key: found.pop(key) for key in RUN_KEYS} | found


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tok/s" if value < 100 else f"{value:.0f} tok/s"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, justify in columns:
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    return table


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def summary(stats: Json) -> RenderableType:
    """What one run did: speeds, bytes per tier, busy lanes, predicted and measured time."""
    plan: Json = stats["plan"]
    emulated = " (emulated)" if stats["emulated"] else ""
    tiers = ", ".join(f"{tier} {size(nbytes)}" for tier, nbytes in plan["tiers"].items())
    replans = plan["replans"]
    rows = [
        (
            "prompt",
            f"{stats['prompt_tokens']} tokens, {rate(stats['prefill_tok_per_s'])}, "
            f"first token after {seconds(stats['ttft_s'])}{emulated}",
        ),
        (
            "decode",
            f"{stats['completion_tokens']} tokens, {rate(stats['decode_tok_per_s'])}{emulated} "
            f"({stats['finish_reason']})",
        ),
        (
            "per token",
            f"{seconds(stats.get('predicted_step_s'))} predicted, "
            f"{seconds(stats.get('measured_step_s'))} measured{emulated}",
        ),
        ("weights", tiers),
        ("plan", f"{plan['plan_id']}, re-planned {replans} time{'' if replans == 1 else 's'}"),
        ("load", seconds(stats["load_s"])),
    ]
    lanes = _table(
        ("lane", "left"), ("busy", "right"), ("of the time", "right"), ("moved", "right")
    )
    for name, lane in stats["lanes"].items():
        slowest = " (bottleneck)" if name == stats["bottleneck"] else ""
        lanes.add_row(
            Text(name + slowest),
            seconds(lane["busy_s"]),
            f"{lane['busy_pct']:.0f} %",
            size(lane["nbytes"]),
        )
    parts: list[RenderableType] = [_facts(rows), "", lanes]
    if stats["bottleneck"] not in stats["lanes"]:
        parts.append(Text(f"bottleneck: {stats['bottleneck']}"))
    return Lines(*parts)


def plan_report(plan: Json) -> RenderableType:
    """A plan for people: the budget and what fills it, the predictions, then group by group."""
    rows = [(name.replace("_", " "), text) for name, text in _plan_facts(plan)]
    groups = _table(("group", "left"), ("bytes", "right"), ("tier", "left"), ("lane", "left"))
    groups.add_column("why", overflow="fold")
    for entry in plan.get("groups", ()):
        groups.add_row(
            Text(entry["name"]),
            size(entry["nbytes"]),
            Text(_where(entry.get("tiers") or entry.get("tier"))),
            Text(_where(entry.get("lanes") or entry.get("lane"))),
            Text(entry.get("why", "")),
        )
    return Lines(_facts(rows), "", groups)


def _where(place: Any) -> str:
    """One place, or several with what each holds: "ram", "ram 12.0 MiB + disk 3.0 MiB"."""
    if place is None:
        return "-"
    if isinstance(place, str):
        return place
    if isinstance(place, Mapping):
        if len(place) == 1:
            return str(next(iter(place)))
        return " + ".join(f"{name} {_share(value)}" for name, value in place.items())
    return " + ".join(str(name) for name in place)


def _share(value: Any) -> str:
    if isinstance(value, float) and 0 <= value <= 1:
        return f"{value:.0%}"
    return size(value) if isinstance(value, int) else str(value)


def _plan_facts(plan: Json) -> list[tuple[str, str]]:
    """Every scalar of the plan by its name, sizes and times with their units; tables come later."""
    facts: list[tuple[str, str]] = []
    for key, value in plan.items():
        if key in ("groups", "notes", "candidates", "programs"):
            continue
        if isinstance(value, Mapping):
            parts = [f"{name} {_figure(f'{key}_{name}', part)}" for name, part in value.items()]
            facts.append((key, ", ".join(parts)))
        elif not isinstance(value, list | tuple):
            facts.append((key, _figure(key, value)))
    for candidate in plan.get("candidates", ()):
        facts.append((f"candidate {candidate['name']}", seconds(candidate["step_s"])))
    return facts


def _figure(key: str, value: Any) -> str:
    if value is None:
        return "unmeasured"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "tok_per_s" in key:
        return rate(value)
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if "bytes" in key or key.startswith(("tiers", "budget", "ram", "disk")):
        return size(int(value))
    if key.endswith("_s"):
        return seconds(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tree(values: Json) -> RenderableType:
    """A measured profile, or anything nested: one row per figure, its path as the name."""
    table = _table(("figure", "left"), ("value", "right"))
    for name, value in _leaves("", values):
        table.add_row(Text(name), Text(_figure(name, value)))
    return table


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


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Repetitions of one measurement: "pp512" is prefill of 512 tokens, "tg128" decode of 128."""

    test: str
    tok_per_s: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tok_per_s)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.tok_per_s) if len(self.tok_per_s) > 1 else 0.0


def bench_object(model: str, rows: Sequence[BenchRow], stats: Json) -> dict[str, Any]:
    """What `bench --output json` prints: each repetition, mean, deviation, and the plan it ran."""
    return {
        "model": model,
        "tests": [
            {
                "test": row.test,
                "tok_per_s": list(row.tok_per_s),
                "mean_tok_per_s": row.mean,
                "deviation_tok_per_s": row.deviation,
            }
            for row in rows
        ],
        "plan": stats["plan"],
        "bottleneck": stats["bottleneck"],
        "emulated": stats["emulated"],
    }


def bench_markdown(model: str, rows: Sequence[BenchRow], stats: Json) -> str:
    """The same as a Markdown table, to be pasted beside other engines' tables."""
    tiers = stats["plan"]["tiers"]
    emulated = " (emulated)" if stats["emulated"] else ""
    head = ("model", *tiers, "bottleneck", "test", "tok/s" + emulated)
    lines = [head, ("---",) * (len(head) - 1) + ("---:",)]
    for row in rows:
        speed = f"{row.mean:.2f} ± {row.deviation:.2f}"
        places = [size(nbytes) for nbytes in tiers.values()]
        lines.append((model, *places, stats["bottleneck"], row.test, speed))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
