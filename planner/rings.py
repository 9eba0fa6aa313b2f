"""What an engine lays out once, when it starts, and every later plan has to do with: rings.

A card's ring is where a link brings what does not live there; a plan that brings nothing has no
use for it. But once a card or the processor is lost in part, the best answer is often to bring
something, so an engine whose plans may change begins with a ring on each card. `laid_out` tells the
planner what there is, so that it proposes only what can be.
"""

from __future__ import annotations

from dataclasses import replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, demand, stage_nbytes, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import MIN_SLOTS, PAGE_NBYTES, Placement
from shadowlane.planner.search import later_slots

EXPERT_RING_PART = 4  # of a card, that a ring may be where experts come
UNUSED_RING_PART = 32  # of a card, that a ring is where nothing comes yet and the rest is full


def card_slot_nbytes(catalog: Catalog, card: Card, *, comes: bool) -> int:
    """Of a card's ring, whatever other programs take of the card.

    comes: routed experts may be brought, too; then one has room in a slot, unless that makes the
    ring too large a part of the card.
    """
    expert = catalog.experts.slot_nbytes if catalog.experts and comes else 0
    if MIN_SLOTS * expert > memory_of(card) // EXPERT_RING_PART:
        return catalog.slot_nbytes
    return max(catalog.slot_nbytes, expert)


def takes_experts(catalog: Catalog, card: Card) -> bool:
    """Whether routed experts can be brought to a card."""
    slot = card_slot_nbytes(catalog, card, comes=True)
    return (
        catalog.experts is not None
        and catalog.experts.slot_nbytes <= slot
        and MIN_SLOTS * slot <= memory_of(card)
    )


def memory_of(card: Card) -> int:
    """Bytes that plans may use of a card, a ring included, in whole pages."""
    return int(card.vram_nbytes - card.reserved_nbytes) // PAGE_NBYTES * PAGE_NBYTES


def most_slots(card: Card, slot_nbytes: int, budget: int) -> int:
    """Slots of a card's ring: as it is laid out, or else of one to which a plan brings something.

    budget: bytes of the card. 0: there is no room for any.
    """
    if card.ring_nbytes is not None:
        return round(card.ring_nbytes) // slot_nbytes
    if MIN_SLOTS * slot_nbytes > budget:
        return 0
    return max(MIN_SLOTS, min(int(stage_nbytes(card)), budget) // slot_nbytes)


def with_rings(
    catalog: Catalog, question: Question, plan: Plan, *, is_least: bool = False
) -> Question:
    """The question of an engine that is to start with `plan`, or one much like it, and has rings.

    Where the plan brings something, the ring is as large as it counts on. Where it does not, the
    ring takes what the plan leaves free, up to as much; at least `UNUSED_RING_PART` of the card.
    is_least: no ring is larger than that.
    """
    need = demand(question.model, plan, question.work, question.machine, question.state)
    comes = any(load.comes for load in question.model.loads)
    cards: list[Card] = []
    for card, held, stage in zip(question.machine.cards, need.vram, need.stages, strict=True):
        slot = card_slot_nbytes(catalog, card, comes=comes)
        most = most_slots(card, slot, memory_of(card))
        slots = most
        if most and (is_least or not stage):
            room = vram_room(card, question.state)
            wanted = room / UNUSED_RING_PART
            if not is_least:
                wanted = max(wanted, room - held)
            slots = min(most, max(MIN_SLOTS, int(wanted) // slot))
        cards.append(replace(card, ring_nbytes=float(slots * slot)))
    return replace(question, machine=replace(question.machine, cards=tuple(cards)))


def without_unused(question: Question, plan: Plan) -> Question:
    """The same without rings on cards to which `plan` brings nothing; nothing can be, later."""
    unlaid = [replace(card, ring_nbytes=None) for card in question.machine.cards]
    machine = replace(question.machine, cards=tuple(unlaid))
    stages = demand(question.model, plan, question.work, machine, question.state).stages
    cards = tuple(
        card if stage else replace(card, ring_nbytes=0.0)
        for card, stage in zip(question.machine.cards, stages, strict=True)
    )
    return replace(question, machine=replace(machine, cards=cards))


def laid_out(catalog: Catalog, machine: Hardware, placement: Placement) -> Hardware:
    """The machine under an engine that runs `placement`, whose rings and slots stay as they are."""
    cards = tuple(
        replace(card, ring_nbytes=float(part.slots_nbytes))
        for card, part in zip(machine.cards, placement.cards, strict=True)
    )
    if catalog.experts is not None:  # which are read into their slots, or into a ring for links
        return replace(
            machine,
            cards=cards,
            ring_nbytes=float(placement.slots_nbytes),
            experts_nbytes=float(placement.experts_nbytes),
        )
    slots = placement.num_slots or later_slots(catalog.slot_nbytes)
    return replace(machine, cards=cards, ring_nbytes=float(slots * catalog.slot_nbytes))
