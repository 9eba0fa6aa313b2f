"""What a model would do on a machine that is not this one: plans from headers and hardware files.

Nothing runs and nothing is measured. One placement serves prompts and answers; it is the best for a
request of both, and is set beside the layouts that people tune by hand for the same request and
beside two bounds, all predicted by the same model; docs/calibration.md says how far that is from
published speeds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadowlane.actors.spec import SMALL
from shadowlane.llama_cpp import llama_cpp_flags
from shadowlane.planner.chunks import ANSWER_TOKENS, PROMPT_PART
from shadowlane.planner.hardware import Hardware, with_small_matrices
from shadowlane.planner.hybrid import (
    Model,
    Plan,
    Prompts,
    Work,
    assumed_hits,
    demand,
    model_of,
)
from shadowlane.planner.hybrid_bounds import HybridBounds, hybrid_bounds
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Answer, Question, TooLarge
from shadowlane.planner.hybrid_play import Times
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.pins import check_pins_fit, homes_of, pinned
from shadowlane.planner.placement import show_nbytes
from shadowlane.planner.shortage import what_is_short

OURS = "shadowlane"
PROMPT_ROWS = 2048  # of a prompt that is planned for at once
PARTS = ("vram", "ram", "disk", "brought", "brought_prefill")  # of a kind of group


def what_if(
    model: Model,
    machine: Hardware,
    *,
    context: int | None = None,
    ram: int | None = None,
    gpu_memory: int | Sequence[int] | None = None,
    pins: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A plan with what it does in decode and in prefill, as one object that JSON can hold.

    context: tokens to keep room for; None: 4096 or the model's. ram, gpu_memory: bytes to plan
    with, of all RAM and of each card (or one for each), in place of what the machine has less what
    is reserved; gpu_memory 0: without cards. pins: pattern of groups -> home; layouts by hand keep
    to them too.

    It is the best for a request like the one that chunks are chosen for: a prompt of half of the
    context, then 128 tokens.

    Raises TooLarge where the model fits nowhere, ValueError for a budget above what there is and
    for pins that cannot be.
    """
    machine = with_budgets(machine, ram, gpu_memory)
    groups = [(load.name, load.kind) for load in model.loads]
    model = pinned(model, homes_of(groups, pins or {}, len(machine.cards)))
    room = min(context or 4096, model.max_context)
    work = Work(context=min(512, room), max_context=room)
    tokens = max(1, room // PROMPT_PART)
    rows = min(PROMPT_ROWS, tokens)
    prompts = Prompts(
        Work("prefill", rows, 1, max(1, tokens // 2), room), tokens / rows / ANSWER_TOKENS
    )
    question = Question(model, machine, work, hit_rate=assumed_hits(model), prompts=prompts)
    check_pins_fit(model, work, machine)
    began = time.perf_counter()
    try:
        hand = by_hand(question)
        best = search(question, rivals=hand)
    except TooLarge as error:
        raise TooLarge(f"{error}: {what_is_short(question)}") from None
    plan = best.plan
    planning_s = time.perf_counter() - began
    need = demand(model, plan, work, machine)
    lanes = replace(question, machine=with_small_matrices(machine, SMALL))
    return {
        "model": model.name,
        "hardware": machine.name,
        "emulated": True,
        "planning_s": planning_s,
        "weights_nbytes": model.nbytes,
        "context": room,
        "request": {"prompt_tokens": tokens, "answer_tokens": ANSWER_TOKENS},
        "rows": _rows(question, hand, best),
        "emulated_lanes": {
            "small_nbytes": SMALL,
            "predicted_tok_per_s": work.rows / lanes.times(plan).step_s,
        },
        "plan": {
            "strategy": plan.name,
            "vram_nbytes": list(need.vram),
            "ram_nbytes": need.ram,
            "stage_nbytes": list(need.stages),  # of each card's, for what is brought
            "ring_nbytes": need.ring,  # of RAM's, for what is read off the disk
            "disk_nbytes": sum(
                load.whole_nbytes * max(0.0, 1.0 - site.vram - site.ram)
                for load, site in zip(model.loads, plan.sites, strict=True)
            ),
            "kinds": _kinds(model, plan),
        },
        "llama_cpp": llama_cpp_flags(model, plan, work),
    }


def with_budgets(
    machine: Hardware, ram: int | None, gpu_memory: int | Sequence[int] | None
) -> Hardware:
    """With these bytes to plan with, see `what_if`. Raises ValueError for more than there is."""
    if ram is not None:
        _check("ram", ram, machine.ram_nbytes, machine.name)
        machine = replace(machine, ram_nbytes=ram, reserved_nbytes=0.0)
    if gpu_memory is None:
        return machine
    sizes = [gpu_memory] * len(machine.cards) if isinstance(gpu_memory, int) else gpu_memory
    if gpu_memory == 0 or not any(sizes):
        if gpu_memory and not machine.cards:
            raise ValueError(f"gpu_memory must be 0: {machine.name} has no card")
        return replace(machine, cards=())
    for card, nbytes in zip(machine.cards, sizes, strict=True):
        _check("gpu_memory", nbytes, card.vram_nbytes, card.name)
    cards = tuple(
        replace(card, vram_nbytes=nbytes, reserved_nbytes=0.0)
        for card, nbytes in zip(machine.cards, sizes, strict=True)
    )
    return replace(machine, cards=cards)


def _check(name: str, asked: int, there: float, where: str) -> None:
    if asked > there:
        most, got = show_nbytes(round(there)), show_nbytes(asked)
        raise ValueError(f"{name} must be at most the {most} of {where}; got {got}")


def _rows(question: Question, hand: dict[str, Answer], best: Answer) -> list[dict[str, Any]]:
    """Each layout in each phase; the longest request first, ours last."""
    answers = dict(sorted(hand.items(), key=lambda item: -item[1].seconds)) | {OURS: best}
    rows: list[dict[str, Any]] = []
    for work in question.works:
        bound = hybrid_bounds(replace(question, work=work, prompts=None))
        for name, answer in answers.items():
            times = answer.times if work is question.work else answer.prompt_times
            assert times is not None
            rows.append(_row(question, name, answer, work, times, bound, best))
    return rows


def _row(
    question: Question,
    name: str,
    answer: Answer,
    work: Work,
    times: Times,
    bound: HybridBounds,
    best: Answer,
) -> dict[str, Any]:
    # A prompt's step has all its rows; a decode step one of each sequence.
    return {
        "model": question.model.name,
        "hardware": question.machine.name,
        "strategy": name,
        "layout": answer.plan.name,
        "phase": work.phase,
        "context": work.context,
        "step_rows": work.rows,
        "tok_per_s": None,
        "predicted_tok_per_s": work.rows / times.step_s,
        "resource_bound": work.rows / bound.resource_s,
        "path_bound": work.rows / bound.path_s,
        "busy": {lane: busy_s / times.step_s for lane, busy_s in times.busy_s.items()},
        "bottleneck": times.bottleneck,
        "request_over_ours": answer.seconds / best.seconds,
        "emulated": True,
    }


def _kinds(model: Model, plan: Plan) -> dict[str, dict[str, float]]:
    """Per kind of group, which part of its bytes (of its keys and values, for attn) is where."""
    found: dict[str, dict[str, float]] = {}
    total: dict[str, float] = {}
    for load, site in zip(model.loads, plan.sites, strict=True):
        nbytes = load.whole_nbytes or load.kv_nbytes_per_token
        parts = found.setdefault(load.kind, dict.fromkeys(PARTS, 0.0))
        total[load.kind] = total.get(load.kind, 0.0) + nbytes
        parts["vram"] += nbytes * site.vram
        parts["ram"] += nbytes * (site.ram if load.whole_nbytes else 1.0 - site.vram)
        if load.whole_nbytes:
            parts["disk"] += nbytes * max(0.0, 1.0 - site.vram - site.ram)
        parts["brought"] += nbytes * (1.0 - site.vram) * site.brought
        parts["brought_prefill"] += nbytes * (1.0 - site.vram) * site.brought_prefill
    return {
        kind: {tier: part / total[kind] if total[kind] else 0.0 for tier, part in parts.items()}
        for kind, parts in found.items()
    }


def load_model(name: str, path: Path | None, context: int | None) -> Model:
    """A model by short name, or of files that are here: headers alone are read."""
    if path is None:
        from shadowlane.shapes import shape_model

        return shape_model(name, context)
    from shadowlane.actors.blueprint import read_blueprint
    from shadowlane.actors.spec import Options

    blueprint, _ = read_blueprint(path, Options(context=context), 1, is_elsewhere=True)
    return model_of(blueprint.catalog, name, blueprint.config.windows)
