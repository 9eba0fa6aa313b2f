"""A what-if plan as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shadowlane.sizes import format_size
from shadowlane.what_if import OURS

TIERS = ("vram", "ram", "disk", "brought")
KIND_NAMES = {"attn": "attention (KV)", "qkv": "q, k, v", "gate_up": "gate and up"}


def what_if_report(planned: Mapping[str, Any]) -> RenderableType:
    """Both phases and where things would live, slowest first, ours last."""
    weights = format_size(round(planned["weights_nbytes"]))
    head = Text(f"{planned['model']}, {weights} of weights, on {planned['hardware']}", style="bold")
    told = Text(
        "emulated: predicted from a hardware file, nothing was run. Good for comparing rows;\n"
        "docs/calibration.md says how far decode is from speeds that others published.",
        style="dim",
    )
    phases = [_phase(planned, phase) for phase in ("decode", "prefill")]
    plan = planned["plan"]
    cards = ", ".join(
        f"card {index} {format_size(round(nbytes))}"
        for index, nbytes in enumerate(plan["vram_nbytes"])
    )
    where = f"{cards + ', ' if cards else ''}RAM {format_size(round(plan['ram_nbytes']))}"
    if plan["disk_nbytes"] >= 1:
        where += f", only on disk {format_size(round(plan['disk_nbytes']))}"
    return Lines(
        head,
        told,
        *phases,
        Text(f"\nWhere {OURS} would keep things: {where}", style="bold"),
        _kinds(plan["kinds"]),
        Text(f"\nplanned in {planned['planning_s']:.2f} s", style="dim"),
    )


def _phase(planned: Mapping[str, Any], phase: str) -> RenderableType:
    rows = [row for row in planned["rows"] if row["phase"] == phase]
    ours = next(row for row in rows if row["strategy"] == OURS)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    columns = ["layout", f"{OURS} over it", "of the bound", "busiest"]
    if phase == "decode":
        columns.insert(1, "tok/s, emulated")
    for name in columns:
        table.add_column(name, justify="left" if name in ("layout", "busiest") else "right")
    for row in rows:
        speed = row["predicted_tok_per_s"]
        cells = [
            row["layout"] if row is not ours else f"{OURS}: {row['layout']}",
            f"{ours['predicted_tok_per_s'] / speed:.2f}",
            f"{speed / row['path_bound']:.0%}",
            f"{row['bottleneck']} {row['busy'][row['bottleneck']]:.0%}",
        ]
        if phase == "decode":
            cells.insert(1, f"{speed:.3g}")
        table.add_row(*cells, style="bold" if row is ours else "")
    room = planned["context"]
    what = (
        f"Decode, one sequence, {ours['context']} of {room} tokens"
        if phase == "decode"
        else f"Prompt, {2 * ours['context']} tokens at once"
    )
    return Lines(Text(f"\n{what}", style="bold"), table)


def _kinds(kinds: Mapping[str, Mapping[str, float]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("groups")
    for tier in TIERS:
        table.add_column("brought per token" if tier == "brought" else tier, justify="right")
    for kind, parts in kinds.items():
        cells = (f"{parts[tier]:.0%}" if parts[tier] >= 0.005 else "" for tier in TIERS)
        table.add_row(KIND_NAMES.get(kind, kind), *cells)
    return table
