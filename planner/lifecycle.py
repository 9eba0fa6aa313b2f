"""The life of placements in a running engine: published, acknowledged, announced, active, retired.

At most one is on its way besides those the engine has promised to run. One that not all lanes have
acknowledged can be withdrawn; between our word to announce it and the engine's answer it cannot,
so what comes next waits in `wanted`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from shadowlane.planner import events as ev
from shadowlane.planner.measured import Window
from shadowlane.planner.placement import DISK_LANE, Placement
from shadowlane.planner.trial import Option, Settings

Stage = Literal["published", "acknowledged", "announced", "active"]  # then retired: forgotten


class PlannerError(Exception):
    """An event that cannot be, or a bug. The text ends with the story of what it is about."""


@dataclass(slots=True)
class Record:
    option: Option
    placement: Placement
    reason: str
    paces: Window  # of measured steps
    stage: Stage = "published"
    acknowledged: set[str] = field(default_factory=set)  # lanes
    content: int | None = None  # see MeasuredPaces.content; None until it is asked for
    settling: int = 0  # steps still to pass unmeasured


class Placements:
    """The placements that are not retired, by id; ids count from 1 and never come again."""

    def __init__(self, settings: Settings, story: Callable[[str], str]) -> None:
        self.records: dict[int, Record] = {}
        self.num_published = 0
        self.active: int | None = None  # steps retire under it
        self.pending: int | None = None  # the newest, not active yet
        self.wanted: tuple[Option, str] | None = None  # (what, why) to be published next
        self._settings = settings
        self._story = story

    @property
    def is_switching(self) -> bool:
        return self.pending is not None or self.wanted is not None

    @property
    def newest(self) -> Option:
        """What runs, or is on its way to. There must be one."""
        if self.wanted is not None:
            return self.wanted[0]
        newest = self.pending if self.pending is not None else self.active
        assert newest is not None
        return self.records[newest].option

    def record(self, placement_id: int) -> Record | None:
        """None: it is retired, and what is told of it was under way meanwhile."""
        if not 1 <= placement_id <= self.num_published:
            raise PlannerError(
                f"no placement {placement_id} was ever published; story: {self._story('placement')}"
            )
        return self.records.get(placement_id)

    def publish(self, option: Option, reason: str) -> list[ev.Command]:
        commands: list[ev.Command] = []
        if self.pending is not None:
            stage = self.records[self.pending].stage
            if stage == "acknowledged":  # the engine may be announcing it just now
                self.wanted = option, reason
                return []
            if stage == "published":  # nobody was promised anything: withdraw it
                del self.records[self.pending]
                commands.append(ev.RetirePlacement(self.pending))
        self.wanted = None
        self.num_published += 1
        placement_id = self.num_published
        placement = replace(option.placement, placement_id=placement_id)
        self.records[placement_id] = self._record(option, placement, reason)
        self.pending = placement_id
        return [*commands, ev.PublishPlacement(placement, reason)]

    def take_over(self, option: Option, newest_id: int) -> None:
        """The running placement of a planner that is gone; its ids are not given again."""
        placement = option.placement
        self.num_published = max(newest_id, placement.placement_id)
        self.active = placement.placement_id
        record = self._record(option, placement, option.label)
        record.stage = "active"
        self.records[self.active] = record

    def _record(self, option: Option, placement: Placement, reason: str) -> Record:
        paces = Window(self._settings.min_steps_between, self._settings.trial_s)
        return Record(option, placement, reason, paces, settling=self._settings.settle_steps)

    def acknowledge(self, event: ev.PlacementAcknowledged) -> list[ev.Command]:
        record = self.record(event.placement_id)
        if record is None or record.stage != "published":
            return []
        record.acknowledged.add(event.lane)
        placement = record.placement
        needed = {DISK_LANE, *(each.name for each in placement.lanes)}
        needed |= {card.link for card in placement.cards}
        if not needed <= record.acknowledged:
            return []
        record.stage = "acknowledged"
        return [ev.AnnouncePlacement(event.placement_id)]

    def refuse(self, placement_id: int) -> list[ev.Command]:
        record = self.records[placement_id]
        if record.stage != "published":
            raise self._impossible(placement_id, "was refused while")
        del self.records[placement_id]
        self.pending = None
        return [ev.RetirePlacement(placement_id)]

    def announce(self, event: ev.PlacementAnnounced) -> list[ev.Command]:
        record = self.record(event.placement_id)
        if record is None:
            return []
        if record.stage != "acknowledged":
            raise self._impossible(event.placement_id, "was announced while")
        record.stage = "announced"
        return self.publish(*self.wanted) if self.wanted else []

    def activate(self, placement_id: int) -> list[ev.Command]:
        """The first step under it has retired, and with it the last step under any older one."""
        record = self.records[placement_id]
        if record.stage == "published":
            raise self._impossible(placement_id, "had a step retired while only")
        record.stage = "active"
        self.active = placement_id
        if self.pending == placement_id:
            self.pending = None
        commands: list[ev.Command] = []
        for older_id in [each for each in self.records if each < placement_id]:
            del self.records[older_id]
            commands.append(ev.RetirePlacement(older_id))
        if self.wanted and self.pending is None:
            commands += self.publish(*self.wanted)
        return commands

    def unsettle(self) -> None:
        """The conditions have changed: what the running placement measured so far is void."""
        if self.active is not None:
            self.records[self.active].paces.clear()
            self.records[self.active].settling = self._settings.settle_steps

    def validate(self) -> None:
        """Invariants that hold between any two events."""
        stages = {placement_id: record.stage for placement_id, record in self.records.items()}
        active = [placement_id for placement_id, stage in stages.items() if stage == "active"]
        assert active == ([] if self.active is None else [self.active]), (active, self.active)
        if self.pending is not None:
            assert stages[self.pending] in ("published", "acknowledged", "announced"), stages
            assert self.pending == self.num_published, "only the newest can be pending"
            assert self.active is None or self.active < self.pending
        else:
            assert self.active is not None or not self.records, stages
        if self.wanted is not None:
            assert self.pending is not None
            assert stages[self.pending] == "acknowledged", stages
        for placement_id, record in self.records.items():
            assert record.placement.placement_id == placement_id
            assert record.placement.total_nbytes <= record.placement.ram

    def _impossible(self, placement_id: int, what: str) -> PlannerError:
        stage = self.records[placement_id].stage
        story = self._story(f"placement {placement_id}")
        return PlannerError(f"placement {placement_id} {what} {stage}; story: {story}")
