"""Chunks of prompts in several micro-batches, one behind the other: the same bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import inprocess
import numpy as np
import pytest
from card_mixtures import Mixture
from cards import by_layers, drawn, machine_with, on_cards
from fake_card import fake_cards
from inprocess import AMPLE, ONE_THREAD, PATIENCE_S, InProcess, collect, listen, plan, running
from mortal import MortalScripted, collect_after_recovery, end_of
from tiny import tiny_tokens

from shadowlane.actors import engine as engines
from shadowlane.actors.arena import plan_layout
from shadowlane.actors.blueprint import Options, read_blueprint
from shadowlane.actors.scratch import TURN_BUFFERS
from shadowlane.actors.spec import CardSettings, Emulated
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import Placement, Request

ROWS = 16  # of a sub-chunk
OPTIONS = Options(context=160, prefill_chunk=ROWS, logit_rows=8 * ROWS)
SUBCHUNKS = 8
# one sub-chunk and less, whole ones, a rest, and a rest that is a step of its own
LENGTHS = (12, 16, 32, 45, 51, 80)
COUNTS = (2, 4)
WHOLE_LAYERS = (1, 9)  # of a mixture: the first on one card, the others on the next
First = Callable[[Catalog, Request], Placement]
TOLERANCE = 2e-4  # of cards that are here, in another order of addition

pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def model(biased_llama: Path) -> Path:
    return biased_llama


def prompt(length: int) -> list[int]:
    return tiny_tokens(length + 7)[7:]


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> dict[int, list[int]]:
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        return {length: engine.generate(prompt(length), 6) for length in LENGTHS}


@pytest.fixture(scope="module")
def logits(model: Path, blocks_of_a_page: None) -> np.ndarray:
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        return engine.logits(prompt(80))


@contextmanager
def emulated(
    model: Path, first: First, cards: int, options: Options = OPTIONS, **how: Any
) -> Iterator[InProcess]:
    with running(
        model,
        ram=AMPLE,
        options=options,
        cores=ONE_THREAD,
        first=first,
        cards=(CardSettings(1 << 30),) * cards,
        emulated=Emulated(machine_with(cards), **how),
        subchunks=SUBCHUNKS,
    ) as engine:
        yield engine


def answers(engine: InProcess) -> dict[int, list[int]]:
    return {length: engine.generate(prompt(length), 6) for length in LENGTHS}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_any_split_of_rows_gives_the_same_bits(
    model: Path,
    expected: dict[int, list[int]],
    logits: np.ndarray,
    seed: int,
    cards: int,
    count: int,
) -> None:
    first = drawn(seed, cards, comes=False, micro_batches=count)
    with emulated(model, first, cards, seed=seed) as engine:
        assert engine.engine.placement.subchunks == SUBCHUNKS
        assert answers(engine) == expected
        assert np.array_equal(engine.logits(prompt(80)), logits)


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("ends", [(1,), (1, 2)])
def test_any_split_of_layers_gives_the_same_bits(
    model: Path,
    expected: dict[int, list[int]],
    logits: np.ndarray,
    ends: tuple[int, ...],
    count: int,
) -> None:
    with emulated(model, by_layers(ends, count), len(ends)) as engine:
        assert answers(engine) == expected
        assert np.array_equal(engine.logits(prompt(80)), logits)


def test_windows(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3-window")
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected, rows = answers(engine), engine.logits(prompt(80))
    with emulated(model, by_layers((1,), 4), 1) as engine:
        assert answers(engine) == expected
        assert np.array_equal(engine.logits(prompt(80)), rows)


def test_decode_rows_of_others_share_steps(model: Path) -> None:
    check_shared_steps(model, by_layers((1, 2), 4), drawn(1, 2, comes=False, micro_batches=3))


def test_decode_rows_of_others_share_steps_of_a_mixture(mixture: Mixture) -> None:
    check_shared_steps(mixture.path, by_layers(WHOLE_LAYERS, 4))


def check_shared_steps(model: Path, *firsts: First) -> None:
    options = replace(OPTIONS, max_batch=3)
    prompts = [prompt(20), prompt(80), prompt(50)[9:]]
    lengths = [60, 8, 8]
    with running(model, options=replace(options, max_batch=1), cores=ONE_THREAD) as engine:
        alone = [engine.generate(*each) for each in zip(prompts, lengths, strict=True)]
    for first in firsts:
        with emulated(model, beside(first), 2, options, slowed=1.0) as engine:
            shared = noted_steps(engine)
            one = engine.submit(prompts[0], lengths[0])
            while not one.outputs.qsize():  # it decodes
                pass
            others = [engine.submit(*each) for each in zip(prompts[1:], lengths[1:], strict=True)]
            assert [collect(each) for each in (one, *others)] == alone
            assert any(each.num_decode and each.num_prefill > ROWS for each in shared)


def beside(first: First) -> First:
    """With whole chunks beside the rows of others."""
    return lambda catalog, request: replace(first(catalog, request), beside_subchunks=SUBCHUNKS)


def noted_steps(engine: InProcess) -> list[Any]:
    """The plans of all steps from now on."""
    found: list[Any] = []
    batch = engine.engine.batch
    form_step = batch.form_step

    def noted(*most: int) -> Any:
        step = form_step(*most)
        found.append(step.plan)
        return step

    batch.form_step = noted  # type: ignore[method-assign]
    return found


def test_a_chunk_that_is_cancelled_is_not_computed_to_its_end(
    model: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cancelled(model, by_layers((1, 2), 4), expected, monkeypatch)


def test_a_chunk_of_a_mixture_that_is_cancelled(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(mixture.path, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = answers(engine)
    check_cancelled(mixture.path, by_layers(WHOLE_LAYERS, 4), expected, monkeypatch)


def check_cancelled(
    model: Path, first: First, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CHECK_NS", 1)
    with emulated(model, first, 2, slowed=200.0) as engine:
        void: list[int] = []
        make_void = engine.engine._records.make_void

        def noted(step: int) -> None:
            void.append(step)
            make_void(step)

        monkeypatch.setattr(engine.engine._records, "make_void", noted)
        until = time.monotonic() + PATIENCE_S
        while len(void) < 3:
            assert time.monotonic() < until, "no step was made void"
            sequence = engine.submit(prompt(80), 6)
            while not sequence.timing.started:
                pass
            engine.engine.cancel(sequence)
            assert listen(sequence)[-1].finish_reason == "cancelled"
            assert engine.generate(prompt(45), 6) == expected[45]
        assert answers(engine) == expected


@pytest.mark.parametrize("count", COUNTS)
def test_a_mixture_gives_the_same_bits(mixture: Mixture, count: int) -> None:
    """Counts too: of what was chosen, and how many experts cards computed."""
    first = by_layers(WHOLE_LAYERS, count)
    with (
        emulated(mixture.path, first, 2) as engine,
        emulated(mixture.path, by_layers(WHOLE_LAYERS, 1), 2) as whole,
    ):
        assert engine.engine.placement.micro_batches == count
        for length in LENGTHS:
            assert engine.generate(prompt(length), 6) == whole.generate(prompt(length), 6)
            assert engine.engine.gauges.expert_use() == whole.engine.gauges.expert_use()
            one, other = (each.engine.lane_use_now().lanes for each in (engine, whole))
            assert {lane: nbytes for lane, (_, nbytes) in one.items()} == {
                lane: nbytes for lane, (_, nbytes) in other.items()
            }
        assert np.array_equal(engine.logits(prompt(80)), whole.logits(prompt(80)))
        heat = engine.engine.expert_heat()
        assert heat is not None
        assert heat.visits


@pytest.mark.parametrize("count", COUNTS)
def test_a_mixture_on_cards_that_are_here(
    mixture: Mixture, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = by_layers(WHOLE_LAYERS, count)
    with (
        fake_cards(monkeypatch, 2),
        on_cards(mixture.path, first, 2, options=OPTIONS, subchunks=SUBCHUNKS) as engine,
    ):
        assert mixture.agrees(engine)


@pytest.mark.parametrize("lane", ["gpu:0", "gpu:1", "cpu:0"])
def test_death_in_between_spares_the_next(
    model: Path, expected: dict[int, list[int]], lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "ScriptedHost", MortalScripted)
    draw = random.Random(lane)
    with emulated(model, by_layers((1, 2), 4), 2, slowed=100.0) as engine:
        for _ in range(3):
            request = engine.submit(prompt(80), 6)
            while not request.timing.started:
                pass
            threading.Event().wait(draw.random() * 0.02)
            next(each for each in engine.engine.crew.all_lanes if each.name == lane).kill()
            error = end_of(request).error
            assert error is None or error == f"{lane}: its process died"
            collect_after_recovery(engine, prompt(80), expected[80])
        assert engine.engine.error is None


def test_a_re_plan_between_chunks(model: Path) -> None:
    """Of a prompt of eight chunks each is under another plan; so is what decodes after it."""
    options = replace(OPTIONS, context=256)
    long = tiny_tokens(8 * 2 * ROWS - 20)
    with running(model, options=options, cores=ONE_THREAD) as engine:
        expected = engine.generate(long, 12)
    plans: list[First] = [
        drawn(3, 2, comes=True),  # first: cards have a ring, which all plans may use
        by_layers((1, 2), 2),
        by_layers((1, 1), 1),
        drawn(5, 2, comes=False, micro_batches=2),
        by_layers((1, 2), 2),
        drawn(6, 2, comes=False, micro_batches=2),
    ]
    with running(
        model,
        ram=AMPLE,
        options=options,
        cores=ONE_THREAD,
        first=plans[0],
        cards=(CardSettings(1 << 30),) * 2,
        emulated=Emulated(machine_with(2)),
        subchunks=2,
    ) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn, each in enumerate(plans[1:], 1):
            again = each(now.blueprint.catalog, now.request)
            planner.script.append((2 * turn, replace(again, placement_id=turn)))
        for _ in range(100):
            assert engine.generate(long, 12) == expected
            if len(planner.announced) == len(plans):
                break
        assert [placement for placement, _ in planner.announced] == list(range(len(plans)))


@pytest.mark.parametrize(
    ("down", "count"),
    [("gpu:1", 4), ("disk", 1)],
)
def test_the_planner_gives_what_is_asked_for_where_it_can(
    model: Path, expected: dict[int, list[int]], down: str, count: int
) -> None:
    pins = (
        ("^0", "gpu:0"),
        (r"^[1-9].*(qkv|attn|o|up)$|lm_head", "gpu:1"),
        (r"^[1-9].*down", down),
    )
    with running(
        model,
        ram=AMPLE,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(1 << 30),) * 2,
        emulated=Emulated(machine_with(2)),
        subchunks=SUBCHUNKS,
        micro_batches=4,
        pins=pins,
    ) as engine:
        placement = engine.engine.placement
        assert placement.micro_batches == count
        note = "prompts go through in one piece, not 4 micro-batches"
        assert any(note in each for each in placement.notes) == (count == 1)
        assert answers(engine) == expected


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "cards"), [("rows", 1), ("rows", 2), ("layers", 2)])
def test_cards_that_are_here(
    model: Path,
    expected: dict[int, list[int]],
    logits: np.ndarray,
    kind: str,
    cards: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = drawn(count, cards, comes=False, micro_batches=count)
    first = by_layers((1, 2), count) if kind == "layers" else rows
    with (
        fake_cards(monkeypatch, cards),
        on_cards(model, first, cards, options=OPTIONS, subchunks=SUBCHUNKS) as engine,
    ):
        assert answers(engine) == expected
        assert np.abs(engine.logits(prompt(80)) - logits).max() <= TOLERANCE


def test_halves_of_a_layer_lie_apart_where_micro_batches_may_be_in_both(model: Path) -> None:
    for are_cards, subchunks in ((True, 4), (True, 1), (False, 4)):
        blueprint, _ = read_blueprint(model, OPTIONS, 1, are_cards=are_cards)
        catalog = blueprint.catalog.with_subchunks(subchunks)
        placement = plan(replace(blueprint, catalog=catalog), AMPLE, ONE_THREAD)
        placement = replace(placement, subchunks=subchunks)
        layout, scratch = plan_layout(blueprint, placement), blueprint.scratch[subchunks]
        regions = [
            sorted((layout.scratch[name], getattr(scratch, name)) for name in names)
            for names in TURN_BUFFERS
        ]
        assert (regions[0][0][0] == regions[1][0][0]) == (not are_cards or subchunks == 1)
        if are_cards and subchunks > 1:
            found = sorted((start, start + nbytes) for half in regions for start, nbytes in half)
            assert all(one[1] <= other[0] for one, other in pairwise(found))
