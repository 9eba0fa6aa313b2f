"""What is told of one request when it is over: its speeds, its plans, and what each lane did."""

from __future__ import annotations

import statistics
from typing import Any

from shadowlane.actors.engine import Engine
from shadowlane.actors.sequence import DecodeStep, Sequence, since
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import tiers
from shadowlane.planner.explain_cards import card_tiers, copies_nbytes
from shadowlane.planner.hit_rate import curve_of, hit_rate_beside, with_measured
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Profile
from shadowlane.planner.simulate import simulate


def expert_use(engine: Engine, sequence: Sequence) -> dict[str, Any] | None:
    """What decode steps found of their experts in RAM while a request ran; None if dense."""
    experts, placement = engine.blueprint.catalog.experts, engine.placement
    if experts is None:
        return None
    use = since(sequence.use_before.experts, sequence.use_after.experts)
    known = engine.catalog.experts
    assert known is not None, "of the same model"
    tokens = len(sequence.generated) - 1  # the first comes from the prompt
    all_chosen = use.on_cards + use.chosen
    return {
        "slots": placement.expert_slots,
        "of": experts.total,
        "on_cards": placement.experts_on_cards,
        "card_rate": use.on_cards / all_chosen if all_chosen else None,
        "hit_rate": use.resident / use.chosen if use.chosen else None,
        "expected_hit_rate": hit_rate_beside(
            known, placement.expert_slots, placement.experts_on_cards
        ),
        "expected_from": curve_of(known).source,
        "early_hit_rate": use.early / use.chosen if use.chosen else None,
        "read_nbytes_per_token": use.read_nbytes // tokens if tokens > 0 else None,
        **engine.gauges.expert_report(),
    }


def stats_of(engine: Engine, sequence: Sequence, profile: Profile | None) -> dict[str, Any]:
    """Of a request that is over. Raises ValueError for one that never began."""
    timing = sequence.timing
    if not timing.started:
        raise ValueError("the newest request ended before its first step: it has no figures")
    placement = engine.placement
    generated = len(sequence.generated)
    scale = engine.slowed  # seconds here for one second of what is told
    decode_s = (timing.ended - timing.first_token) / scale
    prefill_s = (timing.first_token - timing.started) / scale
    new_tokens = len(sequence.prompt) - timing.cached_tokens
    window = max(1e-9, timing.ended - timing.started)
    lanes = {
        name: {
            "busy_s": busy / scale,
            "busy_pct": round(min(100.0, 100 * busy / window), 1),
            "nbytes": nbytes,
        }
        for name, (busy, nbytes) in sequence.lane_use.items()
    }
    steps = sequence.decode_steps
    plans = by_plan(steps, scale)
    predicted = placement.predicted_step_s  # of the plan in force
    experts = expert_use(engine, sequence)
    at_hits_s = None
    if experts is not None and experts["hit_rate"] is not None and len(plans) <= 1:
        rate, tokens = experts["hit_rate"], generated - 1
        catalog = with_measured(engine.catalog, placement.expert_slots, rate, tokens)
        at_hits_s = at_hits_of(catalog, placement, profile)
    # what streams is read at every step; of experts it is what was read
    read: int | None = sum(
        engine.blueprint.catalog.blocks[index].held_nbytes for index in placement.sweep
    )
    if experts is not None:
        of_experts = experts["read_nbytes_per_token"]
        read = None if of_experts is None else read + of_experts
    overrun_s = decode_overrun(sequence) if generated > 1 and decode_s > 0 else {}
    return {
        "prompt_tokens": len(sequence.prompt),
        "cached_tokens": timing.cached_tokens,
        "completion_tokens": generated,
        "finish_reason": sequence.finish_reason,
        # Of prompts emulation says too little: see docs/calibration.md.
        "ttft_s": (timing.first_token - timing.submitted)
        if generated and engine.emulator is None
        else None,
        "prefill_tok_per_s": new_tokens / prefill_s
        if generated and prefill_s > 0 and engine.emulator is None
        else None,
        "prefill_s": prefill_s if generated and engine.emulator is None else None,
        "decode_tok_per_s": (generated - 1) / decode_s if generated > 1 and decode_s > 0 else None,
        "load_s": engine.load_s,
        "plan": {
            "plan_id": placement.placement_id,
            "replans": engine.shadow.replans,
            "predicted_decode_tok_per_s": 1 / predicted if predicted else None,
            "tiers": (card_tiers if placement.cards else tiers)(
                engine.blueprint.catalog, placement
            ),
            "copies_nbytes": copies_nbytes(engine.blueprint.catalog, placement),
            "strategy": placement.strategy,
            "read_nbytes_per_token": read,
            "arena_nbytes": placement.total_nbytes,
            "expanded_nbytes": placement.expanded_nbytes,
            "ram_budget": placement.ram,
        },
        "lanes": lanes,
        "experts": experts,
        "bottleneck": bottleneck(lanes),
        "emulated": engine.emulator is not None,
        "slowed": scale,
        "overrun_s": engine.emulator.overrun_s() if engine.emulator is not None else None,
        "decode_overrun_pct": round(100 * max(overrun_s.values()) / decode_s, 1)
        if overrun_s
        else None,
        "predicted_step_s": predicted_step_s(steps) if steps else predicted or None,
        "predicted_at_hits_step_s": at_hits_s,  # with the hits that there were
        "measured_step_s": statistics.median(step.seconds for step in steps) / scale
        if steps
        else None,
        "plans": plans,
        "notes": list(
            dict.fromkeys(
                [
                    *engine.notes,
                    *engine.shadow.notes,
                    *engine.to_come(),
                    *_cut_short(sequence),
                ]
            )
        ),
        "decisions": list(engine.shadow.decisions),
    }


def by_plan(steps: list[DecodeStep], scale: float) -> list[dict[str, Any]]:
    """Of each plan that made tokens, in their order: its steps, what it promised, what they took.

    scale: seconds here for one that is told.
    """
    found: dict[int, list[DecodeStep]] = {}
    for step in steps:
        found.setdefault(step.placement_id, []).append(step)
    return [
        {
            "plan_id": plan_id,
            "steps": len(its),
            "predicted_step_s": its[0].predicted_s,
            "measured_step_s": statistics.median(step.seconds for step in its) / scale,
        }
        for plan_id, its in found.items()
    ]


def predicted_step_s(steps: list[DecodeStep]) -> float | None:
    """The median over steps of what the plan of each promised; None where one promised nothing."""
    promised = [step.predicted_s for step in steps]
    known = [each for each in promised if each is not None]
    return statistics.median(known) if known and len(known) == len(promised) else None


def decode_overrun(sequence: Sequence) -> dict[str, float]:
    """Of each emulated lane, the seconds of decode that its work took beyond what was emulated."""
    before = sequence.use_at_first.overrun_s
    return {
        lane: seconds - before.get(lane, 0.0)
        for lane, seconds in sequence.use_after.overrun_s.items()
    }


def _cut_short(sequence: Sequence) -> tuple[str, ...]:
    limit = sequence.params.max_tokens
    if sequence.finish_reason != "length" or len(sequence.generated) == limit:
        return ()
    held = len(sequence.prompt) + len(sequence.generated)
    return (f"the answer ends because the context of {held} tokens is full; ask for a larger one",)


def at_hits_of(catalog: Catalog, placement: Placement, profile: Profile | None) -> float | None:
    """Predicted seconds of a decode step, had it been known how often experts are hit.

    None with cards, of which a profile knows nothing.
    """
    if placement.cards:
        return None
    return simulate(catalog, placement, CostModel(profile)).step_s


def bottleneck(lanes: dict[str, dict[str, Any]]) -> str:
    """The busiest lane: what has to become faster, or do less, for the whole to be faster."""
    return max(lanes, key=lambda name: lanes[name]["busy_s"])
