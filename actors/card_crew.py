"""What an engine has its cards' lanes do beyond steps: who copies, and heads that change sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shadowlane.actors.arena import MOVE_COUNTER, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.copier import CopyError
from shadowlane.actors.copy_choice import COURSE_NBYTES, Choice, CopyTimes, Course, choose
from shadowlane.actors.cuda.devices import is_wsl2
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.held_heads import Heads, heads_on, num_moved
from shadowlane.actors.hosts import LaneDied, Pending, Remote
from shadowlane.planner.placement import Placement

PATIENCE_S = 0.5  # between two looks whether those that are needed live


def choose_copier(number: int, card: Remote, link: Remote, layout: ArenaLayout) -> Choice:
    """Find out who copies faster to a card that is here. Before anything is loaded there.

    number: among cards; card, link: its lanes, which have the arena. Raises LaneDied; ValueError
    with what the thread failed with, where the process cannot copy either.
    """
    where = layout.cards[number]
    course = Course(
        source=layout.landing,
        target=0,
        nbytes=min(COURSE_NBYTES, layout.landing_nbytes, where.weights + where.weights_nbytes),
        counter=layout.counter(MOVE_COUNTER + number),
        abort=layout.abort,
    )
    sizes: list[int] = []

    def thread() -> CopyTimes:
        times: CopyTimes = link.call("time_thread", course).result()
        return times

    def process() -> CopyTimes:
        handle, nbytes = card.call("export").result()
        sizes.append(nbytes)
        times: CopyTimes = link.call("time_process", course, handle).result()
        return times

    try:
        return choose(thread, process, card_nbytes=lambda: sizes[0], is_wsl2=is_wsl2())
    except (CopyError, CudaError, TimeoutError) as error:
        raise ValueError(f"{card.name}: nothing can be copied to it: {error}") from None


def use_process(card: Remote, link: Remote) -> str | None:
    """Have the transfer lane's process copy; why its card's thread has to, where it cannot."""
    try:
        handle, _ = card.call("export").result()
        link.call("use_process", handle).result()
    except (RuntimeError, OSError) as error:
        return f"{card.name}: its thread copies after all: {error}"
    return None


@dataclass(frozen=True, slots=True)
class ChangeOfHeads:
    """What a switch changes of the keys and values on one card."""

    card: int
    left: tuple[int, ...]  # layers of which it holds other heads now, or none
    come: tuple[Heads, ...]
    num_moved: int  # heads of all layers that come or leave


def changes_of_heads(
    blueprint: Blueprint, before: Placement, after: Placement
) -> list[ChangeOfHeads]:
    """Of the cards that have other heads under `after` than under `before`."""
    found = []
    for number, part in enumerate(after.cards):
        old, new = (heads_on(blueprint, each, part.lane) for each in (before, after))
        if old != new:
            left = tuple(each.layer for each in old if each not in new)
            come = tuple(each for each in new if each not in old)
            found.append(ChangeOfHeads(number, left, come, num_moved(old, new)))
    return found


def wait_between_steps(calls: Sequence[Pending]) -> None:
    """Wait for what lanes do with keys and values. Raises LaneDied if one cannot: then they are
    half moved, and what they were of has to begin anew."""
    for call in calls:
        try:
            call.result()
        except LaneDied:
            raise
        except Exception as error:
            reason = f"keys and values could not be moved: {type(error).__name__}: {error}"
            raise LaneDied(reason) from error


def answer_of(call: Pending, needed: Sequence[Remote]) -> object:
    """What a lane answers. Raises LaneDied as soon as one of `needed` has died, which it may be
    waiting for."""
    while True:
        try:
            return call.result(PATIENCE_S)
        except TimeoutError:
            for each in needed:
                each.process_id()
