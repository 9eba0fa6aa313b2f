"""Expanded copies: prompts keep their bits, the arena is what the plan says, lanes come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    PATIENCE_S,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    cut,
    plan,
    request_for,
    running,
    small_blocks,
    smallest_ram,
    weights_nbytes,
)
from tiny import tiny_tokens

from shadowlane.actors.arena import plan_layout
from shadowlane.actors.blueprint import Blueprint, Options
from shadowlane.actors.lowering import lower
from shadowlane.actors.measure import _saved_s_per_byte, measure_groups
from shadowlane.ops import table as t
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files import open_model
from shadowlane.ops.pack_model import pack_model
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.program import build_programs
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog

OPTIONS = Options(dtype="bfloat16", context=128, prefill_chunk=24, logit_rows=41)
PROMPT = tiny_tokens(41)
CATALOG = llama_catalog()
SETUPS = [ONE_THREAD, TWO_THREADS, TWO_LANES]


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(4096):
        yield


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, with biases; 300 rows of `gate`: blocks taller than a panel where tiles are tall."""
    folder = tmp_path_factory.mktemp("expanded")
    source = tiny_model("llama-biases", hidden_size=96, intermediate_size=320)
    pack_model(open_model(source), "q4_0", folder / "packed.gguf", folder, lambda done: None)
    return folder / "packed.gguf"


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    """Logits without copies."""
    with running(model, cores=ONE_THREAD, options=OPTIONS) as engine:
        assert not engine.engine.placement.expanded
        return engine.logits(PROMPT)


def copies_nbytes(blueprint: Blueprint) -> int:
    return sum(block.expanded_nbytes for block in blueprint.catalog.blocks)


def with_all(blueprint: Blueprint) -> int:
    """The least budget with which everything is in RAM, copies included."""
    nothing_spare = plan(blueprint, AMPLE, ONE_THREAD).total_nbytes
    return nothing_spare + copies_nbytes(blueprint)


def test_what_prefill_expands_may_have_a_copy(model: Path) -> None:
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    kinds = {group.name: group.kind for group in blueprint.catalog.groups}
    for block, source in zip(blueprint.catalog.blocks, blueprint.sources, strict=True):
        needs_none = kinds[block.group] in ("embed", "lm_head")
        whole = -(-source.num_rows * source.cols * 2 // 4096) * 4096
        assert block.expanded_nbytes == (0 if needs_none else whole)


def test_weights_in_the_compute_type_get_no_copies(tiny_model: Callable[..., Path]) -> None:
    direct = tiny_model("llama2")
    assert copies_nbytes(cut(direct, replace(OPTIONS, dtype="float32"), ONE_THREAD)) == 0
    assert copies_nbytes(cut(direct, OPTIONS, ONE_THREAD)) > 0
    options = replace(OPTIONS, dtype="float32")
    with running(direct, options=options, expand="always") as engine:
        assert not engine.engine.placement.expanded
        assert any(note.startswith("nothing to expand") for note in engine.engine.notes)


@pytest.mark.parametrize("cores", SETUPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_bits_of_prompts_stay(model: Path, cores: Any, dtype: Any) -> None:
    options = replace(OPTIONS, dtype=dtype)
    found = []
    for expand in ("never", "always"):
        with running(model, cores=cores, options=options, expand=expand) as engine:
            assert bool(engine.engine.placement.expanded) == (expand == "always")
            found.append((engine.logits(PROMPT).tobytes(), engine.generate(PROMPT)))
    assert found[0] == found[1]


def test_the_bits_stay_where_a_block_has_several_panels(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("llama-biases", hidden_size=96, intermediate_size=640)
    pack_model(open_model(source), "q8_0", tmp_path / "tall.gguf", tmp_path, lambda done: None)
    found = []
    with small_blocks(1 << 20, tile_rows=1024):
        heights = [
            each.num_rows for each in cut(tmp_path / "tall.gguf", OPTIONS, ONE_THREAD).sources
        ]
        assert max(heights) > 2 * t.PANEL_ROWS
        for expand in ("never", "always"):
            with running(tmp_path / "tall.gguf", options=OPTIONS, expand=expand) as engine:
                found.append(engine.logits(PROMPT).tobytes())
    assert found[0] == found[1]


def test_copies_hold_the_weights_and_prompts_read_them(model: Path, expected: np.ndarray) -> None:
    """What a copy holds decides what a prompt gives, and nothing that decode does."""
    with running(model, options=OPTIONS, expand="always") as engine:
        inner, blueprint = engine.engine, engine.engine.blueprint
        for block, offset in inner.layout.expanded.items():
            source = blueprint.sources[block]
            raw = np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
            exact = expand_rows(source.layout, raw, source.num_rows, source.cols)
            words = inner.arena.view(offset, np.uint16, source.num_rows, source.cols)
            copy = (words.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(copy, exact, rtol=2**-8)
        assert engine.logits(PROMPT).tobytes() == expected.tobytes()
        few = engine.logits(PROMPT[:4]).tobytes()
        for block, offset in inner.layout.expanded.items():
            nbytes = blueprint.catalog.blocks[block].expanded_nbytes
            inner.arena.memory[offset : offset + nbytes] = 0
        assert engine.logits(PROMPT[:4]).tobytes() == few  # as decode: from the packed blocks
        assert engine.logits(PROMPT).tobytes() != expected.tobytes()


@pytest.mark.parametrize("cores", SETUPS)
def test_the_arena_is_exactly_the_plan(model: Path, cores: Any) -> None:
    blueprint = cut(model, OPTIONS, cores)
    placement = place(
        blueprint.catalog,
        replace(request_for(blueprint, AMPLE, cores), expand="always"),
        CostModel(None),
    )
    layout = plan_layout(blueprint, placement)
    assert layout.nbytes - layout.budget_start == placement.total_nbytes
    assert placement.expanded_nbytes == copies_nbytes(blueprint)
    regions = sorted(
        (offset, offset + blueprint.catalog.blocks[block].expanded_nbytes)
        for block, offset in layout.expanded.items()
    )
    assert len(regions) == len(placement.expanded)
    assert regions[0][0] >= layout.weights + layout.weights_nbytes
    assert regions[-1][1] <= layout.nbytes
    assert all(one[1] <= other[0] for one, other in pairwise(regions))


def test_the_budget_is_a_ceiling(model: Path, expected: np.ndarray) -> None:
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    all_of_it = with_all(blueprint)
    numbers = []
    for missing in (0, 1, copies_nbytes(blueprint) // 2, copies_nbytes(blueprint) + 1):
        ram = all_of_it - missing
        with running(model, ram=ram, cores=ONE_THREAD, options=OPTIONS, expand="always") as engine:
            placement = engine.engine.placement
            assert placement.total_nbytes <= ram
            assert not placement.expanded or not placement.sweep
            numbers.append(len(placement.expanded))
            layout = engine.engine.layout
            assert layout.nbytes - layout.budget_start == placement.total_nbytes
            assert engine.logits(PROMPT).tobytes() == expected.tobytes()
    whole = sum(1 for block in blueprint.catalog.blocks if block.expanded_nbytes)
    assert numbers[0] == whole
    assert numbers[1] == whole - 1
    assert 0 < numbers[2] < whole - 1
    assert numbers[3] == 0


def test_nothing_is_expanded_while_weights_stream(model: Path, expected: np.ndarray) -> None:
    blueprint = cut(model, OPTIONS, TWO_THREADS)
    ram = smallest_ram(blueprint) + weights_nbytes(blueprint) // 2
    with running(model, ram=ram, options=OPTIONS, expand="always") as engine:
        plain = plan(blueprint, ram, TWO_THREADS)
        assert engine.engine.placement.sweep == plain.sweep
        assert not engine.engine.placement.expanded
        assert "nothing is expanded: not all weights are in RAM" in engine.engine.notes
        assert engine.logits(PROMPT).tobytes() == expected.tobytes()


def test_tables_name_copies_that_are_left(model: Path) -> None:
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    request = replace(request_for(blueprint, AMPLE, ONE_THREAD), expand="always")
    placement = place(blueprint.catalog, request, CostModel(None))
    layout = plan_layout(blueprint, placement)
    (program,) = list(build_programs(blueprint.catalog, placement).values())[:1]
    homes = dict.fromkeys(range(len(blueprint.sources)), layout.weights)
    left = placement.expanded[::2]
    blocks = lower(blueprint, layout, placement, program, homes, 1, left).blocks
    for index, row in enumerate(blocks):
        assert row[t.EXPANDED] == (layout.expanded[index] if index in left else -1)


def copied(catalog: Catalog, request: Request) -> Placement:
    return place(catalog, replace(request, expand="always"), CostModel(None), placement_id=1)


def test_copies_a_plan_gives_up_are_released_and_not_missed(
    model: Path, expected: np.ndarray
) -> None:
    """Other plans keep what they name; what none names is gone, also for a plan that names it."""
    with running(model, options=OPTIONS, first=copied) as engine:
        inner = engine.engine
        first = inner.placement
        assert first.expanded
        nbytes = {i: inner.blueprint.catalog.blocks[i].expanded_nbytes for i in first.expanded}
        kept = first.expanded[::3]
        fewer = replace(
            first,
            placement_id=2,
            expanded=kept,
            expanded_nbytes=sum(nbytes[index] for index in kept),
        )
        again = replace(first, placement_id=3)
        for number, placement in enumerate((fewer, again), start=1):
            engine.planner.script.append((0, placement))
            while len(engine.planner.announced) <= number:
                engine.generate(PROMPT, max_tokens=4)
            engine.generate(PROMPT, max_tokens=4)
            assert engine.logits(PROMPT).tobytes() == expected.tobytes()
            for index, offset in inner.layout.expanded.items():
                copy = inner.arena.memory[offset : offset + nbytes[index]]
                assert copy.any() == (index in kept)  # pages that were released read as zero
        assert inner.crew.copies_of(again) == kept


def test_copies_survive_the_lane(model: Path, expected: np.ndarray) -> None:
    with running(model, cores=TWO_LANES, options=OPTIONS, expand="always") as engine:
        inner = engine.engine
        offset, block = next((o, b) for b, o in inner.layout.expanded.items())
        size = inner.blueprint.catalog.blocks[block].expanded_nbytes
        before = inner.arena.memory[offset : offset + size].copy()
        assert engine.logits(PROMPT).tobytes() == expected.tobytes()
        fail_a_lane(engine)
        assert engine.logits(PROMPT).tobytes() == expected.tobytes()
        assert (inner.arena.memory[offset : offset + size] == before).all()
        assert inner.crew.copies_of(inner.placement) == inner.placement.expanded
        assert any("started again" in each for each in inner.shadow.decisions)


def fail_a_lane(engine: InProcess) -> None:
    """End the loop of a lane while a request runs; who asks next is served once it is back."""
    sequence = engine.submit(PROMPT, max_tokens=80)
    sequence.outputs.get(timeout=PATIENCE_S)
    engine.engine.crew.cpus[1].kill()
    while sequence.outputs.get(timeout=PATIENCE_S).error is None:
        pass


def test_what_copies_save_is_measured(model: Path, tiny_model: Callable[..., Path]) -> None:
    """Per byte of copy, or not at all where nothing has to be expanded, or there is no room."""
    found = measure_groups((0,), model, OPTIONS, AMPLE)["copies_save_s_per_byte"]
    assert found is not None
    assert 0 <= found < 1e-6
    direct = tiny_model("llama2"), replace(OPTIONS, dtype="float32")
    room = with_all(cut(model, OPTIONS, ONE_THREAD)) - copies_nbytes(
        cut(model, OPTIONS, ONE_THREAD)
    )
    for arguments, brief in (((*direct, AMPLE), False), ((model, OPTIONS, AMPLE), True)):
        measured = measure_groups((0,), *arguments, brief=brief)
        assert measured["copies_save_s_per_byte"] is None
    assert measure_groups((0,), model, OPTIONS, room)["copies_save_s_per_byte"] is None


@pytest.mark.parametrize(
    ("copied", "saved"),
    [
        pytest.param([0.9, 0.8, 9.0], 0.1 * 0.5, id="the part of the pair in the middle"),
        pytest.param([1.1, 1.2, 0.1], 0.0, id="never below nothing"),
    ],
)
def test_a_part_of_the_processor_is_a_part_of_the_clock(copied: list[float], saved: float) -> None:
    placement = replace(place(CATALOG, Request(ram=1 << 40), CostModel(None)), expanded_nbytes=8)
    found = _saved_s_per_byte(placement, [1.0, 1.0, 1.0], copied, [0.4, 0.5, 5.0])
    assert found == pytest.approx(saved / 8)
