"""Which activations cross between a card and the arena: what each instruction fetches and leaves.

Processors compute in the arena; a card has buffers of its own. Before an instruction it fetches
the columns that others have written since it last had them, and after it leaves behind what anybody
else reads before it is written again. Both follow from the programs of all lanes, so they are
known when a placement is adopted, and nothing crosses for which nobody waits.

What experts give is not among it: which rows a card computes is known only when a router has
chosen, and each goes to a place of its own (`card_activations.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowlane.ops.card.shares import Span, has_shared_gate, output_rows, spans_written
from shadowlane.ops.decoder import DecoderConfig, GroupDescription
from shadowlane.planner.catalog import expert_units
from shadowlane.planner.program import ComputeInstruction, Program

Ranges = list[tuple[int, int]]  # by rising start, apart from one another
RESULTS = "logits"  # the engine reads them after the step


@dataclass(frozen=True, slots=True)
class Crossings:
    """Of one instruction of a card: columns of buffers, in all rows of a step."""

    fetched: tuple[Span, ...]
    left: tuple[Span, ...]


class _Part(NamedTuple):
    """What one lane's instruction reads and writes."""

    lane: str
    number: int  # in its lane's program
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


def crossings(
    config: DecoderConfig,
    groups: Sequence[GroupDescription],
    programs: Mapping[str, Program],
    lane: str,
) -> list[Crossings]:
    """Of each instruction of a card's lane, given the programs of all lanes for one phase.

    Micro-batches are of different rows, and alike but for the head, which the last has for all.
    """
    lanes = {name: _by_micro_batch(program) for name, program in programs.items()}
    last = {name: Program(name, found[max(found)]) for name, found in lanes.items() if found}
    steps = _steps(config, groups, last)
    fetched = _fetched(steps, lane)
    left = _left(steps, lane)
    return [
        Crossings(tuple(fetched[n]), tuple(left[n]))
        for instructions in lanes[lane].values()
        for n in range(len(instructions))
    ]


def _by_micro_batch(program: Program) -> dict[int, tuple[ComputeInstruction, ...]]:
    found: dict[int, list[ComputeInstruction]] = {}
    for each in program.instructions:
        if isinstance(each, ComputeInstruction):
            found.setdefault(each.micro_batch, []).append(each)
    return {number: tuple(each) for number, each in found.items()}


def spans_read(
    config: DecoderConfig, group: GroupDescription, first_unit: int, last_unit: int
) -> tuple[Span, ...]:
    """What units first..last of a group read; of two, the second is of a chunk's rows."""
    hidden = Span("residual", 0, config.hidden_size)
    if group.kind == "embed":
        return ()
    if group.kind == "attn":
        return _heads_read(config, first_unit, last_unit)
    if group.kind not in ("o", "down"):
        return (hidden,)
    name, width = {"o": "attended", "down": "activated"}[group.kind], group.parts[0].cols
    found = [Span(name, 0, width), Span(f"{name}_chunk", 0, width)]
    found.append(Span("residual", *output_rows(group, first_unit, last_unit)))  # added to
    if has_shared_gate(config, group):
        assert config.moe is not None
        found.append(Span("router", config.moe.num_experts, config.moe.num_experts + 1))
    return tuple(found)


def _heads_read(config: DecoderConfig, first: int, last: int) -> tuple[Span, ...]:
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    if config.full_width_qk_norm:  # of all heads together
        return (Span("qkv", 0, (heads + 2 * kv_heads) * dim),)
    grouped = heads // kv_heads
    return (
        Span("qkv", first * grouped * dim, last * grouped * dim),
        Span("qkv", (heads + first) * dim, (heads + last) * dim),
        Span("qkv", (heads + kv_heads + first) * dim, (heads + kv_heads + last) * dim),
    )


def _steps(
    config: DecoderConfig, groups: Sequence[GroupDescription], programs: Mapping[str, Program]
) -> list[list[_Part]]:
    """By group, in their order, what every lane does in it."""
    order = {group.name: number for number, group in enumerate(groups)}
    steps: list[list[_Part]] = [[] for _ in groups]
    for lane, program in programs.items():
        for number, each in enumerate(program.instructions):
            assert isinstance(each, ComputeInstruction)
            group = groups[order[each.group]]
            units = (each.first_unit, each.last_unit)
            reads = spans_read(config, group, *units)
            if group.kind == "attn" and not lane.startswith("gpu:"):
                reads += _angles(config)  # cards compute them at the beginning of a step
            part = _Part(lane, number, reads, _spans_written(config, group, *units))
            steps[order[each.group]].append(part)
    return steps


def _spans_written(
    config: DecoderConfig, group: GroupDescription, first_unit: int, last_unit: int
) -> tuple[Span, ...]:
    if group.kind == "experts":
        assert config.moe is not None
        adds_up = last_unit == expert_units(config.moe.num_experts)
        return (Span("residual", 0, config.hidden_size),) if adds_up else ()
    written = spans_written(config, group, first_unit, last_unit)
    return (*written, *_angles(config)) if group.kind == "embed" else written


def _angles(config: DecoderConfig) -> tuple[Span, ...]:
    """Who embeds a row leaves the angles of its position, too."""
    return Span("cos", 0, config.head_dim // 2), Span("sin", 0, config.head_dim // 2)


def _fetched(steps: Sequence[Sequence[_Part]], lane: str) -> dict[int, list[Span]]:
    stale: dict[str, Ranges] = {}  # what others wrote since
    found: dict[int, list[Span]] = {}
    for step in steps:
        for part in step:
            if part.lane != lane:
                continue
            found[part.number] = []
            for span in part.reads:
                ranges = stale.get(span.buffer, [])
                for first, last in within(ranges, span):
                    found[part.number].append(Span(span.buffer, first, last))
                stale[span.buffer] = without(ranges, span)
        for part in step:
            for span in part.writes:
                ranges = without(stale.get(span.buffer, []), span)
                if part.lane != lane and span.last > span.first:
                    ranges = joined([*ranges, (span.first, span.last)])
                stale[span.buffer] = ranges
    return found


def _left(steps: Sequence[Sequence[_Part]], lane: str) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for at, step in enumerate(steps):
        for part in step:
            if part.lane == lane:
                found[part.number] = [
                    span
                    for span in part.writes
                    if span.buffer == RESULTS or _is_read(span, steps[at + 1 :], lane)
                ]
    return found


def _is_read(span: Span, steps: Sequence[Sequence[_Part]], lane: str) -> bool:
    """Whether another lane reads any of it before it is written again."""
    ranges = [(span.first, span.last)]
    for step in steps:
        for part in step:
            if part.lane == lane:
                continue
            for read in part.reads:
                if read.buffer == span.buffer and within(ranges, read):
                    return True
        for part in step:
            for written in part.writes:
                if written.buffer == span.buffer:
                    ranges = without(ranges, written)
        if not ranges:
            return False
    return False


# Ranges ------------------------------------------------------------------------------------------


def within(ranges: Ranges, span: Span) -> Ranges:
    """The parts of ranges that a span covers."""
    cut = [(max(first, span.first), min(last, span.last)) for first, last in ranges]
    return [(first, last) for first, last in cut if first < last]


def without(ranges: Ranges, span: Span) -> Ranges:
    """Ranges but for what a span covers."""
    left = []
    for first, last in ranges:
        pieces = ((first, min(last, span.first)), (max(first, span.last), last))
        left += [piece for piece in pieces if piece[0] < piece[1]]
    return left


def joined(ranges: Ranges) -> Ranges:
    """The same ranges by rising start, those that touch as one."""
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
