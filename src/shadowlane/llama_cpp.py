"""Flags of llama.cpp that come closest to a plan, for others to confirm or refute it.

It knows whole tensors on one device, so parts are rounded to whole groups. Layers are alike: of
each kind of group as many are put on cards as in the plan, but always those of the last layers, as
`-ngl` has it, which makes the fewest crossings. Routers go with their layers. What is brought ahead
has no flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shadowlane.planner.hybrid import Load, Model, Plan, Work, kv_nbytes

TENSORS = {
    "qkv": ("attn_", "q", "k", "v"),
    "o": ("attn_", "output"),
    "gate_up": ("ffn_", "gate", "up"),
    "down": ("ffn_", "down"),
    "shared_gate_up": ("ffn_", "gate_shexp", "up_shexp"),
    "shared_down": ("ffn_", "down_shexp"),
}
HEAD = "^(output|token_embd)"  # the second where both are one tensor; its rows are gathered in RAM
SLACK_NBYTES = 64e6  # by which rounding may fill cards beyond the plan, out of what is reserved
HALF = 0.5
NEARLY = 1e-6


@dataclass(frozen=True, slots=True)
class _Kind:
    """All groups of one kind, in the order of their layers."""

    layers: tuple[int, ...]
    nbytes: float  # of one, keys and values included
    on_cards: int  # the last so many

    @property
    def off(self) -> tuple[int, ...]:
        return self.layers[: len(self.layers) - self.on_cards]


def llama_cpp_flags(model: Model, plan: Plan, work: Work) -> list[str]:
    """For llama-server and llama-cli; `-ngl` counts the head first, as since December 2025."""
    sites = list(zip(model.loads, plan.sites, strict=True))
    kinds, spare = _kinds(model, plan, work)
    layers = 1 + max(layer for kind in kinds.values() for layer in kind.layers)
    firsts = [kind.layers[len(kind.off)] for kind in kinds.values() if kind.on_cards]
    first = min(firsts, default=layers)
    has_head = any(
        load.kind == "lm_head" and site.vram and (1.0 - site.vram) * load.nbytes <= spare
        for load, site in sites
    )
    context = ["-c", str(work.max_context)]
    if first == layers and not has_head:
        return ["-ngl", "0", *context]
    flags = ["-ngl", str(layers - first + 1), *context]
    kv = kinds["attn"]
    kv_on_cards = kv.on_cards >= HALF * (layers - first)
    if not kv_on_cards:
        flags.append("--no-kv-offload")
    experts = kinds.get("experts")
    if experts and experts.off and experts.off[-1] >= first:
        several = ["--n-cpu-moe", str(experts.off[-1] + 1)]
        flags += several if experts.on_cards else ["--cpu-moe"]
    overrides: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        off = [layer for layer in kind.off if layer >= first]
        if off and name in TENSORS:
            # Layers before the first are off anyway, so they may be named or not.
            pattern = min(number_pattern(off), number_pattern(kind.off), key=len)
            where = rf"blk\.{_group(pattern)}\." if kind.on_cards else ""
            overrides.setdefault(where, []).append(name)
    for where, names in overrides.items():
        flags += ["-ot", rf"{where}{_tensors(names)}\.=CPU"]
    if not has_head:
        flags += ["-ot", rf"{HEAD}\.=CPU"]
    if len(plan.sites[0].over) > 1:
        weights = [
            sum(
                kind.nbytes
                for name, kind in kinds.items()
                if layer in kind.layers
                and layer not in kind.off
                and (name != "attn" or kv_on_cards)
            )
            for layer in range(first, layers)
        ]
        head = sum(load.nbytes for load, _ in sites if load.kind == "lm_head") if has_head else 0.0
        flags += _card_flags(model, plan, work, [*weights, head])
    return flags


def _kinds(model: Model, plan: Plan, work: Work) -> tuple[dict[str, _Kind], float]:
    """(kinds by name, bytes that rounding leaves free on the cards)."""
    found: dict[str, list[tuple[Load, float]]] = {}
    for load, site in zip(model.loads, plan.sites, strict=True):
        if load.layer is not None:
            found.setdefault(load.name.partition(".")[2], []).append((load, site.vram))
    kinds: dict[str, _Kind] = {}
    rest: dict[str, float] = {}  # of a group, that was on cards and is rounded away
    for name, members in found.items():
        parts = sum(vram for _, vram in members)
        nbytes = max(load.whole_nbytes + kv_nbytes(load, work) for load, _ in members)
        layers = tuple(load.layer or 0 for load, _ in members)
        kinds[name] = _Kind(layers, nbytes, int(parts + NEARLY))
        rest[name] = max(0.0, parts - kinds[name].on_cards)
    spare = SLACK_NBYTES + sum(rest[name] * kind.nbytes for name, kind in kinds.items())
    for name, kind in sorted(kinds.items(), key=lambda item: item[1].nbytes):
        if rest[name] > NEARLY and kind.nbytes <= spare:
            kinds[name] = replace(kind, on_cards=kind.on_cards + 1)
            spare -= kind.nbytes
    return kinds, spare


def _card_flags(model: Model, plan: Plan, work: Work, nbytes: Sequence[float]) -> list[str]:
    """How cards share layers: as many on each as come closest to the bytes that the plan has there.

    nbytes: on cards, of each layer that is there, the head last. Where the plan divides most
    groups between cards, rows are divided.
    """
    cards = range(len(plan.sites[0].over))
    held = [0.0 for _ in cards]
    divided = whole = 0.0
    for load, site in zip(model.loads, plan.sites, strict=True):
        here = (load.whole_nbytes + kv_nbytes(load, work)) * site.vram
        if not load.experts and max(site.over) < 1.0 - NEARLY:
            divided += here
        else:
            whole += here
        for card in cards:
            held[card] += here * site.over[card]
    total = sum(held)
    if divided > whole:
        shares = [round(100 * each / total) for each in held]
        return ["-sm", "row", "-ts", ",".join(map(str, shares))]
    counts: list[int] = []
    wanted = before = 0.0
    place = 0
    for card in cards:
        wanted += held[card] / total * sum(nbytes)
        start = place
        while place < len(nbytes) and before + HALF * nbytes[place] <= wanted:
            before += nbytes[place]
            place += 1
        counts.append(place - start)
    counts[-1] += len(nbytes) - place
    return ["-ts", ",".join(map(str, counts))]


def _tensors(names: Sequence[str]) -> str:
    """A pattern of the tensors of these kinds of groups, without what follows their names."""
    ends: dict[str, list[str]] = {}
    for name in names:
        prefix, *parts = TENSORS[name]
        ends.setdefault(prefix, []).extend(parts)
    patterns = [prefix + _group("|".join(parts)) for prefix, parts in ends.items()]
    return patterns[0] if len(patterns) == 1 else f"({'|'.join(patterns)})"


def _group(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


def number_pattern(numbers: Iterable[int]) -> str:
    r"""A short regular expression that matches these numbers and no others: 0 to 79 is [1-7]?\d."""
    last_digits: dict[int, set[int]] = {}  # by what stands before; 0: nothing
    for number in numbers:
        last_digits.setdefault(number // 10, set()).add(number % 10)
    same: dict[str, list[int]] = {}
    for before, digits in last_digits.items():
        same.setdefault(_digits(digits), []).append(before)
    patterns = []
    for last, befores in same.items():
        rest = [before for before in befores if before]
        lead = _group(number_pattern(rest)) if rest else ""
        if rest and len(rest) < len(befores):
            is_one = len(lead) == 1 or lead == r"\d" or lead[0] + lead[-1] in ("[]", "()")
            lead = f"{lead}?" if is_one else f"({lead})?"
        patterns.append(lead + last)
    return "|".join(patterns)


def _digits(digits: set[int]) -> str:
    if len(digits) == 10:
        return r"\d"
    runs: list[list[int]] = []
    for digit in sorted(digits):
        if runs and digit == runs[-1][-1] + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(map(str, run)) for run in runs]
    return parts[0] if len(digits) == 1 else f"[{''.join(parts)}]"
