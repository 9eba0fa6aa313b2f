"""Published speeds of other engines, and what the planner's model says of each of them.

`read_points` reads `benchmarks/data/llama_bench.yaml`. `law_of` makes of a set of figures (shares
of nominal rates, costs) the machine as one point meets it; `seconds` plays the layout that
llama.cpp used on it. What llama.cpp does otherwise than this project is said here, not in the
planner: it copies weights to the card when it comes to them, and computes after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

import yaml

from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work
from shadowlane.planner.hybrid_play import play
from shadowlane.shapes import shape_model

DATA = Path(__file__).resolve().parent / "data" / "llama_bench.yaml"
ENOUGH = 1e15  # room, or a rate that a point does not depend on
MOST_OF_LINK = 0.85  # pinned copies of 23.9-26.4 GB/s over 31.5 nominal (nvbandwidth issue 15)
STREAMED_FROM_ROWS = 32  # fewer rows are computed where the weights are
# Dates of llama.cpp's changes; texts of dates compare like dates.
GRAPHS_SINCE = "2024-05-08"  # one launch for the kernels of a decode step (pull request 6766)
USED_EXPERTS_SINCE = "2025-08-20"  # copies only experts that some row chose (pull request 15346)
HEAD_FIRST_SINCE = "2025-12-20"  # the output layer is the first to go to a card (18148)
INTEGERS_SINCE = "2024-06-15"  # packed weights are multiplied by integer tensor cores (7676)

Offload = Literal["full", "partial", "none"]


@dataclass(frozen=True, slots=True)
class Point:
    """One published speed. Lengths in tokens."""

    machine: str
    model: str
    source: str
    date: str
    engine: str  # "llama.cpp" or "ik_llama.cpp"
    is_fused: bool  # attention
    phase: Literal["decode", "prefill"]
    length: int
    depth: int  # tokens before them
    rows: int  # of one prefill step, at most
    ngl: int | None  # layers on the cards, the output layer being one; None: all
    cpu_moe: int  # layers whose experts are in RAM
    on_cpu: bool  # prefill: the processor computes what is in RAM
    kv_in_ram: bool  # and attention there
    cards: tuple[str, ...]
    tok_s: float

    @property
    def offload(self) -> Offload:
        if not self.cards or self.ngl == 0:
            return "none"
        is_partial = self.ngl is not None or self.cpu_moe or self.kv_in_ram
        return "partial" if is_partial else "full"

    @property
    def is_mixture(self) -> bool:
        return _choice(self.model) is not None


@cache
def data() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(DATA.read_text())
    return found


def read_points() -> list[Point]:
    points: list[Point] = []
    for run in data()["runs"]:
        for each in run["points"]:
            points.append(
                Point(
                    machine=run["machine"],
                    model=run["model"],
                    source=run["source"],
                    date=run["date"],
                    engine=run.get("engine", "llama.cpp"),
                    is_fused=run.get("flash", False),
                    phase="decode" if "tg" in each else "prefill",
                    length=each["tg"] if "tg" in each else each["pp"],
                    depth=each.get("depth", 0),
                    rows=each.get("rows", 512),
                    ngl=each.get("ngl"),
                    cpu_moe=each.get("cpu_moe", 0),
                    on_cpu=each.get("prefill") == "cpu",
                    kv_in_ram=each.get("kv") == "ram",
                    cards=tuple(data()["machines"][run["machine"]]["cards"]),
                    tok_s=float(each["tok_s"]),
                )
            )
    return points


@cache
def model_named(name: str) -> Model:
    """A model in its published format: all weights, or experts, scaled to the size of the file."""
    entry = data()["models"][name]
    model = replace(shape_model(entry["shape"], layouts=entry.get("layouts")), name=name)
    if "gib" not in entry:
        return model
    is_mixture = any(load.experts for load in model.loads)
    of_scaled = sum(load.whole_nbytes for load in model.loads if bool(load.experts) is is_mixture)
    missing = entry["gib"] * 2**30 - model.nbytes - model.fixed_ram_nbytes
    factor = 1.0 + missing / of_scaled
    loads = tuple(
        replace(load, nbytes=load.nbytes * factor) if bool(load.experts) is is_mixture else load
        for load in model.loads
    )
    return replace(model, loads=loads)


@cache
def _choice(name: str) -> tuple[int, int] | None:
    """Experts of a layer of a mixture, and how many of them a token takes."""
    loads = model_named(name).loads
    return next(((load.experts, load.top_k) for load in loads if load.experts), None)


# -- figures: shares of nominal rates and costs, and the machine that they make


@dataclass(frozen=True, slots=True)
class Law:
    """A machine as one point meets it. Factors are on the cost of a group beside dense weights."""

    machine: Hardware
    kv_bytes: float = 1.0  # factor on bytes of keys and values
    weight_flops: float = 1.0
    attn_flops: float = 1.0
    expert_flops: float = 1.0
    link_bytes_per_s: float = ENOUGH  # of weights copied when they are needed
    copied_experts: float = 1.0  # part of a layer's experts
    overlap: float = 0.0  # of what two cards could do at the same time in prefill


def law_of(point: Point, figures: Mapping[str, float]) -> Law:
    """Figures that a point does not depend on are left out, so that equal laws mean equal times."""
    entry = data()["machines"][point.machine]
    is_decode = point.phase == "decode"
    uses_cpu = point.offload != "full" and (is_decode or point.on_cpu or not point.cards)
    is_f16 = point.model.endswith("8b-f16")
    vram_share = figures["vram_f16" if is_f16 else "vram_packed"]
    is_unpacked = not is_f16 and point.date < INTEGERS_SINCE
    tensor_share = figures["tensor_f16" if is_f16 or is_unpacked else "tensor_packed"]
    launch_s = figures["launch_s" if point.date >= GRAPHS_SINCE else "launch_eager_s"]
    cards = tuple(
        Card(
            name=name,
            vram_nbytes=card["vram_gib"] * 2**30,
            reserved_nbytes=0.0,
            vram_bytes_per_s=card["vram_gb_s"] * 1e9 * vram_share,
            flops=ENOUGH if is_decode else card["tensor_tflops"] * 1e12 * tensor_share,
            h2d_bytes_per_s=ENOUGH,  # activations: what they cost is in the crossing
            d2h_bytes_per_s=ENOUGH,
            launch_s=launch_s if is_decode else 0.0,
            crossing_s=figures["crossing_s"] if uses_cpu or len(point.cards) > 1 else 0.0,
        )
        for name, card in ((name, data()["cards"][name]) for name in point.cards)
    )
    dram = entry["dram_gb_s"] or figures["dram_untold"] * figures[f"dram:{point.machine}"]
    dram_share = figures["dram_q8" if point.model.endswith("q8_0") else "dram"]
    core_flops = figures["core_flops_ik" if point.engine.startswith("ik") else "core_flops"]
    cores = entry["cores"] or 8
    machine = Hardware(
        name=point.machine,
        cards=cards,
        cpu_bytes_per_s=dram * 1e9 * dram_share if uses_cpu else ENOUGH,
        cpu_flops=cores * core_flops if uses_cpu and not is_decode else ENOUGH,
        cpu_launch_s=figures["cpu_launch_s"] if uses_cpu and is_decode else 0.0,
        dram_bytes_per_s=ENOUGH,
        ram_nbytes=ENOUGH,
        reserved_nbytes=0.0,
        disk_bytes_per_s=ENOUGH,
    )
    if is_decode:
        return Law(machine, kv_bytes=vram_share / figures["vram_kv"] if cards else 1.0)
    law = Law(machine)
    if cards:
        attn = figures["tensor_attn_fused" if point.is_fused else "tensor_attn_plain"]
        law = replace(law, attn_flops=tensor_share / attn)
    rows = min(point.rows, point.length)
    if cards and is_unpacked:
        # Each step writes all weights in 16 bits, and reads them: 4 bytes for 2 operations a row.
        per_byte = cards[0].flops / cards[0].vram_bytes_per_s
        law = replace(law, weight_flops=1.0 + 2.0 * per_byte / rows)
    if len(cards) > 1 and point.offload == "full":
        law = replace(law, overlap=figures["overlap"])
    experts, top_k = _choice(point.model) or (0, 0)
    if experts and not uses_cpu:
        law = replace(law, expert_flops=1.0 + figures["expert_padding"] / (rows * top_k / experts))
    if is_streamed(point):
        nominal = min(data()["cards"][name]["link_gb_s"] for name in point.cards) * 1e9
        share = min(MOST_OF_LINK, figures["link"] * figures[f"link:{point.machine}"])
        law = replace(law, link_bytes_per_s=nominal * share)
        if experts and point.engine == "llama.cpp" and point.date >= USED_EXPERTS_SINCE:
            used = expected_distinct(experts, top_k, round(rows ** figures["routing_spread"]))
            law = replace(law, copied_experts=used / experts)
    return law


# -- layouts of llama.cpp, and their time


def is_streamed(point: Point) -> bool:
    """Whether weights in RAM are copied to a card for the rows of a prefill."""
    is_wide = min(point.rows, point.length) >= STREAMED_FROM_ROWS
    return point.phase == "prefill" and bool(point.cards) and is_wide and not point.on_cpu


def parts_on_card(point: Point) -> list[float]:
    """Per load, the part in VRAM: 0 or 1."""
    loads = model_named(point.model).loads
    layers = 1 + max(load.layer or 0 for load in loads)
    ngl = layers + 1 if point.ngl is None else point.ngl
    if not point.cards:
        ngl = 0
    is_head_first = point.engine == "llama.cpp" and point.date >= HEAD_FIRST_SINCE
    has_head = ngl > 0 if is_head_first else ngl > layers
    first = layers - ngl + has_head  # the first of the layers on the cards: the last ones go there
    parts: list[float] = []
    for load in loads:
        is_there = has_head if load.layer is None else load.layer >= first
        is_kept = (bool(load.experts) and (load.layer or 0) < point.cpu_moe) or (
            load.kind == "attn" and point.kv_in_ram
        )
        parts.append(1.0 if is_there and not is_kept else 0.0)
    return parts


def _cards_of(point: Point, loads: tuple[Load, ...], parts: list[float]) -> list[int]:
    """Layers on the cards are shared out in order, by room; what is in RAM goes to the first."""
    if len(point.cards) < 2:
        return [0] * len(loads)
    rooms = [data()["cards"][name]["vram_gib"] for name in point.cards]
    own = sorted({load.layer for load, v in zip(loads, parts, strict=True) if v and load.layer})
    bounds = [len(own) * sum(rooms[: index + 1]) / sum(rooms) for index in range(len(rooms))]
    found: list[int] = []
    for load in loads:
        place = (
            len(own) - 0.5
            if load.layer is None
            else own.index(load.layer)
            if (load.layer in own)
            else 0
        )
        found.append(next(index for index, bound in enumerate(bounds) if place < bound))
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Where llama.cpp put the loads of a point's model.

    Layers repeat, and the time of a step is linear in how often: it is a sum over `shorter`
    models, each given as a factor and the loads it has.
    """

    sites: tuple[Site, ...]
    shorter: tuple[tuple[float, tuple[int, ...]], ...]
    copied_nbytes: float  # in a prefill step, of dense weights
    copied_expert_nbytes: float


@cache
def layout_of(point: Point) -> Layout:
    loads = model_named(point.model).loads
    parts = parts_on_card(point)
    cards = _cards_of(point, loads, parts)
    streams = is_streamed(point)
    count = max(1, len(point.cards))
    sites = tuple(
        Site(vram, 1.0 - vram, over=tuple(float(each == card) for each in range(count)))
        for vram, card in zip([1.0] * len(parts) if streams else parts, cards, strict=True)
    )
    missing = {False: 0.0, True: 0.0}
    for load, part in zip(loads, parts, strict=True):
        if streams and load.kind != "lm_head":
            missing[bool(load.experts)] += load.whole_nbytes * (1.0 - part)
    return Layout(sites, _shorter(loads, sites), missing[False], missing[True])


def _shorter(
    loads: tuple[Load, ...], sites: tuple[Site, ...]
) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """A model with two of each run of like layers; and for each longer run, one with three."""
    layers: dict[int | None, list[int]] = {}
    for index, load in enumerate(loads):
        layers.setdefault(load.layer, []).append(index)
    runs: list[list[list[int]]] = []
    before: object = None
    for indices in layers.values():
        kind = [(replace(loads[i], name="", layer=None), sites[i]) for i in indices]
        if kind != before:
            runs.append([])
        runs[-1].append(indices)
        before = kind

    def with_three_of(chosen: int | None) -> tuple[int, ...]:
        kept = [run[: 3 if number == chosen else 2] for number, run in enumerate(runs)]
        return tuple(index for run in kept for layer in run for index in layer)

    more = [(float(len(run) - 2), number) for number, run in enumerate(runs) if len(run) > 2]
    base = 1.0 - sum(count for count, _ in more)
    return (
        (base, with_three_of(None)),
        *((count, with_three_of(number)) for count, number in more),
    )


def _priced(load: Load, point: Point, law: Law) -> Load:
    """A load at what it costs beside dense weights."""
    flops = load.flops_per_row
    if load.kind == "attn":
        kv_nbytes = load.kv_nbytes_per_token * law.kv_bytes
        return replace(load, kv_nbytes_per_token=kv_nbytes, flops_per_row=flops * law.attn_flops)
    factor = law.expert_flops if load.experts else law.weight_flops
    return replace(load, flops_per_row=flops * factor)


def seconds(point: Point, law: Law) -> float:
    """Of one token of decode, or of the whole prefill of `point.length` tokens."""
    model = model_named(point.model)
    layout = layout_of(point)
    is_decode = point.phase == "decode"
    rows = 1 if is_decode else min(point.rows, point.length)
    work = Work(point.phase, rows=rows, context=point.depth + max(1, point.length // 2))
    step_s = 0.0
    on_card_s = [0.0] * len(point.cards)
    met = sorted({index for _, indices in layout.shorter for index in indices})
    priced = {index: _priced(model.loads[index], point, law) for index in met}
    for factor, indices in layout.shorter:
        loads = tuple(priced[index] for index in indices)
        plan = Plan("llama.cpp", tuple(layout.sites[index] for index in indices))
        times = play(replace(model, loads=loads), plan, work, law.machine)
        step_s += factor * times.step_s
        for card in range(len(point.cards)):
            on_card_s[card] += factor * times.busy_s[f"gpu:{card}"]
    if is_decode:
        return step_s
    steps = ceil(point.length / rows)
    if law.overlap:
        # At best one card has the next step while the other is at this one.
        return steps * step_s - law.overlap * (steps - 1) * (step_s - max(on_card_s))
    copied = layout.copied_nbytes + layout.copied_expert_nbytes * law.copied_experts
    return steps * (step_s + copied / law.link_bytes_per_s)


def speed(point: Point, law: Law) -> float:
    """Tokens per second."""
    took = seconds(point, law)
    return (1.0 if point.phase == "decode" else point.length) / took
