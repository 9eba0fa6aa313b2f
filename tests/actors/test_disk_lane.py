"""The disk lane: what it reads and when, alone in an arena and inside a running engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    PATIENCE_S,
    TWO_LANES,
    TWO_THREADS,
    by_one_thread,
    cut,
    plan,
    running,
    small_blocks,
    smallest_ram,
    weights_nbytes,
)
from tiny import tiny_tokens

from shadowlane.actors.arena import DISK_COUNTER, LINK_COUNTER, STEP_COUNTER, Arena, plan_layout
from shadowlane.actors.blueprint import PAGE, BlockSource, Options, read_blueprint
from shadowlane.actors.disk_lane import (
    GATHER_NBYTES,
    LOAD_NBYTES,
    NUM_READS,
    SWEEP_NBYTES,
    DiskLane,
    ModelFile,
)
from shadowlane.actors.disk_sweep import Sweep
from shadowlane.actors.engine import Engine
from shadowlane.actors.homes import Homes
from shadowlane.actors.measure import measure_disk
from shadowlane.actors.records import record_header
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.errors import ModelError
from shadowlane.planner.placement import InfeasiblePlan
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import build_programs

OPTIONS = Options(context=96, prefill_chunk=16)
PROMPT = tiny_tokens(30)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", hidden_size=96, intermediate_size=200)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(4096):
        yield


# -- the lane alone


class Alone:
    """A disk lane whose only consumer is the test."""

    def __init__(self, model: Path, num_slots: int = 8, **settings: Any) -> None:
        blueprint, files = read_blueprint(model, OPTIONS, 1)
        ram = smallest_ram(blueprint) + (num_slots - 4 + 6) * blueprint.catalog.slot_nbytes
        placement = plan(blueprint, ram, ONE_THREAD)
        self.blueprint = blueprint
        self.placement = replace(
            placement,
            num_slots=num_slots,
            slots_nbytes=num_slots * placement.slot_nbytes,
        )
        self.layout = plan_layout(blueprint, self.placement)
        self.arena = Arena.create(self.layout.nbytes)
        self.lane = DiskLane(blueprint, self.layout, self.arena.handle, files.stamps, **settings)
        programs = build_programs(blueprint.catalog, self.placement)
        self.length = len(programs["cpu:0"].instructions)
        self.sweep = Sweep.of({"decode": programs}, num_slots, 0, 1, {"cpu:0": 0})
        self.homes = Homes(self.layout.weights, self.layout.weights_nbytes, blueprint.held_nbytes)
        self.abort = self.arena.base + self.layout.abort

    def address(self, counter: int) -> int:
        return self.arena.base + self.layout.counter(counter)

    def has_read(self, count: int, timeout_s: float = PATIENCE_S) -> bool:
        timeout_ns = int(timeout_s * 1e9)
        return wait_counter(self.address(DISK_COUNTER), count, self.abort, 0, timeout_ns) == WAIT_OK

    def begin(self, step: int, phase: Phase = "decode") -> None:
        """Fill a step, all before which has retired."""
        header = record_header(self.arena, self.layout, step)
        header[t.PHASE] = t.DECODE if phase == "decode" else t.PREFILL
        header[t.LANE_BASE] = counter_value(self.address(0))
        publish(self.address(STEP_COUNTER), step)

    def consume(self, instructions: int) -> None:
        publish(self.address(0), instructions)

    def frees(self, place: int, phase: Phase = "decode") -> int:
        """The instruction of a step after which the slot of a block may be overwritten."""
        ((_, rel),) = self.sweep.consumers[phase][place]
        return rel

    def assert_slot_holds(self, ordinal: int, sweep: Sweep | None = None) -> None:
        sweep = sweep or self.sweep
        block = sweep.blocks[(ordinal - sweep.base) % len(sweep.blocks)]
        source = self.blueprint.sources[block]
        offset = self.layout.ring + ordinal % sweep.num_slots * self.layout.slot_nbytes
        held = self.arena.view(offset + source.skew, np.uint8, source.nbytes)
        assert np.array_equal(held, weights_of(source)), f"ordinal {ordinal}"


def turned(sweep: Sweep, by: int, **changes: Any) -> Sweep:
    """The same blocks, beginning with another."""
    consumers = {phase: each[by:] + each[:by] for phase, each in sweep.consumers.items()}
    blocks = sweep.blocks[by:] + sweep.blocks[:by]
    return replace(sweep, blocks=blocks, consumers=consumers, **changes)


def weights_of(source: Any) -> np.ndarray:
    return np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)


@contextmanager
def running_alone(model: Path, **settings: Any) -> Iterator[Alone]:
    alone = Alone(model, **settings)
    thread = threading.Thread(target=alone.lane.run, daemon=True)
    thread.start()
    try:
        yield alone
    finally:
        alone.lane.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert alone.lane.error is None


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("direct", [True, False])
def test_reads_ahead_until_the_ring_is_full(model: Path, depth: int, direct: bool) -> None:
    with running_alone(model, num_slots=8, depth=depth, direct=direct) as alone:
        alone.lane.adopt(alone.sweep, {}, 0)
        assert alone.has_read(8)
        for ordinal in range(8):
            alone.assert_slot_holds(ordinal)
        # nothing is overwritten before its consumers have passed
        assert not alone.has_read(9, timeout_s=0.1)
        alone.begin(1)
        first_free = alone.frees(0)
        alone.consume(first_free - 1)
        assert not alone.has_read(9, timeout_s=0.1)
        alone.consume(first_free)
        assert alone.has_read(9)
        alone.assert_slot_holds(8)


def test_each_phase_frees_a_slot_by_its_own_consumers(model: Path) -> None:
    """What was read ahead waits for the step that uses it, whichever phase that will have."""
    with running_alone(model, num_slots=8) as alone:
        count = len(alone.sweep.blocks)
        last = alone.length
        later = tuple(((0, last),) for _ in range(count))
        sweep = replace(alone.sweep, consumers={**alone.sweep.consumers, "prefill": later})
        alone.lane.adopt(sweep, {}, 0)
        alone.begin(1, "prefill")
        alone.consume(last - 1)
        assert alone.has_read(8)
        assert not alone.has_read(9, timeout_s=0.1)
        alone.consume(last)
        assert alone.has_read(count + 8)
        assert not alone.has_read(count + 9, timeout_s=0.1)
        alone.begin(2)
        alone.consume(last + alone.frees(0))
        assert alone.has_read(count + 9)
        alone.assert_slot_holds(count + 8, sweep)


def test_what_nobody_waited_for_is_free_when_its_step_is_over(model: Path) -> None:
    """A link leaves out what a void step would have had it bring, and its counter behind."""
    with running_alone(model, num_slots=8) as alone:
        count = len(alone.sweep.blocks)
        link = tuple(((LINK_COUNTER, place + 1),) for place in range(count))
        sweep = replace(alone.sweep, consumers={**alone.sweep.consumers, "prefill": link})
        alone.lane.adopt(sweep, {}, 0)
        alone.begin(1, "prefill")
        publish(alone.address(LINK_COUNTER), 1)
        assert alone.has_read(9)
        assert not alone.has_read(10, timeout_s=0.1)
        alone.consume(alone.length)
        for step in range(2, 12):  # its record is soon another's
            alone.begin(step)
        assert alone.has_read(count + 8)


def test_goes_round_and_round(model: Path) -> None:
    with running_alone(model, num_slots=8) as alone:
        alone.lane.adopt(alone.sweep, {}, 0)
        count = len(alone.sweep.blocks)
        for step in range(3):
            alone.begin(step + 1)
            assert alone.has_read(step * count + 8)
            alone.assert_slot_holds(step * count + 7)
            alone.consume((step + 1) * alone.length)
        assert alone.has_read(3 * count + 8)


def test_the_same_sweep_goes_on_where_it_was(model: Path) -> None:
    """A new placement with the same blocks keeps what was read ahead."""
    with running_alone(model, num_slots=8) as alone:
        alone.lane.adopt(alone.sweep, {}, 0)
        count = len(alone.sweep.blocks)
        alone.begin(1)
        alone.consume(alone.length)
        assert alone.has_read(count + 8)
        reads = int(alone.lane._statistics[NUM_READS])
        again = replace(alone.sweep, base=count, first_step=2)
        alone.lane.adopt(again, {}, 1)
        assert not alone.has_read(count + 9, timeout_s=0.1)
        assert int(alone.lane._statistics[NUM_READS]) == reads
        for ordinal in range(count, count + 8):
            alone.assert_slot_holds(ordinal)
        alone.begin(2)
        alone.consume(alone.length + alone.frees(0))
        assert alone.has_read(count + 9)


def test_another_sweep_begins_at_what_was_read(model: Path) -> None:
    with running_alone(model, num_slots=8) as alone:
        alone.lane.adopt(alone.sweep, {}, 0)
        assert alone.has_read(8)
        base = alone.lane.park()
        assert base == 8
        other = turned(alone.sweep, 1, base=base)
        with pytest.raises(ValueError, match="must begin at 8; got 5"):
            alone.lane.adopt(replace(other, base=5), {}, 1)
        alone.lane.adopt(other, {}, 1)
        assert alone.has_read(16)
        for ordinal in range(8, 16):
            alone.assert_slot_holds(ordinal, other)


def test_parking_and_going_on_many_times(model: Path) -> None:
    """Whatever moment the lane is parked at, a slot never holds another block's bytes."""
    with running_alone(model, num_slots=8, depth=6) as alone:
        sweep = alone.sweep
        retired = 0  # instructions
        for turn in range(60):
            base = alone.lane.park()
            now = turned(sweep, turn % 5, base=base, first_step=turn + 1)
            alone.lane.adopt(now, {}, turn)
            alone.begin(turn + 1)
            wanted = base + 1 + turn % 8
            assert alone.has_read(wanted)
            for ordinal in range(base, wanted):
                alone.assert_slot_holds(ordinal, now)
            retired += alone.length
            alone.consume(retired)


def test_without_prefetch_a_block_waits_for_the_instruction_before(model: Path) -> None:
    with running_alone(model, num_slots=8, prefetch=False) as alone:
        alone.lane.adopt(alone.sweep, {}, 0)
        first = alone.frees(0)
        of_first = sum(alone.frees(place) == first for place in range(8))
        assert not alone.has_read(1, timeout_s=0.1)
        alone.begin(1)
        alone.consume(first - 2)
        assert not alone.has_read(1, timeout_s=0.1)
        alone.consume(first - 1)
        assert alone.has_read(of_first)
        assert not alone.has_read(of_first + 1, timeout_s=0.1)


@pytest.mark.parametrize("is_adopted_anew", [False, True])
def test_a_slot_is_not_read_into_twice_where_nobody_waited_for_the_first(
    model: Path, is_adopted_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a void step consumers retire without their blocks, so reads may lie far behind them."""
    alone = Alone(model, num_slots=4, depth=4)
    count = len(alone.sweep.blocks)
    last = alone.blueprint.sources[alone.sweep.blocks[-1]]
    is_begun, may_end = threading.Event(), threading.Event()
    read_block = ModelFile.read_block

    def read(file: ModelFile, source: Any, memory: np.ndarray, home: int) -> None:
        if source is last and not is_begun.is_set():
            is_begun.set()
            assert may_end.wait(PATIENCE_S)
        read_block(file, source, memory, home)

    monkeypatch.setattr(ModelFile, "read_block", read)
    alone.begin(1)
    alone.consume(alone.length)
    alone.lane.adopt(alone.sweep, {}, 0)
    if is_adopted_anew:  # between the void step and the next, which begins where no read has been
        next_one = replace(alone.sweep, base=count, first_step=2)
        alone.lane.adopt(next_one, {}, 1)
    thread = threading.Thread(target=alone.lane.run, daemon=True)
    thread.start()
    assert is_begun.wait(PATIENCE_S)
    for _ in range(20):
        threading.Event().wait(0.01)
        reads = int(alone.lane._statistics[NUM_READS])
        assert reads <= count - 1 + 3, "the slot of the last is not free yet"
    may_end.set()
    assert alone.has_read(count + 4)
    for ordinal in range(count, count + 4):
        alone.assert_slot_holds(ordinal)
    alone.lane.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert alone.lane.error is None


def test_loading_gives_every_block_its_bytes(model: Path) -> None:
    alone = Alone(model)
    wanted = [index for index, kept in enumerate(alone.placement.resident) if kept]
    homes = alone.homes.take(wanted)
    alone.lane.load(homes)
    assert homes
    for block, home in homes.items():
        source = alone.blueprint.sources[block]
        held = alone.arena.view(home + source.skew, np.uint8, source.nbytes)
        assert np.array_equal(held, weights_of(source))


def test_a_block_at_the_very_end_of_its_file(tmp_path: Path) -> None:
    """Its enclosing range reaches beyond the end; and one that is cut short is an error."""
    data = np.random.default_rng(3).integers(0, 255, 3 * PAGE + 100, np.uint8)
    path = tmp_path / "weights"
    data.tofile(path)
    memory = Arena.create(8 * PAGE).memory
    source = BlockSource(str(path), PAGE + 40, 2 * PAGE + 60, "f32", 60, 0, 1, 0, 0)
    for direct in (True, False):
        memory[:] = 0
        file = ModelFile(str(path), direct)
        file.read_block(source, memory, PAGE)
        assert np.array_equal(memory[PAGE + 40 :][: source.nbytes], data[PAGE + 40 :])
        for longer in (1, PAGE, 5 * PAGE):
            beyond = replace(source, nbytes=source.nbytes + longer)
            wide = Arena.create(16 * PAGE).memory
            with pytest.raises(ValueError, match=f"it ends {longer} bytes early"):
                file.read_block(beyond, wide, PAGE)


# -- inside an engine: how many bytes


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_THREADS])
def test_a_step_reads_exactly_what_is_not_resident(model: Path, cores: Any) -> None:
    blueprint = cut(model, OPTIONS, cores)
    for part in (0, 3, 6):
        ram = smallest_ram(blueprint) + weights_nbytes(blueprint) * part // 10
        # without prefetch nothing of the next step is read before it begins
        with running(model, ram=ram, cores=cores, options=OPTIONS, prefetch=False) as engine:
            placement = engine.engine.placement
            missing = sum(
                blueprint.sources[index].nbytes
                for index, kept in enumerate(placement.resident)
                if not kept and blueprint.catalog.blocks[index].group != "embed"
            )
            assert missing > 0
            engine.generate(PROMPT, max_tokens=9)
            assert engine.sweep_nbytes == engine.engine.steps_retired * missing
            engine.generate(PROMPT[3:], max_tokens=4)
            assert engine.sweep_nbytes == engine.engine.steps_retired * missing


def test_reading_ahead_wastes_nothing(model: Path) -> None:
    blueprint = cut(model, OPTIONS, TWO_THREADS)
    ram = smallest_ram(blueprint) + weights_nbytes(blueprint) // 3
    with running(model, ram=ram, options=OPTIONS) as engine:
        placement = engine.engine.placement
        engine.generate(PROMPT, max_tokens=9)
        engine.generate(PROMPT[5:], max_tokens=9)
        before = engine.engine.steps_retired * len(placement.sweep)
        address = engine.engine._address(DISK_COUNTER)
        abort = engine.engine.arena.base + engine.engine.layout.abort
        full = before + placement.num_slots
        assert wait_counter(address, full, abort, 0, int(PATIENCE_S * 1e9)) == WAIT_OK
        sizes = [blueprint.sources[index].nbytes for index in placement.sweep]
        assert engine.sweep_nbytes == sum(sizes[each % len(sizes)] for each in range(full))


def test_a_model_that_fits_reads_nothing_after_it_was_loaded(model: Path) -> None:
    blueprint = cut(model, OPTIONS, TWO_THREADS)
    with running(model, options=OPTIONS) as engine:
        statistics = engine.engine.gauges.disk_statistics()
        assert statistics[LOAD_NBYTES] == sum(source.nbytes for source in blueprint.sources)
        reads = int(statistics[NUM_READS])
        assert reads == len(blueprint.sources)
        engine.generate(PROMPT)
        assert statistics[NUM_READS] == reads
        assert statistics[SWEEP_NBYTES] == statistics[GATHER_NBYTES] == 0


def test_rows_of_embeddings_are_gathered_once_per_step(model: Path) -> None:
    options = replace(OPTIONS, prefill_chunk=64)
    blueprint = cut(model, options, TWO_THREADS)
    prompt = [5, 6, 5, 5, 6, 7, 300, 5, 9, 9, 6, 5]
    with running(model, options=options, ram=smallest_ram(blueprint)) as engine:
        assert not any(engine.engine.placement.resident)
        engine.generate(prompt, max_tokens=3)
        row_nbytes = blueprint.embedding.shape[1] * 4
        # one row per different token of the prompt, then one per step
        assert engine.engine.gauges.disk_statistics()[GATHER_NBYTES] == (5 + 2) * row_nbytes


# -- inside an engine: memory


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_LANES])
def test_the_arena_stays_within_its_budget(model: Path, cores: Any) -> None:
    blueprint = cut(model, OPTIONS, cores)
    for ram in (smallest_ram(blueprint), smallest_ram(blueprint) + 40 * PAGE, AMPLE):
        with running(model, ram=ram, cores=cores, options=OPTIONS) as engine:
            engine.generate(PROMPT, max_tokens=40)
            layout, placement = engine.engine.layout, engine.engine.placement
            assert layout.nbytes - layout.budget_start == placement.total_nbytes <= ram
            assert engine.engine.arena.resident_nbytes() <= ram + layout.budget_start


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_LANES])
def test_the_smallest_budget_is_the_sum_that_is_named(model: Path, cores: Any) -> None:
    blueprint = cut(model, OPTIONS, cores)
    least = smallest_ram(blueprint)
    with running(model, ram=least, cores=cores, options=OPTIONS) as engine:
        assert engine.engine.placement.num_slots == 4
        assert engine.generate(PROMPT)
    with (
        pytest.raises(InfeasiblePlan) as refused,
        running(model, ram=least - PAGE, cores=cores, options=OPTIONS),
    ):
        pass
    assert refused.value.needed == sum(refused.value.parts.values()) == least
    assert refused.value.deficit == PAGE
    for name in refused.value.parts:
        assert name in str(refused.value)


# -- counters that wrap


class NearTheWrap(Engine):
    """All counters begin so that they pass 2**31 or 2**32 within a few steps."""

    begin = 0

    def _write_constants(self, arena: Arena) -> None:
        """The arena is there and the lanes have it; nothing has been read or run yet."""
        super()._write_constants(arena)
        self.crew.lane_bases = [self.begin - 30 - number for number in range(len(self.lanes))]
        for number, base in enumerate(self.crew.lane_bases):
            publish(self._address(number), base)
        lane = self.crew.disk_lane._target._lane
        lane._retired = lane._next = self.begin - 100
        publish(self._address(DISK_COUNTER), lane._retired)


@pytest.mark.parametrize("begin", [2**31, 2**32])
@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_counters_may_wrap(model: Path, cores: Any, begin: int) -> None:
    blueprint = cut(model, OPTIONS, cores)
    ram = smallest_ram(blueprint) + weights_nbytes(blueprint) // 3
    expected = by_one_thread(model, OPTIONS, PROMPT, max_tokens=20)
    near = type("Near", (NearTheWrap,), {"begin": begin})
    for settings in ({}, {"prefetch": False}):
        with running(
            model, ram=ram, cores=cores, options=OPTIONS, engine_type=near, **settings
        ) as engine:
            assert engine.generate(PROMPT, max_tokens=20) == expected
            assert engine.engine.crew.lane_bases[0] > begin
            assert engine.engine.crew.disk_base > begin


# -- files that change


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(copytree(model, tmp_path / "model"))


@pytest.mark.parametrize("change", ["written", "truncated", "replaced", "removed"])
def test_a_file_that_changes_fails_the_request(model: Path, tmp_path: Path, change: str) -> None:
    path = copied(model, tmp_path)
    weights = path / "model.safetensors"
    ram = smallest_ram(cut(path, OPTIONS, TWO_THREADS))
    with running(path, ram=ram, options=OPTIONS) as engine:
        request = engine.submit(PROMPT, max_tokens=60)
        assert request.outputs.get(timeout=PATIENCE_S).token_ids
        if change == "written":
            with weights.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"changed!")
        elif change == "truncated":
            os.truncate(weights, weights.stat().st_size // 2)
        elif change == "replaced":
            (tmp_path / "other").write_bytes(weights.read_bytes())
            os.replace(tmp_path / "other", weights)
        else:
            weights.unlink()
        ended = time.monotonic() + PATIENCE_S
        while (output := request.outputs.get(timeout=PATIENCE_S)).finish_reason is None:
            assert time.monotonic() < ended
        assert output.error is not None
        assert str(weights) in output.error
        assert "must not change while it is used" in output.error
        assert "\n" not in output.error


@pytest.mark.parametrize("what", ["constants", "weights"])
def test_a_file_that_changed_before_it_is_loaded(model: Path, tmp_path: Path, what: str) -> None:
    path = copied(model, tmp_path)

    class Late(Engine):
        def _write_constants(self, arena: Arena) -> None:
            if what == "constants":
                os.truncate(path / "model.safetensors", 5000)
            super()._write_constants(arena)
            os.truncate(path / "model.safetensors", 5000)

    with (
        pytest.raises((ModelError, ValueError), match=r"model\.safetensors"),
        running(path, options=OPTIONS, engine_type=Late),
    ):
        pass


def test_rows_of_a_changed_file_are_not_gathered(model: Path, tmp_path: Path) -> None:
    """All is resident but the embeddings, and the next token's row is asked for."""
    path = copied(model, tmp_path)
    blueprint = cut(path, OPTIONS, ONE_THREAD)
    embeddings = sum(
        block.held_nbytes for block in blueprint.catalog.blocks if block.group == "embed"
    )
    slots = 4 * blueprint.catalog.slot_nbytes
    ram = smallest_ram(blueprint) - slots + weights_nbytes(blueprint) - embeddings
    with running(path, ram=ram, cores=ONE_THREAD, options=OPTIONS) as engine:
        assert not engine.engine.placement.sweep
        assert not all(engine.engine.placement.resident)
        engine.generate(PROMPT)
        os.utime(path / "model.safetensors", ns=(1, 1))
        request = engine.submit(PROMPT[4:], max_tokens=4)
        while (output := request.outputs.get(timeout=PATIENCE_S)).finish_reason is None:
            continue
        assert output.error is not None
        assert "must not change while it is used" in output.error


def test_a_disk_is_not_measured_by_reads_that_fail(tmp_path: Path) -> None:
    """A file that ends early would otherwise count as a disk that gives nothing."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 * 4096))
    whole = BlockSource(str(path), 0, 8192, "f32", 4096, 0, 2, 0, 0)
    assert measure_disk([whole], depth=2, direct=True, seconds=0.01).bytes_per_s > 0
    with pytest.raises(ValueError, match="it ends 8192 bytes early"):
        measure_disk([whole, replace(whole, offset=8192, nbytes=12288)], 2, True, 0.01)
