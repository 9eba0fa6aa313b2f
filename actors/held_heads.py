"""Which KV heads each card holds under a placement, and what they take of its memory.

Keys and values live beside a card's weights. Where a placement has other heads on a card than the
one before it, what is cached of a layer passes through the arena, which has room for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shadowlane.actors.blueprint import Blueprint
from shadowlane.planner.placement import Placement, whole_pages
from shadowlane.planner.profile import Phase


class Heads(NamedTuple):
    """KV heads [first, last) of a layer: with a home on a card like a block, but in one piece."""

    layer: int
    first: int
    last: int


def heads_on(blueprint: Blueprint, placement: Placement, lane: str) -> tuple[Heads, ...]:
    """The heads that a card attends with, by rising layer."""
    found: dict[int, Heads] = {}
    phases: tuple[Phase, Phase] = ("decode", "prefill")
    layers = {group.name: group.layer for group in blueprint.catalog.groups if group.kind == "attn"}
    for phase in phases:
        shares = placement.shares_of(phase)
        for name, layer in layers.items():
            for share in shares[name]:
                if share.lane == lane and layer is not None:
                    before = found.get(layer, Heads(layer, share.first_unit, share.last_unit))
                    first = min(before.first, share.first_unit)
                    found[layer] = Heads(layer, first, max(before.last, share.last_unit))
    return tuple(found[layer] for layer in sorted(found))


def page_nbytes(blueprint: Blueprint) -> int:
    """Of one page of one head: its keys and its values."""
    config = blueprint.config
    return blueprint.catalog.page_nbytes // (config.num_layers * config.num_kv_heads)


def spare_nbytes(blueprint: Blueprint) -> int:
    """What a card's homes for heads take beyond the pages that a plan counts: one page of each
    layer, where rows that pad a step write, and the rest of the last page of memory."""
    config = blueprint.config
    one = config.num_kv_heads * page_nbytes(blueprint)
    return config.num_layers * (whole_pages(one) + whole_pages(1))


class CardSizes:
    """Bytes of whatever may have a home on a card: blocks and experts by number, and heads."""

    def __init__(self, blueprint: Blueprint, num_pages: int) -> None:
        self._held: Sequence[int] = blueprint.held_nbytes
        self._of_head = (num_pages + 1) * page_nbytes(blueprint)

    def __getitem__(self, key: int | Heads) -> int:
        if isinstance(key, Heads):
            return whole_pages((key.last - key.first) * self._of_head)
        return self._held[key]


def num_moved(before: Sequence[Heads], after: Sequence[Heads]) -> int:
    """Heads, over all layers, that come to a card or leave it."""

    def each(of: Sequence[Heads]) -> set[tuple[int, int]]:
        return {(each.layer, head) for each in of for head in range(each.first, each.last)}

    return len(each(before) ^ each(after))
