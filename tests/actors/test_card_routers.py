"""Routers on CUDA cards over a recorded driver: whoever chooses, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import inprocess
import numpy as np
import pytest
from card_layouts import interpret_few_programs, needs_interpreter
from card_mixtures import PROMPT, Mixture, choices_asked_for, few_slots, lane_of
from cards import OPTIONS, all_on_a_card, drawn, machine_with, on_cards
from fake_card import FakeRuntime, fake_cards
from inprocess import (
    AMPLE,
    FIRST,
    ONE_THREAD,
    SECOND,
    by_one_thread,
    cancelling,
    collect,
    cut,
    running,
)
from mortal import MortalScripted, collect_after_recovery, end_of, hear
from test_experts_run import MANY
from tiny import tiny_tokens

from shadowlane.actors import engine as engines
from shadowlane.actors.spec import CardSettings
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import LaneSpec, Placement, Request, Share
from shadowlane.planner.routing_files import read_trace

THREADS = ((FIRST, SECOND, FIRST),)

pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


def choosers(placement: Placement) -> list[str]:
    """By layer with experts, the lane that computes its router."""
    return [
        share.lane
        for name, shares in placement.shares.items()
        if name.endswith(".router")
        for share in shares
    ]


@pytest.mark.parametrize("cards", [1, 2])
def test_any_router_on_a_card_gives_the_same_tokens(
    mixture: Mixture, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside experts that are there, that come, and that are read; whoever adds them up."""
    seen: set[str] = set()
    few = few_slots(mixture.path)
    for seed, slots, brings in ((0, None, False), (1, few, False), (2, None, True)):
        first = drawn(seed, cards, slots, brings=brings, routes=True)
        with fake_cards(monkeypatch, cards), on_cards(mixture.path, first, cards) as engine:
            seen |= set(choosers(engine.engine.placement))
            assert mixture.agrees(engine)
    assert any(each.startswith("gpu:") for each in seen)


def routed_by(
    catalog: Catalog, placement: Placement, lanes: Sequence[str], **changes: Any
) -> Placement:
    """The same, with the router of each layer where it is named; "": where it was."""
    shares = [dict(placement.shares), dict(placement.shares_of("prefill"))]
    here = {part.lane: set(part.resident) for part in placement.cards}
    resident = list(placement.resident)
    for experts, lane in zip(catalog.sparse_groups, lanes, strict=True):
        group = catalog.group(experts.name.replace("experts", "router"))
        if not lane:
            continue
        for blocks in here.values():
            blocks -= set(group.blocks)
        if lane in here:
            here[lane] |= set(group.blocks)
        for block in group.blocks:
            resident[block] = lane not in here
        for phase in shares:
            phase[group.name] = (Share(lane, 0, group.units),)
    parts = [replace(part, resident=tuple(sorted(here[part.lane]))) for part in placement.cards]
    return replace(
        placement,
        shares=shares[0],
        prefill_shares=shares[1],
        resident=tuple(resident),
        cards=tuple(parts),
        **changes,
    )


def num_layers(model: Path) -> int:
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    return experts.num_layers


@pytest.mark.parametrize("lanes", ["0", "1", "all", "two cards"])
def test_routers_of_no_layer_of_one_and_of_all(
    tiny_model: Callable[..., Path], lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is where it was; some experts are on cards, and some have to be read."""
    model = tiny_model(MANY)
    count = num_layers(model)
    of_layers = {
        "0": ["cpu:0"] * count,
        "1": ["gpu:0", *["cpu:0"] * (count - 1)],
        "all": ["gpu:0"] * count,
        "two cards": [f"gpu:{layer % 2}" for layer in range(count)],
    }[lanes]
    tokens = by_one_thread(model, OPTIONS, PROMPT, 12)

    def first(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(3, 2, few_slots(model), sums=True)(catalog, request)
        return routed_by(catalog, placement, of_layers)

    with fake_cards(monkeypatch, 2), on_cards(model, first, 2) as engine:
        assert choosers(engine.engine.placement) == of_layers
        assert engine.generate(PROMPT, 12) == tokens
        use = engine.engine.gauges.expert_use()
        assert use.on_cards > 0
        assert use.chosen > use.resident
        assert use.read_nbytes > 0


def test_a_model_that_is_all_on_a_card_crosses_nothing_but_its_ends(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts what was chosen there, and the reader of experts learns of it."""
    model, prompt = tiny_model("qwen2-moe"), PROMPT[:20]
    tokens = by_one_thread(model, OPTIONS, prompt, 12)
    with fake_cards(monkeypatch) as (driver,), on_cards(model, all_on_a_card) as engine:
        now = engine.engine
        experts = now.blueprint.catalog.experts
        assert experts is not None
        assert engine.generate(prompt, 1) == tokens[:1]
        before = len(driver.calls)
        assert engine.generate(prompt, 12) == tokens
        calls = [name for name, _ in driver.calls[before:]]
        # each step waits for the embedding and tells of its end; and the host, without Triton, asks
        # for each layer's choice
        assert calls.count("wait_value") == 12
        assert calls.count("write_value") == 12 * (1 + experts.num_layers)
        use = now.gauges.expert_use()
        assert use.chosen == 0
        assert use.on_cards == 11 * experts.num_layers * experts.top_k
        heat = now.expert_heat()
        assert heat is not None
        assert heat.visits > 0


@needs_interpreter
def test_a_step_with_routers_is_one_piece(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured from the first router to the last sum; the host learns no choice."""
    model = tiny_model("mixtral", num_hidden_layers=2)
    prompt = PROMPT[:20]
    tokens = by_one_thread(model, OPTIONS, prompt, 5)
    monkeypatch.setattr(FakeRuntime, "uses_triton", True)
    interpret_few_programs(monkeypatch)
    asked = choices_asked_for(monkeypatch)
    with fake_cards(monkeypatch) as (driver,), on_cards(model, all_on_a_card) as engine:
        before = len(driver.calls)
        assert engine.generate(prompt, 5) == tokens
        calls = [name for name, _ in driver.calls[before:]]
        assert calls.count("write_value") == 5 + 2, "of the prompt each layer's choice"
        graphs, now = lane_of(engine)._graphs, engine.engine
        assert graphs is not None
        (kind,) = graphs._graphs
        (graph,) = graphs.of(kind).values()
        program = lane_of(engine)._programs[now.placement.placement_id, "decode"]
        assert graph.end == len(program.instructions)
        assert set(asked) == {len(prompt)}, "of the prompt alone"


def test_the_planner_gives_routers_to_a_card_that_is_here(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 12)
    with (
        fake_cards(monkeypatch, base=inprocess.ThreadHost),
        running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            cards=(CardSettings(1 << 30),),
            machine=replace(machine_with(1), cpu_bytes_per_s=1e8, cpu_flops=1e10),
        ) as engine,
    ):
        assert set(choosers(engine.engine.placement)) == {"gpu:0"}
        assert engine.generate(PROMPT, 12) == tokens


def test_requests_that_share_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(MANY)
    options = replace(OPTIONS, max_batch=3)
    prompts = [tiny_tokens(20 + 17 * number)[number:] for number in range(3)]
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = [engine.generate(prompt, 10) for prompt in prompts]
    for first in (drawn(5, 2, few_slots(model), routes=True), all_on_a_card):
        cards = 1 if first is all_on_a_card else 2
        with (
            fake_cards(monkeypatch, cards),
            on_cards(model, first, cards, options=options) as engine,
        ):
            together = [engine.submit(prompt, 10) for prompt in prompts]
            assert [collect(sequence) for sequence in together] == alone


def test_several_threads_take_a_route_that_a_card_has_left(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them makes a route of it, the others wait for that. Without memory operations, too."""
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 20)

    def first(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(4, 1, few_slots(model), sums=True)(catalog, request)
        lanes = (
            LaneSpec("cpu:0", len(THREADS[0])),
            *(each for each in placement.lanes if each.name != "cpu:0"),
        )
        placement = replace(placement, lanes=lanes)
        return routed_by(catalog, placement, ["gpu:0"] * len(catalog.sparse_groups))

    for has_memops in (True, False):
        with (
            fake_cards(monkeypatch, has_memops=has_memops),
            on_cards(model, first, cores=THREADS) as engine,
        ):
            for _ in range(3):
                assert engine.generate(PROMPT, 20) == tokens


def test_routing_that_is_recorded_and_replayed(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2-moe")
    trace, again = tmp_path / "routes.jsonl", tmp_path / "again.jsonl"
    with running(model, options=OPTIONS, cores=ONE_THREAD, trace_routing=trace) as engine:
        engine.generate(PROMPT, 20)
    with running(model, options=OPTIONS, cores=ONE_THREAD, replay_routing=trace) as engine:
        tokens = engine.generate(PROMPT, 20)
    for first in (drawn(3, 1, routes=True), all_on_a_card):
        settings = {"replay_routing": trace, "trace_routing": again}
        with fake_cards(monkeypatch), on_cards(model, first, **settings) as engine:
            assert engine.generate(PROMPT, 20) == tokens
        assert np.array_equal(read_trace(again).choices, read_trace(trace).choices)
        again.unlink()


@pytest.mark.parametrize("slots", [None, 9])
def test_routers_move_while_tokens_are_made(
    tiny_model: Callable[..., Path], slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the processor to cards, from card to card, and back, with the plan that is in force."""
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 20)
    start = drawn(1, 2, slots, sums=True)
    count = num_layers(model)
    turns = [
        ["cpu:0"] * count,
        ["gpu:0"] * count,
        [f"gpu:{layer % 2}" for layer in range(count)],
        ["gpu:1", *["cpu:0"] * (count - 1)],
    ]

    def first(catalog: Catalog, request: Request) -> Placement:
        return routed_by(catalog, start(catalog, request), turns[0])

    with fake_cards(monkeypatch, 2), on_cards(model, first, 2) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn, lanes in enumerate(turns[1:], 1):
            again = routed_by(now.blueprint.catalog, now.placement, lanes, placement_id=turn)
            planner.script.append((8 * turn, again))
        for _ in range(50):
            assert engine.generate(PROMPT, 20) == tokens
            if len(planner.announced) == len(turns):
                break
        assert [placement for placement, _ in planner.announced] == list(range(len(turns)))
        assert choosers(now.placement) == turns[-1]
        assert engine.generate(PROMPT, 20) == tokens


@pytest.mark.parametrize("seed", range(2))
def test_deaths_while_routers_move(
    tiny_model: Callable[..., Path], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 24)
    draw, start = random.Random(seed), drawn(1, 2, 9, sums=True)
    count = num_layers(model)

    def first(catalog: Catalog, request: Request) -> Placement:
        return routed_by(catalog, start(catalog, request), ["gpu:0"] * count)

    with (
        fake_cards(monkeypatch, 2, base=MortalScripted),
        on_cards(model, first, 2) as engine,
    ):
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn in range(1, 6):
            lanes = [draw.choice(("cpu:0", "gpu:0", "gpu:1")) for _ in range(count)]
            again = routed_by(now.blueprint.catalog, now.placement, lanes, placement_id=turn)
            planner.script.append((12 * turn, again))
        for _ in range(6):
            request = engine.submit(PROMPT, max_tokens=30)
            hear(request, draw.randrange(12))
            name = draw.choice(["gpu:0", "gpu:1", "h2d:0", "disk:0", "cpu:0"])
            next(each for each in now.crew.all_lanes if each.name == name).kill()
            error = end_of(request).error
            assert error is None or error.endswith("its process died")
            collect_after_recovery(engine, PROMPT, tokens)
        assert now.error is None
        assert len(planner.announced) > 1, "plans have changed between the deaths"
        assert engine.generate(PROMPT, 24) == tokens


def test_a_prompt_that_is_cancelled_leaves_no_route_half_made(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is void while the card has chosen for some layers and for others not."""
    model = tiny_model(MANY, moe_intermediate_size=512)
    prompt = tiny_tokens(120)
    tokens = by_one_thread(model, OPTIONS, prompt, 8)
    monkeypatch.setattr(engines, "CHECK_NS", 1)

    def first(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(1, 1, few_slots(model), sums=True)(catalog, request)
        return routed_by(catalog, placement, ["gpu:0"] * len(catalog.sparse_groups))

    with fake_cards(monkeypatch), on_cards(model, first) as engine:
        for _ in cancelling(engine, prompt, 8):
            assert engine.generate(prompt, 8) == tokens
