"""What a model would do on a machine that is not this one: plans from headers and hardware files.

Nothing runs and nothing is measured. The best plan is set beside the layouts that people tune by
hand and beside two bounds, all predicted by the same model; docs/calibration.md says how far that
is from published speeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hit_rate import assumed_hit_rate
from shadowlane.planner.hybrid import HitRate, Model, Plan, Work, demand, model_of
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_layouts import Answer, Question, by_hand, num_layers
from shadowlane.planner.hybrid_search import search

OURS = "shadowlane"
PROMPT_ROWS = 2048  # of a prompt that is planned for at once
FEW_EXPERTS = 16  # of models with so few none is much hotter than another
_FINE = 1_000_000


def what_if(
    catalog: Catalog,
    name: str,
    machine: Hardware,
    *,
    context: int | None = None,
    ram: int | None = None,
    gpu_memory: int | None = None,
) -> dict[str, Any]:
    """Plans for decode and prefill, as one object that JSON can hold.

    context: tokens to keep room for; None: 4096 or the model's. ram, gpu_memory: bytes to plan
    with, of all RAM and of each card, in place of what the machine has less what is reserved.

    Raises TooLarge where the model fits nowhere, ValueError for a budget above what there is.
    """
    machine = _with_budgets(machine, ram, gpu_memory)
    model = model_of(catalog, name)
    room = min(context or 4096, model.max_context)
    works = (
        Work(context=min(512, room), max_context=room),
        Work("prefill", min(PROMPT_ROWS, room), 1, min(PROMPT_ROWS, room) // 2, room),
    )
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    plans: dict[str, Plan] = {}
    for work in works:
        question = Question(model, machine, work, hit_rate=_hit_rate(model))
        hand = by_hand(question)
        best = search(question, rivals=hand)
        plans[work.phase] = best.plan
        rows += _rows(question, hand, best)
    decode = plans["decode"]
    need = demand(model, decode, works[0], len(machine.cards))
    return {
        "model": name,
        "hardware": machine.name,
        "emulated": True,
        "planning_s": time.perf_counter() - began,
        "weights_nbytes": model.nbytes,
        "context": room,
        "rows": rows,
        "plan": {
            "strategy": decode.name,
            "vram_nbytes": list(need.vram),
            "ram_nbytes": need.ram,
            "disk_nbytes": sum(
                load.whole_nbytes * max(0.0, 1.0 - site.vram - site.ram)
                for load, site in zip(model.loads, decode.sites, strict=True)
            ),
            "kinds": _kinds(model, decode),
        },
        "llama_cpp": llama_cpp_flags(model, decode),
    }


def _with_budgets(machine: Hardware, ram: int | None, gpu_memory: int | None) -> Hardware:
    if ram is not None:
        if ram > machine.ram_nbytes:
            raise ValueError(f"ram must be at most the {machine.ram_nbytes / 1e9:.1f} GB there are")
        machine = replace(machine, ram_nbytes=ram, reserved_nbytes=0.0)
    if gpu_memory is not None:
        for card in machine.cards:
            if gpu_memory > card.vram_nbytes:
                raise ValueError(
                    f"gpu_memory must be at most the {card.vram_nbytes / 1e9:.1f} GB of {card.name}"
                )
        cards = tuple(
            replace(card, vram_nbytes=gpu_memory, reserved_nbytes=0.0) for card in machine.cards
        )
        machine = replace(machine, cards=cards)
    return machine


def _hit_rate(model: Model) -> HitRate:
    """How hot experts are is assumed: as recorded of a model with many, even in one with few."""
    if max((load.experts for load in model.loads), default=0) <= FEW_EXPERTS:
        return lambda part: part
    return lambda part: assumed_hit_rate(round(part * _FINE), _FINE)


def _rows(question: Question, hand: dict[str, Answer], best: Answer) -> list[dict[str, Any]]:
    bound = hybrid_bounds(question)
    work = question.work
    answers = {**hand, OURS: best}
    # A prompt's step has all its rows; a decode step one of each sequence.
    rows = [
        {
            "model": question.model.name,
            "hardware": question.machine.name,
            "strategy": name,
            "layout": answer.plan.name,
            "phase": work.phase,
            "context": work.context,
            "tok_per_s": None,
            "predicted_tok_per_s": work.rows / answer.times.step_s,
            "resource_bound": work.rows / bound.resource_s,
            "path_bound": work.rows / bound.path_s,
            "busy": {
                lane: busy_s / answer.times.step_s for lane, busy_s in answer.times.busy_s.items()
            },
            "bottleneck": answer.times.bottleneck,
            "emulated": True,
        }
        for name, answer in answers.items()
    ]
    return sorted(rows, key=lambda row: row["predicted_tok_per_s"])


def _kinds(model: Model, plan: Plan) -> dict[str, dict[str, float]]:
    """Per kind of group, which part of its bytes (of its keys and values, for attn) is where."""
    found: dict[str, dict[str, float]] = {}
    total: dict[str, float] = {}
    for load, site in zip(model.loads, plan.sites, strict=True):
        nbytes = load.whole_nbytes or load.kv_nbytes_per_token
        parts = found.setdefault(load.kind, {"vram": 0.0, "ram": 0.0, "disk": 0.0, "brought": 0.0})
        total[load.kind] = total.get(load.kind, 0.0) + nbytes
        parts["vram"] += nbytes * site.vram
        parts["ram"] += nbytes * (site.ram if load.whole_nbytes else 1.0 - site.vram)
        if load.whole_nbytes:
            parts["disk"] += nbytes * max(0.0, 1.0 - site.vram - site.ram)
        parts["brought"] += nbytes * (1.0 - site.vram) * site.brought
    return {
        kind: {tier: part / total[kind] if total[kind] else 0.0 for tier, part in parts.items()}
        for kind, parts in found.items()
    }


_TENSORS = {
    "qkv": "attn_(q|k|v)",
    "o": "attn_output",
    "gate_up": "ffn_(gate|up)",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}


def llama_cpp_flags(model: Model, plan: Plan) -> list[str]:
    """The flags of llama.cpp that come closest to `plan`, for others to confirm or refute it.

    It knows whole tensors on one device: parts are rounded, and what is brought ahead has no flag.
    """
    layers = num_layers(model) - 1
    if not any(site.vram for site in plan.sites):
        return ["-ngl", "0"]
    flags = ["-ngl", str(layers + 1)]
    off: dict[str, list[int]] = {}
    experts_off = 0.0
    kv_off = kv = 0
    for load, site in zip(model.loads, plan.sites, strict=True):
        if load.kind == "attn":
            kv += 1
            kv_off += site.vram < 0.5
        elif load.experts:
            experts_off += 1.0 - site.vram
        elif site.vram < 0.5 and load.kind in _TENSORS:
            off.setdefault(load.kind, []).append(load.layer or 0)
        elif site.vram < 0.5 and load.kind == "lm_head":
            flags[1] = str(layers)
    if round(experts_off):
        flags += ["--n-cpu-moe", str(round(experts_off))]
    if 2 * kv_off > kv:
        flags.append("--no-kv-offload")
    for kind, those in off.items():
        which = r"\d+" if len(those) == layers else f"({'|'.join(map(str, those))})"
        flags += ["-ot", rf"blk\.{which}\.{_TENSORS[kind]}\.weight=CPU"]
    return flags


def load_catalog(name: str, path: Path | None, context: int | None) -> Catalog:
    """The groups of a model by short name, or of files that are here: headers alone are read."""
    if path is None:
        from shadowlane.shapes import shape_catalog

        return shape_catalog(name, context)
    from shadowlane.actors.blueprint import read_blueprint
    from shadowlane.actors.spec import Options

    blueprint, _ = read_blueprint(path, Options(context=context), 1)
    return blueprint.catalog


def shell(flags: Sequence[str]) -> str:
    """Flags as they can be typed."""
    import shlex

    return shlex.join(flags)
