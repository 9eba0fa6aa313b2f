"""Whether to read experts before it is known that they will be needed.

The next layer's router, applied early, names the experts that layer is likely to choose. Those that
are missing are read behind the certain ones. A right guess is a read that has begun early; a wrong
one took the disk's time from others. So guessing goes on while enough of what was read was used,
and rests otherwise, to be tried again later: twice as much later each time that it did not pay.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LookAheadSettings:
    window: float = 256.0  # early reads after which one counts half
    least_use: float = 0.6  # part of the early reads that must have been used
    min_reads: int = 64  # before the first verdict
    rest_routes: int = 2000  # routes that pass before guessing is tried again
    most_rest: int = 64_000


@dataclass(slots=True)
class LookAhead:
    """Told of every guess what became of it; `is_on` says whether to guess."""

    settings: LookAheadSettings
    is_on: bool = True
    right: float = 0.0  # early reads that were used, decayed
    wrong: float = 0.0
    named: int = 0  # chosen experts that had been guessed, and all: recall
    chosen: int = 0
    early_reads: int = 0  # since the start
    used_reads: int = 0
    withdrawn: int = 0  # guesses that were wrong and had not been submitted
    early_hits: int = 0  # experts read early that were there when their route came
    _left: int = 0  # routes until the next try
    _rest: int = 0

    def note(self, *, right: int, wrong: int, named: int, chosen: int, withdrawn: int) -> None:
        """A route has shown what a guess was worth.

        right, wrong: early reads of it that were used, or not; named: how many of the `chosen`
        experts it had named, read or not; withdrawn: reads that were taken back in time.
        """
        keep = 0.5 ** ((right + wrong) / self.settings.window)
        self.right = keep * self.right + right
        self.wrong = keep * self.wrong + wrong
        self.named += named
        self.chosen += chosen
        self.early_reads += right + wrong
        self.used_reads += right
        self.withdrawn += withdrawn
        reads = self.right + self.wrong
        if reads >= self.settings.min_reads and self.right < self.settings.least_use * reads:
            longer = max(self.settings.rest_routes, 2 * self._rest)
            self._rest = min(longer, self.settings.most_rest)
            self._left = self._rest
            self.is_on = False

    def pass_route(self) -> None:
        """A route without a guess."""
        if self.is_on:
            return
        self._left -= 1
        if self._left <= 0:
            self.is_on, self.right, self.wrong = True, 0.0, 0.0

    @property
    def recall(self) -> float | None:
        """Part of the chosen experts that a guess had named."""
        return self.named / self.chosen if self.chosen else None
