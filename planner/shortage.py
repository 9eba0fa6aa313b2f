"""What is short where a model fits nowhere: what must be in memory, and what memory there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shadowlane.planner.hybrid import Plan, all_kv_nbytes, demand, kv_nbytes, ram_room, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import show_nbytes

ENDLESS = 1e18  # bytes


def what_is_short(question: Question) -> str:
    """Of a model that fits nowhere. Weights need not be in memory: they can stay on disk."""
    model, machine = question.model, question.machine
    kv = sum(kv_nbytes(load, question.work) for load in model.loads)
    room = ", ".join([f"{_size(ram_room(machine))} of RAM", *_rooms_of_cards(question)])
    return (
        f"keys and values take {show_nbytes(round(kv))}, embedding and scratch "
        f"{show_nbytes(round(model.fixed_ram_nbytes))} of RAM; there are {room} to plan with"
    )


def what_a_layout_lacks(question: Question, plan_of: Callable[[Question], Plan | None]) -> str:
    """Of a layout that does not fit: what it wants of cards and RAM, and what there is of either.

    plan_of: makes the layout for a question.
    """
    machine = question.machine
    cards = tuple(replace(card, vram_nbytes=ENDLESS) for card in machine.cards)
    roomy = replace(question, machine=replace(machine, cards=cards, ram_nbytes=ENDLESS))
    plan = plan_of(roomy)
    if plan is None:
        return what_is_short(question)
    model, kvs = question.model, all_kv_nbytes(question.model, question.work)
    parts = [site.vram for site in plan.sites]
    weights = sum(nbytes * part for nbytes, part in zip(model.wholes, parts, strict=True))
    kv = sum(nbytes * part for nbytes, part in zip(kvs, parts, strict=True))
    need = demand(model, plan, question.work, roomy.machine)
    brought = f" + for what is brought {_size(sum(need.stages))}" if sum(need.stages) else ""
    rooms = sum(vram_room(card, question.state) for card in machine.cards)
    told = (
        f"on cards weights {_size(weights)} + keys and values {_size(kv)}{brought} = "
        f"{_size(sum(need.vram))}, and there are {', '.join(_rooms_of_cards(question))}"
    )
    if machine.cards and sum(need.vram) > rooms:
        return f"{told}, short by {_size(sum(need.vram) - rooms)}"
    in_ram = model.fixed_ram_nbytes + sum(kvs) - kv  # weights can stay on disk
    if in_ram > ram_room(machine):
        return (
            f"in RAM keys and values {_size(sum(kvs) - kv)} + embedding and scratch "
            f"{_size(model.fixed_ram_nbytes)} = {_size(in_ram)}, and there are "
            f"{_size(ram_room(machine))}, short by {_size(in_ram - ram_room(machine))}"
        )
    return f"{told}, and each group goes whole to one card"


def _rooms_of_cards(question: Question) -> list[str]:
    cards = question.machine.cards
    return [f"{_size(vram_room(card, question.state))} of {card.name}" for card in cards]


def _size(nbytes: float) -> str:
    return show_nbytes(round(nbytes))
