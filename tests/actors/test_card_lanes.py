"""Emulated cards: the same tokens wherever groups are computed, in the time of another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cards import OPTIONS, drawn, machine_with, on_cards
from inprocess import (
    AMPLE,
    ONE_THREAD,
    by_one_thread,
    cancelling,
    collect,
    cut,
    running,
    weights_nbytes,
)
from tiny import tiny_tokens

from shadowlane.actors import engine as engines
from shadowlane.actors.spec import CardSettings, Emulated
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import CALM, Conditions
from shadowlane.planner.pins import catalog_homes
from shadowlane.planner.placement import Placement, Request, Share

PROMPT = tiny_tokens(41)


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> list[int]:
    return by_one_thread(model, OPTIONS, PROMPT)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_any_placement_over_cards_gives_the_same_tokens(
    model: Path, expected: list[int], seed: int, cards: int, streams: bool
) -> None:
    with on_cards(
        model,
        drawn(seed, cards, streams=streams),
        cards,
        emulated=Emulated(machine_with(cards), seed=seed),
    ) as engine:
        assert engine.generate(PROMPT) == expected
        assert engine.generate(PROMPT) == expected
        use = engine.engine.gauges.lane_use([0] * (1 + cards))
        for card, part in enumerate(engine.engine.placement.cards):
            assert use[part.lane][0] > 0, "the card has worked"
            assert (use[f"h2d:{card}"][1] > 0) == bool(part.decode_sweep or part.prefill_sweep)


def test_memory_of_emulated_cards_is_asked_for_here(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, too: they lie in the arena, and are written there."""
    asked: list[int] = []
    monkeypatch.setattr(engines, "check_room", asked.append)
    with on_cards(model, drawn(2, 1), emulated=Emulated(machine_with(1))) as engine:
        placement, layout = engine.engine.placement, engine.engine.layout
        assert placement.cards[0].kv_nbytes > 0
        there = sum(card.total_nbytes for card in placement.cards)
        assert asked == [layout.budget_start + placement.total_nbytes + there]


def test_disturbances_begin_when_they_should_and_are_told_where_they_do_not(model: Path) -> None:
    half = Conditions(cpu=0.5)
    script = ((0, half), (3, CALM), (200, half), (300, CALM))
    with on_cards(
        model, drawn(2, 1), emulated=Emulated(machine_with(1), slowed=1.0, script=script)
    ) as engine:
        begun: list[tuple[int, Conditions]] = []
        there = engine.engine
        emulator = there.emulator
        assert emulator is not None
        began = emulator.set
        emulator.set = lambda state: (  # type: ignore[method-assign]
            begun.append((there._decode_steps, state)),
            began(state),
        )[1]
        engine.generate(PROMPT, max_tokens=6)
        assert begun == [(1, half), (3, CALM)], "0 is the first there is"
        assert there.to_come() == (
            "the disturbance from token 200 on has not begun: decode took 5 steps",
        )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_changing_what_lives_where_while_tokens_are_made_changes_none(
    model: Path, expected: list[int], seed: int, streams: bool
) -> None:
    first = drawn(10 * seed, 2, streams=streams)
    with on_cards(model, first, 2, emulated=Emulated(machine_with(2), seed=seed)) as engine:
        planner, running_now = engine.planner, engine.engine
        assert planner is not None
        catalog = running_now.blueprint.catalog
        before = running_now.lane_use_now().lanes
        for turn in range(1, 5):
            again = drawn(10 * seed + turn, 2, streams=streams)(catalog, running_now.request)
            planner.script.append((3 * turn, replace(again, placement_id=turn)))
        for _ in range(200):
            assert engine.generate(PROMPT) == expected
            if len(planner.announced) == 5:
                break
        assert [placement for placement, _ in planner.announced] == [0, 1, 2, 3, 4]
        for name, (busy, nbytes) in running_now.lane_use_now().lanes.items():
            if name.startswith(("disk", "h2d")) and busy > before[name][0]:
                assert nbytes > before[name][1], f"{name} was busy with nothing"
        for part, there in zip(
            running_now.placement.cards, running_now.crew.mover.card_homes, strict=True
        ):
            assert set(there.offsets) == set(part.resident), "what nobody needs is dropped"


def test_a_budget_need_not_be_whole_pages(model: Path, expected: list[int]) -> None:
    """Of what it leaves, blocks that may come to RAM later have whole pages."""

    def tight(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(1, 1)(catalog, request)
        return replace(placement, ram=placement.total_nbytes + 12345)

    with on_cards(model, tight, emulated=Emulated(machine_with(1), seed=1)) as engine:
        assert engine.generate(PROMPT) == expected


def test_a_ring_that_no_plan_needs_any_more_takes_no_memory(
    model: Path, expected: list[int]
) -> None:
    """Other blocks may have its part of the budget."""
    with on_cards(
        model, drawn(1, 1, streams=True), emulated=Emulated(machine_with(1), seed=1)
    ) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        nbytes = now.placement.num_slots * now.placement.slot_nbytes
        ring = now.arena.view(now.layout.ring, np.uint8, nbytes)
        again = drawn(1, 1)(now.blueprint.catalog, now.request)
        assert engine.generate(PROMPT) == expected
        assert ring.any(), "what streams has come through it"
        planner.script.append((0, replace(again, placement_id=1)))
        while len(planner.announced) < 2:
            assert engine.generate(PROMPT) == expected
        assert not now.placement.num_slots
        assert not ring.any(), "the system has its pages"


@pytest.mark.parametrize("seed", range(3))
def test_tokens_beside_prompts_that_bring_what_is_read(model: Path, seed: int) -> None:
    """Requests share steps; in some all of what streams goes to cards, in others little of it."""
    options = replace(OPTIONS, max_batch=3)
    prompts = [tiny_tokens(60 + 17 * number)[number:] for number in range(3)]
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = [engine.generate(prompt, 12) for prompt in prompts]
    with on_cards(
        model,
        drawn(seed, 2, streams=True),
        2,
        options=options,
        emulated=Emulated(machine_with(2), seed=seed),
    ) as engine:
        placement = engine.engine.placement
        assert placement.prefill_shares is not None
        come = {index for part in placement.cards for index in part.prefill_sweep}
        assert come.intersection(placement.sweep)
        for _ in range(3):
            together = [engine.submit(prompt, 12) for prompt in prompts]
            assert [collect(sequence) for sequence in together] == alone


def bringing_all(catalog: Catalog, request: Request) -> Placement:
    """Prompts are the card's, which has nothing of its own; all is read off the disk."""
    placement = drawn(2, 1, streams=True)(catalog, request)
    (part,) = placement.cards
    streamed = [group for group in catalog.groups if group.kind != "embed"]
    sweep = tuple(index for group in streamed for index in group.blocks)
    shares = {group.name: (Share("cpu:0", 0, group.units),) for group in catalog.groups}
    theirs = {group.name: (Share("gpu:0", 0, group.units),) for group in streamed if group.blocks}
    here = [catalog.blocks[index].group == "embed" for index in range(len(catalog.blocks))]
    part = replace(part, resident=(), decode_sweep=(), prefill_sweep=sweep, kv_nbytes=0)
    return replace(
        placement,
        resident=tuple(here),
        sweep=sweep,
        cards=(part,),
        shares=shares,
        prefill_shares={**shares, **theirs},
    )


def test_a_prompt_that_is_cancelled_leaves_nobody_waiting(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is through before its link, which is left behind; decode brings nothing there."""
    monkeypatch.setattr(engines, "CHECK_NS", 1)
    slow = replace(machine_with(1), disk_bytes_per_s=1e7)
    with on_cards(model, bringing_all, emulated=Emulated(slow, slowed=1.0)) as engine:
        for _ in cancelling(engine, PROMPT):
            assert engine.generate(PROMPT) == expected


@pytest.mark.parametrize(
    "pins",
    [
        (("attn|qkv", "gpu:0"), ("down", "cpu")),
        (("attn", "cpu"), ("^0.*(o|up)", "gpu:1"), ("lm_head", "gpu:0")),
        (("down", "disk"), (r"^1\.(qkv|attn)", "gpu:1")),
    ],
)
@pytest.mark.parametrize(("strategy", "layers"), [("auto", None), ("layer-split", 1)])
def test_pins_change_where_tokens_come_from_and_not_which(
    model: Path,
    expected: list[int],
    pins: tuple[tuple[str, str], ...],
    strategy: str,
    layers: int | None,
) -> None:
    with running(
        model,
        ram=AMPLE,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(1 << 30),) * 2,
        emulated=Emulated(machine_with(2), seed=1),
        pins=pins,
        strategy=strategy,
        strategy_layers=layers,
    ) as engine:
        placement = engine.engine.placement
        catalog = engine.engine.blueprint.catalog
        homes = catalog_homes(catalog, dict(pins), 2)
        assert homes
        for name, home in homes.items():
            lanes = {share.lane for share in placement.shares[name]}
            if home != "disk":
                assert lanes == {"cpu:0" if home == "cpu" else home}
            assert home != "disk" or set(catalog.group(name).blocks) <= set(placement.sweep)
        assert engine.generate(PROMPT) == expected
        assert engine.generate(PROMPT) == expected


def test_the_planner_fills_a_card_and_learns_how_fast_the_machine_is(
    model: Path, expected: list[int]
) -> None:
    memory = weights_nbytes(cut(model, OPTIONS, ONE_THREAD)) // 2
    slow = replace(machine_with(1), cpu_bytes_per_s=1e8, cpu_flops=1e10)
    with running(
        model,
        ram=AMPLE,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(memory),),
        emulated=Emulated(slow, seed=3, is_hidden=True, slowed=2.0, small_nbytes=1e4),
    ) as engine:
        running_now = engine.engine
        (card,) = running_now.placement.cards
        assert card.resident
        assert card.total_nbytes <= memory
        for _ in range(20):
            assert engine.generate(PROMPT) == expected
        assert running_now.shadow.is_open, running_now.shadow.notes
        print(running_now.shadow.decisions)
