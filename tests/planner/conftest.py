"""An engine without lanes: it obeys commands at once, and a test says how long its steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from shadowlane.planner import events as ev
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import Workload
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.profile import Profile
from shadowlane.planner.program import build_programs
from shadowlane.planner.shadow import PlannerState
from shadowlane.planner.simulate import simulate
from shadowlane.planner.synthetic import llama_catalog
from shadowlane.planner.trial import Settings
from shadowlane.planner.validate import validate

# Seconds of a step and busy seconds per lane, for a placement and the spin of each lane.
Machine = Callable[[Placement, Mapping[str, int]], tuple[float, dict[str, float]]]


class ImaginaryEngine:
    def __init__(self, state: PlannerState, machine: Machine | None = None) -> None:
        self.state = state
        self.machine = machine or self.as_predicted
        self.running: Placement | None = None
        self.next: Placement | None = None  # announced for the next step
        self.published: dict[int, Placement] = {}
        self.retired: list[int] = []
        self.spins = dict.fromkeys(state.lanes, state.settings.spin_us)
        self.log: list[ev.Command] = []
        self.step = 0

    def as_predicted(
        self, placement: Placement, _spins: Mapping[str, int]
    ) -> tuple[float, dict[str, float]]:
        workload = Workload("decode", 1, 256)
        simulation = simulate(self.state.catalog, placement, self.state.cost, workload=workload)
        return simulation.step_s, dict(simulation.busy_s)

    def tell(self, event: ev.Event) -> list[ev.Command]:
        commands = self.state.handle(event)
        self.state.validate()
        for command in commands:
            self._obey(command)
        return commands

    def _obey(self, command: ev.Command) -> None:
        self.log.append(command)
        if isinstance(command, ev.PublishPlacement):
            placement = command.placement
            validate(self.state.catalog, placement, build_programs(self.state.catalog, placement))
            self.published[placement.placement_id] = placement
            for name in [*(lane.name for lane in placement.lanes), DISK_LANE]:
                self.tell(ev.PlacementAcknowledged(name, placement.placement_id))
        elif isinstance(command, ev.AnnouncePlacement):
            self.next = self.published[command.placement_id]
            self.tell(ev.PlacementAnnounced(command.placement_id, self.step + 1))
        elif isinstance(command, ev.SetSpin):
            self.spins[command.lane] = command.spin_us
        elif isinstance(command, ev.RetirePlacement):
            self.retired.append(command.placement_id)

    def run(self, steps: int, *, rows: int = 1, context: int = 200) -> list[ev.Command]:
        """Decode steps; returns what the planner said meanwhile."""
        before = len(self.log)
        for _ in range(steps):
            self.running, self.next = self.next or self.running, None
            assert self.running is not None
            self.step += 1
            seconds, busy_s = self.machine(self.running, self.spins)
            placement_id = self.running.placement_id
            self.tell(
                ev.StepRetired(self.step, placement_id, "decode", rows, context, seconds, busy_s)
            )
        return self.log[before:]

    def rows_of(self, lane: str) -> int:
        """Units of the first `down` that a lane has in the running placement."""
        assert self.running is not None
        return sum(
            share.last_unit - share.first_unit
            for share in self.running.shares["0.down"]
            if share.lane == lane
        )


EngineMaker = Callable[..., ImaginaryEngine]


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    """Makes engines that have started; the whole state of each is validated when the test ends."""
    made: list[ImaginaryEngine] = []

    def make(
        *,
        catalog: Catalog | None = None,
        ram: int = 1 << 30,
        num_lanes: int = 2,
        profile: Profile | None = None,
        settings: Settings | None = None,
        machine: Machine | None = None,
    ) -> ImaginaryEngine:
        catalog = catalog or llama_catalog(layers=2, hidden=1024, inner=4096)
        lanes = tuple(LaneSpec(f"cpu:{number}", 1) for number in range(num_lanes))
        # Scripts count in steps, which are short; what counts in seconds has its own tests.
        settings = settings or Settings(drift_s=0.0, trial_s=0.0, min_s_between=0.0)
        state = PlannerState(catalog, Request(ram=ram, lanes=lanes), profile, settings)
        engine = ImaginaryEngine(state, machine)
        engine.tell(ev.EngineStarted())
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.state.validate()
        live = set(engine.published) - set(engine.retired)
        promised = {engine.state.placements.active, engine.state.placements.pending} - {None}
        assert live == promised, "a placement was forgotten"


@pytest.fixture(scope="session")
def engine_class() -> type[ImaginaryEngine]:
    return ImaginaryEngine
