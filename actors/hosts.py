"""Where lanes run: in this process (tests, profiling), or as Ray actors.

The engine sees no difference. A `Remote` is a lane or planner somewhere; `call` starts a method
there and gives a `Pending`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Protocol

from shadowlane.planner.card_planner import CardPlanner
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.events import Command, EngineResumed, Event
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.profile import Profile
from shadowlane.planner.shadow import PlannerState

if TYPE_CHECKING:  # a process imports what its lane needs, and nothing before it must
    from shadowlane.actors.arena import ArenaHandle, ArenaLayout
    from shadowlane.actors.blueprint import Blueprint
    from shadowlane.actors.copy_choice import CopyTimes, Course
    from shadowlane.actors.cuda.driver import Driver
    from shadowlane.actors.cuda.memory import CardMemoryHandle
    from shadowlane.actors.cuda.runtime import CardRuntime


STANDS_IN = (-1,)  # the cores of a lane that stands in for a card: one thread, anywhere


class LaneDied(Exception):
    """A lane's process is gone, or its loop has ended; the text says which and why."""


class LaneFailed(LaneDied):
    """The process lives, but its loop ended with an error of its own."""


class Pending(Protocol):
    def is_done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any:
        """The method's result. Raises TimeoutError, LaneDied, or what the method raised."""
        ...


class Settled:
    """A Pending whose result is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def is_done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Remote(Protocol):
    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending: ...

    def kill(self) -> None:
        """Stop the process at once (a lane in this process is asked to stop)."""
        ...

    def process_id(self) -> int: ...


class Host(Protocol):
    """Starts lanes. They come up side by side; their first call waits for them."""

    def start_cpu(self, number: int, cores: Sequence[int]) -> Remote: ...

    def start_card(self, number: int, card: int, *, is_emulated: bool, uuid: str = "") -> Remote:
        """The compute lane of a card; number: its place among all compute lanes.

        is_emulated: a processor's, that stands in for a card which is not here. uuid: of one that
        is; "": as the driver counts them.
        """
        ...

    def start_link(self, card: int) -> Remote: ...

    def start_disk(self, depth: int, direct: bool, prefetch: bool) -> Remote: ...

    def start_planner(self) -> Remote: ...


class CpuLaneHost:
    """A compute lane before and after it has an arena: what runs inside a lane's process."""

    def __init__(self, number: int, cores: Sequence[int], span: Any = None) -> None:
        self._number = number
        self._cores = tuple(cores)
        self._span = span
        self._lane: Any = None

    def make_ready(self) -> None:
        """Load what the lane runs, while the engine is still reading headers and planning."""
        from shadowlane.ops.warm import warm_decode, warm_prefill

        warm_decode()
        warm_prefill()

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        """Map the arena and make ready, so that no step waits for a compiler.

        Where everything is in the cache of compiled code, torch may still be on its way.
        """
        from shadowlane.actors.cpu_lane import CpuLane
        from shadowlane.ops.warm import is_warm, warm_decode, warm_layouts, warm_prefill

        was_warm = is_warm()
        warm_decode()
        warm_layouts(blueprint.layouts)
        if not was_warm:
            warm_prefill()
        self._lane = CpuLane(self._number, self._cores, blueprint, layout, handle, self._span)

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """Times of this model's operators on this lane's cores; see `actors/measure.py`."""
        from shadowlane.actors.measure import measure_groups

        return measure_groups(self._cores, *args, **kwargs)

    def stop(self) -> None:
        if self._lane is not None:
            self._lane.stop()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._lane, method)


class CardLaneHost:
    """The lane of a card that is here, before and after it has an arena."""

    def __init__(self, number: int, card: int, ordinal: int, span: Any = None) -> None:
        """ordinal: of the card, as this process sees it."""
        self._number, self._card, self._ordinal = number, card, ordinal
        self._span = span
        self._lane: Any = None
        self._is_running = False

    def make_ready(self) -> None:
        """Load what the lane runs, while the engine is still reading headers and planning."""
        from shadowlane.actors import card_lane  # noqa: F401
        from shadowlane.ops.warm import warm_counters

        warm_counters()

    def make_runtime(self) -> CardRuntime:
        """Torch on the card. Raises CudaError where there is none."""
        from shadowlane.actors.cuda.runtime import CudaRuntime

        return CudaRuntime(self._ordinal)

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        """Map the arena and take the card's memory. Raises MemoryError, CudaError."""
        self._lane, self._is_running = None, False
        runtime = self.make_runtime()
        from shadowlane.actors.card_lane import CardLane

        where = (self._number, self._card, runtime, blueprint, layout, handle)
        self._lane = CardLane(*where, span=self._span, ordinal=self._ordinal)

    def run(self) -> Any:
        self._is_running = True
        return self._lane.run()

    def stop(self) -> None:
        if self._lane is None:
            return
        self._lane.stop()
        if not self._is_running:
            self._lane.close()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._lane, method)


class TransferLaneHost:
    """The transfer lane of a card before and after it has an arena."""

    def __init__(self, card: int, span: Any = None) -> None:
        self._card = card
        self._span = span
        self._lane: Any = None

    def make_ready(self) -> None:
        """Load what the lane runs, while the engine is still reading headers and planning."""
        from shadowlane.actors import transfer_lane  # noqa: F401
        from shadowlane.ops.warm import warm_counters

        warm_counters()

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        from shadowlane.actors.transfer_lane import TransferLane

        self._lane = TransferLane(self._card, blueprint, layout, handle, self._span)

    def time_process(self, course: Course, handle: CardMemoryHandle) -> CopyTimes:
        """How fast this process copies to a card. Raises CudaError where it cannot."""
        times: CopyTimes = self._lane.time_process(course, handle, self.make_driver(handle.uuid))
        return times

    def use_process(self, handle: CardMemoryHandle) -> None:
        """This process copies from now on. Raises CudaError where it cannot."""
        self._lane.use_process(handle, self.make_driver(handle.uuid))

    def make_driver(self, uuid: str) -> Driver:
        """For copies by this process, which is to see this card. Raises CudaError."""
        from shadowlane.actors.cuda.driver import CudaDriver

        return CudaDriver()

    def stop(self) -> None:
        if self._lane is not None:
            self._lane.stop()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._lane, method)


class DiskLaneHost:
    """The storage lane before and after it has an arena."""

    def __init__(self, depth: int, direct: bool, prefetch: bool, span: Any = None) -> None:
        self._settings = {"depth": depth, "direct": direct, "prefetch": prefetch, "span": span}
        self._lane: Any = None

    def make_ready(self) -> None:
        """Load what the lane runs, while the engine is still reading headers and planning."""
        from shadowlane.actors import disk_lane  # noqa: F401
        from shadowlane.ops.warm import warm_counters

        warm_counters()

    def open(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        stamps: Sequence[object],
    ) -> None:
        from shadowlane.actors.disk_lane import DiskLane

        self._lane = DiskLane(blueprint, layout, handle, stamps, **self._settings)

    def measure(self, *args: Any) -> Any:
        """Bandwidth of this model's files; see `actors/measure.py`."""
        from shadowlane.actors.measure import measure_disk

        return measure_disk(*args)

    def stop(self) -> None:
        if self._lane is not None:
            self._lane.stop()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._lane, method)


class PlannerHost:
    """The planner's state where events arrive and commands leave."""

    def __init__(self, state: PlannerState | CardPlanner | None = None) -> None:
        """state: of a planner that moves here from another process."""
        self._state = state

    @property
    def state(self) -> PlannerState | CardPlanner | None:
        return self._state

    def open(self, catalog: Catalog, request: Request, profile: Profile | None) -> None:
        self._state = (
            CardPlanner(catalog, request)
            if request.cards
            else PlannerState(catalog, request, profile)
        )

    def resume(
        self,
        catalog: Catalog,
        request: Request,
        profile: Profile | None,
        running: Placement,
        newest_id: int,
    ) -> list[Command]:
        """Take over from a planner that is gone: `running` is what the engine runs under."""
        self.open(catalog, request, profile)
        return self.handle([EngineResumed(running, newest_id)])

    def handle(self, events: Sequence[Event]) -> list[Command]:
        assert self._state is not None, "the planner must be opened first"
        return [command for event in events for command in self._state.handle(event)]

    def regret(self) -> float | None:
        assert self._state is not None, "the planner must be opened first"
        return self._state.regret()


class _LocalPending:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                raise
            raise TimeoutError("no answer in time") from error


class _LocalRemote:
    def __init__(self, name: str, target: Any, pool: ThreadPoolExecutor) -> None:
        self.name = name
        self._target = target
        self._pool = pool

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        return _LocalPending(self._pool.submit(getattr(self._target, method), *args, **kwargs))

    def process_id(self) -> int:
        return os.getpid()

    def kill(self) -> None:
        stop = getattr(self._target, "stop", None)  # the planner has no loop to be stopped
        if stop is not None:
            stop()


class ThreadHost:
    """Lanes as threads of this process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="lane")

    def start_cpu(self, number: int, cores: Sequence[int]) -> Remote:
        return _LocalRemote(f"cpu:{number}", CpuLaneHost(number, cores), self._pool)

    def start_card(self, number: int, card: int, *, is_emulated: bool, uuid: str = "") -> Remote:
        lane = CpuLaneHost(number, STANDS_IN) if is_emulated else CardLaneHost(number, card, card)
        return _LocalRemote(f"gpu:{card}", lane, self._pool)

    def start_link(self, card: int) -> Remote:
        return _LocalRemote(f"h2d:{card}", TransferLaneHost(card), self._pool)

    def start_disk(self, depth: int, direct: bool, prefetch: bool) -> Remote:
        return _LocalRemote("disk:0", DiskLaneHost(depth, direct, prefetch), self._pool)

    def start_planner(self) -> Remote:
        return _LocalRemote("planner", PlannerHost(), self._pool)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
