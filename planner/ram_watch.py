"""When a RAM budget that nobody named gives way to other programs, and when it grows back.

Such a budget was all that was free but for a headroom. Once less than a part of the headroom is
left, or tasks wait for memory, it shrinks below what the plan in force takes; when there has been
room for a while it grows again, never above what it was. A budget that was named stays.

Pure: readings come in, budgets go out.
"""

from __future__ import annotations

from dataclasses import dataclass

from shadowlane.planner.placement import PAGE_NBYTES, show_nbytes

SHORT_PART = 4  # others are short with less free than this part of the headroom
GOAL_PART = 2  # and then so much of it is to be free again; growing back leaves as much
STALLED = 10.0  # percent of the last ten seconds in which some task waited for memory
CALM = 1.0  # percent below which nobody is short
STEP_PART = 16  # the least change of a budget, as a part of what was asked for
MOST_PART = 4  # the most that a plan gives away at once, as a part of what it takes
WAIT_S = 10.0  # after a change, for it to show in what is read
CALM_S = 30.0  # for which there has to be room before a budget grows back


@dataclass(frozen=True, slots=True)
class RamRead:
    """What a look at this machine's memory found."""

    at_s: float  # on any clock that runs on
    free_nbytes: int  # that could be taken now, in the tightest control group above us too
    stalled: float = 0.0  # percent of the last ten seconds; see STALLED


class RamWatch:
    """`budget` is what plans may take now."""

    def __init__(self, asked: int, headroom: int) -> None:
        """asked: bytes of the budget at the start; headroom: what it left free then."""
        self.budget = asked
        self._asked = asked
        self._headroom = headroom
        self._before = asked  # the budget before the newest change
        self._changed_s: float | None = None
        self._calm_s: float | None = None  # since when there has been room
        self._is_least = False  # nothing smaller can be planned

    @property
    def taken(self) -> int:
        """Bytes of what was asked for that others have now."""
        return self._asked - self.budget

    def read(self, now: RamRead, used: int) -> str | None:
        """Why `budget` is another from now on; None: it stays. used: bytes of the plan in force."""
        goal = self._headroom // GOAL_PART
        is_short = now.free_nbytes < self._headroom // SHORT_PART or now.stalled > STALLED
        room = now.free_nbytes - goal
        step = self._asked // STEP_PART
        has_room = not is_short and now.stalled < CALM and room >= min(step, self.taken)
        if not has_room or self._calm_s is None:
            self._calm_s = now.at_s if has_room else None
        if self._changed_s is not None and now.at_s - self._changed_s < WAIT_S:
            return None
        if is_short and not self._is_least:
            used = min(self.budget, used)
            wanted = used - min(max(step, -room), used // MOST_PART)
            return self._change(now, wanted, "short") if wanted >= PAGE_NBYTES else None
        is_calm = self._calm_s is not None and now.at_s - self._calm_s >= CALM_S
        if is_calm and self.taken:
            self._is_least = False
            return self._change(now, min(self._asked, self.budget + room), "free again")
        return None

    def refuse(self) -> None:
        """The newest budget holds no plan: the one before it stays, until there is room again."""
        self.budget, self._is_least = self._before, True

    def _change(self, now: RamRead, budget: int, what: str) -> str:
        self._before, self.budget = self.budget, budget // PAGE_NBYTES * PAGE_NBYTES
        if budget == self._asked:
            self.budget = budget
        self._changed_s, self._calm_s = now.at_s, None
        stalled = f", tasks waited for memory {now.stalled:.0f} % of the time" * (now.stalled >= 1)
        return (
            f"RAM is {what} ({show_nbytes(now.free_nbytes)} free{stalled}): "
            f"the budget is now {show_nbytes(self.budget)}"
        )
