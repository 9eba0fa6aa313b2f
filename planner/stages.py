"""Changing what lives on a full card: what is new finds no room before what is old has gone.

Then the change takes two stages. Under the first placement the card holds what both have in common,
and the processor computes what is to come; nothing that a step needs is ever missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.placement import Placement, Share, whole_pages


def first_stage(catalog: Catalog, old: Placement, new: Placement) -> Placement | None:
    """What has to run between `old` and `new`; None where there is room for both at once.

    None, too, where RAM cannot hold what would be in neither card's memory meanwhile: then the
    engine will refuse `new`.
    """
    late: dict[str, set[int]] = {}  # card -> blocks that have to wait for room
    for before, after in zip(old.cards, new.cards, strict=True):
        both = {*before.resident, *after.resident}
        held = sum(catalog.blocks[index].held_nbytes for index in both)
        beside = max(before.slots_nbytes, after.slots_nbytes)
        beside += max(before.kv_nbytes, after.kv_nbytes)
        if held + beside > after.budget:
            late[after.lane] = set(after.resident) - set(before.resident)
    if not any(late.values()):
        return None
    resident = list(new.resident)
    for blocks in late.values():
        for index in blocks:
            resident[index] = True
    held = whole_pages(sum(b.held_nbytes for b in catalog.blocks if resident[b.index]))
    grown = new.total_nbytes + max(0, held - new.weights_nbytes)
    if grown > new.ram:
        return None
    return replace(
        new,
        strategy=f"making room for {new.strategy}",
        resident=tuple(resident),
        weights_nbytes=max(held, new.weights_nbytes),
        cards=tuple(
            replace(
                card,
                resident=tuple(i for i in card.resident if i not in late.get(card.lane, ())),
            )
            for card in new.cards
        ),
        shares=_without(catalog, new.shares, late),
        prefill_shares=None
        if new.prefill_shares is None
        else _without(catalog, new.prefill_shares, late),
    )


def _without(
    catalog: Catalog,
    shares: Mapping[str, tuple[Share, ...]],
    late: Mapping[str, set[int]],
) -> dict[str, tuple[Share, ...]]:
    """The same shares, but what needs blocks that are late is computed by the processor."""
    found: dict[str, tuple[Share, ...]] = {}
    for group in catalog.groups:
        parts: list[Share] = []
        for share in shares[group.name]:
            for first, last, lane in _split(catalog, group, share, late.get(share.lane, set())):
                if parts and parts[-1].lane == lane:
                    parts[-1] = Share(lane, parts[-1].first_unit, last)
                else:
                    parts.append(Share(lane, first, last))
        found[group.name] = tuple(parts)
    return found


def _split(
    catalog: Catalog, group: Group, share: Share, late: set[int]
) -> list[tuple[int, int, str]]:
    """Parts of one share by rising unit, each with who computes it."""
    blocks = [catalog.blocks[index] for index in group.blocks if index in late]
    borders = {share.first_unit, share.last_unit}
    for block in blocks:
        borders |= {max(share.first_unit, min(share.last_unit, block.first_unit))}
        borders |= {max(share.first_unit, min(share.last_unit, block.last_unit))}
    ordered = sorted(borders)
    return [
        (
            first,
            last,
            "cpu:0"
            if any(block.first_unit < last and block.last_unit > first for block in blocks)
            else share.lane,
        )
        for first, last in pairwise(ordered)
    ]
