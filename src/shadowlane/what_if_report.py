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
from shadowlane.what_if import OURS, PARTS

WORTH_TELLING = 0.05  # of a speed
TITLES = {  # the last two: computed on cards, brought there when it is needed
    "vram": "VRAM",
    "ram": "RAM",
    "disk": "only on disk",
    "brought": "brought",
    "brought_prefill": "for prompts",
}
KIND_NAMES = {"attn": "attention (KV)", "qkv": "q, k, v", "gate_up": "gate and up"}
LEGEND = {  # what each kind of layout is, by the beginning of its name
    "cpu": "nothing on cards",
    "layer-split": "so many layers on cards, the head counted as one",
    "layer-split, pipelined": "evenly over cards, prompts in micro-batches",
    "row-split": "the same, each divided between all cards",
    "layer-stream": "as layer-split; the other layers are brought over the link",
    "attention-gpu": "all but MLPs and experts on cards",
    "cpu-moe": "all on cards but the experts of so many layers",
}
ENDINGS = {
    "KV in RAM": "... but for keys and values, and attention",
    "streamed": "... what it leaves in RAM is brought over the link for prompts",
}


def what_if_report(planned: Mapping[str, Any]) -> RenderableType:
    """Both phases, the longest request first, ours last; then where things would live."""
    weights = format_size(round(planned["weights_nbytes"]))
    head = Text(f"{planned['model']}, {weights} of weights\non {planned['hardware']}", style="bold")
    told = Text(
        "Emulated: predicted from a hardware file, nothing was run. Rows can be compared; how far "
        "such figures are from published speeds is in docs/calibration.md.",
        style="dim",
    )
    phases = [_phase(planned, phase) for phase in ("decode", "prefill")]
    return Lines(
        head,
        told,
        *phases,
        _request(planned),
        _legend(planned),
        Text(f"\nWhere {OURS} would keep things, and what each phase brings", style="bold"),
        Text(_sizes(planned["plan"])),
        "",
        _kinds(planned["plan"]["kinds"]),
        Text(f"\nplanned in {planned['planning_s']:.2f} s", style="dim"),
    )


def _sizes(plan: Mapping[str, Any]) -> str:
    cards = [
        f"card {index} {format_size(round(nbytes))}" + _of_it(stage, "for what is brought")
        for index, (nbytes, stage) in enumerate(
            zip(plan["vram_nbytes"], plan["stage_nbytes"], strict=True)
        )
    ]
    disk = plan["disk_nbytes"]
    on_disk = [f"only on disk {format_size(round(disk))}"] if disk >= 1 else []
    ram = format_size(round(plan["ram_nbytes"])) + _of_it(plan["ring_nbytes"], "to read ahead")
    return ", ".join([*cards, f"RAM {ram}", *on_disk])


def _of_it(nbytes: float, what: str) -> str:
    return f" ({format_size(round(nbytes))} of it {what})" if nbytes >= 1 else ""


def _phase(planned: Mapping[str, Any], phase: str) -> RenderableType:
    rows = [row for row in planned["rows"] if row["phase"] == phase]
    ours = next(row for row in rows if row["strategy"] == OURS)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    columns = ["layout", "ours / it", "of bound", "busiest"]
    if phase == "decode":
        columns.insert(1, "emulated tok/s")
    for name in columns:
        is_text = name in ("layout", "busiest")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        speed = row["predicted_tok_per_s"]
        cells = [
            OURS if row is ours else row["layout"].removesuffix(", streamed"),
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
        else f"Prompt, {ours['step_rows']} tokens at once"
    )
    parts: list[RenderableType] = [Text(f"\n{what}, emulated", style="bold"), table]
    if phase == "decode":
        parts += _on_lanes(planned, ours["predicted_tok_per_s"])
    return Lines(*parts)


def _on_lanes(planned: Mapping[str, Any], predicted: float) -> list[RenderableType]:
    """Where matrices are so small that lanes which are emulated would tell other figures."""
    lanes = planned["emulated_lanes"]
    expected = lanes["predicted_tok_per_s"]
    if expected > predicted * (1.0 - WORTH_TELLING):
        return []
    nbytes = lanes["small_nbytes"] / 1e6
    return [
        Text(
            f"\nWhat small matrices lose is in no row. On emulated lanes, as run has them, one of "
            f"{nbytes:g} MB reaches half of a rate: {expected:.3g} tok/s with this plan. Of a "
            "model that is here, a plan by groups is what they begin with.",
            style="dim",
        )
    ]


def _request(planned: Mapping[str, Any]) -> RenderableType:
    """What layouts are compared by: each is the same in both phases."""
    asked = planned["request"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("layout, at its best setting for this", no_wrap=True)
    table.add_column("ours / it", justify="right")
    for row in planned["rows"]:
        if row["phase"] == "decode":
            name = OURS if row["strategy"] == OURS else row["layout"]
            is_ours = "bold" if name == OURS else ""
            table.add_row(name, f"{row['request_over_ours']:.2f}", style=is_ours)
    what = f"{asked['prompt_tokens']} tokens of prompt, then {asked['answer_tokens']} of answer"
    return Lines(
        Text(f"\n{what}, emulated", style="bold"),
        table,
        Text(f"{OURS}, ours, is: {planned['plan']['strategy']}", style="dim"),
    )


def _legend(planned: Mapping[str, Any]) -> RenderableType:
    """Of the layouts that are in the tables."""
    names = [row["strategy"] for row in planned["rows"]]
    layouts = [row["layout"] for row in planned["rows"]]
    shown = {name.partition(",")[0] for name in names} | set(names)
    shown |= {ending for ending in ENDINGS if any(f", {ending}" in each for each in layouts)}
    grid = Table.grid(padding=(0, 2))
    for name, meaning in {**LEGEND, **ENDINGS}.items():
        if name in shown:
            grid.add_row(Text(name, style="dim"), Text(meaning, style="dim"))
    return Lines("", grid)


def _kinds(kinds: Mapping[str, Mapping[str, float]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("groups")
    for tier in PARTS:
        table.add_column(TITLES[tier], justify="right", no_wrap=True)
    for kind, parts in kinds.items():
        cells = (f"{parts[tier]:.0%}" if parts[tier] >= 0.005 else "" for tier in PARTS)
        table.add_row(KIND_NAMES.get(kind, kind), *cells)
    return table
