"""Changing what lives on a full card: what is new finds no room before what is old has gone.

Then the change takes two stages. Under the first placement the card holds what both have in common,
and the processor computes what is to come; nothing that a step needs is ever missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from shadowlane.planner.brought_experts import disk_order
from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.placement import CardPart, Placement, Share, expert_shares, whole_pages
from shadowlane.planner.profile import Phase
from shadowlane.planner.search import most_more_kept


def first_stage(catalog: Catalog, old: Placement, new: Placement) -> Placement | None:
    """What has to run between `old` and `new`; None where there is room for both at once.

    None, too, where RAM cannot hold what would be in neither card's memory meanwhile: then the
    engine will refuse `new`.
    """
    late: dict[str, set[int]] = {}  # card -> blocks that have to wait for room
    fewer: dict[str, tuple[tuple[int, ...], ...]] = {}  # card -> experts that have not to
    for before, after in zip(old.cards, new.cards, strict=True):
        both = {*before.resident, *after.resident}
        held = sum(catalog.blocks[index].held_nbytes for index in both)
        held += _both_experts_nbytes(catalog, before, after)
        beside = max(before.slots_nbytes, after.slots_nbytes)
        beside += max(before.kv_nbytes, after.kv_nbytes)
        if held + beside > after.budget:
            late[after.lane] = set(after.resident) - set(before.resident)
            if _experts_in_common(before, after) != after.experts:
                fewer[after.lane] = _experts_in_common(before, after)
    for group in catalog.groups:
        if group.kind == "router":  # which one lane computes, all of it
            for card in new.cards:
                if late.get(card.lane, set()).intersection(group.blocks):
                    late[card.lane] |= set(group.blocks)
    if not any(late.values()) and not fewer:
        return None
    resident = list(new.resident)
    for blocks in late.values():
        for index in blocks:
            resident[index] = True
    held = whole_pages(sum(b.held_nbytes for b in catalog.blocks if resident[b.index]))
    grown = new.total_nbytes + max(0, held - new.weights_nbytes)
    if grown > new.ram:
        return None
    cards = tuple(
        replace(
            card,
            resident=tuple(i for i in card.resident if i not in late.get(card.lane, ())),
            experts=fewer.get(card.lane, card.experts),
        )
        for card in new.cards
    )
    return replace(
        new,
        strategy=f"making room for {new.strategy}",
        resident=tuple(resident),
        weights_nbytes=max(held, new.weights_nbytes),
        cards=cards,
        shares=_without(catalog, new, "decode", late, cards),
        prefill_shares=None
        if new.prefill_shares is None
        else _without(catalog, new, "prefill", late, cards),
    )


def _shares_of_experts(
    catalog: Catalog, cards: Sequence[CardPart], phase: Phase, adds_up: str, group: Group
) -> tuple[Share, ...]:
    """Who computes the routed experts of one layer, as cards hold them and have them brought."""
    layer = catalog.sparse_groups.index(group)
    held = {card.lane: len(card.experts_of(layer)) for card in cards}
    come = {card.lane: len(catalog.experts_in(card.stream(phase).sweep)[layer]) for card in cards}
    return expert_shares(held, "cpu:0", group.units, adds_up, brought=come)


def with_experts(
    catalog: Catalog, placement: Placement, cards: Sequence[tuple[tuple[int, ...], ...]]
) -> Placement:
    """Other experts on the cards, as many of each layer: [card][layer].

    Those that leave are brought for prompts in place of those that come: off the disk, or as far as
    they can have slots in RAM beside these.
    """
    assert catalog.experts is not None, "only mixtures have routed experts"
    come: list[list[int]] = [[] for _ in catalog.sparse_groups]  # by layer, over all cards
    leave: list[list[int]] = [[] for _ in catalog.sparse_groups]
    for part, experts in zip(placement.cards, cards, strict=True):
        for layer, of_layer in enumerate(experts):
            come[layer] += of_layer
            leave[layer] += part.experts_of(layer)
    kept, read = placement.experts_out_of_ram(catalog), set(placement.prefill_sweep)
    more = most_more_kept(catalog.experts, placement.expert_slots, len(kept))
    instead: dict[int, int | None] = {}  # numbers
    for layer, (after, before) in enumerate(zip(come, leave, strict=True)):
        new = [expert for expert in after if expert not in before]
        old = [expert for expert in before if expert not in after]
        for one, other in zip(new, old, strict=True):
            number = catalog.expert_number(layer, one)
            if number not in kept | read:
                continue
            its = catalog.expert_number(layer, other)
            if number in kept and more > 0:
                more -= 1
            elif placement.num_slots:
                read.add(its)
            else:
                instead[number] = None
                continue
            instead[number] = its
    parts = tuple(
        replace(
            part,
            experts=experts,
            prefill_sweep=tuple(
                comes
                for each in part.prefill_sweep
                if (comes := instead.get(each, each)) is not None
            ),
        )
        for part, experts in zip(placement.cards, cards, strict=True)
    )
    shares = placement.prefill_shares
    if shares is not None:
        shares = dict(shares)
        for group in catalog.sparse_groups:
            adds_up = shares[group.name][-1].lane
            shares[group.name] = _shares_of_experts(catalog, parts, "prefill", adds_up, group)
    return replace(
        placement,
        cards=parts,
        prefill_shares=shares,
        prefill_sweep=disk_order(catalog, [part.prefill_sweep for part in parts], read),
    )


def _experts_in_common(one: CardPart, other: CardPart) -> tuple[tuple[int, ...], ...]:
    """By layer, those of `other` that are in `one` too."""
    return tuple(
        tuple(expert for expert in experts if expert in set(one.experts_of(layer)))
        for layer, experts in enumerate(other.experts)
    )


def _both_experts_nbytes(catalog: Catalog, one: CardPart, other: CardPart) -> int:
    """Of experts that live on a card under either of two placements."""
    if catalog.experts is None:
        return 0
    common = sum(map(len, _experts_in_common(one, other)))
    return (one.num_experts + other.num_experts - common) * catalog.experts.slot_nbytes


def _without(
    catalog: Catalog,
    placement: Placement,
    phase: Phase,
    late: Mapping[str, set[int]],
    cards: Sequence[CardPart],
) -> dict[str, tuple[Share, ...]]:
    """The shares of a placement, but what needs blocks that are late is computed by the processor.

    cards: with the experts that are not late.
    """
    shares = placement.shares_of(phase)
    found: dict[str, tuple[Share, ...]] = {}
    for group in catalog.groups:
        if group.kind == "experts":
            adds_up = shares[group.name][-1].lane
            found[group.name] = _shares_of_experts(catalog, cards, phase, adds_up, group)
            continue
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
