"""A placement over cards in the making: the sections of all groups, and what cards hold of them.

RAM comes after it: `card_placement.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar, cast

from shadowlane.planner.brought_experts import Brought, Sources, dealt, disk_order
from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.hybrid import NOTHING, Plan, Site, whole_on
from shadowlane.planner.hybrid_layouts import PHASES, Question
from shadowlane.planner.placement import (
    MIN_SLOTS,
    CardPart,
    Share,
    expert_shares,
    show_nbytes,
    whole_pages,
)
from shadowlane.planner.profile import Phase
from shadowlane.planner.rings import card_slot_nbytes, most_slots
from shadowlane.planner.sections import (
    Carry,
    Cuts,
    Sections,
    cuts_of,
    parted,
    shared_as,
    until_each,
)

Found = TypeVar("Found")


class Draft:
    """Sections change as rooms are found too small: first those of cards, then those of RAM."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        question: Question,
        cards: Sequence[str],
        budgets: Sequence[int],
        kv_nbytes: int,
        homes: Mapping[str, str],
    ) -> None:
        """cards: their lanes. budgets: bytes of each. kv_nbytes: of all layers together.

        homes: of groups that the user pinned.
        """
        self.catalog = catalog
        self.homes = homes
        self.cards = cards
        self.budgets = budgets
        self.notes: list[str] = []
        self.cuts = [cuts_of(catalog, group) for group in catalog.groups]
        attns = sum(1 for group in catalog.groups if group.kind == "attn")
        self._kv_of_layer = Fraction(kv_nbytes, max(1, attns))
        comes = any(load.comes for load in question.model.loads)
        on = question.machine.cards
        self._slot_nbytes = [card_slot_nbytes(catalog, card, comes=comes) for card in on]
        self._is_laid_out = [card.ring_nbytes is not None for card in on]
        self._most_slots = [
            most_slots(card, slot, budget)
            for card, slot, budget in zip(on, self._slot_nbytes, budgets, strict=True)
        ]
        self._able = [most > 0 for most in self._most_slots]
        expert = catalog.experts.slot_nbytes if catalog.experts else 0
        self._takes_experts = [
            can and expert <= slot for can, slot in zip(self._able, self._slot_nbytes, strict=True)
        ]
        self.sources = Sources(catalog)  # of experts that come for prompts
        self._last: dict[tuple[str, Phase], tuple[object, object]] = {}  # see `_while_same`
        self._sites = self._sites_of(plan, question)
        self.sections = self._rounded()

    def groups(self) -> Iterator[tuple[Group, Cuts, Sections]]:
        return zip(self.catalog.groups, self.cuts, self.sections, strict=True)

    def _sites_of(self, plan: Plan, question: Question) -> list[Site]:
        """The site of each group of the catalog, with as many cards as there are lanes."""
        count = len(self.cards)
        loads = question.model.loads
        named = {load.name: site for load, site in zip(loads, plan.sites, strict=True)}
        can_route = {load.name for load in loads if load.is_undivided}
        found: list[Site] = []
        for group in self.catalog.groups:
            if group.kind == "embed" or (
                group.kind == "router"
                and (group.name not in can_route or _card_of(named[group.name]) is None)
            ):
                found.append(Site(0.0, 1.0, over=(0.0,) * count))
                continue
            site = named[group.name]
            if not count:
                site = Site(0.0, site.ram, over=())
            elif len(site.over) != count:
                raise ValueError(f"{group.name} must be shared by {count} cards; got {site.over}")
            # What a router chose would come too late; itself is whole, and stays where it is.
            if group.kind in ("attn", "router"):
                site = replace(site, brought=0.0, brought_prefill=0.0)
            if group.kind == "experts":
                site = replace(site, brought=0.0)
            found.append(site)
        return found

    def wanted_on_disk(self, index: int) -> float:
        """The part of one group that the plan leaves only on disk. Of mixtures only experts are."""
        group, site = self.catalog.groups[index], self._sites[index]
        if self.catalog.experts or not group.blocks or group.kind == "embed":
            return 0.0
        part = 1.0 - site.vram - site.ram
        return part if part > NOTHING else 0.0

    def _rounded(self) -> list[Sections]:
        """What the plan wants on cards, rounded, and the rest in RAM."""
        carry = Carry()
        count = len(self.cards)
        found: list[Sections] = []
        for group, cuts, site in zip(self.catalog.groups, self.cuts, self._sites, strict=True):
            held = 0
            if group.kind == "router" and site.vram:  # undivided, and may have no blocks
                card = _card_of(site)
                ends = [0 if card is None or each < card else cuts.last for each in range(count)]
                found.append(Sections(ends, cuts.last))
                continue
            if site.vram > 0.0 and site.over:
                most = cuts.last
                if group.kind == "experts":  # behind them is their sum
                    most -= 1
                held = carry.round(group.kind, cuts, site.vram * cuts.total, 0, most)
            until = until_each(site.over, [True] * len(site.over))
            ends = [0] * count
            if held:
                # Of others, what is brought is shared alike, and rounded apart.
                among = carry if group.kind == "experts" else None
                ends = parted(cuts, 0, held, until, among, group.kind)
            found.append(Sections(ends, cuts.last))
        return found

    def _while_same(self, what: Callable[[Phase], Found], phase: Phase) -> Found:
        """`what` of a phase, worked out again only if other things live on cards than last time."""
        now = self.sources, [tuple(own.ends) for own in self.sections]
        before, found = self._last.get((what.__name__, phase), (None, None))
        if before != now:
            found = what(phase)
            self._last[what.__name__, phase] = now, found
        return cast(Found, found)

    def _brought(self, phase: Phase) -> list[list[int]]:
        """Per group, the ends of what is brought to each card; the first begins where RAM does."""
        return self._while_same(self._all_brought, phase)

    def _all_brought(self, phase: Phase) -> list[list[int]]:
        carry = Carry()
        ends: list[int] = []  # of what comes to any card
        untils: list[list[float]] = []
        for (group, cuts, own), site in zip(self.groups(), self._sites, strict=True):
            first, end = own.on_cards, own.on_cards
            part = site.brought_in(phase)
            until: list[float] = []
            if part > 0.0:
                sums = shared_as(cuts, own, site.over)
                over = [later - sooner for sooner, later in pairwise((0.0, *sums))]
                is_routed = group.kind == "experts"
                until = until_each(over, self._takes_experts if is_routed else self._able)
            if until:
                before = cuts.nbytes[first]
                wanted = before + part * (cuts.total - before)
                most = cuts.last - (group.kind == "experts")  # behind them is their sum
                end = carry.round(group.kind, cuts, wanted, first, most)
            ends.append(end)
            untils.append(until)
        if self.sources.most is not None and not self.sources.reads:
            self._bring_fewer(ends, self.sources.most)
        return [
            parted(cuts, own.on_cards, end, until) if until else [own.on_cards] * len(self.cards)
            for (_, cuts, own), end, until in zip(self.groups(), ends, untils, strict=True)
        ]

    def _bring_fewer(self, ends: list[int], most: int) -> None:
        """No more than so many experts, of all layers the same part; of those that may come."""
        routed = [
            (index, own.on_cards)
            for index, (group, _, own) in enumerate(self.groups())
            if group.kind == "experts"
        ]
        for layer, (index, first) in enumerate(routed):
            ends[index] = min(ends[index], first + len(self.sources.may_come(layer, first)))
        total = sum(ends[index] - first for index, first in routed)
        if total > most:
            for index, first in routed:
                ends[index] = first + (ends[index] - first) * most // total

    def _brought_experts(self) -> list[tuple[Brought, list[int]]]:
        """By layer, those that come for prompts, and how many to each card."""
        groups = [
            (own.on_cards, ends)
            for (group, _, own), ends in zip(self.groups(), self._brought("prefill"), strict=True)
            if group.kind == "experts"
        ]
        per_layer = self.catalog.experts.per_layer if self.catalog.experts else 0
        off_cards = sum(per_layer - on_cards for on_cards, _ in groups)
        return [
            (
                self.sources.come(layer, on_cards, ends[-1] - on_cards, off_cards),
                [last - first for first, last in pairwise((on_cards, *ends))],
            )
            for layer, (on_cards, ends) in enumerate(groups)
            if ends
        ]

    @property
    def brings_experts(self) -> bool:
        """Whether any come to cards for prompts."""
        return any(come.order for come, _ in self._brought_experts())

    def read_for_cards(self) -> tuple[int, ...]:
        """Those that the disk reads for links, by their numbers, in the order of their use."""
        read = {
            self.catalog.expert_number(layer, expert)
            for layer, (come, _) in enumerate(self._brought_experts())
            for expert in come.read
        }
        return disk_order(self.catalog, self._sweeps("prefill"), read)

    def _sweeps(self, phase: Phase) -> list[list[int]]:
        """Per card, what comes over its link, in the order of its use."""
        return self._while_same(self._all_sweeps, phase)

    def _all_sweeps(self, phase: Phase) -> list[list[int]]:
        sweeps: list[list[int]] = [[] for _ in self.cards]
        experts = iter(enumerate(self._brought_experts() if phase == "prefill" else ()))
        for (group, cuts, own), ends in zip(self.groups(), self._brought(phase), strict=True):
            start = own.on_cards
            for card, end in enumerate(ends):
                sweeps[card] += group.blocks[cuts.blocks[start] : cuts.blocks[end]]
                start = end
            if group.kind == "experts" and phase == "prefill" and self.cards:
                layer, (come, counts) = next(experts)
                for card, of_card in enumerate(dealt(come.order, counts)):
                    sweeps[card] += [self.catalog.expert_number(layer, each) for each in of_card]
        return sweeps

    def _slots(self) -> list[int]:
        """Of each card's ring: as it is laid out; where it is not yet, enough for what comes in any
        phase, as far as there is room."""
        by_phase = [self._sweeps(phase) for phase in PHASES]
        longest = [max(map(len, sweeps)) for sweeps in zip(*by_phase, strict=True)]
        return [
            most if is_there else max(MIN_SLOTS, min(most, length)) if length else 0
            for is_there, most, length in zip(
                self._is_laid_out, self._most_slots, longest, strict=True
            )
        ]

    def fit_cards(self) -> None:
        """Take from the end of the model what a card has no room for; before all else experts.

        Raises ValueError where pins leave nothing to take.
        """
        taken, experts = [0] * len(self.cards), [0] * len(self.cards)
        while True:
            slots = self._slots()
            again = False
            for card, budget in enumerate(self.budgets):
                room = budget - slots[card] * self._slot_nbytes[card]
                weights, kv = self.held(card)
                index = len(self.cuts) - 1
                while weights + whole_pages(up(kv)) > room:
                    coldest = self._with_most_experts(card)
                    if coldest is not None:
                        index = coldest
                    if index < 0:
                        raise ValueError(
                            f"pins must fit {self.cards[card]}: weights {show_nbytes(weights)} + "
                            f"keys and values {show_nbytes(up(kv))}; it has {show_nbytes(room)}"
                        )
                    own = self.sections[index]
                    if own.ends[card] == own.start(card) or self._is_on_its_card(index):
                        index -= 1
                        continue
                    before, kv_before = self._held_of(index, card)
                    fewer = 1
                    if self.catalog.groups[index].kind == "router":
                        fewer = own.ends[card]
                    for later in range(card, len(own.ends)):  # those keep as many blocks
                        own.ends[later] -= fewer
                    after, kv_after = self._held_of(index, card)
                    weights, kv = weights + after - before, kv + kv_after - kv_before
                    experts[card] += coldest is not None
                    taken[card] += before - after + up(kv_before - kv_after)
                    again = True
                    if coldest is not None:
                        index = len(self.cuts) - 1
            if not again:
                break
        for lane, nbytes, count in zip(self.cards, taken, experts, strict=True):
            if count > 1 or nbytes > self._rounding():
                self.notes.append(
                    f"{show_nbytes(nbytes)} of what was planned for {lane} do not fit it"
                )

    def _rounding(self) -> int:
        """Bytes by which whole blocks may come to more than was planned, of which nobody is told:
        of each kind of group one block, of keys and values one head."""
        kinds = {group.kind for group in self.catalog.groups if group.blocks}
        heads = min(
            (cuts.last for group, cuts, _ in self.groups() if group.kind == "attn"), default=1
        )
        return len(kinds) * self.catalog.slot_nbytes + up(self._kv_of_layer / heads)

    def _with_most_experts(self, card: int) -> int | None:
        """The group with most experts on a card, of several the last; None: it has none."""
        counts = [
            (own.ends[card] - own.start(card), index)
            for index, (group, _, own) in enumerate(self.groups())
            if group.kind == "experts" and not self._is_on_its_card(index)
        ]
        most, index = max(counts, default=(0, 0))
        return index if most else None

    def _is_on_its_card(self, index: int) -> bool:
        return self.homes.get(self.catalog.groups[index].name, "").startswith("gpu:")

    def experts(self) -> list[tuple[tuple[int, ...], ...]]:
        """The routed experts on each card, by layer; cards that share a layer are hit alike."""
        experts = self.catalog.experts
        if experts is None:
            return [()] * len(self.cards)
        layers: list[tuple[tuple[int, ...], ...]] = []
        for group, _, own in self.groups():
            if group.kind == "experts":
                counts = [own.ends[card] - own.start(card) for card in range(len(self.cards))]
                layers.append(dealt(experts.ranked(len(layers)), counts))
        return list(zip(*layers, strict=True))

    def held(self, card: int) -> tuple[int, Fraction]:
        """Bytes of weights, experts too, and of keys and values on a card."""
        each = [self._held_of(index, card) for index in range(len(self.cuts))]
        return sum(weights for weights, _ in each), sum((kv for _, kv in each), Fraction(0))

    def _held_of(self, index: int, card: int) -> tuple[int, Fraction]:
        own, cuts = self.sections[index], self.cuts[index]
        start, end = own.start(card), own.ends[card]
        if self.catalog.groups[index].kind == "attn":
            return 0, self._kv_of_layer * Fraction(end - start, cuts.last)
        return cuts.held_nbytes[end] - cuts.held_nbytes[start], Fraction(0)

    def on_cards(self) -> set[int]:
        """Blocks that live on any card."""
        return {
            index
            for group, cuts, own in self.groups()
            for index in group.blocks[: cuts.blocks[own.on_cards]]
        }

    def card_parts(self) -> tuple[CardPart, ...]:
        slots = self._slots()
        decode, prefill = (self._sweeps(phase) for phase in PHASES)
        experts = self.experts()
        expert_nbytes = self.catalog.experts.slot_nbytes if self.catalog.experts else 0
        found: list[CardPart] = []
        for card, lane in enumerate(self.cards):
            weights, kv = self.held(card)
            experts_nbytes = sum(map(len, experts[card])) * expert_nbytes
            resident = [
                index
                for group, cuts, own in self.groups()
                for index in group.blocks[
                    cuts.blocks[own.start(card)] : cuts.blocks[own.ends[card]]
                ]
            ]
            found.append(
                CardPart(
                    lane=lane,
                    resident=tuple(resident),
                    decode_sweep=tuple(decode[card]),
                    prefill_sweep=tuple(prefill[card]),
                    num_slots=slots[card],
                    slot_nbytes=self._slot_nbytes[card],
                    budget=self.budgets[card],
                    weights_nbytes=weights - experts_nbytes,
                    slots_nbytes=slots[card] * self._slot_nbytes[card],
                    kv_nbytes=whole_pages(up(kv)),
                    experts=experts[card] if experts_nbytes else (),
                    experts_nbytes=experts_nbytes,
                )
            )
        return tuple(found)

    def shares(self, processor: str, phase: Phase) -> dict[str, tuple[Share, ...]]:
        """What lives on cards, then what comes to them, then the processor's part, group by group.

        What comes is a share of its own beside what lives on the same card: only it waits.
        """
        brought = self._brought(phase)
        shares: dict[str, tuple[Share, ...]] = {}
        chooser = processor  # of the layer's experts: who computes the router
        for (group, cuts, own), ends in zip(self.groups(), brought, strict=True):
            if group.kind == "experts":
                held = [own.ends[card] - own.start(card) for card in range(len(self.cards))]
                come = [last - first for first, last in pairwise((own.on_cards, *ends))]
                shares[group.name] = expert_shares(
                    dict(zip(self.cards, held, strict=True)),
                    processor,
                    group.units,
                    chooser,
                    brought=dict(zip(self.cards, come, strict=True)),
                )
                continue
            parts: list[Share] = []
            start = 0
            lanes = [*self.cards, *self.cards, processor]
            for lane, end in zip(lanes, [*own.ends, *ends, cuts.last], strict=True):
                if end > start:
                    parts.append(Share(lane, cuts.units[start], cuts.units[end]))
                    start = end
            shares[group.name] = tuple(parts)
            if group.kind == "router":
                chooser = parts[0].lane
        return shares


def _card_of(site: Site) -> int | None:
    """The card that has all of a group."""
    return whole_on(site.vram, site.over)


def up(nbytes: Fraction) -> int:
    return -(-nbytes.numerator // nbytes.denominator)
