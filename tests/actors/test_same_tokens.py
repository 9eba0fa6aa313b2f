"""Whatever the plan, the budget, the threads or other people's requests: the same tokens.

All comparisons are exact, of token ids and where logits are at hand of their bits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    collect,
    cut,
    plan,
    running,
    small_blocks,
    smallest_ram,
    weights_nbytes,
    with_resident,
    with_shares,
)
from tiny import reference_logits, tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.search import place

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)
BLOCK_NBYTES = 4096
SETUPS = [ONE_THREAD, TWO_THREADS, TWO_LANES]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    """Untied, with biases, and with about 80 blocks: room for every way of streaming them."""
    return tiny_model("llama-biases", hidden_size=96, intermediate_size=200, head_dim=24)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(BLOCK_NBYTES):
        yield


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """One thread, everything in RAM."""
    with running(model, cores=ONE_THREAD, options=OPTIONS) as engine:
        assert not engine.engine.placement.sweep
        return engine.generate(PROMPT, max_tokens=24)


def budgets(model: Path, cores: Any, options: Options = OPTIONS) -> list[int]:
    """From the smallest that is feasible to everything in RAM, and two between."""
    blueprint = cut(model, options, cores)
    least = smallest_ram(blueprint)
    weights = weights_nbytes(blueprint)
    return [least, least + weights // 3, least + weights * 3 // 4, AMPLE]


@pytest.mark.parametrize("cores", SETUPS)
def test_any_budget(model: Path, expected: list[int], cores: Any) -> None:
    streamed = []
    for ram in budgets(model, cores):
        with running(model, ram=ram, cores=cores, options=OPTIONS) as engine:
            assert engine.generate(PROMPT, max_tokens=24) == expected
            streamed.append(len(engine.engine.placement.sweep))
    assert streamed == sorted(streamed, reverse=True)
    assert len(set(streamed)) == 4
    assert streamed[-1] == 0


def test_any_budget_with_keys_in_8_bits(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3")
    options = replace(OPTIONS, kv="q8_0")
    found = []
    for cores in SETUPS:
        for ram in budgets(model, cores, options)[::2]:
            with running(model, ram=ram, cores=cores, options=options) as engine:
                found.append(engine.generate(PROMPT, max_tokens=24))
    assert len({tuple(each) for each in found}) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": False},
        {"direct": False},
        {"depth": 1},
        {"depth": 7},
        {"num_slots": 5},
        {"num_slots": 33, "depth": 2},
        {"prefetch": False, "direct": False, "depth": 1, "num_slots": 4},
    ],
)
@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_any_way_of_reading(
    model: Path, expected: list[int], cores: Any, settings: dict[str, Any]
) -> None:
    blueprint = cut(model, OPTIONS, cores)
    slots = settings.get("num_slots", 4)
    ram = smallest_ram(blueprint) + (slots + 5) * blueprint.catalog.slot_nbytes
    with running(model, ram=ram, cores=cores, options=OPTIONS, **settings) as engine:
        assert engine.engine.placement.sweep
        assert engine.generate(PROMPT, max_tokens=24) == expected


@pytest.mark.parametrize("spin_us", [0, 50, 2000])
def test_any_time_of_spinning(model: Path, expected: list[int], spin_us: int) -> None:
    with running(model, cores=TWO_LANES, options=OPTIONS) as engine:
        engine.engine.set_spin_us(None, spin_us)
        assert engine.generate(PROMPT, max_tokens=24) == expected


def test_a_file_system_in_memory(model: Path, expected: list[int]) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to put a model in")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        copied = Path(copytree(model, Path(folder) / "model"))
        ram = budgets(copied, TWO_THREADS)[1]
        with running(copied, ram=ram, options=OPTIONS) as engine:
            assert engine.generate(PROMPT, max_tokens=24) == expected
            notices = [note for note in engine.engine.notes if "page cache" in note]
            assert len(notices) <= 1  # newer kernels take O_DIRECT for such files too


# -- other people's requests


@pytest.mark.parametrize("max_batch", [1, 2, 4])
@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_other_requests_change_nothing(
    model: Path, expected: list[int], cores: Any, max_batch: int
) -> None:
    options = replace(OPTIONS, max_batch=max_batch)
    prompts = [PROMPT, PROMPT[20:], PROMPT[5:8], tiny_tokens(90)[50:], PROMPT[11:]]
    alone = []
    for prompt in prompts:  # a fresh engine each: nothing cached
        with running(model, cores=ONE_THREAD, options=OPTIONS) as engine:
            alone.append(engine.generate(prompt, max_tokens=24))
    assert alone[0] == expected
    for ram in budgets(model, cores, options)[1::2]:
        with running(model, cores=cores, options=options, ram=ram) as engine:
            requests = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
            assert [collect(request) for request in requests] == alone


@pytest.mark.parametrize("logit_rows", [1, 4, 24])
def test_logits_are_given_beside_other_requests(model: Path, logit_rows: int) -> None:
    """A chunk that wants all its logits shares a step with a row of every other sequence."""
    options = replace(OPTIONS, max_batch=3, logit_rows=logit_rows)
    with running(model, options=replace(options, max_batch=1)) as engine:
        alone = engine.logits(PROMPT)
    with running(model, options=options) as engine:
        first = [engine.generate(PROMPT[n:], max_tokens=60) for n in (3, 9)]
        others = [engine.submit(PROMPT[n:], max_tokens=60) for n in (3, 9)]
        heard = [list(other.outputs.get(timeout=60).token_ids) for other in others]
        assert np.array_equal(engine.logits(PROMPT), alone)
        assert [ids + collect(other) for ids, other in zip(heard, others, strict=True)] == first


def test_a_cancelled_request_changes_nothing(model: Path, expected: list[int]) -> None:
    options = replace(OPTIONS, max_batch=2)
    with running(model, options=options) as engine:
        other = engine.submit(PROMPT[7:], max_tokens=80)
        mine = engine.submit(PROMPT, max_tokens=24)
        assert other.outputs.get(timeout=60).token_ids
        engine.engine.cancel(other)
        assert collect(mine) == expected
        while (output := other.outputs.get(timeout=60)).finish_reason is None:
            continue
        assert output.finish_reason in ("cancelled", "length")


def test_seeded_draws_repeat_beside_others(model: Path) -> None:
    params = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
    with running(model, options=replace(OPTIONS, max_batch=3)) as engine:
        alone = engine.generate(PROMPT, max_tokens=24, **params)
    with running(model, options=replace(OPTIONS, max_batch=3)) as engine:
        others = [engine.submit(PROMPT[n:], 24, temperature=2.0, seed=n) for n in (3, 9)]
        assert engine.generate(PROMPT, max_tokens=24, **params) == alone
        for other in others:
            collect(other)


# -- what is cached


def converse(engine: InProcess) -> tuple[list[list[int]], list[int]]:
    """Three turns of a conversation: the answers, and how many tokens each found cached."""
    history: list[int] = []
    answers, cached = [], []
    for turn in (PROMPT[:30], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [5]):
        history += turn
        request = engine.submit(history, max_tokens=7, reuses_cache=True)
        answers.append(collect(request))
        cached.append(request.timing.cached_tokens)
        history += answers[-1]
    return answers, cached


def test_an_appended_turn_computes_only_what_is_new(model: Path) -> None:
    with running(model, options=OPTIONS) as engine:
        first, cached = converse(engine)
    # the last token of an answer has not been through a step when the answer ends
    assert cached == [0, 30 + 6, 30 + 7 + 11 + 6]
    for cores in SETUPS:
        for ram in budgets(model, cores):
            with running(model, options=OPTIONS, cores=cores, ram=ram) as engine:
                assert converse(engine) == (first, cached)


def test_a_prompt_said_again_gives_the_same_tokens(model: Path, expected: list[int]) -> None:
    """What others left in the cache is not used, unless a conversation goes on."""
    with running(model, options=replace(OPTIONS, max_batch=2)) as engine:
        for prompt in (PROMPT, PROMPT[:20], [*PROMPT, 5, 6], PROMPT):
            request = engine.submit(prompt, max_tokens=24)
            answer = collect(request)
            assert request.timing.cached_tokens == 0
        assert answer == expected


def test_a_cached_prompt_recomputes_its_last_token(model: Path, expected: list[int]) -> None:
    with running(model, options=OPTIONS) as engine:
        assert engine.generate(PROMPT, max_tokens=24) == expected
        answers = []
        for _ in range(2):
            request = engine.submit(PROMPT, max_tokens=24, reuses_cache=True)
            answers.append(collect(request))
            assert request.timing.cached_tokens == len(PROMPT) - 1
        assert answers[0] == answers[1]


def test_a_prompt_that_departs_from_the_cache_is_cut_back(model: Path) -> None:
    departed = [*PROMPT[:10], *tiny_tokens(80)[60:]]
    with running(model, options=replace(OPTIONS, prefill_chunk=1)) as engine:
        alone = engine.generate(departed, max_tokens=24)
    # prompts token by token: every cached key has the bits of a decode row, so all are equal
    with running(model, options=replace(OPTIONS, prefill_chunk=1)) as engine:
        engine.generate(PROMPT, max_tokens=24)
        request = engine.submit(departed, max_tokens=24, reuses_cache=True)
        assert collect(request) == alone
        assert request.timing.cached_tokens == 10


# -- re-plans while tokens are generated


def first_plan(ram: int, cores: Any) -> Callable[[Catalog, Request], Placement]:
    def first(catalog: Catalog, request: Request) -> Placement:
        placement = place(catalog, request, CostModel(None))
        weights = {lane.name: 1.0 for lane in request.lanes}
        return with_shares(catalog, placement, 0, weights)

    return first


@pytest.mark.parametrize("level", [0, 1, 3])
def test_shares_move_and_lanes_come_and_go(model: Path, expected: list[int], level: int) -> None:
    ram = budgets(model, TWO_LANES)[level]
    with running(
        model, ram=ram, cores=TWO_LANES, options=OPTIONS, first=first_plan(ram, TWO_LANES)
    ) as engine:
        assert engine.planner is not None
        catalog, placement = engine.engine.blueprint.catalog, engine.engine.placement
        splits = [
            {"cpu:0": 0.7, "cpu:1": 0.3},
            {"cpu:0": 1.0},  # one lane is dropped
            {"cpu:0": 0.05, "cpu:1": 0.95},  # and brought back
            {"cpu:1": 1.0},
            {"cpu:0": 0.5, "cpu:1": 0.5},
        ]
        engine.planner.script = [
            (2 + 4 * index, with_shares(catalog, placement, index + 1, split))
            for index, split in enumerate(splits)
        ]
        assert engine.generate(PROMPT, max_tokens=24) == expected
        # the prompt of the second request goes through under yet another split
        assert engine.generate(PROMPT[::-1], max_tokens=8)
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert engine.engine.shadow.replans == len(splits)
        steps = [step for _, step in engine.planner.announced]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_blocks_leave_and_enter_ram(model: Path, expected: list[int], cores: Any) -> None:
    blueprint = cut(model, OPTIONS, cores)
    ram = budgets(model, cores)[2]
    base = plan(blueprint, ram, cores)
    resident = [index for index, kept in enumerate(base.resident) if kept]

    def keep(kept: list[int]) -> list[bool]:
        return [index in set(kept) for index in range(len(base.resident))]

    with running(model, ram=ram, cores=cores, options=OPTIONS, first=first_plan(ram, cores)) as e:
        assert e.planner is not None
        first = e.engine.placement
        choices = [resident[::2], resident[::2] + resident[1::4], [], resident]
        e.planner.script = [
            (2 + 5 * index, with_resident(blueprint, first, index + 1, keep(kept)))
            for index, kept in enumerate(choices)
        ]
        assert e.generate(PROMPT, max_tokens=24) == expected
        assert e.generate(PROMPT[::-1], max_tokens=4)
        assert e.generate(PROMPT, max_tokens=24) == expected
        assert e.engine.shadow.replans == len(choices)
        assert set(e.engine.crew.mover.homes.offsets) == set(resident)


def test_a_placement_that_is_withdrawn_gives_its_room_back(model: Path) -> None:
    blueprint = cut(model, OPTIONS, TWO_THREADS)
    ram = budgets(model, TWO_THREADS)[2]
    resident = plan(blueprint, ram, TWO_THREADS).resident
    kept = [index for index, is_kept in enumerate(resident) if is_kept]

    def few(catalog: Catalog, request: Request) -> Placement:
        first = place(catalog, request, CostModel(None))
        return with_resident(
            blueprint, first, 0, [index in kept[::2] for index in range(len(resident))]
        )

    with running(model, ram=ram, options=OPTIONS, first=few) as engine:
        crew = engine.engine.crew
        more = with_resident(blueprint, engine.engine.placement, 1, resident)
        moves = crew.start_moving(more)
        while not crew.mover.go_on(moves):
            moves.pending[0].result(timeout=60)
        assert moves.why is None
        for answer in crew.publish(more):
            assert answer.pending.result(timeout=60) == 1
        assert set(crew.mover.homes.offsets) == set(kept)
        crew.retire(1)
        assert set(crew.mover.homes.offsets) == set(kept[::2])


@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_a_plan_that_stays_needs_no_planner(model: Path, expected: list[int], cores: Any) -> None:
    with running(model, cores=cores, options=OPTIONS, replan=False) as engine:
        assert engine.engine.shadow.planner is None
        assert engine.generate(PROMPT, max_tokens=24) == expected
        assert engine.engine.placement.placement_id == 1


def test_shares_smaller_than_blocks(tiny_model: Callable[..., Path]) -> None:
    """A lane whose share holds no block's first row has no tile in prefill, and keeps up."""
    model = tiny_model("llama2", intermediate_size=400)
    prompts = [PROMPT, PROMPT[:20]]
    with small_blocks(2 << 20, 256):
        with running(model, cores=ONE_THREAD, options=OPTIONS) as engine:
            alone = [engine.generate(prompt) for prompt in prompts]
        for part in (0.03, 0.2, 0.5, 0.9):

            def first(catalog: Catalog, request: Request, part: float = part) -> Placement:
                placement = place(catalog, request, CostModel(None))
                return with_shares(catalog, placement, 0, {"cpu:0": part, "cpu:1": 1 - part})

            with running(model, cores=TWO_LANES, options=OPTIONS, first=first) as engine:
                assert [engine.generate(prompt) for prompt in prompts] == alone


# -- shapes


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 16), (6, 3, 20), (3, 3, 10)])
def test_kv_heads_that_threads_do_not_divide(
    tiny_model: Callable[..., Path], heads: int, kv_heads: int, head_dim: int
) -> None:
    """Query heads are shared out then; rows of k and v begin inside a unit of 16 where head_dim
    is no multiple of it."""
    model = tiny_model(
        "llama2",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
    )
    chunks = [1] * len(PROMPT)
    theirs = reference_logits(model, PROMPT, chunks)
    tokens, rows = [], []
    for cores in SETUPS:
        with running(model, cores=cores, options=replace(OPTIONS, logit_rows=1)) as engine:
            rows.append(engine.logits(PROMPT))
            tokens.append(engine.generate(PROMPT, max_tokens=24))
    assert np.abs(rows[0] - theirs).max() <= 1e-4
    for each in rows[1:]:
        assert np.array_equal(each, rows[0])
    assert tokens == [tokens[0]] * len(SETUPS)


# -- a real model


def smollm2() -> Path:
    from shadowlane.models import KNOWN

    known = KNOWN["smollm2"]
    if not known.is_cached:
        pytest.skip(f"smollm2 has not been fetched to {known.path}")
    return known.path


def test_a_real_model_in_and_out_of_ram() -> None:
    path = smollm2()
    options = Options(context=256)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    answers = []
    for cores, ram in ((TWO_THREADS, 1 << 30), (TWO_LANES, 80 << 20)):
        with running(path, ram=ram, cores=cores, options=options) as engine:
            answers.append(engine.generate(prompt, max_tokens=10))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3


def test_logits_have_the_same_bits(model: Path) -> None:
    options = replace(OPTIONS, logit_rows=24)
    rows = []
    for cores in SETUPS:
        for ram in budgets(model, cores, options)[::3]:
            with running(model, ram=ram, cores=cores, options=options) as engine:
                rows.append(engine.logits(PROMPT))
    for each in rows[1:]:
        assert np.array_equal(each, rows[0])
