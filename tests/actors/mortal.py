"""Lanes that can die as processes do, for tests of what an engine makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inprocess import PATIENCE_S, InProcess, ScriptedHost

from shadowlane.actors.hosts import LaneDied, Pending, Remote, ThreadHost
from shadowlane.actors.sequence import Output
from shadowlane.actors.sequence import Sequence as RunningSequence


class Mortal:
    """A lane that can die as a process does: every call of it fails from then on."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self.name = remote.name
        self.target = remote._target
        self.is_dead = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        return MortalPending(self, self._remote.call(method, *args, **kwargs))

    def process_id(self) -> int:
        if self.is_dead:
            raise LaneDied(f"{self.name}: its process died")
        return int(self._remote.process_id())

    def kill(self) -> None:
        self.is_dead = True
        self._remote.kill()


class MortalPending:
    def __init__(self, remote: Mortal, pending: Pending) -> None:
        self._remote = remote
        self._pending = pending

    def is_done(self) -> bool:
        return self._pending.is_done()

    def result(self, timeout: float | None = None) -> Any:
        value = self._pending.result(timeout)
        if self._remote.is_dead:
            raise LaneDied(f"{self._remote.name}: its process died")
        return value


class MortalHost(ThreadHost):
    def start_cpu(self, *args: Any) -> Remote:
        return Mortal(super().start_cpu(*args))

    def start_disk(self, *args: Any) -> Remote:
        return Mortal(super().start_disk(*args))

    def start_planner(self) -> Remote:
        return Mortal(super().start_planner())

    def start_card(self, *args: Any, **kwargs: Any) -> Remote:
        return Mortal(super().start_card(*args, **kwargs))

    def start_link(self, *args: Any) -> Remote:
        return Mortal(super().start_link(*args))


class MortalScripted(ScriptedHost, MortalHost):
    """A planner by script, and lanes that can die, those of cards too."""

    def as_remote(self, remote: Remote) -> Remote:
        return Mortal(remote)


def hear(request: RunningSequence, count: int) -> None:
    for _ in range(count):
        output = request.outputs.get(timeout=PATIENCE_S)
        assert output.error is None, output.error


def end_of(request: RunningSequence) -> Output:
    while True:
        output = request.outputs.get(timeout=PATIENCE_S)
        if output.finish_reason is not None:
            return output


def collect_after_recovery(
    engine: InProcess, prompt: Sequence[int], expected: Sequence[int]
) -> None:
    """The next request; one more where a death was noticed only when it ran."""
    for _ in range(3):
        request = engine.submit(prompt, max_tokens=len(expected))
        ids: list[int] = []
        while True:
            output = request.outputs.get(timeout=PATIENCE_S)
            ids.extend(output.token_ids)
            if output.finish_reason is not None:
                break
        if output.error is None:
            assert ids == list(expected)
            return
    raise AssertionError("no request got through after three tries")
