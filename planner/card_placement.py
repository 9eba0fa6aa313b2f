"""A plan over cards made exact: parts of groups as blocks and units. `plan_of` is the way back.

Each group is cut into sections (`sections.py`). Budgets are kept exactly: what rounding makes too
large for a card goes to RAM, from the end of the model; what RAM cannot hold is left on disk, of
all groups the same part, so that the disk reads steadily.

The processor computes the embedding, whatever the plan says of it. Who computes a layer's router
adds up what its experts give: a card, where the plan has all of it there and cards can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from shadowlane.planner.brought_experts import Sources
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.draft import Draft, up
from shadowlane.planner.hit_rate import missing_nbytes
from shadowlane.planner.hybrid import DISK_RING_NBYTES, DISK_RING_PART, Plan, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.micro_batches import with_micro_batches
from shadowlane.planner.pins import catalog_homes
from shadowlane.planner.placement import (
    MIN_SLOTS,
    PAGE_NBYTES,
    InfeasiblePlan,
    Placement,
    Request,
    show_nbytes,
    whole_pages,
)
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.search import (
    RING_NBYTES,
    RING_PART,
    RING_SLOTS,
    least_slots,
    most_kept,
    most_more_kept,
)
from shadowlane.planner.sections import Carry

SCALES = 1 << 16  # of what RAM holds, where it cannot hold all that is wanted


def place_on_cards(
    catalog: Catalog,
    plan: Plan,
    request: Request,
    question: Question,
    *,
    placement_id: int = 0,
    budgets: Mapping[str, int] | None = None,
    expert_slots: int | None = None,
    before: Placement | None = None,
) -> Placement:
    """`plan` in whole blocks, for the lanes of `request`: cpu:0, which computes alone, and cards.

    question: the one that `plan` answers; its machine has the cards of the lanes, in their order.
    Where `request` names no context, there is room for the question's.
    budgets: bytes of each card by its lane; None: what the question's conditions leave of them.
    expert_slots: routed experts that RAM has room for, whatever it takes; None: as many as fit.
    before: what is in force until this is; experts that are brought must have a slot by then.

    Raises InfeasiblePlan where RAM cannot hold what it must, ValueError for lanes, budgets or pins
    that do not suit.
    """
    catalog = catalog.with_subchunks(request.subchunks or 1)
    cards = _card_lanes(request, question)
    tokens = min(request.context or question.work.max_context, catalog.max_context)
    kv_pages = -(-tokens // catalog.page_tokens) * request.max_batch
    kv_nbytes = kv_pages * catalog.page_nbytes
    homes = catalog_homes(catalog, request.pins, len(cards))
    rooms = _budgets(cards, question, budgets)
    draft = Draft(catalog, plan, question, cards, rooms, kv_nbytes, homes)
    draft.fit_cards()

    fixed = _fixed_nbytes(draft, kv_nbytes)
    room = request.ram - sum(fixed.values())
    num_slots = _fit_ram(draft, request, fixed)
    resident, sweep = _residence(draft)
    weights = sum(block.held_nbytes for block in catalog.blocks if resident[block.index])
    experts = catalog.experts
    parts = draft.card_parts()
    expert_nbytes = experts.slot_nbytes if experts else 1
    needed = experts.total - sum(part.num_experts for part in parts) if experts else 0
    slot_nbytes = catalog.slot_nbytes
    room -= weights
    if before is not None and experts is not None:  # a running engine keeps its ring
        num_slots, slot_nbytes = before.num_slots, before.slot_nbytes
    elif draft.brings_experts and needed > min(room // expert_nbytes, expert_slots or needed):
        slot_nbytes = max(slot_nbytes, expert_nbytes)
        num_slots = _slots_to_pass_on(request, room, slot_nbytes)
    room -= num_slots * slot_nbytes
    if expert_slots is not None and expert_slots * expert_nbytes > room:
        what = {f"{expert_slots} experts": expert_slots * expert_nbytes}
        raise InfeasiblePlan("a running engine keeps its experts", what, max(0, room))
    least = expert_slots or 0
    if experts is not None and expert_slots is None:
        least = max(least_slots(experts), min(needed, room // expert_nbytes))
    kept = _keep_embedding(draft, resident, room - expert_nbytes * least)
    weights += kept
    if experts is None:
        expert_slots = 0
    elif expert_slots is None:  # what is left is for what leaves the cards one day: experts last
        others = sum(part.weights_nbytes + part.kv_nbytes for part in parts)
        more = room - kept - others
        expert_slots = min(experts.total, max(least, more // expert_nbytes))
    experts_nbytes = expert_slots * expert_nbytes
    if experts is not None:
        most, may_come = most_kept(experts, expert_slots), None
        if before is not None and expert_slots < experts.total:
            may_come = _with_slots(draft, before)
        draft.sources = Sources(catalog, most, may_come, reads=num_slots > 0)
        parts = draft.card_parts()
    in_memory = min(experts.total, expert_slots + experts.total - needed) if experts else 0
    processor = request.lanes[0].name
    shares, prefill_shares = draft.shares(processor, "decode"), draft.shares(processor, "prefill")
    placement = Placement(
        placement_id=placement_id,
        strategy=plan.name,
        lanes=request.lanes,
        resident=tuple(resident),
        sweep=tuple(sweep),
        num_slots=num_slots,
        slot_nbytes=slot_nbytes,
        context_tokens=tokens,
        kv_pages=kv_pages,
        shares=shares,
        ram=request.ram,
        weights_nbytes=weights,
        slots_nbytes=num_slots * slot_nbytes,
        kv_nbytes=fixed["KV"],
        scratch_nbytes=fixed["scratch"],
        constants_nbytes=fixed["constants"],
        read_nbytes_per_step=sum(catalog.blocks[index].held_nbytes for index in sweep)
        + missing_nbytes(experts, in_memory),
        predicted_step_s=0.0,
        notes=tuple(draft.notes),
        expert_slots=expert_slots,
        experts_nbytes=experts_nbytes,
        subchunks=request.subchunks or 1,
        cards=parts,
        prefill_shares=None if prefill_shares == shares else prefill_shares,
        prefill_sweep=draft.read_for_cards(),
    )
    most = request.micro_batches or plan.micro_batches
    placement = with_micro_batches(catalog, placement, most)
    assert placement.total_nbytes <= request.ram, placement
    exact = plan_of(catalog, placement, question.model)
    return replace(placement, predicted_step_s=question.times(exact).step_s)


def _card_lanes(request: Request, question: Question) -> list[str]:
    names = [lane.name for lane in request.lanes]
    cards = [name for name in names if name.startswith("gpu:")]
    processors = names[: len(names) - len(cards)]
    expected = [f"gpu:{number}" for number in range(len(question.machine.cards))]
    if cards != expected or not processors or processors + cards != names:
        raise ValueError(
            "lanes must be those of processors, then one for each card of "
            f"{question.machine.name} in order ({', '.join(expected) or 'none'}); "
            f"got {', '.join(names)}"
        )
    return cards


def _budgets(
    cards: Sequence[str], question: Question, asked: Mapping[str, int] | None
) -> list[int]:
    """Bytes of each card, in whole pages."""
    if asked is None:
        rooms = [
            int(vram_room(card, question.state) + (card.ring_nbytes or 0.0))
            for card in question.machine.cards
        ]
    elif set(asked) != set(cards):
        raise ValueError(
            f"budgets must name {', '.join(cards) or 'no card'}; got {', '.join(asked) or 'none'}"
        )
    else:
        rooms = [asked[lane] for lane in cards]
    return [room // PAGE_NBYTES * PAGE_NBYTES for room in rooms]


# -- RAM


def _with_slots(draft: Draft, before: Placement) -> set[int]:
    """The experts that surely have a slot in RAM where not all do: those that are brought as it is,
    and of those that leave cards as many as can be copied there beside them."""
    catalog, experts = draft.catalog, draft.catalog.experts
    assert experts is not None, "only mixtures have routed experts"
    brought = before.experts_out_of_ram(catalog)
    stay = draft.experts()
    leaving = [
        catalog.expert_number(layer, expert)
        for card in before.cards
        for layer, of_layer in enumerate(card.experts)
        for expert in of_layer
        if not any(layers and expert in layers[layer] for layers in stay)
    ]
    more = most_more_kept(experts, before.expert_slots, len(brought))
    return brought.union(leaving[:more])


def _fixed_nbytes(draft: Draft, kv_nbytes: int) -> dict[str, int]:
    """What RAM holds beside weights and rings."""
    on_cards = sum((draft.held(card)[1] for card in range(len(draft.cards))), Fraction(0))
    return {
        "constants": whole_pages(draft.catalog.constants_nbytes),
        "KV": whole_pages(up(kv_nbytes - on_cards)),
        "scratch": whole_pages(draft.catalog.scratch_nbytes),
    }


def _fit_ram(draft: Draft, request: Request, fixed: Mapping[str, int]) -> int:
    """Leave on disk what RAM has no room for. Slots of the ring through which that comes; or 0."""
    room = request.ram - sum(fixed.values())
    experts = draft.catalog.experts
    if experts is not None:
        least, weights = least_slots(experts), _off_cards_nbytes(draft)
        parts = {"weights of every token": weights, f"{least} experts": least * experts.slot_nbytes}
        if sum(parts.values()) > room:
            raise InfeasiblePlan("the plan does not fit", {**fixed, **parts}, request.ram)
        return 0
    slots = _disk_slots(draft, request, room)
    ring = slots * draft.catalog.slot_nbytes

    def fits(scale: int) -> bool:
        _leave_on_disk(draft, scale / SCALES)
        return _off_cards_nbytes(draft) + (ring if _reads(draft) else 0) <= room

    if fits(SCALES):
        return slots if _reads(draft) else 0
    planned = _off_cards_nbytes(draft)
    low, high = 0, SCALES
    if not fits(low):  # a small model may take less than the ring
        for own, cuts in zip(draft.sections, draft.cuts, strict=True):
            own.ram = cuts.last
        weights = _off_cards_nbytes(draft)
        if weights > room or "disk" in draft.homes.values():
            parts = {"weights": weights} if weights < ring else {f"{slots} slots": ring}
            raise InfeasiblePlan("the plan does not fit", {**fixed, **parts}, request.ram)
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    fits(low)
    more = show_nbytes(planned - _off_cards_nbytes(draft))
    draft.notes.append(f"{more} more than planned are read from disk in every step")
    return slots


def _disk_slots(draft: Draft, request: Request, room: int) -> int:
    """As `place` has it: powers of two, so that a slightly different budget has the same."""
    if request.num_slots is not None:
        return request.num_slots
    affordable = min(RING_NBYTES, room // RING_PART) // max(1, draft.catalog.slot_nbytes)
    slots = MIN_SLOTS
    while slots * 2 <= min(RING_SLOTS, affordable):
        slots *= 2
    return slots


def _slots_to_pass_on(request: Request, room: int, slot_nbytes: int) -> int:
    """Of a ring into which experts are read for links to take; 0: RAM has no room for one."""
    room //= DISK_RING_PART
    affordable = min(int(DISK_RING_NBYTES), room) // slot_nbytes
    count = request.num_slots or max(MIN_SLOTS, min(RING_SLOTS, affordable))
    return count if count * slot_nbytes <= room else 0


def _leave_on_disk(draft: Draft, scale: float) -> None:
    """RAM holds `scale` of what is neither on cards nor planned for the disk, in each group."""
    carry = Carry()
    for index, (group, cuts, own) in enumerate(draft.groups()):
        if group.blocks and group.kind != "embed":
            if draft.homes.get(group.name) == "cpu":
                own.ram = cuts.last
                continue
            on_cards = cuts.nbytes[own.on_cards]
            on_disk = draft.wanted_on_disk(index) * cuts.total
            kept = scale * max(0.0, cuts.total - on_cards - on_disk)
            own.ram = carry.round("", cuts, on_cards + kept, own.on_cards, cuts.last)


def _reads(draft: Draft) -> bool:
    """Whether anything is only on disk, beside the embedding."""
    return any(own.ram < cuts.last for _, cuts, own in draft.groups())


def _off_cards_nbytes(draft: Draft) -> int:
    """What RAM holds of weights that cards do not, without the embedding."""
    return sum(
        cuts.held_nbytes[own.ram] - cuts.held_nbytes[own.on_cards]
        for group, cuts, own in draft.groups()
        if group.blocks and group.kind != "embed"
    )


def _residence(draft: Draft) -> tuple[list[bool], list[int]]:
    """(whether each block is in RAM, blocks that are only on disk), without the embedding."""
    resident = [False] * len(draft.catalog.blocks)
    sweep: list[int] = []
    for group, cuts, own in draft.groups():
        if group.kind != "embed":
            sweep += group.blocks[cuts.blocks[own.ram] :]
            for index in group.blocks[cuts.blocks[own.on_cards] : cuts.blocks[own.ram]]:
                resident[index] = True
    return resident, sweep


def _keep_embedding(draft: Draft, resident: list[bool], room: int) -> int:
    """Bytes of embedding rows in RAM, as many blocks as it has room for; others are gathered.

    Tied rows are those of the head: what a card holds of them is in RAM once more.
    """
    catalog = draft.catalog
    kinds = {group.kind: group for group in catalog.groups}
    home = draft.homes.get(kinds["embed"].name) if "embed" in kinds else None
    if home == "disk":
        return 0
    blocks = kinds["embed"].blocks if "embed" in kinds else ()
    if not blocks:
        on_cards = draft.on_cards()
        blocks = tuple(index for index in kinds["lm_head"].blocks if index in on_cards)
    kept = missing = 0
    for index in blocks:
        nbytes = catalog.blocks[index].held_nbytes
        if kept + nbytes <= room:
            resident[index] = True
            kept += nbytes
        else:
            missing += nbytes
    if missing and home == "cpu":
        raise InfeasiblePlan("the pins do not fit", {"embedding": kept + missing}, max(0, room))
    if missing:
        draft.notes.append(f"{show_nbytes(missing)} of embedding rows are gathered from disk")
    return kept
