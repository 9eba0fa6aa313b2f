"""What a run did and what a plan says, as tables for people and as objects for programs.

Pure formatting: takes the dictionaries that the Python API returns. A figure that is missing is
shown as a dash, never guessed, and an emulated one says so beside the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shadowlane.sizes import format_size

Json = Mapping[str, Any]

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


def run_object(text: str, token_ids: Sequence[int], stats: Json) -> dict[str, Any]:
    """The one object of `run --json`. Raises KeyError if `stats` lacks a key it promises."""
    found = {"text": text, "token_ids": list(token_ids), **stats}
    if stats["emulated"] and "prefill_s" in found:  # prompts are not calibrated
        found["prefill_s"] = None
    return {key: found.pop(key) for key in RUN_KEYS} | found


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tok/s" if value < 100 else f"{value:.0f} tok/s"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-4:
        return f"{value * 1e6:.1f} us"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, justify in columns:
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    return table


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def summary(stats: Json) -> RenderableType:
    """What one run did: speeds, bytes per tier, busy lanes, predicted and measured time."""
    plan: Json = stats["plan"]
    emulated = " (emulated)" if stats["emulated"] else ""
    tiers: Json = plan["tiers"]
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
        (
            "weights",
            f"{_where(tiers)}; {size(plan['read_nbytes_per_token'])} read for each token",
        ),
        *_expert_facts(stats),
        ("plan", f"{plan['plan_id']}, re-planned {replans} time{'' if replans == 1 else 's'}"),
        ("load", seconds(stats["load_s"])),
        *_emulation(stats),
    ]
    lanes = _table(
        ("lane", "left"), ("busy", "right"), ("of the time", "right"), ("moved", "right")
    )
    for name, lane in stats["lanes"].items():
        slowest = " (bottleneck)" if name == stats["bottleneck"] else ""
        lanes.add_row(
            Text(name + slowest),
            seconds(lane["busy_s"]),
            f"{lane['busy_pct']:.0f} %",
            size(lane["nbytes"]),
        )
    parts: list[RenderableType] = [_facts(rows), "", lanes]
    if stats["bottleneck"] not in stats["lanes"]:
        parts.append(Text(f"bottleneck: {stats['bottleneck']}"))
    return Lines(*parts)


def _prompt_speed(stats: Json) -> str:
    if stats["emulated"]:
        return "of which emulation says too little"
    speed = rate(stats["prefill_tok_per_s"])
    return f"{speed}, first token after {seconds(stats['ttft_s'])}"


def _emulation(stats: Json) -> list[tuple[str, str]]:
    if not stats["emulated"]:
        return []
    return [
        (
            "emulated",
            f"seconds of a machine that is not here; each took {stats.get('slowed', 1):g} s here",
        )
    ]


def _where(tiers: Json) -> str:
    """2.0 GiB in RAM, 1.5 GiB on gpu:0, 0 B only on disk."""
    cards = "".join(
        f"{size(nbytes)} on gpu:{name[5:]}, "
        for name, nbytes in tiers.items()
        if name.startswith("vram:")
    )
    return f"{size(tiers['ram'])} in RAM, {cards}{size(tiers['disk'])} only on disk"


def _at_hits(stats: Json) -> str:
    """Of a mixture: what the prediction would have been, had it known how often the cache hits."""
    at_hits = stats.get("predicted_at_hits_step_s")
    return "" if at_hits is None else f" ({seconds(at_hits)} for the hits below)"


#: What an expected hit rate rests on, by its source.
_SOURCES = {
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
        found += f" ({expected}, {_SOURCES[experts['expected_from']]})"
    if rate is not None and experts["early_hit_rate"]:
        found += f", {100 * experts['early_hit_rate']:.1f} % more were read ahead in time"
    held = min(experts["slots"], experts["of"] - experts["on_cards"])
    rows = [("experts", f"{held} of {experts['of']} in RAM{cards}; {found}")]
    if held + experts["on_cards"] == experts["of"]:
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


def plan_report(plan: Json, by_group: bool = False) -> RenderableType:
    """A plan for people: the budget and what fills it, the predictions, then layer by layer.

    `plan` is what `shadowlane.planner.explain.plan_report` makes. Layers that are placed alike
    share a row, unless every group is asked for.
    """
    cards = list(plan["bytes"].get("cards", ()))
    columns = ("bytes", *cards, "ram", "disk")
    table = _table(("part", "left"), *((name, "right") for name in columns))
    table.add_column("lanes")
    table.add_column("why", overflow="fold")
    for part in map(_group_part, plan["groups"]) if by_group else _parts(plan["groups"]):
        table.add_row(
            Text(part.name),
            size(sum(part.nbytes.values())),
            *(size(part.nbytes[place]) for place in (*cards, "ram", "disk")),
            Text(", ".join(part.lanes)),
            Text(part.why),
        )
    return Lines(_facts(_plan_facts(plan)), "", table)


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
            for name, card in _cards(plan)
        ),
        (
            "in RAM",
            f"weights {size(parts['weights'])}, {experts}"
            f"KV cache {size(parts['kv'])} for {plan['context_tokens']} tokens, "
            f"{copies}{slots}scratch {size(parts['scratch'])}, "
            f"constants {size(parts['constants'])}",
        ),
        *([("copies", plan["copies"])] if parts.get("expanded") else []),
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


def _cards(plan: Json) -> list[tuple[str, Json]]:
    return list(plan["bytes"].get("cards", {}).items())


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
    source = _SOURCES[hits["source"]]
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


def _places(group: Json) -> dict[str, int]:
    on_cards: Json = group.get("vram_nbytes", {})
    return {**on_cards, "ram": group["ram_nbytes"], "disk": group["disk_nbytes"]}


def _sum(places: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in places) for name in places[0]}


def _group_part(group: Json) -> _Part:
    lanes = [f"{lane} {first}-{last}" for lane, (first, last) in group["lanes"].items()]
    names = list(group["lanes"]) if len(lanes) == 1 else lanes  # rows matter where they are split
    why = group["why"]
    return _Part(group["group"], _places(group), tuple(names), why)


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
        )
        if is_layer and rows and _is_alike(rows[-1][1], part):
            first, before = rows.pop()
            part = _Part(
                name=f"layers {first}-{name}",
                nbytes=_sum([before.nbytes, part.nbytes]),
                lanes=part.lanes,
                why=part.why,
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


def _figure(key: str, value: Any) -> str:
    """A value with the unit that its name ends in."""
    if value is None:
        return "unmeasured"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if key.endswith("tok_per_s"):
        return rate(value)
    if key.endswith("nbytes"):
        return size(int(value))
    if key.endswith("_s"):
        return seconds(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tree(values: Json) -> RenderableType:
    """A measured profile, or anything nested: one row per figure, its path as the name."""
    table = _table(("figure", "left"), ("value", "right"))
    for name, value in _leaves("", values):
        table.add_row(Text(name), Text(_figure(name, value)))
    return table


def group_figures(figures: Sequence[Json]) -> RenderableType:
    """What was measured of each kind of group: one row per shape, one column per kind of step."""
    columns = sorted({(each["phase"], each["rows"]) for each in figures})
    table = _table(
        ("group", "left"),
        ("weights", "left"),
        ("units", "right"),
        ("columns", "right"),
        ("context", "right"),
        *((f"{phase} of {rows}", "right") for phase, rows in columns),
    )
    found: dict[tuple[Any, ...], dict[tuple[str, int], float]] = {}
    for each in figures:
        shape = (each["units"], each["cols"] or "", each["context"] or "")
        row = (each["kind"], each["layout"], *shape)
        found.setdefault(row, {})[each["phase"], each["rows"]] = each["seconds"]
    for names, times in found.items():
        shown = (seconds(times[each]) if each in times else "" for each in columns)
        table.add_row(*(Text(str(name)) for name in names), *(Text(each) for each in shown))
    return table


def _leaves(prefix: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        items: Any = values.items()
    elif isinstance(values, list | tuple):
        items = enumerate(values)
    else:
        return [(prefix, values)]
    return [
        leaf
        for name, value in items
        for leaf in _leaves(f"{prefix}.{name}" if prefix else str(name), value)
    ]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Repetitions of one measurement: "pp512" is prefill of 512 tokens, "tg128" decode of 128."""

    test: str
    tok_per_s: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tok_per_s)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.tok_per_s) if len(self.tok_per_s) > 1 else 0.0


def bench_object(model: str, rows: Sequence[BenchRow], stats: Json) -> dict[str, Any]:
    """What `bench --output json` prints: each repetition, mean, deviation, and the plan it ran."""
    return {
        "model": model,
        "tests": [
            {
                "test": row.test,
                "tok_per_s": list(row.tok_per_s),
                "mean_tok_per_s": row.mean,
                "deviation_tok_per_s": row.deviation,
            }
            for row in rows
        ],
        "plan": stats["plan"],
        "bottleneck": stats["bottleneck"],
        "emulated": stats["emulated"],
    }


def _vram(tiers: Json) -> list[tuple[str, int]]:
    return [(name, nbytes) for name, nbytes in tiers.items() if name.startswith("vram:")]


def bench_markdown(model: str, rows: Sequence[BenchRow], stats: Json) -> str:
    """The same as a Markdown table, to be pasted beside other engines' tables."""
    plan: Json = stats["plan"]
    emulated = " (emulated)" if stats["emulated"] else ""
    places = {
        **{f"on {name.replace('vram', 'gpu')}": nbytes for name, nbytes in _vram(plan["tiers"])},
        "in RAM": plan["tiers"]["ram"],
        "only on disk": plan["tiers"]["disk"],
        "read per token": plan["read_nbytes_per_token"],
    }
    head = ("model", *places, "bottleneck", "test", "tok/s" + emulated)
    lines = [head, ("---",) * (len(head) - 1) + ("---:",)]
    for row in rows:
        speed = f"{row.mean:.2f} ± {row.deviation:.2f}"
        sizes = [size(nbytes) for nbytes in places.values()]
        lines.append((model, *sizes, stats["bottleneck"], row.test, speed))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
