"""What a plan says, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from shadowlane.report.figures import Json, facts, rate, seconds, size, table
from shadowlane.report.run import SOURCES

UNBOUNDED = 1000  # columns, more than any row needs


def plan_report(plan: Json, by_group: bool = False) -> RenderableType:
    """A plan for people: the budget and what fills it, the predictions, then layer by layer.

    `plan` is what `shadowlane.planner.explain.plan_report` makes. Layers that are placed alike
    share a row, unless every group is asked for.
    """
    groups = plan["groups"]
    parts = list(map(_group_part, groups)) if by_group else _parts(groups)
    return Lines(facts(_plan_facts(plan)), "", _PartTable(parts, list(_cards(plan))))


class _PartTable:
    """Rows with their reasons beside them or, where the terminal is too narrow, below the table."""

    def __init__(self, parts: Sequence[_Part], cards: Sequence[str]) -> None:
        self._parts = parts
        self._places = [*cards, "ram", "disk"]
        self._has_twice = any(part.twice for part in parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table([part.why for part in self._parts])
        needed = whole.__rich_measure__(console, options.update(max_width=UNBOUNDED)).maximum
        if needed <= options.max_width:
            yield whole
            return
        reasons = list(dict.fromkeys(part.why for part in self._parts))
        narrow = self._table([f"({1 + reasons.index(part.why)})" for part in self._parts])
        narrow.padding = (0, 1, 0, 0)
        yield narrow
        yield ""
        yield facts([(f"({number})", why) for number, why in enumerate(reasons, 1)])

    def _table(self, reasons: Sequence[str]) -> Table:
        made = table(("part", "left"))
        for name in ["bytes", *self._places, *(["twice"] if self._has_twice else [])]:
            made.add_column(name, justify="right", no_wrap=True)
        made.add_column("lanes")
        made.add_column("why")
        for part, why in zip(self._parts, reasons, strict=True):
            twice = [size(part.twice)] if self._has_twice else []
            made.add_row(
                Text(part.name),
                size(sum(part.nbytes.values()) - part.twice),
                *(size(part.nbytes[place]) for place in self._places),
                *twice,
                Text(", ".join(part.lanes)),
                Text(why),
            )
        return made


def _plan_facts(plan: Json) -> list[tuple[str, str]]:
    parts: Json = plan["bytes"]
    predicted: Json = plan["predicted"]
    guess = "" if plan["measured"] else ", from assumed speeds: nothing was measured yet"
    if plan["measured"] and plan["unmeasured"]:
        guess = f", unmeasured: {', '.join(plan['unmeasured'])}"
    if plan.get("emulated"):
        guess = ", emulated"
    lanes = ", ".join(f"{lane} {busy:.0f} %" for lane, busy in predicted["busy_pct"].items())
    experts = ""
    if parts.get("experts"):
        experts = f"{plan['expert_slots']} experts {size(parts['experts'])}, "
    copies = f"expanded copies {size(parts['expanded'])}, " if parts.get("expanded") else ""
    reads = "are expected to be" if experts else "are"
    slots = f"ring of {plan['num_slots']} slots {size(parts['slots'])}, " if parts["slots"] else ""
    machine = f"{plan.get('hardware')}{', emulated' * plan.get('emulated', False)}"
    return [
        *([("machine", machine)] if plan.get("hardware") else []),
        ("strategy", f"{plan['strategy']}: {plan['why']}"),
        ("budget", f"{size(plan['budget']['ram'])} of RAM, {size(parts['total'])} of it used"),
        *(
            (name, _on_card(card, plan["budget"][name], plan["emulated"]))
            for name, card in _cards(plan).items()
        ),
        (
            "in RAM",
            f"weights {size(parts['weights'])}, {experts}"
            f"KV cache {size(parts['kv'])} for {plan['context_tokens']} tokens, "
            f"{copies}{slots}scratch {size(parts['scratch'])}, "
            f"constants {size(parts['constants'])}",
        ),
        *([("copies", plan["copies"])] if parts.get("expanded") else []),
        *_twice(plan),
        *_weights(plan.get("weights")),
        ("prompts", f"up to {plan['chunk_rows']} tokens in one step, which reads weights once"),
        (
            "on disk",
            f"weights {size(plan['tiers']['disk'])}; "
            f"{size(plan['read_nbytes_per_step'])} {reads} read for each token",
        ),
        (
            "predicted",
            f"decode {rate(predicted['decode_tok_per_s'])} "
            f"({seconds(predicted['decode_step_s'])} a token)"
            f"{_predicted_prompt(plan)}{guess}",
        ),
        *_expected(plan.get("expected_hits")),
        ("busy", f"{lanes}; bottleneck {predicted['bottleneck']}"),
        (
            "bounds",
            f"no placement is below {seconds(predicted['resource_bound_s'])} a token "
            f"({predicted['resource']}), nor below "
            f"{seconds(predicted['critical_path_bound_s'])} on the critical path",
        ),
    ]


def _cards(plan: Json) -> Mapping[str, Json]:
    return plan["bytes"].get("cards", {})  # type: ignore[no-any-return]


def _weights(weights: Json | None) -> list[tuple[str, str]]:
    """The model's own bytes, and what they take in tiers: as much as the table has."""
    if weights is None:
        return []
    held = size(weights["held_nbytes"])
    return [("weights", f"{size(weights['nbytes'])}; {held} in whole pages of 4 KiB, as below")]


def _twice(plan: Json) -> list[tuple[str, str]]:
    nbytes = plan.get("copies_nbytes")
    if not nbytes:
        return []
    return [("twice", f"{size(nbytes)} in RAM are copies of what is on cards")]


def _on_card(card: Json, budget: int, is_emulated: bool) -> str:
    """What the budget of a card holds; on one that is here something comes beside it."""
    beside = "" if is_emulated else "; beside it come activations and the driver's context"
    experts = f"experts {size(card['experts'])}, " if card["experts"] else ""
    brought = ""
    if card["slots"]:
        brought = (
            f", {size(card['slots'])} for what is brought: {size(card['brought_per_token'])} for "
            "each token"
        )
    return (
        f"{size(budget)}, {size(card['total'])} of it used: weights {size(card['weights'])}, "
        f"{experts}KV cache {size(card['kv'])}{brought}{beside}"
    )


def _predicted_prompt(plan: Json) -> str:
    """Nothing of an emulated machine, whose prompts are not calibrated."""
    predicted: Json = plan["predicted"]
    if plan.get("emulated"):
        return ""
    return (
        f", prompt {rate(predicted['prefill_tok_per_s'])} in chunks of {predicted['prefill_rows']}"
    )


def _expected(hits: Json | None) -> list[tuple[str, str]]:
    """Of a mixture: what the prediction rests on."""
    if hits is None:
        return []
    source = SOURCES[hits["source"]]
    tokens = f", {hits['tokens']} tokens" if hits["tokens"] else ""
    return [
        ("rests on", f"{100 * hits['rate']:.0f} % of the chosen experts in RAM: {source}{tokens}")
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """A row of the plan's table: a group outside the layers, or a run of layers placed alike."""

    name: str
    nbytes: Mapping[str, int]  # by place: each card, "ram", "disk"
    lanes: tuple[str, ...]
    why: str
    twice: int = 0  # bytes of them that are copies of others


def _places(group: Json) -> dict[str, int]:
    on_cards: Json = group.get("vram_nbytes", {})
    return {**on_cards, "ram": group["ram_nbytes"], "disk": group["disk_nbytes"]}


def _twice_of(groups: Sequence[Json]) -> int:
    return sum(group.get("copies_nbytes", 0) for group in groups)


def _sum(places: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in places) for name in places[0]}


def _group_part(group: Json) -> _Part:
    lanes = [f"{lane} {first}-{last}" for lane, (first, last) in group["lanes"].items()]
    names = list(group["lanes"]) if len(lanes) == 1 else lanes  # rows matter where they are split
    why = group["why"]
    return _Part(group["group"], _places(group), tuple(names), why, _twice_of([group]))


def _parts(groups: Sequence[Json]) -> list[_Part]:
    """Groups gathered into layers, and neighbouring layers that are placed alike into one row."""
    layers: dict[str, list[Json]] = {}
    for group in groups:
        layer, dot, _ = group["group"].partition(".")
        layers.setdefault(layer if dot else group["group"], []).append(group)
    rows: list[tuple[str, _Part]] = []  # (first layer of the run, row)
    for name, members in layers.items():
        is_layer = "." in members[0]["group"]
        part = _Part(
            name=f"layer {name}" if is_layer else name,
            nbytes=_sum([_places(member) for member in members]),
            lanes=tuple(dict.fromkeys(lane for member in members for lane in member["lanes"])),
            why=_layer_why(members) if is_layer else members[0]["why"],
            twice=_twice_of(members),
        )
        if is_layer and rows and _is_alike(rows[-1][1], part):
            first, before = rows.pop()
            part = _Part(
                name=f"layers {first}-{name}",
                nbytes=_sum([before.nbytes, part.nbytes]),
                lanes=part.lanes,
                why=part.why,
                twice=before.twice + part.twice,
            )
            rows.append((first, part))
        else:
            rows.append((name, part))
    return [part for _, part in rows]


def _is_alike(one: _Part, other: _Part) -> bool:
    return one.name.startswith("layer") and (one.why, one.lanes) == (other.why, other.lanes)


def _layer_why(groups: Sequence[Json]) -> str:
    if any("vram_nbytes" in group for group in groups):
        return _where_kinds_are(groups)
    whole = [g["kind"] for g in groups if g["disk_nbytes"] and not g["ram_nbytes"]]
    partly = [g["kind"] for g in groups if g["disk_nbytes"] and g["ram_nbytes"]]
    if not whole and not partly:
        return "stays in RAM"
    if not any(group["ram_nbytes"] for group in groups):
        return "streams each step"
    streams = [f"all of {', '.join(whole)}"] if whole else []
    streams += [f"parts of {', '.join(partly)}"] if partly else []
    return f"streams {' and '.join(streams)} each step"


def _where_kinds_are(groups: Sequence[Json]) -> str:
    """Which kinds of a layer's groups are computed where, whole or in part."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        lanes = list(group["lanes"])
        for lane in lanes:
            part = "" if len(lanes) == 1 else "part of "
            kinds.setdefault(lane, []).append(part + group["kind"])
    if len(kinds) == 1:
        return f"all on {next(iter(kinds))}"
    return "; ".join(f"{', '.join(names)} on {lane}" for lane, names in kinds.items())
