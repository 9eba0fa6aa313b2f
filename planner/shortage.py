"""What is short where a model fits nowhere: what must be in memory, and what memory there is."""

from __future__ import annotations

from shadowlane.planner.hybrid import kv_nbytes, ram_room, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import show_nbytes


def what_is_short(question: Question) -> str:
    """Of a model that fits nowhere. Weights need not be in memory: they can stay on disk."""
    model, machine = question.model, question.machine
    kv = sum(kv_nbytes(load, question.work) for load in model.loads)
    rooms = [ram_room(machine), *(vram_room(card) for card in machine.cards)]
    names = ["RAM", *(card.name for card in machine.cards)]
    room = ", ".join(
        f"{show_nbytes(round(nbytes))} of {name}" for nbytes, name in zip(rooms, names, strict=True)
    )
    return (
        f"keys and values take {show_nbytes(round(kv))}, embedding and scratch "
        f"{show_nbytes(round(model.fixed_ram_nbytes))} of RAM; there are {room} to plan with"
    )
