"""An engine and its lanes as threads of this process: what the tests of the engine drive.

Nothing of the engine is replaced. Only the host differs from the one that starts Ray actors, and
where a test says so, the planner is one that publishes the placements it is told to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shadowlane.actors import blueprint as blueprints
from shadowlane.actors import shadow_link
from shadowlane.actors.blueprint import Blueprint, Options, read_blueprint
from shadowlane.actors.engine import Engine, EngineSettings
from shadowlane.actors.hosts import Remote, ThreadHost
from shadowlane.actors.sequence import Output
from shadowlane.actors.sequence import Sequence as RunningSequence
from shadowlane.ops.sampling import SamplingParams
from shadowlane.planner import events as ev
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import MIN_SLOTS, LaneSpec, Placement, Request, Share
from shadowlane.planner.profile import Profile
from shadowlane.planner.search import UNDIVIDED, place

PATIENCE_S = 60.0  # only a hang takes as long, also on a machine that other work keeps busy
AMPLE = 1 << 28
# Threads are pinned: test runners side by side (of pytest-xdist) each begin with a core of its own.
RUNNER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
FIRST, SECOND = (0, 1) if RUNNER % 2 == 0 else (1, 0)
ONE_THREAD = ((FIRST,),)
TWO_THREADS = ((FIRST, SECOND),)
TWO_LANES = ((FIRST,), (SECOND,))


@contextmanager
def small_blocks(nbytes: int, tile_rows: int = 16) -> Iterator[None]:
    """Cut models into blocks of about `nbytes`, so that tiny ones have many of them."""
    before = blueprints.BLOCK_NBYTES, blueprints.MIN_TILE_ROWS
    blueprints.BLOCK_NBYTES, blueprints.MIN_TILE_ROWS = nbytes, tile_rows
    try:
        yield
    finally:
        blueprints.BLOCK_NBYTES, blueprints.MIN_TILE_ROWS = before


def num_threads(cores: Sequence[Sequence[int]]) -> int:
    return sum(len(each) for each in cores)


def lanes_of(cores: Sequence[Sequence[int]]) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(f"cpu:{number}", len(each)) for number, each in enumerate(cores))


def request_for(
    blueprint: Blueprint, ram: int, cores: Sequence[Sequence[int]], num_slots: int | None = None
) -> Request:
    options = blueprint.options
    return Request(
        ram=ram,
        lanes=lanes_of(cores),
        context=options.context,
        max_batch=options.max_batch,
        num_slots=num_slots,
    )


def smallest_ram(blueprint: Blueprint) -> int:
    """The least budget under which the model can run: everything that cannot be avoided."""
    catalog, options = blueprint.catalog, blueprint.options
    assert options.context is not None, "a context that may shrink has no smallest budget"
    pages = options.max_batch * -(-options.context // catalog.page_tokens)
    return (
        blueprints.whole_pages(catalog.constants_nbytes)
        + blueprints.whole_pages(catalog.scratch_nbytes)
        + blueprints.whole_pages(pages * catalog.page_nbytes)
        + MIN_SLOTS * catalog.slot_nbytes
    )


def weights_nbytes(blueprint: Blueprint) -> int:
    """Bytes that all weights hold in RAM."""
    return sum(block.held_nbytes for block in blueprint.catalog.blocks)


class ScriptedPlanner:
    """Publishes the given placements, each after a number of retired steps, and announces them."""

    def __init__(self, first: Callable[[Catalog, Request], Placement]) -> None:
        self._first = first
        self.script: list[tuple[int, Placement]] = []  # (retired steps, placement)
        self.announced: list[tuple[int, int]] = []  # (placement, first step)
        self._waiting: dict[int, set[str]] = {}  # placement -> lanes that have not acknowledged
        self._steps = 0
        self._active = -1

    def open(self, catalog: Catalog, request: Request, profile: Profile | None) -> None:
        self._placement = self._first(catalog, request)
        links = (f"h2d:{n}" for n in range(sum(e.name[:3] == "gpu" for e in request.lanes)))
        self._lanes = {*(lane.name for lane in request.lanes), *links, "disk:0"}

    def handle(self, events: Sequence[ev.Event]) -> list[ev.Command]:
        commands: list[ev.Command] = []
        for event in events:
            if isinstance(event, ev.EngineStarted):
                commands.append(self._publish(self._placement))
            elif isinstance(event, ev.PlacementAcknowledged):
                waiting = self._waiting[event.placement_id]
                waiting.discard(event.lane)
                if not waiting and event.placement_id != self._placement.placement_id:
                    commands.append(ev.AnnouncePlacement(event.placement_id))
            elif isinstance(event, ev.PlacementAnnounced):
                self.announced.append((event.placement_id, event.step))
                if self._active >= 0 and self._active != event.placement_id:
                    commands.append(ev.RetirePlacement(self._active))
                self._active = event.placement_id
            elif isinstance(event, ev.StepRetired):
                self._steps += 1
                while self.script and self.script[0][0] <= self._steps:
                    commands.append(self._publish(self.script.pop(0)[1]))
        return commands

    def _publish(self, placement: Placement) -> ev.PublishPlacement:
        self._waiting[placement.placement_id] = set(self._lanes)
        return ev.PublishPlacement(placement, f"placement {placement.placement_id} by script")

    def regret(self) -> float | None:
        return None


class ScriptedHost(ThreadHost):
    """Lanes as threads, and a planner that obeys the test."""

    def __init__(self, planner: ScriptedPlanner) -> None:
        super().__init__()
        self._planner = planner

    def start_planner(self) -> Remote:
        from shadowlane.actors.hosts import _LocalRemote

        return _LocalRemote("planner", self._planner, self._pool)


class InProcess:
    """A running engine with the questions that tests ask."""

    def __init__(self, engine: Engine, planner: ScriptedPlanner | None) -> None:
        self.engine = engine
        self.planner = planner

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 12,
        reuses_cache: bool = False,
        **params: Any,
    ) -> RunningSequence:
        chosen = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})
        return self.engine.submit(prompt, chosen, reuses_cache=reuses_cache)

    def generate(self, prompt: Sequence[int], max_tokens: int = 12, **params: Any) -> list[int]:
        return collect(self.submit(prompt, max_tokens, **params))

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """float32 [len(prompt), vocab]: one row per position."""
        sequence = self.engine.submit(prompt, SamplingParams(), wants_logits=True)
        return np.concatenate(
            [output.logits for output in listen(sequence) if output.logits is not None]
        )

    @property
    def sweep_nbytes(self) -> int:
        """Bytes of weights that the sweeps have read so far."""
        from shadowlane.actors.disk_lane import SWEEP_NBYTES

        return int(self.engine.gauges.disk_statistics()[SWEEP_NBYTES])


def listen(sequence: RunningSequence) -> list[Output]:
    """All outputs of a request. Raises AssertionError with the error that ended it, if one did."""
    outputs = []
    while True:
        output = sequence.outputs.get(timeout=PATIENCE_S)
        assert output.error is None, output.error
        outputs.append(output)
        if output.finish_reason is not None:
            return outputs


def collect(sequence: RunningSequence) -> list[int]:
    return [token for output in listen(sequence) for token in output.token_ids]


def cancelling(
    engine: InProcess,
    prompt: Sequence[int],
    max_tokens: int = 12,
    during: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Come back after each request that was cancelled while its prompt was computed.

    Until three steps have become void: some are cancelled before their step begins. during: what
    is entered for that time.
    """
    void: list[int] = []
    records = engine.engine._records
    make_void = records.make_void

    def noted(step: int) -> None:
        void.append(step)
        make_void(step)

    records.make_void = noted  # type: ignore[method-assign]
    until = time.monotonic() + PATIENCE_S
    while len(void) < 3:
        assert time.monotonic() < until, "no step was made void"
        with during():
            sequence = engine.submit(prompt, max_tokens)
            while not sequence.timing.started:
                pass
            engine.engine.cancel(sequence)
            assert listen(sequence)[-1].finish_reason == "cancelled"
        yield


@contextmanager
def running(
    model: Path,
    *,
    ram: int = AMPLE,
    cores: Sequence[Sequence[int]] = TWO_THREADS,
    options: Options | None = None,
    first: Callable[[Catalog, Request], Placement] | None = None,
    engine_type: type[Engine] = Engine,
    **settings: Any,
) -> Iterator[InProcess]:
    """An engine that serves until the block ends. `first`: the placement of a scripted planner."""
    planner = ScriptedPlanner(first) if first else None
    host = ScriptedHost(planner) if planner else ThreadHost()
    chosen = EngineSettings(ram, tuple(tuple(each) for each in cores), **settings)
    engine = engine_type(model, options or Options(context=128), chosen, host)
    serving = threading.Thread(target=engine.serve, name="serve", daemon=True)
    period = shadow_link.EVENT_PERIOD_S
    if planner:
        shadow_link.EVENT_PERIOD_S = 0.0  # events after every step, so that a script is exact
    try:
        engine.start(None)
        serving.start()
        yield InProcess(engine, planner)
    finally:
        engine.close()
        if serving.ident is not None:
            serving.join(PATIENCE_S)
        host.close()
        shadow_link.EVENT_PERIOD_S = period
    assert not serving.is_alive(), "the step loop must end when the engine is closed"


def by_one_thread(
    model: Path, options: Options, prompt: Sequence[int], max_tokens: int = 12
) -> list[int]:
    """What a processor with room for everything writes: the tokens that others have to give."""
    with running(model, options=options, cores=ONE_THREAD) as engine:
        return engine.generate(prompt, max_tokens)


def plan(blueprint: Blueprint, ram: int, cores: Sequence[Sequence[int]]) -> Placement:
    return place(blueprint.catalog, request_for(blueprint, ram, cores), CostModel(None))


def cut(model: Path, options: Options, cores: Sequence[Sequence[int]]) -> Blueprint:
    return read_blueprint(model, options, num_threads(cores))[0]


def with_shares(
    catalog: Catalog, placement: Placement, placement_id: int, weights: Mapping[str, float]
) -> Placement:
    """The same bytes in the same places; rows of each group in proportion to `weights`."""
    shares = {}
    total = sum(weights.values())
    for group in catalog.groups:
        if group.kind in ("embed", *UNDIVIDED):
            name = next(name for name, weight in weights.items() if weight)
            shares[group.name] = (Share(name, 0, group.units),)
            continue
        first, reached, parts = 0, 0.0, []
        for name, weight in weights.items():
            reached += weight
            last = round(group.units * reached / total)
            if last > first:
                parts.append(Share(name, first, last))
                first = last
        shares[group.name] = tuple(parts)
    return replace(placement, placement_id=placement_id, shares=shares)


def with_resident(
    blueprint: Blueprint, placement: Placement, placement_id: int, resident: Sequence[bool]
) -> Placement:
    """Other blocks in RAM; the arena keeps the sizes it was laid out with."""
    catalog = blueprint.catalog
    sweep = tuple(
        index
        for group in catalog.groups
        if group.kind != "embed"
        for index in group.blocks
        if not resident[index]
    )
    return replace(
        placement,
        placement_id=placement_id,
        resident=tuple(resident),
        sweep=sweep,
        read_nbytes_per_step=sum(catalog.blocks[index].held_nbytes for index in sweep),
    )
