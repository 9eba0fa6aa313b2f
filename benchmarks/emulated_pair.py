"""One model on one emulated machine, strategy by strategy: the engine is started for each of them.

Nothing here decides what is compared: `emulated_engine.py` does.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from shadowlane import LLM, SamplingParams
from shadowlane.actors.blueprint import Blueprint, Options, read_blueprint
from shadowlane.actors.emulation import Hidden, true_machine
from shadowlane.actors.requests import request_of
from shadowlane.actors.service import heat_path
from shadowlane.actors.spec import CardSettings, EngineSettings
from shadowlane.emulate import emulated_machine
from shadowlane.ops.errors import ModelError
from shadowlane.planner.card_question import question_over_cards
from shadowlane.planner.hand_placement import plan_by_hand
from shadowlane.planner.heat import heat_of, informed
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.routing import Trace, synthesize
from shadowlane.planner.routing_files import write_trace

HARDWARE = Path(__file__).parents[1] / "examples" / "hardware"
PROMPT = [5, 17, 29, 100, 77, 33, 21, 9]
CONTEXT = 512
OURS = ("shadowlane", "static")
LAYOUTS = ("layer-split", "layer-stream", "attention-gpu", "row-split", "cpu-moe", "cpu")
COUNTED = {"layer-split": "gpu_layers", "cpu-moe": "n_cpu_moe"}  # what sets their number
LARGE_LAYER_NBYTES = 400e6  # of the models that are stood in for: 13B in 8 bits, 30B in 4
ROUTED_TOKENS = 1024  # of a trace that is made up; one half is what earlier runs chose


@dataclass(frozen=True, slots=True)
class Pair:
    """A model on a machine whose cards hold `part` of its weights together."""

    model: Path
    machine: str
    part: float
    seed: int  # of hidden factors
    slowed: float | None = None

    @property
    def file(self) -> Path:
        return HARDWARE / f"{self.machine}.yaml"

    @property
    def label(self) -> str:
        return f"{self.model.stem} on {self.machine}, {100 * self.part:.0f} %"


@dataclass(frozen=True, slots=True)
class Sized:
    """A pair with what its model's header tells."""

    pair: Pair
    blueprint: Blueprint
    memory: str  # of each card
    fixed_costs: float
    trace: Trace | None = None  # of a mixture: what routers choose

    def settings(self, name: str) -> dict[str, Any]:
        """Of an engine with one of `OURS`, or a layout with its number, "layer-split 18"."""
        found: dict[str, Any] = {
            "hardware": self.pair.file,
            "gpu_memory": self.memory,
            "emulate_seed": self.pair.seed,
            "fixed_costs": self.fixed_costs,
            "slowed": self.pair.slowed,
            "ctx_size": CONTEXT,
            "replan": name != "static",
        }
        layout, _, number = name.partition(" ")
        if name in OURS:
            return found
        if number and layout in COUNTED:
            return {**found, COUNTED[layout]: int(number)}
        return {**found, "strategy": layout}


def sized(pair: Pair, trace: Trace | None = None, *, is_routed: bool = True) -> Sized:
    """trace: what routers choose; None: of mixtures one is made up, where `is_routed`."""
    blueprint, _ = read_blueprint(pair.model, Options(context=CONTEXT), 1)
    catalog = blueprint.catalog
    weights = sum(block.nbytes for block in catalog.blocks)
    layers = sum(group.kind == "attn" for group in catalog.groups)
    if catalog.experts is not None:
        weights += catalog.experts.total * catalog.experts.nbytes
        if trace is None and is_routed:
            trace = synthesize(
                num_tokens=ROUTED_TOKENS,
                num_layers=catalog.experts.num_layers,
                num_experts=catalog.experts.per_layer,
                top_k=catalog.experts.top_k,
            )
    machine, _ = emulated_machine(pair.file)
    each = int(pair.part * weights / len(machine))
    costs = min(1.0, weights / layers / LARGE_LAYER_NBYTES)
    return Sized(pair, blueprint, ",".join([f"{each}B"] * len(machine)), costs, trace)


def by_hand(each: Sized, *, within: float) -> dict[str, float]:
    """Layouts with the number that is best on the machine as it really is: predicted seconds.

    The best comes first. Those that are predicted to take more than `within` times as long are left
    out.
    """
    cards, emulated = emulated_machine(each.pair.file, each.memory, fixed_costs=each.fixed_costs)
    hidden = true_machine(emulated.hardware, Hidden.drawn(each.pair.seed))
    settings = EngineSettings(
        ram=int(hidden.ram_nbytes - hidden.reserved_nbytes),
        cores=((0,),),
        cards=tuple(CardSettings(card.memory) for card in cards),
        emulated=replace(emulated, hardware=hidden),
    )
    request = request_of(Options(context=CONTEXT), settings)
    catalog = each.blueprint.catalog
    if each.trace is not None:
        first, _ = each.trace.halves()
        catalog = informed(catalog, heat_of(first))
    question = replace(question_over_cards(catalog, request), prompts=None)
    found: dict[str, float] = {}
    for name in LAYOUTS:
        try:
            plan = plan_by_hand(question, name)
        except (TooLarge, ValueError):
            continue
        number = re.search(r"\d+", plan.name)
        label = f"{name} {number.group()}" if number and name in COUNTED else name
        found[label] = question.times(plan).step_s
    most = within * min(found.values())
    ranked = sorted(found.items(), key=lambda item: item[1])
    return {name: seconds for name, seconds in ranked if seconds <= most}


@contextmanager
def routed(each: Sized) -> Iterator[dict[str, Any]]:
    """Settings under which routers choose the second half of the trace; its first half is what
    earlier runs chose. Without a trace nothing is remembered of any run before."""
    path = heat_path(each.blueprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else None
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {}
        if each.trace is not None:
            first, second = each.trace.halves()
            settings["replay_routing"] = Path(folder) / "routes.jsonl.gz"
            write_trace(settings["replay_routing"], second)
            path.write_text(replace(heat_of(first), model=each.blueprint.fingerprint).to_json())
        try:
            yield settings
        finally:
            path.unlink(missing_ok=True)
            if before is not None:
                path.write_text(before)


def run(each: Sized, name: str, learn: int, tokens: int) -> dict[str, Any]:
    """Steps of one answer, after `learn` tokens in which the planner learns."""
    with routed(each) as routing, LLM(each.pair.model, **each.settings(name), **routing) as llm:
        first = llm.generate(PROMPT, SamplingParams(max_tokens=learn, ignore_eos=True))[0]
        before = llm.stats()
        answer = llm.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
        stats = llm.stats()
    step_s = stats["measured_step_s"]
    over = {
        lane: seconds - before["overrun_s"][lane] for lane, seconds in stats["overrun_s"].items()
    }
    return {
        "token_ids": [*first.token_ids[:1], *answer.token_ids],
        "step_s": step_s,
        "strategy": stats["plan"]["strategy"],
        "predicted_step_s": stats["predicted_step_s"],
        "replans": stats["plan"]["replans"],
        "decisions": stats["decisions"],
        "slowed": stats["slowed"],
        "overrun": max(over.values()) / (step_s * (tokens - 1)),
        "busy_pct": {lane: use["busy_pct"] for lane, use in stats["lanes"].items()},
        "experts": stats["experts"],
    }


def run_disturbed(
    each: Sized, name: str, what: str, calm: int, disturbed: int, again: int
) -> dict[str, Any]:
    """Emulated seconds of each token: calm, then something is taken, then it is given back.

    what: "cpu=0.4", as in `--disturb`; calm 0: it is taken from the first token on.
    """
    script = [f"{max(1, calm)}:{what}", f"{calm + disturbed}:"]
    total = calm + disturbed + again
    params = SamplingParams(max_tokens=total, ignore_eos=True)
    ids: list[int] = []
    times: list[float] = []
    with (
        routed(each) as routing,
        LLM(each.pair.model, **each.settings(name), **routing, disturb=script) as llm,
    ):
        for chunk in llm.stream(PROMPT, params):
            ids += chunk.token_ids
            times += [time.monotonic()] * len(chunk.token_ids)
        stats = llm.stats()
    seconds = np.diff(times) / stats["slowed"]
    moved = {lane: use["nbytes"] for lane, use in stats["lanes"].items() if lane.startswith("h2d")}
    return {
        "token_ids": ids,
        "step_s": [round(float(each_s), 7) for each_s in seconds],
        "decisions": stats["decisions"],
        "replans": stats["plan"]["replans"],
        "slowed": stats["slowed"],
        "over_links": moved,
    }


def run_prompt(each: Sized, name: str, length: int) -> dict[str, Any]:
    """Seconds until the first token of a prompt, the second of two."""
    settings = {**each.settings(name), "ctx_size": length + 64}
    ids = [(17 * number + 5) % 997 for number in range(length)]
    with LLM(each.pair.model, **settings) as llm:
        taken = []
        for _ in range(2):
            began, answer = time.monotonic(), list[int]()
            for chunk in llm.stream(ids, SamplingParams(max_tokens=2, ignore_eos=True)):
                if not answer:
                    first_s = time.monotonic() - began
                answer += chunk.token_ids
            stats = llm.stats()
            taken.append(first_s / stats["slowed"])
    return {
        "token_ids": answer,
        "prefill_s": taken[-1],
        "strategy": stats["plan"]["strategy"],
        "slowed": stats["slowed"],
        "overrun": max(stats["overrun_s"].values()) / sum(taken),
        "busy_pct": {lane: use["busy_pct"] for lane, use in stats["lanes"].items()},
    }


def in_turns(
    each: Sized, names: Sequence[str], rounds: int, learn: int, tokens: int, say: Any
) -> dict[str, list[dict[str, Any]]]:
    """Every strategy once per round. Raises AssertionError where tokens differ."""
    found: dict[str, list[dict[str, Any]]] = {}
    expected: list[int] | None = None
    for _ in range(rounds):
        for name in names:
            try:
                result = run(each, name, learn, tokens)
            except (ModelError, ValueError) as error:  # what does not fit as rounded
                say(f"{each.pair.label}, {name}: {error}")
                continue
            ids = result.pop("token_ids")
            expected = expected or ids
            if ids != expected:
                raise AssertionError(f"{each.pair.label}, {name}: other tokens than before")
            found.setdefault(name, []).append(result)
            say(
                f"{each.pair.label}, {name}: {1e3 * result['step_s']:.3f} ms, "
                f"over by {100 * result['overrun']:.2f} %, slowed {result['slowed']:g}, "
                f"{result['strategy']}"
            )
    return found


def step_of(results: Sequence[dict[str, Any]]) -> float:
    return median(result["step_s"] for result in results)


def kept_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
