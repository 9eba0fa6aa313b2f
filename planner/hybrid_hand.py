"""Layouts over cards and RAM that people tune by hand.

What llama.cpp, accelerate and others offer as settings: whole layers on cards, one card after the
other or each matrix divided between all, with or without their keys and values; everything but the
experts of some layers; attention alone; the rest brought over the link layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from shadowlane.planner.hybrid import Model, Plan
from shadowlane.planner.hybrid_layouts import (
    PHASES,
    Answer,
    Question,
    Spread,
    best_of,
    fitting,
    in_micro_batches,
    pack,
    settle,
    streamed,
)

MOST_SETTINGS = 12  # of one kind of layout that are played through
PIPELINED = "layer-split, pipelined"


def layer_split(
    question: Question,
    layers: int,
    *,
    kv: bool = True,
    across: bool = False,
    pipelined: bool = False,
) -> Plan | None:
    """The first `layers` layers on cards, the head as one layer more. None: they do not fit.

    kv: whether keys, values and attention go with them. across: all cards share every group.
    pipelined: cards have as many layers as take each as long, and prompts go through them in
    micro-batches.
    """
    loads = question.model.loads
    wanted = [
        index
        for index, is_within in enumerate(_within(question.model, layers))
        if is_within and (kv or loads[index].kind != "attn")
    ]
    name = f"{'row' if across else 'layer'}-split {layers}{'' if kv else ', KV in RAM'}"
    if not pipelined:
        return _whole(question, name, wanted, across=across)
    plan = _whole(question, f"{name}, pipelined", wanted, evenly=True)
    return None if plan is None else in_micro_batches(question, plan)


def cpu_moe(question: Question, layers: int, *, kv: bool = True) -> Plan | None:
    """Everything on cards but the experts of the first `layers` layers. None: it does not fit.

    kv: whether keys, values and attention are there, too.
    """
    name = f"cpu-moe {layers}{'' if kv else ', KV in RAM'}"
    return _whole(
        question, name, _but_experts(question.model, num_layers(question.model), layers, kv)
    )


def split_moe(question: Question, layers: int) -> Plan | None:
    """As `layer_split`, but for the experts of as many of these layers as have to stay in RAM.

    None: the rest does not fit either.
    """
    model = question.model

    def plan_of(off: int) -> Plan | None:
        name = f"layer-split {layers} + cpu-moe {off}"
        return _whole(question, name, _but_experts(model, layers, off))

    if plan_of(layers) is None:
        return None
    return plan_of(_end(cache(plan_of), layers, -1))


def _but_experts(model: Model, layers: int, off: int, kv: bool = True) -> list[int]:
    """The loads of the first `layers` layers without the experts of the first `off`."""
    return [
        index
        for index, (load, is_within) in enumerate(
            zip(model.loads, _within(model, layers), strict=True)
        )
        if is_within
        and (not load.experts or (load.layer or 0) >= off)
        and (kv or load.kind != "attn")
    ]


def attention_gpu(question: Question) -> Plan | None:
    """All but MLPs and experts on cards. None: it does not fit."""
    others = ("gate_up", "down", "experts")
    wanted = [i for i, load in enumerate(question.model.loads) if load.kind not in others]
    return _whole(question, "attention-gpu", wanted)


def layer_stream(question: Question, layers: int, *, all_kv: bool = False) -> Plan | None:
    """As `layer_split`; the others are brought over the link, group by group.

    all_kv: keys and values of all layers are on cards, so that attention is computed there.
    """
    loads = question.model.loads
    wanted = [
        index
        for index, is_within in enumerate(_within(question.model, layers))
        if is_within or (all_kv and loads[index].kind == "attn")
    ]
    name = f"layer-stream {layers}{', all KV' if all_kv else ''}"
    plan = _whole(question, name, wanted)
    return None if plan is None else streamed(question, plan, name, PHASES)


def num_layers(model: Model) -> int:
    """Layers of `model`, its head counted as one more."""
    return 2 + max((load.layer or 0) for load in model.loads)


def _within(model: Model, layers: int) -> list[bool]:
    """Whether each load is in the first `layers` layers."""
    total = num_layers(model)
    return [(total - 1 if load.layer is None else load.layer) < layers for load in model.loads]


def _whole(
    question: Question,
    name: str,
    wanted: Sequence[int],
    *,
    across: bool = False,
    evenly: bool = False,
) -> Plan | None:
    """These loads on cards, all of each."""
    limit = [1.0] * len(question.model.loads)
    spread = pack(question, wanted, limit, across=across, evenly=evenly)
    loads = question.model.loads
    if any(spread.vram[index] < 1.0 and loads[index].home is None for index in wanted):
        return None
    return fitting(question, settle(question, name, spread))


def by_hand(question: Question) -> dict[str, Answer]:
    """The best of each kind of layout that people tune by hand: name -> its best setting.

    Of a prompt, what a layout leaves in RAM may be brought too, as llama.cpp does unasked: the
    layout is then the same in both phases, and what is brought is not.
    """
    model, cards = question.model, len(question.machine.cards)
    layers = num_layers(model)
    kinds: dict[str, tuple[Callable[[int], Plan | None], int]] = {
        "cpu": (
            lambda _: fitting(question, settle(question, "cpu", Spread.nowhere(model, cards))),
            0,
        )
    }
    if cards:
        kinds["layer-split"] = (lambda n: layer_split(question, n), layers)
        kinds["layer-split, KV in RAM"] = (lambda n: layer_split(question, n, kv=False), layers)
        if cards > 1:
            kinds["row-split"] = (lambda n: layer_split(question, n, across=True), layers)
            kinds[PIPELINED] = (lambda n: layer_split(question, n, pipelined=True), layers)
        kinds["layer-stream"] = (lambda n: layer_stream(question, n), layers)
        kinds["attention-gpu"] = (lambda _: attention_gpu(question), 0)
        if any(load.experts for load in model.loads):
            without_head = layers - 1  # which has no experts
            kinds["cpu-moe"] = (lambda n: cpu_moe(question, n), without_head)
            kinds["cpu-moe, KV in RAM"] = (lambda n: cpu_moe(question, n, kv=False), without_head)
            kinds["layer-split + cpu-moe"] = (lambda n: split_moe(question, n), layers)
    has_prompts = any(work.phase == "prefill" for work in question.works)
    found: dict[str, Answer] = {}
    for name, (plan_of, most) in kinds.items():
        tried = _thinned(plan_of, most)
        if has_prompts and name not in ("cpu", "layer-stream", PIPELINED):
            tried += _thinned(_for_prompts(question, plan_of), most)
        if tried:
            found[name] = best_of(question, tried)
    return found


def _for_prompts(
    question: Question, plan_of: Callable[[int], Plan | None]
) -> Callable[[int], Plan | None]:
    def streamed_of(setting: int) -> Plan | None:
        plan = plan_of(setting)
        if plan is None:
            return None
        return streamed(question, plan, f"{plan.name}, streamed", ["prefill"])

    return streamed_of


def _thinned(plan_of: Callable[[int], Plan | None], most: int) -> list[Plan]:
    """Of the settings from 0 to `most` that fit, the ends and an even choice between.

    Times change smoothly from layer to layer. What fits are neighbours: their ends are searched for
    between settings that are tried first.
    """
    plan_at = cache(plan_of)
    steps = min(most, MOST_SETTINGS - 1)
    first = [round(i * most / steps) for i in range(steps + 1)] if most else [0]
    fitting = [n for n in first if plan_at(n)] or [n for n in range(most + 1) if plan_at(n)]
    if not fitting:
        return []
    low, high = min(fitting), max(fitting)
    low = _end(plan_at, low, max((n for n in first if n < low), default=-1))
    high = _end(plan_at, high, min((n for n in first if n > high), default=most + 1))
    count = min(MOST_SETTINGS, high - low + 1)
    chosen = {low + round(i * (high - low) / max(1, count - 1)) for i in range(count)}
    return [plan for plan in map(plan_at, sorted(chosen)) if plan is not None]


def _end(plan_at: Callable[[int], Plan | None], fits_at: int, not_at: int) -> int:
    """The last setting that fits on the way from one that does to one that does not."""
    while abs(fits_at - not_at) > 1:
        middle = (fits_at + not_at) // 2
        if plan_at(middle):
            fits_at = middle
        else:
            not_at = middle
    return fits_at
