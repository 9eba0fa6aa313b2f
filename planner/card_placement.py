"""A plan over cards made exact: from parts of groups to blocks and units, and back.

Each group is cut into sections (`sections.py`). Budgets are kept exactly: what rounding makes too
large for a card goes to RAM, from the end of the model; what RAM cannot hold is left on disk, of
all groups the same part, so that the disk reads steadily.

The processor computes the embedding, routers and experts, whatever the plan says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hit_rate import missing_nbytes
from shadowlane.planner.hybrid import NOTHING, Plan, Site, stage_nbytes, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import (
    MIN_SLOTS,
    PAGE_NBYTES,
    CardPart,
    InfeasiblePlan,
    Placement,
    Request,
    Share,
    show_nbytes,
    whole_pages,
)
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.profile import Phase
from shadowlane.planner.search import RING_NBYTES, RING_PART, RING_SLOTS, UNDIVIDED, least_slots
from shadowlane.planner.sections import (
    Carry,
    Sections,
    cuts_of,
    parted,
    shared_as,
    until_each,
)

PHASES: tuple[Phase, ...] = ("decode", "prefill")
SCALES = 1 << 16  # of what RAM holds, where it cannot hold all that is wanted


def place_on_cards(
    catalog: Catalog,
    plan: Plan,
    request: Request,
    question: Question,
    *,
    placement_id: int = 0,
    budgets: Mapping[str, int] | None = None,
) -> Placement:
    """`plan` in whole blocks, for the lanes of `request`: cpu:0, which computes alone, and cards.

    question: the one that `plan` answers; its machine has the cards of the lanes, in their order.
    budgets: bytes of each card by its lane; None: what the question's conditions leave of them.

    Raises InfeasiblePlan where RAM cannot hold what it must.
    """
    return _Maker(catalog, plan, request, question, budgets).placement(placement_id)


class _Maker:
    """One placement in the making: sizes, then cards, then RAM, then shares."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        request: Request,
        question: Question,
        budgets: Mapping[str, int] | None,
    ) -> None:
        self.catalog = catalog.with_subchunks(request.subchunks or 1)
        self.plan = plan
        self.request = request
        self.question = question
        self.cards = _card_lanes(request, question)
        self.budgets = _budgets(self.cards, question, budgets)
        self.ring_slots = [  # at most
            max(MIN_SLOTS, min(int(stage_nbytes(card)), budget) // catalog.slot_nbytes)
            for card, budget in zip(question.machine.cards, self.budgets, strict=True)
        ]
        self.able = [MIN_SLOTS * catalog.slot_nbytes <= budget for budget in self.budgets]
        self.notes: list[str] = []

        asked = min(request.context or question.work.max_context, catalog.max_context)
        self.context_tokens = asked
        self.kv_pages = -(-asked // catalog.page_tokens) * request.max_batch
        attns = sum(1 for group in catalog.groups if group.kind == "attn")
        self.kv_of_layer = Fraction(self.kv_pages * catalog.page_nbytes, max(1, attns))

        self.cuts = [cuts_of(catalog, group) for group in catalog.groups]
        self.sites = self._sites()
        if any(self._wanted_on_disk(each) for each in range(len(self.sites))):
            self._bring_alike()
        self.sections = self._on_cards()

    def placement(self, placement_id: int) -> Placement:
        self._fit_cards()
        num_slots = self._fit_ram()
        catalog, request = self.catalog, self.request
        resident, sweep = self._residence()
        if sweep:
            self._bring_alike()
        shares = {phase: self._shares(phase) for phase in PHASES}
        weights = sum(block.held_nbytes for block in catalog.blocks if resident[block.index])
        fixed = self._fixed_nbytes()
        room = request.ram - sum(fixed.values()) - weights - num_slots * catalog.slot_nbytes
        experts = catalog.experts
        expert_slots = min(experts.total, room // experts.slot_nbytes) if experts else 0
        experts_nbytes = expert_slots * experts.slot_nbytes if experts else 0
        weights += self._keep_embedding(resident, room - experts_nbytes)
        placement = Placement(
            placement_id=placement_id,
            strategy=self.plan.name,
            lanes=request.lanes,
            resident=tuple(resident),
            sweep=tuple(sweep),
            num_slots=num_slots,
            slot_nbytes=catalog.slot_nbytes,
            context_tokens=self.context_tokens,
            kv_pages=self.kv_pages,
            shares=shares["decode"],
            ram=request.ram,
            weights_nbytes=weights,
            slots_nbytes=num_slots * catalog.slot_nbytes,
            kv_nbytes=fixed["KV"],
            scratch_nbytes=fixed["scratch"],
            constants_nbytes=fixed["constants"],
            read_nbytes_per_step=sum(catalog.blocks[index].held_nbytes for index in sweep)
            + missing_nbytes(experts, expert_slots),
            predicted_step_s=0.0,
            expert_slots=expert_slots,
            experts_nbytes=experts_nbytes,
            subchunks=request.subchunks or 1,
            cards=tuple(self._card(card) for card in range(len(self.cards))),
            prefill_shares=None if shares["prefill"] == shares["decode"] else shares["prefill"],
        )
        assert placement.total_nbytes <= request.ram, placement
        exact = plan_of(catalog, placement, self.question.model)
        return replace(
            placement,
            predicted_step_s=self.question.times(exact).step_s,
            notes=tuple(self.notes),
        )

    # -- what is wanted

    def _sites(self) -> list[Site]:
        """The site of each group of the catalog, with as many cards as there are lanes."""
        count = len(self.cards)
        found: list[Site] = []
        named = {
            load.name: site
            for load, site in zip(self.question.model.loads, self.plan.sites, strict=True)
        }
        for group in self.catalog.groups:
            # NOTE: here experts on cards begin: they would be counted by id, not cut by unit.
            if group.kind == "embed" or group.kind in UNDIVIDED or not count:
                site = named.get(group.name, Site(0.0, 1.0))
                kept = 1.0 if group.kind in UNDIVIDED or group.kind == "embed" else site.ram
                found.append(Site(0.0, kept, over=(0.0,) * count))
                continue
            site = named[group.name]
            if len(site.over) != count:
                raise ValueError(
                    f"{group.name} must be shared by the {count} cards; got {site.over}"
                )
            moves = group.kind != "attn"
            found.append(
                replace(
                    site,
                    brought=site.brought if moves else 0.0,
                    brought_prefill=site.brought_prefill if moves else 0.0,
                )
            )
        return found

    def _bring_alike(self) -> None:
        """What comes off the disk comes in one order, so that all phases have the same shares."""
        if any(site.brought != site.brought_prefill for site in self.sites):
            self.notes.append(
                "prompts have the same shares as single tokens, because weights are read from disk"
            )
            self.sites = [replace(site, brought_prefill=site.brought) for site in self.sites]

    def _wanted_on_disk(self, index: int) -> float:
        """The part of one group that the plan leaves only on disk. Of mixtures only experts are."""
        group, site = self.catalog.groups[index], self.sites[index]
        if self.catalog.experts or not group.blocks or group.kind == "embed":
            return 0.0
        part = 1.0 - site.vram - site.ram
        return part if part > NOTHING else 0.0

    def _on_cards(self) -> list[Sections]:
        """What the plan wants on cards, rounded, and the rest in RAM."""
        carry = Carry()
        found: list[Sections] = []
        for group, cuts, site in zip(self.catalog.groups, self.cuts, self.sites, strict=True):
            held = 0
            if site.vram > 0.0 and site.over:
                held = carry.round(group.kind, cuts, site.vram * cuts.total, 0, cuts.last)
            until = until_each(site.over, [True] * len(site.over))
            ends = parted(cuts, 0, held, until) if held else [0] * len(self.cards)
            found.append(Sections(ends, cuts.last))
        return found

    # -- cards

    def _brought(self, phase: Phase) -> list[list[int]]:
        """Per group, the ends of what is brought to each card; the first begins where RAM does."""
        carry = Carry()
        found: list[list[int]] = []
        for group, cuts, site, own in zip(
            self.catalog.groups, self.cuts, self.sites, self.sections, strict=True
        ):
            first, end = own.on_cards, own.on_cards
            part = site.brought_in(phase)
            until: list[float] = []
            if part > 0.0:
                sums = shared_as(cuts, own, site.over)
                over = [each - before for each, before in zip(sums, (0.0, *sums), strict=False)]
                until = until_each(over, self.able)
            if until:
                before = cuts.nbytes[first]
                wanted = before + part * (cuts.total - before)
                end = carry.round(group.kind, cuts, wanted, first, own.ram)
            found.append(parted(cuts, first, end, until) if until else [first] * len(self.cards))
        return found

    def _sweeps(self, phase: Phase) -> list[list[int]]:
        """Per card, the blocks that come over its link, in the order of their use."""
        sweeps: list[list[int]] = [[] for _ in self.cards]
        brought = self._brought(phase)
        for group, cuts, own, ends in zip(
            self.catalog.groups, self.cuts, self.sections, brought, strict=True
        ):
            start = own.on_cards
            for card, end in enumerate(ends):
                sweeps[card] += group.blocks[cuts.blocks[start] : cuts.blocks[end]]
                start = end
        return sweeps

    def _slots(self) -> list[int]:
        """Of each card's ring: enough for what comes in any phase, as far as there is room."""
        by_phase = [self._sweeps(phase) for phase in PHASES]
        longest = [max(map(len, sweeps)) for sweeps in zip(*by_phase, strict=True)]
        return [
            max(MIN_SLOTS, min(most, length)) if length else 0
            for most, length in zip(self.ring_slots, longest, strict=True)
        ]

    def _fit_cards(self) -> None:
        """Take from the end of the model what a card has no room for."""
        taken = [0] * len(self.cards)
        while True:
            slots = self._slots()
            again = False
            for card, budget in enumerate(self.budgets):
                room = budget - slots[card] * self.catalog.slot_nbytes
                weights, kv = self._held(card)
                index = len(self.cuts) - 1
                while weights + whole_pages(_up(kv)) > room:
                    own = self.sections[index]
                    if own.ends[card] == own.start(card):
                        index -= 1
                        continue
                    before, kv_before = self._held_of(index, card)
                    for later in range(card, len(own.ends)):  # those keep as many blocks
                        own.ends[later] -= 1
                    after, kv_after = self._held_of(index, card)
                    weights, kv = weights + after - before, kv + kv_after - kv_before
                    taken[card] += before - after + _up(kv_before - kv_after)
                    again = True
            if not again:
                break
        for lane, nbytes in zip(self.cards, taken, strict=True):
            if nbytes:
                self.notes.append(
                    f"{show_nbytes(nbytes)} of what was planned for {lane} do not fit it"
                )

    def _held(self, card: int) -> tuple[int, Fraction]:
        """Bytes of weights and of keys and values on a card."""
        each = [self._held_of(index, card) for index in range(len(self.cuts))]
        return sum(weights for weights, _ in each), sum((kv for _, kv in each), Fraction(0))

    def _held_of(self, index: int, card: int) -> tuple[int, Fraction]:
        own, cuts = self.sections[index], self.cuts[index]
        start, end = own.start(card), own.ends[card]
        if self.catalog.groups[index].kind == "attn":
            return 0, self.kv_of_layer * Fraction(end - start, cuts.last)
        return cuts.held_nbytes[end] - cuts.held_nbytes[start], Fraction(0)

    def _card(self, card: int) -> CardPart:
        resident = [
            block
            for group, cuts, own in zip(self.catalog.groups, self.cuts, self.sections, strict=True)
            for block in group.blocks[cuts.blocks[own.start(card)] : cuts.blocks[own.ends[card]]]
        ]
        weights, kv = self._held(card)
        slots = self._slots()[card]
        return CardPart(
            lane=self.cards[card],
            resident=tuple(resident),
            decode_sweep=tuple(self._sweeps("decode")[card]),
            prefill_sweep=tuple(self._sweeps("prefill")[card]),
            num_slots=slots,
            slot_nbytes=self.catalog.slot_nbytes,
            budget=self.budgets[card],
            weights_nbytes=weights,
            slots_nbytes=slots * self.catalog.slot_nbytes,
            kv_nbytes=whole_pages(_up(kv)),
        )

    # -- RAM

    def _fixed_nbytes(self) -> dict[str, int]:
        """What RAM holds beside weights and rings."""
        on_cards = sum((self._held(card)[1] for card in range(len(self.cards))), Fraction(0))
        rest = Fraction(self.kv_pages * self.catalog.page_nbytes) - on_cards
        return {
            "constants": whole_pages(self.catalog.constants_nbytes),
            "KV": whole_pages(_up(rest)),
            "scratch": whole_pages(self.catalog.scratch_nbytes),
        }

    def _fit_ram(self) -> int:
        """Leave on disk what RAM has no room for. Slots of the ring through which it comes then."""
        catalog = self.catalog
        fixed = self._fixed_nbytes()
        room = self.request.ram - sum(fixed.values())
        if catalog.experts is not None:
            experts = least_slots(catalog.experts)
            weights = self._off_cards_nbytes()
            if weights + experts * catalog.experts.slot_nbytes > room:
                parts = {**fixed, "weights of every token": weights}
                parts[f"{experts} experts"] = experts * catalog.experts.slot_nbytes
                raise InfeasiblePlan("the plan does not fit", parts, self.request.ram)
            return 0
        slots = self._disk_slots(room)
        ring = slots * catalog.slot_nbytes

        def fits(scale: int) -> bool:
            self._leave_on_disk(scale / SCALES)
            reads = any(
                own.ram < cuts.last for own, cuts in zip(self.sections, self.cuts, strict=True)
            )
            return self._off_cards_nbytes() + (ring if reads else 0) <= room

        if not fits(SCALES):
            planned = self._off_cards_nbytes()
            low, high = 0, SCALES
            if not fits(low):
                parts = {**fixed, f"{slots} slots": ring}
                if planned < ring:
                    parts = {**fixed, "weights": planned}
                raise InfeasiblePlan("the plan does not fit", parts, self.request.ram)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            fits(low)
            missing = planned - self._off_cards_nbytes()
            self.notes.append(f"{show_nbytes(missing)} more than planned are read from disk")
        return slots if self._residence()[1] else 0

    def _disk_slots(self, room: int) -> int:
        """As `place` has it: powers of two, so that a slightly different budget has the same."""
        if self.request.num_slots is not None:
            return self.request.num_slots
        affordable = min(RING_NBYTES, room // RING_PART) // max(1, self.catalog.slot_nbytes)
        slots = MIN_SLOTS
        while slots * 2 <= min(RING_SLOTS, affordable):
            slots *= 2
        return slots

    def _leave_on_disk(self, scale: float) -> None:
        """RAM holds `scale` of what is neither on cards nor planned for the disk, in each group."""
        carry = Carry()
        for index, (group, cuts, own) in enumerate(
            zip(self.catalog.groups, self.cuts, self.sections, strict=True)
        ):
            if not group.blocks or group.kind == "embed":
                continue
            on_disk = self._wanted_on_disk(index) * cuts.total
            off = cuts.total - cuts.nbytes[own.on_cards]
            kept = scale * max(0.0, off - on_disk)
            end = cuts.nbytes[own.on_cards] + kept
            own.ram = carry.round("", cuts, end, own.on_cards, cuts.last)

    def _off_cards_nbytes(self) -> int:
        """What RAM holds of weights that cards do not; without the embedding."""
        return sum(
            cuts.held_nbytes[own.ram] - cuts.held_nbytes[own.on_cards]
            for group, cuts, own in zip(self.catalog.groups, self.cuts, self.sections, strict=True)
            if group.kind != "embed"
        )

    def _residence(self) -> tuple[list[bool], list[int]]:
        """(whether each block is in RAM, blocks that are only on disk), without the embedding."""
        resident = [False] * len(self.catalog.blocks)
        sweep: list[int] = []
        for group, cuts, own in zip(self.catalog.groups, self.cuts, self.sections, strict=True):
            if group.kind != "embed":
                sweep += group.blocks[cuts.blocks[own.ram] :]
                for index in group.blocks[cuts.blocks[own.on_cards] : cuts.blocks[own.ram]]:
                    resident[index] = True
        return resident, sweep

    def _keep_embedding(self, resident: list[bool], room: int) -> int:
        """Rows in RAM are not gathered from disk: as many blocks as there is room for.

        Tied rows are those of the head: what a card holds of them is in RAM once more.
        """
        kept = missing = 0
        embed = next((group for group in self.catalog.groups if group.kind == "embed"), None)
        is_tied = embed is not None and not embed.blocks
        holder = self.catalog.group("lm_head") if is_tied else embed
        if holder is None:
            return 0
        place = self.catalog.groups.index(holder)
        on_cards = self.cuts[place].blocks[self.sections[place].on_cards]
        blocks = holder.blocks[:on_cards] if is_tied else holder.blocks
        for index in blocks:
            nbytes = self.catalog.blocks[index].held_nbytes
            if kept + nbytes <= room:
                resident[index] = True
                kept += nbytes
            else:
                missing += nbytes
        if missing:
            self.notes.append(f"{show_nbytes(missing)} of embedding rows are gathered from disk")
        return kept

    # -- who computes what

    def _shares(self, phase: Phase) -> dict[str, tuple[Share, ...]]:
        """What lives on a card, then what comes to cards, then the processor's part.

        What comes is a share of its own beside what lives on the same card: only it waits.
        """
        brought = self._brought(phase)
        shares: dict[str, tuple[Share, ...]] = {}
        for group, cuts, own, ends in zip(
            self.catalog.groups, self.cuts, self.sections, brought, strict=True
        ):
            parts: list[Share] = []
            start = 0
            lanes = [*self.cards, *self.cards, self.request.lanes[0].name]
            for lane, end in zip(lanes, [*own.ends, *ends, cuts.last], strict=True):
                if end > start:
                    parts.append(Share(lane, cuts.units[start], cuts.units[end]))
                    start = end
            shares[group.name] = tuple(parts)
        return shares


def _card_lanes(request: Request, question: Question) -> list[str]:
    names = [lane.name for lane in request.lanes]
    cards = [name for name in names if name.startswith("gpu:")]
    expected = [f"gpu:{number}" for number in range(len(question.machine.cards))]
    if cards != expected or names[: len(names) - len(cards)] + cards != names:
        raise ValueError(
            f"lanes must be processors, then a lane for each card of {question.machine.name}, in "
            f"order ({', '.join(expected) or 'none'}); got {', '.join(names)}"
        )
    if len(cards) == len(names):
        raise ValueError(f"a plan over cards must have a lane of the processor; got {names}")
    if request.pins:
        raise ValueError(f"pins must be empty for a plan over cards; got {dict(request.pins)}")
    return cards


def _budgets(
    cards: Sequence[str], question: Question, asked: Mapping[str, int] | None
) -> list[int]:
    """Bytes of each card, in whole pages."""
    if asked is None:
        rooms = [int(vram_room(card, question.state)) for card in question.machine.cards]
    elif set(asked) != set(cards):
        raise ValueError(f"budgets must name {', '.join(cards)}; got {', '.join(asked)}")
    else:
        rooms = [asked[lane] for lane in cards]
    return [room // PAGE_NBYTES * PAGE_NBYTES for room in rooms]


def _up(nbytes: Fraction) -> int:
    return -(-nbytes.numerator // nbytes.denominator)
