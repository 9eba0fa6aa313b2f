"""Which rows and columns a share of a group is about, on a card: what meets what other lanes do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from shadowlane.ops.card.packed_torch import DIRECT
from shadowlane.ops.card.products import CardBlock
from shadowlane.ops.decoder import DecoderConfig, GroupDescription

UNIT_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Columns first..last of a buffer, in all rows of a step."""

    buffer: str  # a name of CardBuffers
    first: int
    last: int


def buffers_read(config: DecoderConfig, group: GroupDescription) -> tuple[str, ...]:
    """Names of the buffers that a group reads; of two, the second is that of a chunk's rows."""
    found = {
        "embed": ("gather",),
        "attn": ("qkv",),
        "o": ("attended", "attended_chunk"),
        "down": ("activated", "activated_chunk"),
    }.get(group.kind, ("residual",))
    return (*found, "router") if has_shared_gate(config, group) else found


def spans_written(
    config: DecoderConfig, group: GroupDescription, first_unit: int, last_unit: int
) -> tuple[Span, ...]:
    """What units first..last of a group write; of two, the second is of a chunk's rows.

    Not for groups of experts, whose rows are those of pairs.
    """
    first, last = output_rows(group, first_unit, last_unit)
    match group.kind:
        case "embed":
            return (Span("residual", 0, config.hidden_size),)
        case "attn":
            width = config.num_heads // config.num_kv_heads * config.head_dim
            first, last = first_unit * width, last_unit * width
            return Span("attended", first, last), Span("attended_chunk", first, last)
        case "gate_up":
            return Span("activated", first, last), Span("activated_chunk", first, last)
        case "qkv" | "router":
            return (Span(group.kind, first, last),)
        case "lm_head":
            return (Span("logits", first, last),)
    return (Span("residual", first, last),)


def has_shared_gate(config: DecoderConfig, group: GroupDescription) -> bool:
    """Whether a group is the second half of an expert that every row goes to, scaled by a gate."""
    moe = config.moe
    if moe is None or not moe.has_shared_gate or group.kind != "down":
        return False
    return group.layer in moe.sparse_layers


def output_rows(group: GroupDescription, first_unit: int, last_unit: int) -> tuple[int, int]:
    """Output rows of units first..last."""
    parts = group.parts[:1] if group.kind == "gate_up" else group.parts
    total = sum(part.rows for part in parts)
    return min(first_unit * UNIT_ROWS, total), min(last_unit * UNIT_ROWS, total)


def part_starts(group: GroupDescription) -> list[int]:
    """First output row of each part of a group whose parts lie one behind the other."""
    starts = [0]
    for part in group.parts:
        starts.append(starts[-1] + part.rows)
    return starts


def cut_blocks(
    blocks: Iterable[CardBlock], span: tuple[int, int]
) -> Iterable[tuple[CardBlock, int, int]]:
    """Blocks with those of their own rows that output rows span[0]..span[1] need."""
    for block in blocks:
        first = max(span[0] - block.output_row, 0)
        last = min(span[1] - block.output_row, block.num_rows)
        if first < last:
            yield block, first, last


Cut = tuple[CardBlock, int, int]  # a block, and the first and the end of its own rows


def pair_blocks(cut: Iterable[Cut]) -> list[tuple[Cut, Cut]] | None:
    """Packed blocks of gate with those of up for the same rows; None where some do not pair."""
    gates: list[Cut] = []
    ups: list[Cut] = []
    for each in sorted(cut, key=lambda one: one[0].output_row + one[1]):
        if each[0].layout in DIRECT:
            return None
        (ups if each[0].part else gates).append(each)

    def spans(half: list[Cut]) -> list[tuple[int, int]]:
        return [(block.output_row + first, last - first) for block, first, last in half]

    return list(zip(gates, ups, strict=True)) if spans(gates) == spans(ups) else None


def of_width(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """A buffer that is as wide as the widest group needs, as rows of `width` one by one."""
    return buffer.view(-1)[: buffer.shape[0] * width].view(-1, width)
