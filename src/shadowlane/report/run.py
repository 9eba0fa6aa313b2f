"""What a run did, as tables for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from shadowlane.report.figures import Json, facts, rate, seconds, size, table

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


TOLD_OVERRUN = 10.0  # percent of the time of an answer


def run_object(text: str, token_ids: Sequence[int], stats: Json) -> dict[str, Any]:
    """The one object of `run --json`. Raises KeyError if `stats` lacks a key it promises."""
    found = {"text": text, "token_ids": list(token_ids), **stats}
    return {key: found.pop(key) for key in RUN_KEYS} | found


def summary(stats: Json) -> RenderableType:
    """What one run did: speeds, bytes per tier, busy lanes, predicted and measured time."""
    plan: Json = stats["plan"]
    emulated = " (emulated)" if stats["emulated"] else ""
    replans = plan["replans"]
    rows = [
        ("prompt", f"{stats['prompt_tokens']} tokens, {_prompt_speed(stats)}"),
        (
            "decode",
            f"{stats['completion_tokens']} tokens, {rate(stats['decode_tok_per_s'])}{emulated} "
            f"({stats['finish_reason']})",
        ),
        (
            "per token",
            f"{seconds(stats.get('predicted_step_s'))} predicted{_at_hits(stats)}, "
            f"{seconds(stats.get('measured_step_s'))} measured{emulated}",
        ),
        *_plans(stats),
        (
            "weights",
            f"{_where(plan)}; {size(plan['read_nbytes_per_token'])} read for each token",
        ),
        *_expert_facts(stats),
        ("plan", f"{plan['plan_id']}, re-planned {replans} time{'' if replans == 1 else 's'}"),
        ("load", seconds(stats["load_s"])),
        *_emulation(stats),
    ]
    lanes = table(("lane", "left"), ("busy", "right"), ("of the time", "right"), ("moved", "right"))
    for name, lane in stats["lanes"].items():
        slowest = " (bottleneck)" if name == stats["bottleneck"] else ""
        lanes.add_row(
            Text(name + slowest),
            seconds(lane["busy_s"]),
            f"{lane['busy_pct']:.0f} %",
            size(lane["nbytes"]),
        )
    parts: list[RenderableType] = [facts(rows), "", lanes]
    if stats["bottleneck"] not in stats["lanes"]:
        parts.append(Text(f"bottleneck: {stats['bottleneck']}"))
    return Lines(*parts)


def _prompt_speed(stats: Json) -> str:
    if stats["emulated"]:
        return "of which emulation says too little"
    speed = rate(stats["prefill_tok_per_s"])
    return f"{speed}, first token after {seconds(stats['ttft_s'])}"


def _plans(stats: Json) -> list[tuple[str, str]]:
    """Where several plans made the answer: what each promised, and took."""
    plans = stats.get("plans", ())
    if len(plans) < 2:
        return []
    return [
        (
            "",
            f"plan {plan['plan_id']}, {_tokens(plan['steps'])}: "
            f"{seconds(plan['predicted_step_s'])} predicted, "
            f"{seconds(plan['measured_step_s'])} measured",
        )
        for plan in plans
    ]


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _emulation(stats: Json) -> list[tuple[str, str]]:
    if not stats["emulated"]:
        return []
    slowed = stats.get("slowed", 1)
    told = [f"seconds of a machine that is not here; each took {slowed:g} s here"]
    over = stats.get("decode_overrun_pct") or 0.0
    if over >= TOLD_OVERRUN:
        part = max(0.05, 1.0 - over / 100)  # of the time that would have been enough
        told.append(
            f"too slow: for {over:.0f} % of the time this machine was not through with what was "
            f"emulated; try --slowed {ceil(round(slowed / part, 3))} or more"
        )
    return [("emulated" * (not number), text) for number, text in enumerate(told)]


def _where(plan: Json) -> str:
    """2.0 GiB in RAM, 1.5 GiB on gpu:0, 0 B only on disk."""
    tiers: Json = plan["tiers"]
    cards = "".join(
        f"{size(nbytes)} on gpu:{name[5:]}, "
        for name, nbytes in tiers.items()
        if name.startswith("vram:")
    )
    copies = plan.get("copies_nbytes", 0)
    twice = f" ({size(copies)} of it copies of what is on cards)" if copies else ""
    return f"{size(tiers['ram'])} in RAM{twice}, {cards}{size(tiers['disk'])} only on disk"


def _at_hits(stats: Json) -> str:
    """Of a mixture: what the prediction would have been, had it known how often the cache hits."""
    at_hits = stats.get("predicted_at_hits_step_s")
    return "" if at_hits is None else f" ({seconds(at_hits)} for the hits below)"


#: What an expected hit rate rests on, by its source.
SOURCES = {
    "assumed": "assumed, as nothing is known yet of how its routers choose",
    "remembered": "from what earlier runs chose",
    "measured": "measured in this run",
}


def _expert_facts(stats: Json) -> list[tuple[str, str]]:
    """Of a mixture: how many of the chosen experts were on cards and in RAM, and what the others
    cost."""
    experts: Json | None = stats.get("experts")
    if not experts:
        return []
    rate = experts["hit_rate"]
    found = "-" if rate is None else f"{100 * rate:.1f} % of the chosen were there"
    cards = ""
    if experts["on_cards"]:
        cards = f", {experts['on_cards']} on cards"
        if experts["card_rate"] is not None:
            cards += f" with {100 * experts['card_rate']:.1f} % of the chosen"
        found = "-" if rate is None else f"{100 * rate:.1f} % of the others were in RAM"
    if rate is not None and experts["slots"] + experts["on_cards"] < experts["of"]:
        expected = f"{100 * experts['expected_hit_rate']:.0f} % expected"
        found += f" ({expected}, {SOURCES[experts['expected_from']]})"
    if rate is not None and experts["early_hit_rate"]:
        found += f", {100 * experts['early_hit_rate']:.1f} % more were read ahead in time"
    twice = max(0, experts["slots"] + experts["on_cards"] - experts["of"])
    both = f" ({twice} of them copies of those on cards)" if twice else ""
    rows = [("experts", f"{experts['slots']} of {experts['of']} in RAM{both}{cards}; {found}")]
    if experts["slots"] + experts["on_cards"] >= experts["of"]:
        return rows
    switches = experts["policy_switches"]
    changed = f", changed {switches} time{'' if switches == 1 else 's'}" if switches else ""
    look: Json = experts["look_ahead"]
    guess = "not tried"
    if look["recall"] is not None:
        used = "none were read" if look["used"] is None else f"{100 * look['used']:.0f} % were used"
        rest = "" if look["is_on"] else "; off, it did not pay"
        guess = (
            f"{100 * look['recall']:.0f} % of the chosen were guessed a layer ahead; of "
            f"{look['early_reads']} early reads {used}{rest}"
        )
    kept = f"{experts['kept']} ({experts['policy']}){changed}"
    return [*rows, ("kept", kept), ("look-ahead", guess)]
