"""Lanes and planners that fail: who is told, what goes on, and that the tokens stay the same.

Lanes are threads here, and die when their loop is over, with what they were at half done. That a
real process can be killed at any moment is `test_ray.py`'s to show.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import inprocess
import pytest
from inprocess import (
    ONE_THREAD,
    PATIENCE_S,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    ScriptedPlanner,
    collect,
    cut,
    running,
    small_blocks,
    smallest_ram,
    weights_nbytes,
    with_shares,
)
from mortal import MortalHost, collect_after_recovery, end_of, hear
from tiny import tiny_tokens

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import check_room
from shadowlane.actors.batch import Step
from shadowlane.actors.blueprint import Options
from shadowlane.actors.engine import Engine, EngineError
from shadowlane.actors.hosts import ThreadHost
from shadowlane.actors.preview import check_tokenizer
from shadowlane.actors.service import Service
from shadowlane.actors.spec import ServiceSpec
from shadowlane.ops import aten
from shadowlane.ops.errors import ModelError
from shadowlane.ops.sampling import SamplingParams
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.lifecycle import PlannerError
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.search import place
from shadowlane.sizes import FreeRam

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama-biases", hidden_size=96, intermediate_size=200, head_dim=24)


@pytest.fixture(autouse=True)
def _small_blocks_and_mortal_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inprocess, "ThreadHost", MortalHost)
    with small_blocks(4096):
        yield


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with small_blocks(4096), running(model, cores=ONE_THREAD, options=OPTIONS) as engine:
        return engine.generate(PROMPT, max_tokens=24)


def half(model: Path, cores: Any, options: Options = OPTIONS) -> int:
    """A budget under which about half of the weights are streamed."""
    blueprint = cut(model, options, cores)
    return smallest_ram(blueprint) + weights_nbytes(blueprint) // 2


@contextmanager
def serving(model: Path, cores: Any = TWO_LANES, **settings: Any) -> Iterator[InProcess]:
    settings = {"options": OPTIONS, "ram": half(model, cores), **settings}
    with running(model, cores=cores, **settings) as engine:
        assert engine.engine.placement.sweep
        assert any(engine.engine.placement.resident)
        yield engine


def remote(engine: InProcess, name: str) -> Any:
    lanes = [*engine.engine.crew.cpus, engine.engine.crew.disk_lane, engine.engine.shadow.planner]
    return next(lane for lane in lanes if lane.name == name)


# -- lanes


@pytest.mark.parametrize("lane", ["cpu:0", "cpu:1", "disk:0"])
@pytest.mark.parametrize("heard", [0, 3])
def test_death_fails_the_running_and_spares_the_next(
    model: Path, expected: list[int], lane: str, heard: int
) -> None:
    with serving(model) as engine:
        loaded = int(engine.engine.gauges.disk_statistics()[disk.LOAD_NBYTES])
        request = engine.submit(PROMPT, max_tokens=80)
        waiting = engine.submit(PROMPT, max_tokens=24)  # there is one slot: it has not begun
        hear(request, heard)
        began = time.monotonic()
        remote(engine, lane).kill()
        output = end_of(request)
        assert time.monotonic() - began < 2.0
        assert output.error == f"{lane}: its process died"
        assert output.finish_reason == "cancelled"
        assert collect(waiting) == expected
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert int(engine.engine.gauges.disk_statistics()[disk.LOAD_NBYTES]) == loaded
        assert any(lane in note for note in engine.engine.shadow.decisions)


@pytest.mark.parametrize("lane", ["cpu:0", "cpu:1", "disk:0"])
def test_death_while_idle_is_mended_unasked(model: Path, expected: list[int], lane: str) -> None:
    with serving(model) as engine:
        dead = remote(engine, lane)
        dead.kill()
        ended = time.monotonic() + PATIENCE_S
        while remote(engine, lane) is dead or not engine.engine.crew.runs:
            assert time.monotonic() < ended
            threading.Event().wait(0.01)
        assert engine.generate(PROMPT, max_tokens=24) == expected


def test_what_a_failed_request_cached_is_dropped(model: Path) -> None:
    with serving(model, options=replace(OPTIONS, max_batch=2)) as engine:
        other = PROMPT[::-1]
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 1)
        engine.generate(other, max_tokens=2)
        remote(engine, "cpu:0").kill()
        assert end_of(request).error
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        cached = []
        for prompt in (PROMPT, other):
            again = engine.engine.submit(prompt, params, reuses_cache=True)
            collect(again)
            cached.append(again.timing.cached_tokens)
        assert cached == [0, len(other) - 1]  # a request that had ended keeps what it has


@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_deaths_at_any_moment(model: Path, expected: list[int], cores: Any) -> None:
    draw = random.Random(7)
    with serving(model, cores) as engine:
        victims = [*(lane.name for lane in engine.engine.lanes), "disk:0", "planner"]
        for _ in range(6):
            victim = draw.choice(victims)
            request = engine.submit(PROMPT, max_tokens=30)
            try:
                hear(request, draw.randrange(12))
            except AssertionError:  # of the death before, noticed late where two came at once
                collect_after_recovery(engine, PROMPT, expected)
                continue
            remote(engine, victim).kill()
            if draw.random() < 0.3:  # a second one, maybe while the first is being mended
                remote(engine, draw.choice(victims)).kill()
            error = end_of(request).error
            assert error is None or error.endswith("its process died")
            collect_after_recovery(engine, PROMPT, expected)
        assert engine.engine.error is None


def test_nothing_piles_up_over_deaths(model: Path) -> None:
    with serving(model) as engine:
        counts = []
        for _ in range(4):
            request = engine.submit(PROMPT, max_tokens=60)
            hear(request, 1)
            remote(engine, "disk:0").kill()
            end_of(request)
            engine.generate(PROMPT, max_tokens=2)
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        # each death made descriptors for three arenas and the model's files; two may be in passing
        assert counts[-1] <= counts[0] + 2


def test_a_placement_on_its_way_arrives_after_a_death(model: Path, expected: list[int]) -> None:
    def first(catalog: Catalog, request: Request) -> Placement:
        return with_shares(
            catalog, place(catalog, request, CostModel(None)), 0, {"cpu:0": 1.0, "cpu:1": 1.0}
        )

    with serving(model, first=first) as engine:
        assert isinstance(engine.planner, ScriptedPlanner)
        catalog, placement = engine.engine.blueprint.catalog, engine.engine.placement
        adopting = threading.Event()
        publish = engine.engine.crew.publish

        def publish_and_die(which: Placement) -> Any:
            pending = publish(which)
            if which.placement_id == 1 and not adopting.is_set():
                adopting.set()
                engine.engine.crew.disk_lane._target.stop()
            return pending

        engine.engine.crew.publish = publish_and_die  # type: ignore[method-assign]
        engine.planner.script = [
            (3, with_shares(catalog, placement, 1, {"cpu:0": 0.2, "cpu:1": 0.8}))
        ]
        end_of(engine.submit(PROMPT, max_tokens=24))
        assert adopting.is_set()
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert engine.engine.placement.placement_id == 1


# -- the planner


def test_a_lost_planner_costs_no_request(model: Path, expected: list[int]) -> None:
    with serving(model) as engine:
        for _ in range(2):
            request = engine.submit(PROMPT, max_tokens=24)
            hear(request, 1)
            remote(engine, "planner").kill()
            engine.engine.shadow.thinking = engine.engine.shadow.planner.call("handle", [])
            outputs = [request.outputs.get(timeout=PATIENCE_S) for _ in range(23)]
            assert outputs[-1].finish_reason == "length"
            assert all(output.error is None for output in outputs)
            assert engine.generate(PROMPT, max_tokens=24) == expected
        state = engine.engine.shadow.planner.target._state
        assert state.active_placement.placement_id == engine.engine.placement.placement_id
        assert state.placements.num_published >= engine.engine.placement.placement_id
        state.validate()
        assert not any("without a shadow" in note for note in engine.engine.shadow.notes)


def test_a_fault_of_the_planner_is_noted_once(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model) as engine:

        def fail(events: Any) -> None:
            raise PlannerError("placement 3 had a step retired while only published; story: ...")

        monkeypatch.setattr(engine.engine.shadow.planner.target, "handle", fail)
        for _ in range(3):
            assert engine.generate(PROMPT, max_tokens=24) == expected
        told = [note for note in engine.engine.shadow.notes if "without a shadow" in note]
        assert len(told) == 1
        assert told[0].startswith("planner: PlannerError: placement 3")


# -- errors


def refusal(engine: InProcess) -> str:
    """Why new requests are refused. The first may find the engine still failing the old ones."""
    ended = time.monotonic() + PATIENCE_S
    while time.monotonic() < ended:
        try:
            request = engine.submit(PROMPT)
        except EngineError as error:
            return str(error)
        assert end_of(request).error
    raise AssertionError("requests are still taken")


def failing_reads(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    read = disk.ModelFile.read_block
    left = [failures]

    def read_block(self: disk.ModelFile, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
        read(self, *args)

    monkeypatch.setattr(disk.ModelFile, "read_block", read_block)


def test_a_read_error_fails_one_request(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model) as engine:
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 1)
        failing_reads(monkeypatch, 1)
        error = end_of(request).error
        assert error is not None
        assert "disk:0" in error
        assert "Input/output error" in error
        assert "model.safetensors" in error
        assert "\n" not in error
        assert engine.generate(PROMPT, max_tokens=24) == expected


def test_an_error_that_stays_closes_the_door(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as engine:
        request = engine.submit(PROMPT, max_tokens=80)
        waiting = engine.submit(PROMPT, max_tokens=80)
        hear(request, 1)
        failing_reads(monkeypatch, 10**9)
        error = end_of(request).error
        assert error is not None
        assert end_of(waiting).error == error
        with pytest.raises(EngineError) as refused:
            engine.generate(PROMPT)
        assert str(refused.value) == error


@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_what_torch_refuses_is_told(
    model: Path, cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = aten.load().copy()
    table[aten.DTYPES :] = 99  # torch has no such type
    monkeypatch.setattr(aten, "load", lambda: table)
    with serving(model, cores=cores) as engine:
        said = end_of(engine.submit(PROMPT)).error
        assert said is not None
        assert "torch refused an operation; " in said
        assert said.split("; ", 1)[1]  # and why, in its own words


def test_a_changed_model_is_refused_from_then_on(model: Path, tmp_path: Path) -> None:
    path = Path(copytree(model, tmp_path / "model"))
    with serving(path) as engine:
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 1)
        os.utime(path / "model.safetensors", ns=(1, 1))
        error = end_of(request).error
        assert error is not None
        assert "must not change while it is used" in error
        assert refusal(engine) == error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_is_told(model: Path) -> None:
    class Faulty(Engine):
        def _wait_for_lanes(self, step: Step) -> bool:
            raise ZeroDivisionError("division by zero")

    with serving(model, engine_type=Faulty) as engine:
        error = end_of(engine.submit(PROMPT)).error
        assert error == "the engine failed: ZeroDivisionError: division by zero"
        assert refusal(engine) == error


def test_closing_tells_all_who_wait(model: Path) -> None:
    with serving(model) as engine:
        requests = [engine.submit(PROMPT, max_tokens=80) for _ in range(3)]
        hear(requests[0], 1)
        engine.engine.close()
        assert {end_of(request).error for request in requests} == {"the engine was closed"}
        with pytest.raises(EngineError, match="closed"):
            engine.submit(PROMPT)


# -- cancelling


@pytest.mark.parametrize("heard", [0, 3])
def test_a_cancelled_request_frees_its_slot_within_a_step(model: Path, heard: int) -> None:
    with serving(model, options=replace(OPTIONS, prefill_chunk=4)) as engine:
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, heard)
        engine.engine.cancel(request)
        step = engine.engine.step
        assert end_of(request).finish_reason == "cancelled"
        assert engine.engine.step <= step + 1
        assert engine.generate(PROMPT[:3], max_tokens=2)


# -- memory


def test_a_start_that_fails_can_be_closed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("the constants cannot be read")

    monkeypatch.setattr(Engine, "_write_constants", fail)
    with (
        pytest.raises(OSError, match="the constants cannot be read"),
        running(model, options=Options(context=128)),
    ):
        pytest.fail("it did not start")


def test_an_arena_that_does_not_fit_is_refused_by_name() -> None:
    check_room(1 << 30, FreeRam(1 << 30, 0, "MemAvailable"))
    with pytest.raises(MemoryError) as refused:
        check_room((1 << 30) + 1, FreeRam(1 << 30, 0, "control group /job"))
    assert "control group /job leaves 1.00 GiB" in str(refused.value)
    with pytest.raises(MemoryError, match=r"needs 1024 TiB of RAM; .* leaves"):
        check_room(1 << 50)


def test_a_broken_tokenizer_is_told_before_anything_is_measured_or_loaded(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(copytree(tiny_model("llama2"), tmp_path / "model"))
    (model / "tokenizer.json").write_text('{"version": "1.0", "model"')
    settings = inprocess.EngineSettings(ram=inprocess.AMPLE, cores=inprocess.ONE_THREAD)
    spec = ServiceSpec(model, Options(), settings)

    def find_profile(*_: object) -> None:
        raise AssertionError("nothing must be measured")

    monkeypatch.setattr(Service, "_find_profile", find_profile)
    host = ThreadHost()
    service = Service(host)
    try:
        with pytest.raises(ModelError, match=r"tokenizer\.json: must be a tokenizer"):
            service.start(spec)
    finally:
        service.close()
        host.close()
    with pytest.raises(ModelError, match=r"tokenizer\.json: must be a tokenizer"):
        check_tokenizer(spec)
