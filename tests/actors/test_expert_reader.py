"""The reader of missing experts alone: its only compute lane is the test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inprocess import AMPLE, ONE_THREAD, PATIENCE_S, cut, plan

from shadowlane.actors.arena import READY_COUNTER, Arena, plan_layout
from shadowlane.actors.blueprint import Options, read_blueprint
from shadowlane.actors.disk_lane import EXPERT_NBYTES, NUM_READS, NUM_SPANS, DiskLane
from shadowlane.actors.expert_reader import ExpertReader
from shadowlane.actors.lowering import make_geometry
from shadowlane.actors.predecessor import start_of, take_over, wait_until_gone
from shadowlane.actors.scratch import route_layout
from shadowlane.ops import expert_board as boards
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, counter_value, wait_counter
from shadowlane.ops.expert_walk import finish_expert
from shadowlane.ops.routes import SLOT_MASK, call_disk_lane, route

OPTIONS = Options(context=96, prefill_chunk=16, dtype="float32")
EXPERTS, TOP_K, LAYERS = 16, 2, 3


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3-moe-norm", num_experts=EXPERTS, num_experts_per_tok=TOP_K)


class Alone:
    """A disk lane with so many slots for experts, full; its threads run where a test starts them.

    Layers are those with experts. Routes are of one row of TOP_K experts, or of several.
    """

    def __init__(self, model: Path, slots: int) -> None:
        _, files = read_blueprint(model, OPTIONS, 1)
        self.blueprint = cut(model, OPTIONS, ONE_THREAD)
        assert self.blueprint.experts is not None
        slot_nbytes = self.blueprint.experts.catalog.slot_nbytes
        placement = replace(
            plan(self.blueprint, AMPLE, ONE_THREAD),
            expert_slots=slots,
            experts_nbytes=slots * slot_nbytes,
        )
        self.slots, self.slot_nbytes = slots, slot_nbytes
        self.layout = plan_layout(self.blueprint, placement)
        self.arena = Arena.create(self.layout.nbytes)
        self.base = self.arena.base
        self.lane = DiskLane(self.blueprint, self.layout, self.arena.handle, files.stamps)
        self.lane.keep_experts(None, None)
        self.lane.load_experts()
        assert self.lane._experts is not None
        self.reader: ExpertReader = self.lane._experts
        self.geometry = make_geometry(self.blueprint, self.layout, 0, 1)
        self.numbers = self.arena.view(self.layout.route_numbers, np.int64, t.ROUTE_WORDS)
        self.numbers[t.ROUTE_FORCED] = 1
        self.words = self.arena.view(
            self.layout.scratch["expert_words"], np.int64, LAYERS * EXPERTS
        )
        self.offsets = route_layout(self.blueprint.config, self.layout.step_rows)
        self.state = self.reader._board.state

    def route_at(self, layer: int) -> int:
        return self.layout.scratch["routes"] + layer * self.offsets["nbytes"]

    def field(self, layer: int, name: str, count: int) -> np.ndarray:
        return self.arena.view(self.route_at(layer) + self.offsets[name], np.int32, count)

    def header(self, layer: int) -> np.ndarray:
        return self.arena.view(self.route_at(layer), np.int64, t.ROUTE_HEADER_FIELDS)

    def choose(self, layer: int, experts: Sequence[int]) -> None:
        """The next route, as the compute lane makes it."""
        rows = len(experts) // TOP_K
        self.field(layer, "ids", len(experts))[:] = experts
        row = np.zeros(t.INSTRUCTION_COLUMNS, np.int64)
        row[t.SPARSE_LAYER], row[t.OUTPUT] = layer, self.layout.scratch["router"]
        row[t.CARD_EXPERTS] = -1
        no_items = np.zeros((0, t.ITEM_COLUMNS), np.int64)
        if route(self.base, self.geometry, row, no_items, 0, rows, 1):
            call_disk_lane(self.base, self.geometry)

    def is_ready(self, layer: int, count: int | None = None, timeout_s: float = PATIENCE_S) -> bool:
        header = self.header(layer)
        wanted = int(header[t.READY_BASE]) + (count or int(header[t.NUM_CHOSEN]))
        counter = self.base + self.layout.counter(READY_COUNTER)
        abort = self.base + self.layout.abort
        return wait_counter(counter, wanted, abort, 0, int(timeout_s * 1e9)) == WAIT_OK

    def order(self, layer: int) -> list[int]:
        return self.field(layer, "order", int(self.header(layer)[t.NUM_CHOSEN])).tolist()

    def finish(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            at = self.base + self.route_at(layer)
            finish_expert(self.base, self.geometry, at, layer, expert)

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        self.numbers[t.LOOKS_AHEAD] = 1
        self.field(layer, "guesses", TOP_K)[:] = experts
        self.header(layer)[t.GUESS_FOR] = self.numbers[0] + 1
        self.numbers[t.NEWEST_GUESS] = layer + 1
        call_disk_lane(self.base, self.geometry)

    def resident(self) -> set[int]:
        return set(np.flatnonzero(self.words & SLOT_MASK).tolist())

    def let_go(self, *keys: int) -> None:
        """These are the victims, in this order."""
        lists = np.array([keys], np.int64).reshape(1, -1)
        layers = np.zeros(LAYERS, np.int64)
        boards.set_victims(self.reader._board, lists, self.words.copy(), layers)

    def assert_holds(self, key: int) -> None:
        slot = int(self.words[key] & SLOT_MASK) - 1
        assert 0 <= slot < self.slots
        assert self.blueprint.experts is not None
        for extent in self.blueprint.experts.sources[key].extents:
            home = self.layout.expert_slots + slot * self.slot_nbytes + extent.home + extent.skew
            held = self.arena.view(home, np.uint8, extent.nbytes)
            wanted = np.fromfile(extent.path, np.uint8, extent.nbytes, offset=extent.offset)
            assert np.array_equal(held, wanted), f"expert {key}"


def until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread, which gives no signal for it."""
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if is_so():
            return
        done.wait(0.002)
    raise AssertionError("it has not come about")


@contextmanager
def threads_of(alone: Alone, *loops: Callable[[], None]) -> Iterator[None]:
    threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        alone.reader.stop()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("slots", [TOP_K + 2, 12, 24])
def test_what_a_route_misses_is_read(model: Path, slots: int) -> None:
    alone = Alone(model, slots)
    assert len(alone.resident()) == slots
    thread = threading.Thread(target=alone.lane.run, daemon=True)
    thread.start()
    random = np.random.default_rng(slots)
    before = alone.lane._statistics.copy()
    missed = 0
    for number in range(300):
        layer = number % LAYERS
        chosen = random.choice(EXPERTS, TOP_K, replace=False).tolist()
        alone.choose(layer, chosen)
        missed += TOP_K - int(alone.header(layer)[t.NUM_RESIDENT])
        assert alone.is_ready(layer)
        assert sorted(alone.order(layer)) == sorted(chosen)
        for expert in chosen:
            alone.assert_holds(layer * EXPERTS + expert)
        held = (alone.words & SLOT_MASK)[alone.words & SLOT_MASK != 0].tolist()
        assert len(held) == len(set(held)) <= slots
        alone.finish(layer, chosen)
    alone.lane.stop()
    thread.join(PATIENCE_S)
    assert alone.lane.error is None
    read = alone.lane._statistics - before
    assert alone.blueprint.experts is not None
    sources = alone.blueprint.experts.sources
    assert missed > 0
    assert read[NUM_READS] == read[NUM_SPANS] == missed * len(sources[0].extents)
    assert read[EXPERT_NBYTES] == missed * sources[0].nbytes
    assert alone.reader.heat().counts.sum() > 0


def test_experts_come_in_waves_where_slots_are_fewer_than_a_route_chooses(model: Path) -> None:
    """As soon as one is computed the next is read; nothing is evicted before."""
    alone = Alone(model, 4)
    alone.reader.start()
    with threads_of(alone, alone.reader.serve, alone.reader.work):
        chosen = list(range(8))
        alone.choose(1, chosen)
        for number in range(4, 8):
            assert alone.is_ready(1, number)
            assert not alone.is_ready(1, number + 1, timeout_s=0.05)
            expert = alone.order(1)[number - 4]
            alone.assert_holds(EXPERTS + expert)
            alone.finish(1, [expert])
        assert alone.is_ready(1)
        assert sorted(alone.order(1)) == chosen


def test_victims_that_were_used_since_stay(model: Path) -> None:
    alone = Alone(model, 12)
    alone.reader.start()
    first, second, third, *_ = sorted(alone.resident())[:3]
    missing = [key for key in range(EXPERTS) if key not in alone.resident()]
    with threads_of(alone, alone.reader.serve, alone.reader.work):
        alone.choose(1, [0, 1])
        assert alone.is_ready(1)
        alone.finish(1, [0, 1])
        alone.let_go(first, second, third)
        alone.choose(0, [first, third])
        assert alone.is_ready(0)
        alone.finish(0, [first, third])
        alone.choose(0, missing[:2])
        assert alone.is_ready(0)
        assert second not in alone.resident()
        assert {first, third, *missing[:2]} <= alone.resident()
        # the list gave one; the other is one of those whose use was longest ago
        assert alone.state[boards.NUM_OLDEST] == 1


def test_what_was_used_longest_ago_goes_where_no_victim_is_known(model: Path) -> None:
    alone = Alone(model, 4)
    alone.reader.start()
    with threads_of(alone, alone.reader.serve, alone.reader.work):
        for chosen in ([0, 1], [2, 3], [0, 1]):
            alone.let_go()
            alone.choose(0, chosen)
            assert alone.is_ready(0)
            alone.finish(0, chosen)
        alone.let_go()
        alone.choose(0, [4, 5])
        assert alone.is_ready(0)
        assert alone.resident() == {0, 1, 4, 5}


def test_a_guess_evicts_nothing_that_it_names(model: Path) -> None:
    alone = Alone(model, 4)
    alone.reader.start()
    with threads_of(alone, alone.reader.serve, alone.reader.work):
        for chosen in ([0, 1], [2, 3]):
            alone.choose(1, chosen)
            assert alone.is_ready(1)
            alone.finish(1, chosen)
        alone.choose(0, [0, 1])  # now two of the four slots have experts of layer 1
        assert alone.is_ready(0)
        alone.finish(0, [0, 1])
        kept, other = sorted(alone.resident() - {0, 1})
        missing = next(each for each in range(EXPERTS) if EXPERTS + each not in alone.resident())
        alone.let_go(kept, other)
        alone.guess(1, [missing, kept % EXPERTS])
        until(lambda: EXPERTS + missing in alone.resident())
        assert kept in alone.resident()
        assert other not in alone.resident()
        # and its choice finds both
        alone.choose(1, [missing, kept % EXPERTS])
        assert alone.header(1)[t.NUM_RESIDENT] == 2


def test_a_wrong_guess_that_has_not_begun_is_withdrawn(model: Path) -> None:
    alone = Alone(model, 8)
    alone.reader.start()
    missing = [each for each in range(EXPERTS) if EXPERTS + each not in alone.resident()][:3]
    counts = np.zeros(boards.PASSED + 1 - boards.RIGHT, np.int64)
    with threads_of(alone, alone.reader.serve):  # nobody reads yet
        alone.choose(0, [0, 1])
        alone.let_go(*sorted(alone.resident() - {0, 1}))
        alone.guess(1, missing[:2])
        flights = alone.reader._board.flights
        until(lambda: np.count_nonzero(flights) == 2)
        alone.choose(1, missing[1:])
        until(lambda: flights[EXPERTS + missing[0]] == 0)
        with threads_of(alone, alone.reader.work):
            assert alone.is_ready(1)
            for expert in missing[1:]:
                alone.assert_holds(EXPERTS + expert)
    assert EXPERTS + missing[0] not in alone.resident()
    boards.take_counts(alone.reader._board, counts)
    right, wrong, named, chosen, withdrawn, early_hits, _ = counts.tolist()
    assert (right, wrong, named, chosen, withdrawn) == (0, 0, 1, TOP_K, 1)
    assert early_hits == 0


def test_a_read_that_fails_names_its_file(model: Path) -> None:
    alone = Alone(model, 4)
    alone.reader._board.extents[:, boards.DESCRIPTOR] = -1
    thread = threading.Thread(target=alone.lane.run, daemon=True)
    thread.start()
    alone.choose(1, [14, 15])
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert alone.lane.error is not None
    assert "Bad file descriptor" in alone.lane.error
    assert "model.safetensors" in alone.lane.error


def test_the_lane_before_must_be_gone() -> None:
    """Its last read may still be on its way into a slot that the next lane would give away."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as before:
        assert before.stdout is not None
        before.stdout.readline()
        born = start_of(before.pid)
        assert born is not None
        owner = np.array([before.pid, born], np.int64)
        with pytest.raises(TimeoutError, match=f"process {before.pid} must end"):
            take_over(owner, patience_s=0.05)
        assert wait_until_gone(before.pid, born - 1, 0)  # the number is another's now
        before.send_signal(signal.SIGKILL)
        take_over(owner, PATIENCE_S)
        assert owner.tolist() != [before.pid, born]


def test_waiting_for_no_request_ends_with_the_lane(model: Path) -> None:
    alone = Alone(model, 4)
    before = counter_value(alone.base + alone.layout.counter(READY_COUNTER))
    alone.reader.start()
    with threads_of(alone, alone.reader.serve, alone.reader.work, alone.reader.follow):
        pass
    assert counter_value(alone.base + alone.layout.counter(READY_COUNTER)) == before
