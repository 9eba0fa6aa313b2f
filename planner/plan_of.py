"""The plan that an exact placement is: which parts of groups its blocks and units come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.hybrid import Model, Plan, Site
from shadowlane.planner.hybrid_layouts import PHASES
from shadowlane.planner.placement import MIN_SLOTS, Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.sections import Cuts, cuts_of, parted, until_each


def plan_of(catalog: Catalog, placement: Placement, model: Model) -> Plan:
    """Parts are of bytes, of attention of KV heads; `place_on_cards` makes `placement` of it again.

    What is in RAM and on a card counts as on the card.
    """
    card_of = {index: card for card, part in enumerate(placement.cards) for index in part.resident}
    brought = {
        phase: {
            index: card
            for card, part in enumerate(placement.cards)
            for index in part.stream(phase).sweep
        }
        for phase in PHASES
    }
    groups = {group.name: group for group in catalog.groups}
    sites: list[Site] = []
    for load in model.loads:
        group = groups[load.name]
        if group.kind == "attn":
            sites.append(_attention(group, placement))
        elif group.kind == "experts":
            sites.append(_experts(catalog, group, placement, brought["prefill"]))
        elif group.kind == "router":
            sites.append(_router(group, placement))
        else:
            sites.append(_weights(catalog, group, placement, card_of, brought))
    return Plan(placement.strategy, tuple(sites), placement.micro_batches)


def _nobody(placement: Placement) -> tuple[float, ...]:
    return (1.0, *(0.0 for _ in placement.cards[1:]))


def _router(group: Group, placement: Placement) -> Site:
    (share,) = placement.shares[group.name]
    over = tuple(float(part.lane == share.lane) for part in placement.cards)
    if any(over):
        return Site(1.0, 0.0, over=over)
    return Site(0.0, 1.0, over=_nobody(placement))


def _experts(
    catalog: Catalog, group: Group, placement: Placement, brought: Mapping[int, int]
) -> Site:
    """RAM holds the same part of all layers' experts; those on cards need no room there.

    brought: for prompts, to which card each.
    """
    experts = catalog.experts
    assert experts is not None, "only mixtures have routed experts"
    layer = [each.name for each in catalog.sparse_groups].index(group.name)
    counts = [len(part.experts_of(layer)) for part in placement.cards]
    on_cards = sum(counts)
    numbers = {catalog.expert_number(layer, expert) for expert in range(experts.per_layer)}
    to_cards = [brought[number] for number in numbers if number in brought]
    if not on_cards:
        counts = [to_cards.count(card) for card in range(len(placement.cards))]
    total = sum(counts)
    vram = on_cards / experts.per_layer
    return Site(
        vram,
        min(1.0 - vram, placement.expert_slots / experts.total),
        over=tuple(count / total for count in counts) if total else _nobody(placement),
        brought_prefill=len(to_cards) / max(1, experts.per_layer - on_cards),
    )


def _attention(group: Group, placement: Placement) -> Site:
    heads = [0] * len(placement.cards)
    lanes = {part.lane: card for card, part in enumerate(placement.cards)}
    for lane, first, last in placement.shares[group.name]:
        if lane in lanes:
            heads[lanes[lane]] += last - first
    total = sum(heads)
    over = tuple(each / total for each in heads) if total else _nobody(placement)
    return Site(total / group.units, 1.0 - total / group.units, over=over)


def _weights(
    catalog: Catalog,
    group: Group,
    placement: Placement,
    card_of: dict[int, int],
    brought: dict[Phase, dict[int, int]],
) -> Site:
    sizes = {index: catalog.blocks[index].nbytes for index in group.blocks}
    total = sum(sizes.values())
    off = [index for index in group.blocks if index not in card_of]
    off_nbytes = sum(sizes[index] for index in off)
    in_ram = sum(sizes[index] for index in off if placement.resident[index])
    parts = [
        sum(sizes[index] for index in off if index in each) / off_nbytes if off else 0.0
        for each in brought.values()
    ]
    return Site(
        vram=(total - off_nbytes) / total,
        ram=in_ram / total,
        brought=parts[0],
        over=_over(catalog, group, placement, card_of, list(brought.values())),
        brought_prefill=parts[1],
    )


def _over(
    catalog: Catalog,
    group: Group,
    placement: Placement,
    card_of: dict[int, int],
    brought: Sequence[dict[int, int]],
) -> tuple[float, ...]:
    """How cards share the group.

    What lives on them and what is brought were rounded apart, so that they are not shared alike to
    the byte. What is sought is shared as what lives there, or else as what is brought, or else in
    some way between, of which all of them come by rounding.
    """
    count = len(placement.cards)
    homes = (card_of, *brought)
    having = {each[index] for each in homes for index in group.blocks if index in each}
    if count < 2 or not having:
        return _nobody(placement)
    if len(having) == 1:
        return tuple(float(card in having) for card in range(count))
    cuts = cuts_of(catalog, group)
    able = [MIN_SLOTS * part.slot_nbytes <= part.budget for part in placement.cards]
    first = sum(index in card_of for index in group.blocks)
    start = cuts.blocks.index(first)
    found = [_Shared(0, _ends(group, cuts, 0, card_of, count), [True] * count)]
    found += [_Shared(start, _ends(group, cuts, first, each, count), able) for each in brought]
    found = [each for each in found if each.ends[-1] > each.low]
    candidates = [each.until(cuts) for each in found]
    candidates.append(_between(cuts, found, count))
    candidates.append(_between(cuts, [each for each in found if all(each.able)], count))
    for until in candidates:
        if all(each.comes_of(cuts, until) for each in found):
            return tuple(_differences(until))
    return tuple(_differences(candidates[0]))


class _Shared(NamedTuple):
    """What lives on cards, or is brought to them, in the order of the cards."""

    low: int  # where it begins, as a place of the cuts
    ends: list[int]  # of each card's
    able: list[bool]  # cards that may have any

    def until(self, cuts: Cuts) -> list[float]:
        """Parts up to and with each card's."""
        return [self.part(cuts, end) for end in self.ends]

    def part(self, cuts: Cuts, place: int) -> float:
        base = cuts.nbytes[self.low]
        return (cuts.nbytes[place] - base) / (cuts.nbytes[self.ends[-1]] - base)

    def comes_of(self, cuts: Cuts, until: Sequence[float]) -> bool:
        """Whether it is what `until` rounds to."""
        among = until_each(_differences(until), self.able)
        return bool(among) and parted(cuts, self.low, self.ends[-1], among) == self.ends


def _ends(group: Group, cuts: Cuts, first: int, card_of: dict[int, int], count: int) -> list[int]:
    """Places of the cuts at which each card's blocks end, which begin with block `first`."""
    ends: list[int] = []
    for card in range(count):
        first += sum(card_of.get(index) == card for index in group.blocks)
        ends.append(cuts.blocks.index(first))
    return ends


def _differences(until: Sequence[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise((0.0, *until))]


def _between(cuts: Cuts, found: Sequence[_Shared], count: int) -> list[float]:
    """In the middle of what rounds to all of them, card by card."""
    until: list[float] = []
    for card in range(count - 1):
        least, most = 0.0, 1.0
        for each in found:
            end = each.ends[card]
            here = each.part(cuts, end)
            if end > each.low:
                least = max(least, (each.part(cuts, end - 1) + here) / 2)
            if end < each.ends[-1]:
                most = min(most, (here + each.part(cuts, end + 1)) / 2)
        until.append(max((least + most) / 2, until[-1] if until else 0.0))
    return [*until, 1.0]
