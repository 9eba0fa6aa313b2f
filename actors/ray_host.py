"""Lanes, planner and engine as Ray actors: starting them, calling them, noticing their death.

Ray starts and supervises; it is never on the path of a token. Each lane's `run` is an actor method
that lasts as long as the lane, so that its steps show as spans in Ray's own timeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shadowlane.actors.hosts import (
    CpuLaneHost,
    DiskLaneHost,
    LaneDied,
    Pending,
    PlannerHost,
    Remote,
)
from shadowlane.actors.service import Chunk, Prompt, Service
from shadowlane.ops.sampling import SamplingParams

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


class CpuLaneActor(CpuLaneHost, CallByName):
    def __init__(self, number: int, cores: Sequence[int]) -> None:
        super().__init__(number, cores, ray_span)


class DiskLaneActor(DiskLaneHost, CallByName):
    def __init__(self, depth: int, direct: bool, prefetch: bool) -> None:
        super().__init__(depth, direct, prefetch, ray_span)


class PlannerActor(PlannerHost, CallByName):
    """The shadow planner: a millisecond away from everybody, so never on the path of a token."""


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


class RayHost:
    """Lanes as actors. They belong to the actor that starts them, and die with it."""

    def start_cpu(self, number: int, cores: Sequence[int]) -> Remote:
        return _start(f"cpu:{number}", CpuLaneActor, number, tuple(cores))

    def start_disk(self, depth: int, direct: bool, prefetch: bool) -> Remote:
        return _start("disk:0", DiskLaneActor, depth, direct, prefetch)

    def start_planner(self) -> Remote:
        return _start("planner", PlannerActor)


def _start(name: str, kind: type, *args: Any) -> Remote:
    # NOTE: num_cpus=0, since lanes are pinned by us and Ray's count knows nothing of it.
    actor = ray.remote(num_cpus=0, max_concurrency=LANE_THREADS)(kind)
    return RayRemote(name, actor.remote(*args))


class EngineActor(Service, CallByName):
    """The engine and its service; the driver holds the only handle, so both end together."""

    def __init__(self) -> None:
        super().__init__(RayHost())

    def stream_chunks(
        self, request: str, prompt: Prompt, params: SamplingParams
    ) -> Iterator[list[Chunk]]:
        """Like `stream`, with all that is ready in one message: a message costs a millisecond.

        request: a name for `cancel`.
        """
        sequence = self.submit(prompt, params)
        self._named[request] = sequence
        try:
            while not sequence.is_heard:
                chunks = [self.next_chunk(sequence)]
                while not sequence.is_heard and not sequence.outputs.empty():
                    chunks.append(self.next_chunk(sequence))
                yield chunks
        finally:
            self._named.pop(request, None)
            if not sequence.is_over:
                self.engine.cancel(sequence)


def start_engine() -> Any:
    """A handle on a new engine actor."""
    return ray.remote(num_cpus=0, max_concurrency=ENGINE_THREADS)(EngineActor).remote()
