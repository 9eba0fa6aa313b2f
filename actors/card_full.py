"""A card that has less memory than its budget promises, and what is made of that.

Other programs take memory of a card as well, and so do libraries: what is free is only known by
asking for it. Where a card refuses, its budget is lowered and all is planned anew, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shadowlane.actors.hosts import LaneFailed
from shadowlane.actors.spec import CardSettings, EngineSettings
from shadowlane.planner.placement import show_nbytes

MARGIN_NBYTES = 512 << 20  # for what a lane takes of a card beside its budget


class CardFull(MemoryError):
    """A card has refused memory. Of one whose budget was refused: `free_nbytes` is what it has."""

    def __init__(self, reason: str, card: int, free_nbytes: int | None = None) -> None:
        super().__init__(reason)
        self.card = card
        self.free_nbytes = free_nbytes

    def __reduce__(self) -> tuple[object, ...]:
        return CardFull, (str(self), self.card, self.free_nbytes)


class LaneFull(LaneFailed):
    """A lane of a card has ended while steps ran, for want of the card's memory."""

    def __init__(self, full: CardFull) -> None:
        super().__init__(str(full))
        self.full = full


def lowered_budget(budget: int, free_nbytes: int | None) -> int:
    """What a card is asked for after it has refused, in bytes.

    free_nbytes: what it had beside nothing of ours; None: the budget itself was granted, and
    something beside it was not.
    """
    less = budget - max(budget // 8, min(budget // 2, MARGIN_NBYTES))
    if free_nbytes is None:
        return less
    return max(0, min(less, free_nbytes - min(free_nbytes // 4, MARGIN_NBYTES)))


def with_less(settings: EngineSettings, full: CardFull) -> tuple[EngineSettings, str]:
    """Settings for a second try, and a line that says so."""
    before = settings.cards[full.card].memory
    now = lowered_budget(before, full.free_nbytes)
    cards: Sequence[CardSettings] = [
        replace(each, memory=now) if number == full.card else each
        for number, each in enumerate(settings.cards)
    ]
    note = f"{full}; planned anew with {show_nbytes(now)} of it instead of {show_nbytes(before)}"
    return replace(settings, cards=tuple(cards)), note
