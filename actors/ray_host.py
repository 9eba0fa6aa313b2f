"""Lanes, planner and engine as Ray actors: starting them, calling them, noticing their death.

Ray starts and supervises; it is never on the path of a token. Each lane's `run` is an actor method
that lasts as long as the lane, so that its steps show as spans in Ray's own timeline.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shadowlane.actors.hosts import (
    STANDS_IN,
    CardLaneHost,
    CpuLaneHost,
    DiskLaneHost,
    LaneDied,
    Pending,
    PlannerHost,
    Remote,
    Settled,
    TransferLaneHost,
)
from shadowlane.actors.imports import quick_imports
from shadowlane.actors.spec import Chunk, EngineSettings, ServiceSpec
from shadowlane.planner.events import Command, Event, PublishPlacement, StepRetired

if TYPE_CHECKING:
    from shadowlane.actors.arena import ArenaHandle, ArenaLayout
    from shadowlane.actors.blueprint import Blueprint
    from shadowlane.actors.cuda.driver import Driver
    from shadowlane.actors.service import Prompt
    from shadowlane.ops.sampling import SamplingParams

LaneKey = tuple[Any, ...]  # "cpu" or "disk", and what the lane was started with
LANE_THREADS = 4  # `run`, and calls beside it
ENGINE_THREADS = 16  # requests that may be listened to at the same time


def ray_span(name: str) -> AbstractContextManager[object]:
    """A span of the running actor method in Ray's timeline; nothing where Ray has no such thing."""
    try:
        core_worker = ray._private.worker.global_worker.core_worker
        event: AbstractContextManager[object] = core_worker.profile_event(name.encode())
    except AttributeError:  # private to Ray: our own span rings stay the source of truth
        return nullcontext()
    return event


class CallByName:
    """Any method by its name, so that a lane is called alike wherever it runs."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method)(*args, **kwargs)

    def process_id(self) -> int:
        return os.getpid()


class ReadyEarly:
    """A lane that loads its code as soon as its process is there."""

    make_ready: Callable[[], None]

    def start_making_ready(self) -> None:
        self._is_ready = threading.Event()
        _in_background(self._make_ready)

    def _make_ready(self) -> None:
        try:
            with quick_imports():
                self.make_ready()
        finally:  # what failed here fails again where it is needed, and is reported there
            self._is_ready.set()

    def wait_until_ready(self) -> None:
        self._is_ready.wait()


class CpuLaneActor(CpuLaneHost, ReadyEarly, CallByName):
    def __init__(self, number: int, cores: Sequence[int]) -> None:
        super().__init__(number, cores, ray_span)
        self.start_making_ready()

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        end_with(handle.pid)
        super().open(blueprint, layout, handle)


class CardLaneActor(CardLaneHost, ReadyEarly, CallByName):
    """Sees one card, which is number 0 to this process: the one that the plan means.

    NOTE: Ray counts cards and would show each actor any that is left.
    """

    def __init__(self, number: int, card: int, uuid: str) -> None:
        if uuid:
            os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        super().__init__(number, card, 0, ray_span)
        self.start_making_ready()

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        end_with(handle.pid)
        super().open(blueprint, layout, handle)


class TransferLaneActor(TransferLaneHost, ReadyEarly, CallByName):
    def __init__(self, card: int) -> None:
        super().__init__(card, ray_span)
        self.start_making_ready()

    def make_driver(self, uuid: str) -> Driver:
        # NOTE: Ray hides all cards from whoever has asked for none, as this lane has.
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        return super().make_driver(uuid)

    def open(self, blueprint: Blueprint, layout: ArenaLayout, handle: ArenaHandle) -> None:
        end_with(handle.pid)
        super().open(blueprint, layout, handle)


class DiskLaneActor(DiskLaneHost, ReadyEarly, CallByName):
    def __init__(self, depth: int, direct: bool, prefetch: bool) -> None:
        super().__init__(depth, direct, prefetch, ray_span)
        self.start_making_ready()

    def open(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        stamps: Sequence[object],
    ) -> None:
        end_with(handle.pid)
        super().open(blueprint, layout, handle, stamps)


class PlannerActor(PlannerHost, CallByName):
    """The shadow planner: a millisecond away from everybody, so never on the path of a token."""

    def handle(self, events: Sequence[Event]) -> list[Command]:
        """As in any process; a new plan also shows on the planner's row of Ray's timeline."""
        commands = super().handle(events)
        for command in commands:
            if isinstance(command, PublishPlacement):
                with ray_span(f"plan {command.placement.placement_id}: {command.reason}"):
                    pass
        return commands


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def end_with(process_id: int) -> None:
    """End this process when that one, of the engine, does: without it nobody would stop a lane.

    A lane's actor belongs to the driver, which may live on without its engine.
    """
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel before 5.3: the driver's end has to do
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os._exit(1)

    _in_background(wait)


class RayPending:
    """A call of an actor's method."""

    def __init__(self, name: str, reference: Any) -> None:
        self._name = name
        self._reference = reference

    def is_done(self) -> bool:
        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self._reference, timeout=timeout)
        except GetTimeoutError as error:
            raise TimeoutError(f"{self._name} gave no answer in {timeout} s") from error
        except RayActorError as error:
            raise LaneDied(f"{self._name}: its process died") from error
        except RayTaskError as error:
            raise error.cause from None


class RayRemote:
    """An actor by the name of its lane."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        titled = self.actor.call.options(name=f"{self.name} {method}")
        return RayPending(self.name, titled.remote(method, *args, **kwargs))

    def process_id(self) -> int:
        return int(self.call("process_id").result())

    def kill(self) -> None:
        ray.kill(self.actor)


class MovingPlanner:
    """The planner in the engine's own process until steps run, then in an actor of its own.

    A model starts with one plan, which waits for nothing but this. So the planner's process comes
    up when there is something to watch, and not while the first token is waited for.
    """

    name = "planner"

    def __init__(self) -> None:
        self._here: PlannerHost | None = PlannerHost()
        self._there: Remote | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        if self._here is not None and self._is_before_steps(method, args):
            return Settled(getattr(self._here, method)(*args, **kwargs))
        return self._moved().call(method, *args, **kwargs)

    def kill(self) -> None:
        if self._there is not None:
            self._there.kill()

    def process_id(self) -> int:
        return self._moved().process_id()

    @staticmethod
    def _is_before_steps(method: str, args: Sequence[Any]) -> bool:
        if method == "handle":
            return not any(isinstance(event, StepRetired) for event in args[0])
        return method == "open"

    def _moved(self) -> Remote:
        if self._there is None:
            assert self._here is not None, "a planner is in one place"
            self._there = RayRemote("planner", start_actor(PlannerActor, self._here.state))
            self._here = None
        return self._there


class RayHost:
    """Lanes as actors."""

    def __init__(self) -> None:
        self._early: dict[LaneKey, Any] = {}

    def use(self, lanes: Mapping[LaneKey, Any]) -> None:
        """Take these, started earlier, when the engine asks for lanes."""
        self._early.update(lanes)

    def start_cpu(self, number: int, cores: Sequence[int]) -> Remote:
        early = self._early.pop(("cpu", number, tuple(cores)), None)
        return RayRemote(f"cpu:{number}", early or start_actor(CpuLaneActor, number, tuple(cores)))

    def start_card(self, number: int, card: int, *, is_emulated: bool, uuid: str = "") -> Remote:
        if is_emulated:
            early = self._early.pop(("cpu", number, STANDS_IN), None)
            return RayRemote(f"gpu:{card}", early or start_actor(CpuLaneActor, number, STANDS_IN))
        early = self._early.pop(("card", number, card), None)
        return RayRemote(f"gpu:{card}", early or start_card_actor(number, card, uuid))

    def start_link(self, card: int) -> Remote:
        early = self._early.pop(("link", card), None)
        return RayRemote(f"h2d:{card}", early or start_actor(TransferLaneActor, card))

    def start_disk(self, depth: int, direct: bool, prefetch: bool) -> Remote:
        early = self._early.pop(("disk", depth, direct, prefetch), None)
        return RayRemote("disk:0", early or start_actor(DiskLaneActor, depth, direct, prefetch))

    def start_planner(self) -> Remote:
        return MovingPlanner()


def start_actor(kind: type, *args: Any) -> Any:
    # NOTE: num_cpus=0, since lanes are pinned by us and Ray's count knows nothing of it.
    return ray.remote(num_cpus=0, max_concurrency=LANE_THREADS)(kind).remote(*args)


def start_card_actor(number: int, card: int, uuid: str) -> Any:
    """The lane of a card, one of those that Ray counts."""
    kind = ray.remote(num_cpus=0, num_gpus=1, max_concurrency=LANE_THREADS)(CardLaneActor)
    return kind.remote(number, card, uuid)


def start_lanes(settings: EngineSettings) -> dict[LaneKey, Any]:
    """Actors of the lanes that an engine of these settings will ask for."""
    lanes: dict[LaneKey, Any] = {
        ("cpu", number, cores): start_actor(CpuLaneActor, number, cores)
        for number, cores in enumerate(settings.cores)
    }
    for card in range(len(settings.cards)):
        number = len(settings.cores) + card
        if settings.emulated is not None:
            lanes["cpu", number, STANDS_IN] = start_actor(CpuLaneActor, number, STANDS_IN)
        else:
            lanes["card", number, card] = start_card_actor(number, card, settings.cards[card].uuid)
        lanes["link", card] = start_actor(TransferLaneActor, card)
    reading = settings.depth, settings.direct, settings.prefetch
    lanes["disk", *reading] = start_actor(DiskLaneActor, *reading)
    return lanes


class EngineActor:
    """The engine and its service; the driver holds the only handle, so both end together."""

    def __init__(self) -> None:
        # NOTE: imported here, in this process only: whoever starts an engine need not pay for it.
        with quick_imports():
            from shadowlane.actors.service import Service

        self._host = RayHost()
        self._service = Service(self._host)

    def start(self, spec: ServiceSpec, lanes: Mapping[LaneKey, Any]) -> dict[str, Any]:
        """Load the model with these lanes; see `Service.start`."""
        self._host.use(lanes)
        about = self._service.start(spec)
        # What is still on its way, torch mostly, belongs to loading and not to the first request.
        waiting = [lane.wait_until_ready.remote() for lane in lanes.values()]
        with suppress(RayActorError):  # one that died is the engine's to mend
            ray.get(waiting)
        return about

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any method of the service by its name."""
        return getattr(self._service, method)(*args, **kwargs)

    def stream_chunks(
        self, request: str, prompt: Prompt, params: SamplingParams
    ) -> Iterator[list[Chunk]]:
        """Chunks of an answer, all that are ready in one message: a message costs a millisecond.

        request: a name for `cancel`.
        """
        yield from self._service.stream_chunks(request, prompt, params)


def start_engine(spec: ServiceSpec) -> tuple[Any, Any]:
    """A new engine's actor, and a reference to what its `start` will return.

    The processes of engine and lanes come up side by side, from here and not from the engine: that
    is half a second on the way to the first token.
    """
    engine = ray.remote(
        num_cpus=0, max_concurrency=ENGINE_THREADS, concurrency_groups={"control": 1}
    )(EngineActor).remote()
    return engine, engine.start.remote(spec, start_lanes(spec.settings))
