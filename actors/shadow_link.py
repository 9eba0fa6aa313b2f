"""The engine's end of the line to the planner: measurements go out, commands come in.

A message takes a millisecond, so it is sent while a step runs and heard a step or more later.
Whatever becomes of the planner, steps go on: only the shadow is lost.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

from shadowlane.actors.crew import Acknowledgement, Crew
from shadowlane.actors.gauges import Gauges
from shadowlane.actors.hosts import Host, LaneDied, Pending, Remote
from shadowlane.actors.memory_pressure import read_ram
from shadowlane.actors.moves import Moves
from shadowlane.actors.recovery import kill_quietly
from shadowlane.actors.spec import EngineSettings
from shadowlane.planner import events as ev
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.heat import Heat
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.profile import Profile

EVENT_PERIOD_S = 0.05  # measurements go to the planner in batches this far apart
# ... and so many times as far while it has nothing to change: each batch costs two processes some
# milliseconds, which the lanes' cores pay where there are no others.
CALM_PERIODS = 5
ATTENTIVE_S = 1.0  # after its last command that changes something
RAM_PERIOD_S = 2.0  # how far apart looks at this machine's memory are
FOLLOW_STEPS = 16  # of decode, after which the planner is told what a mixture's routers chose
RESTARTS = 3  # how often a planner that dies before it answers is started again


class ShadowLink:
    """One planner, and what it has asked for. `is_open` is False once there is no shadow."""

    def __init__(
        self,
        host: Host,
        catalog: Catalog,
        request: Request,
        crew: Crew,
        settings: EngineSettings,
    ) -> None:
        self._host = host
        self._catalog = catalog
        self._request = request
        self._crew = crew
        self._profile: Profile | None = None
        self._spin_us = settings.spin_us
        self.is_open = settings.replan and settings.shares is None
        self.planner: Remote | None = None
        self.decisions: deque[str] = deque(maxlen=100)  # what the planner decided, and why
        self.notes: list[str] = []
        self.replans = 0
        self._events: list[ev.Event] = []
        self.thinking: Pending | None = None
        self._commands: deque[ev.Command] = deque()
        self._to_move: deque[Placement] = deque()  # to be published, once they have what they need
        self._moves: Moves | None = None  # of the first of them
        self._refused: int | None = None  # the newest placement that could not be
        self._waiting_for: list[Acknowledgement] = []
        self._follows = bool(settings.cards) and catalog.experts is not None
        self._unfollowed = 0  # decode steps since routers' choices were asked for
        self._heat: Pending | None = None  # the answer, on its way
        self._heat_before: Heat | None = None  # all of them, as of the answer before
        self._sent_at = 0.0
        self._looked_at = 0.0  # the memory of this machine
        self._heard_at = 0.0  # of a command that changes something
        self._restarts = 0

    def launch(self) -> None:
        if self.planner is None and self.is_open:
            self.planner = self._host.start_planner()

    def first_placement(self, catalog: Catalog, profile: Profile | None) -> Placement:
        """What the planner starts with. Raises InfeasiblePlan.

        catalog: that of the blueprint, with what is known of the use of experts.
        """
        assert self.planner is not None, "the planner must be launched first"
        self._catalog, self._profile = catalog, profile
        self.planner.call("open", self._catalog, self._request, profile).result()
        (command,) = self.planner.call("handle", [ev.EngineStarted()]).result()
        assert isinstance(command, ev.PublishPlacement)
        return command.placement

    def first_acknowledged(self, answers: list[Acknowledgement], step: int) -> None:
        """All lanes hold the first placement; `step` is the first to run under it."""
        events: list[ev.Event] = []
        for answer in answers:
            answer.pending.result()
            events.append(ev.PlacementAcknowledged(answer.lane, answer.placement_id))
        if self.is_open and self.planner is not None:
            self.planner.call("handle", events).result()
            self.note(ev.PlacementAnnounced(answers[0].placement_id, step))

    def note(self, event: ev.Event) -> None:
        """An event for the next message."""
        if self.is_open:
            self._events.append(event)
            if isinstance(event, ev.StepRetired) and event.phase == "decode":
                self._unfollowed += 1

    def _look_at_ram(self) -> None:
        now = time.monotonic()
        if self._request.headroom is None or now - self._looked_at < RAM_PERIOD_S:
            return
        self._looked_at = now
        with suppress(OSError, ValueError):
            self.note(ev.RamLooked(read_ram()))

    def talk(self, gauges: Gauges) -> None:
        """Take what has come, send what has gathered. May be called while a step runs."""
        self._look_at_ram()
        self._go_on_moving()
        still = []
        for answer in self._waiting_for:
            if answer.pending.is_done():
                answer.pending.result()
                self.note(ev.PlacementAcknowledged(answer.lane, answer.placement_id))
            else:
                still.append(answer)
        self._waiting_for = still
        if self.thinking is not None and self.thinking.is_done():
            thinking, self.thinking = self.thinking, None
            self._hear(thinking)
        if not self.is_open or self.thinking is not None or self.planner is None:
            return
        if self._follows:
            self._follow_routers()
        now = time.monotonic()
        is_calm = now - self._heard_at > ATTENTIVE_S
        period = EVENT_PERIOD_S * (CALM_PERIODS if is_calm else 1)
        if self._events and now - self._sent_at >= period:
            self._events.extend(gauges.run_queue_delays())
            self.thinking = self.planner.call("handle", self._events)
            self._events, self._sent_at = [], now

    def _follow_routers(self) -> None:
        """Ask the disk lane now and then what was chosen; tell the planner what is new of it."""
        if self._heat is None:
            if self._unfollowed >= FOLLOW_STEPS:
                self._unfollowed = 0
                self._heat = self._crew.disk_lane.call("expert_heat")
            return
        if not self._heat.is_done():
            return
        asked, self._heat = self._heat, None
        try:
            heat: Heat = asked.result()
        except LaneDied:  # who looks after the lanes will say so
            self._heat_before = None
            return
        before, self._heat_before = self._heat_before, heat
        visits, counts = heat.visits, heat.counts
        if before is not None and before.visits <= visits:  # else the lane has begun anew
            visits, counts = visits - before.visits, counts - before.counts
        if visits > 0:  # one layer may have been visited once more than the others
            visits = max(visits, float(counts.max()))
            self._events.append(ev.ExpertsChosen(Heat(heat.model, visits, counts)))

    def obey(self, step: int) -> list[ev.SetSpin]:
        """Carry out what the planner asked for, between steps; `step` is the next.

        Returns the commands about spinning, which are the engine's to carry out.
        """
        spins = []
        while self._commands:
            command = self._commands[0]  # one that a dying lane cuts short is obeyed again
            if isinstance(command, ev.SetSpin):
                spins.append(command)
            else:
                self.carry_out(command, step)
            self._commands.popleft()
        return spins

    def carry_out(self, command: ev.Command, step: int) -> None:
        crew = self._crew
        if isinstance(command, ev.Note):
            self.decisions.append(command.text)
        elif isinstance(command, ev.PublishPlacement):
            self.decisions.append(f"plan {command.placement.placement_id} wanted: {command.reason}")
            self._to_move.append(command.placement)  # `talk` sees to what it needs
        elif isinstance(command, ev.AnnouncePlacement):
            placement = crew.published(command.placement_id)
            crew.switch(placement)
            self.replans += 1
            self.decisions.append(f"plan {placement.placement_id} begins: {placement.strategy}")
            self.note(ev.PlacementAnnounced(command.placement_id, step))
        elif isinstance(command, ev.RetirePlacement):
            retired = command.placement_id
            if retired > crew.placement.placement_id and retired != self._refused:
                self.decisions.append(f"plan {retired} was given up before it began")
            self._to_move = deque(p for p in self._to_move if p.placement_id != retired)
            if self._moves is not None and self._moves.placement.placement_id == retired:
                self._moves.is_withdrawn = True
            crew.retire(retired)

    def _go_on_moving(self) -> None:
        """Publish a placement once all that it needs has arrived."""
        if self._moves is None and self._to_move:
            self._moves = self._crew.start_moving(self._to_move[0])  # again, if a lane dies
            self._to_move.popleft()
        moves = self._moves
        if moves is None:
            return
        try:
            if not self._crew.mover.go_on(moves):
                return
        except LaneDied:
            self._moves = None
            if not moves.is_withdrawn:
                self._to_move.appendleft(moves.placement)
            raise
        self._moves = None
        if moves.is_withdrawn:
            return
        if moves.why is not None:
            self._refused = moves.placement.placement_id
            self.note(ev.PlacementRefused(moves.placement.placement_id, moves.why))
        else:
            self._waiting_for += self._crew.publish(moves.placement)

    def begin_anew(self, request: Request) -> None:
        """With another planner, which knows of nothing that was: all lanes have been emptied."""
        kill_quietly([self.planner])
        self.planner, self.thinking = None, None
        self._request = request
        self._commands.clear()
        self._to_move.clear()
        self._events, self._moves, self._waiting_for = [], None, []

    def wait_for_moves(self) -> None:
        """Nothing is on its way any more when this returns; the abort word ends it."""
        if self._moves is not None:
            self._crew.mover.abandon(self._moves)

    def lanes_restarted(self) -> None:
        """Lanes hold all published placements again, so none is waited for."""
        for answer in self._waiting_for:
            self.note(ev.PlacementAcknowledged(answer.lane, answer.placement_id))
        self._waiting_for = []

    def _hear(self, thinking: Pending) -> None:
        """One whose process died is started again, and told what is running; one that failed by
        its own fault would fail again."""
        try:
            commands = thinking.result()
            self._commands.extend(commands)
            if any(not isinstance(command, ev.Note) for command in commands):
                self._heard_at = time.monotonic()
            self._restarts = 0
            return
        except LaneDied as error:
            reason = str(error)
            self._restarts += 1
            self.is_open = self._restarts <= RESTARTS
        except Exception as error:  # a fault of the planner must not become one of the engine
            reason = f"planner: {type(error).__name__}: {error}"
            self.is_open = False
        self._crew.retire_all_but_current()
        self._waiting_for, self._events = [], []
        self._to_move.clear()
        if self._moves is not None:
            self._moves.is_withdrawn = True
        self._commands.clear()
        for lane in self._crew.lanes:  # how long waits spin was the lost planner's wish
            self._commands.append(ev.SetSpin(lane.name, self._spin_us))
        if not self.is_open:
            self.notes.append(f"{reason}; going on without a shadow")
            return
        self.decisions.append(f"{reason}; started again under the plan in force")
        self.planner = self._host.start_planner()
        self.thinking = self.planner.call(
            "resume",
            self._catalog,
            self._request,
            self._profile,
            self._crew.placement,
            self._crew.newest_id,
        )
