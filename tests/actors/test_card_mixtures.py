"""Experts and embeddings on CUDA cards over a recorded driver, and steps in captured pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import inprocess
import numpy as np
import pytest
import torch
from card_layouts import interpret_few_programs, needs_interpreter
from card_mixtures import PROMPT, TOLERANCE, Mixture, choices_asked_for, few_slots, lane_of
from cards import OPTIONS, cut_points, drawn, machine_with, on_cards
from fake_card import FakeRuntime, fake_cards
from inprocess import AMPLE, ONE_THREAD, InProcess, by_one_thread, collect, cut, running
from test_experts_run import MANY, read_nbytes
from tiny import tiny_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shadowlane.actors import card_lane
from shadowlane.actors import disk_lane as disk
from shadowlane.actors.blueprint import Options
from shadowlane.actors.card_compute import CardComputer
from shadowlane.actors.card_graphs import cut_segments
from shadowlane.actors.card_program import CardInstruction, CounterWait
from shadowlane.actors.cuda.driver import Direction
from shadowlane.actors.exchange import Crossings
from shadowlane.actors.spec import CardSettings
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import Placement, Request, Share
from shadowlane.planner.stages import with_experts

pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


def test_any_experts_on_cards_give_the_same_tokens(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = few_slots(mixture.path)
    for seed, cards, slots in ((0, 1, None), (3, 2, few), (2, 1, few)):
        first = drawn(seed, cards, slots, embeds=seed == 3)
        with fake_cards(monkeypatch, cards), on_cards(mixture.path, first, cards) as engine:
            placement = engine.engine.placement
            assert mixture.agrees(engine)
            use = engine.engine.gauges.expert_use()
            assert bool(use.on_cards) == bool(placement.experts_on_cards)


@pytest.mark.parametrize("cards", [1, 2])
def test_experts_that_are_brought_for_prompts_give_the_same_tokens(
    mixture: Mixture, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of their slots in RAM, through rings that are smaller than a layer's experts."""
    brought: set[int] = set()
    for seed, slots in ((0, None), (4, few_slots(mixture.path) + 2)):
        first = drawn(seed, cards, slots, brings=True)
        with fake_cards(monkeypatch, cards), on_cards(mixture.path, first, cards) as engine:
            assert mixture.agrees(engine)
            brought |= set(computed_out_of_slots(engine))
    assert brought


@pytest.mark.parametrize("cards", [1, 2])
def test_experts_that_are_read_to_be_brought_give_the_same_tokens(
    mixture: Mixture, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of a ring in RAM, which is pinned, or passes through staging."""
    num_read = 0
    for seed, limits in ((0, {}), (4, {"pin_limit": 48 << 20})):
        first = drawn(seed, cards, few_slots(mixture.path) + 2, reads=True)
        with (
            fake_cards(monkeypatch, cards, **limits),
            on_cards(mixture.path, first, cards) as engine,
        ):
            assert (lane_of(engine).access.staging is None) == (not limits)
            num_read += len(engine.engine.placement.prefill_sweep)
            assert mixture.agrees(engine)
            swept = int(engine.engine.gauges.disk_statistics()[disk.SWEEP_NBYTES])
            assert bool(swept) == bool(engine.engine.placement.prefill_sweep)
    assert num_read


@pytest.mark.parametrize("cards", [1, 2])
def test_any_card_may_add_up_what_experts_give(
    mixture: Mixture, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has computed stays there; what processors and other cards have comes over."""
    num_sums = 0
    for seed, slots in ((1, None), (4, few_slots(mixture.path) + 2)):
        first = drawn(seed, cards, slots, brings=seed == 1, sums=True)
        with fake_cards(monkeypatch, cards), on_cards(mixture.path, first, cards) as engine:
            assert mixture.agrees(engine)
            for card in range(cards):
                for program in lane_of(engine, card)._programs.values():
                    num_sums += sum(each.sum is not None for each in program.instructions)
    assert num_sums


def test_a_card_that_computes_experts_alone(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the first thing in its program."""
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 8)

    def first(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(1, 1, brings=True, sums=True)(catalog, request)
        (part,) = placement.cards
        experts = tuple(number for number in part.prefill_sweep if catalog.is_expert(number))
        part = replace(part, resident=(), decode_sweep=(), prefill_sweep=experts, kv_nbytes=0)

        def ours(shares: Mapping[str, tuple[Share, ...]]) -> dict[str, tuple[Share, ...]]:
            return {
                group.name: shares[group.name]
                if group.kind == "experts"
                else (Share("cpu:0", 0, group.units),)
                for group in catalog.groups
            }

        return replace(
            placement,
            resident=(True,) * len(placement.resident),
            shares=ours(placement.shares),
            prefill_shares=ours(placement.shares_of("prefill")),
            cards=(part,),
        )

    with fake_cards(monkeypatch), on_cards(model, first) as engine:
        assert engine.generate(PROMPT, 8) == tokens
        assert computed_out_of_slots(engine)


def computed_out_of_slots(engine: InProcess) -> list[int]:
    """The experts, by their numbers, that cards compute in prompts and that live on none."""
    now = engine.engine
    found = []
    for card, part in enumerate(now.placement.cards):
        programs = lane_of(engine, card)._programs
        numbers = [
            now.blueprint.expert_number(each.experts.layer, expert)
            for each in programs[now.placement.placement_id, "prefill"].instructions
            if each.experts is not None
            for expert, _ in each.experts.brought
        ]
        first = len(now.blueprint.sources)
        assert numbers == [number for number in part.prefill_sweep if number >= first]
        found += numbers
    return found


def test_requests_that_share_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decode rows, whose experts go to buffers of their own."""
    model = tiny_model(MANY)
    options = replace(OPTIONS, max_batch=3)
    prompts = [tiny_tokens(20 + 17 * number)[number:] for number in range(3)]
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = [engine.generate(prompt, 10) for prompt in prompts]
    for first in (drawn(5, 2, few_slots(model)), drawn(6, 2, brings=True)):
        with fake_cards(monkeypatch, 2), on_cards(model, first, 2, options=options) as engine:
            together = [engine.submit(prompt, 10) for prompt in prompts]
            assert [collect(sequence) for sequence in together] == alone


@needs_interpreter
@pytest.mark.parametrize("has_more", [False, True])
def test_experts_that_are_found_on_the_card(
    tiny_model: Callable[..., Path], has_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels look up what was chosen, from captured pieces too; the host never knows."""
    model = tiny_model("mixtral", num_hidden_layers=2)
    prompt = PROMPT[:20]
    tokens = by_one_thread(model, OPTIONS, prompt, 6)
    monkeypatch.setattr(FakeRuntime, "uses_triton", True)  # interpreted, which takes its time
    interpret_few_programs(monkeypatch)
    monkeypatch.setattr(card_lane, "MOST_FEW", (1,))
    asked = choices_asked_for(monkeypatch)
    slots = None if has_more else few_slots(model)  # more: brought for the prompt, and added up
    first = drawn(0, 1, slots, brings=has_more, sums=has_more)
    with fake_cards(monkeypatch), on_cards(model, first) as engine:
        assert engine.generate(prompt, 6) == tokens
        lane, placement = lane_of(engine), engine.engine.placement
        assert lane._graphs is not None
        (kind,) = lane._graphs._graphs
        program = lane._programs[placement.placement_id, "decode"]
        groups = [
            each.group
            for first_of, graph in lane._graphs.of(kind).items()
            for each in program.instructions[first_of : graph.end]
        ]
        assert {group.partition(".")[2] for group in groups} >= {"experts", "attn"}
        assert set(asked) == {20}, "of the prompt alone"


def test_without_memory_operations(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread holds back what a card cannot wait for; graphs are replayed all the same."""
    model = tiny_model("qwen2-moe")
    tokens = by_one_thread(model, OPTIONS, PROMPT, 8)
    first = drawn(3, 1, few_slots(model))
    with (
        fake_cards(monkeypatch, has_memops=False) as (driver,),
        on_cards(model, first) as engine,
    ):
        assert lane_of(engine).streams.mode == "events"
        assert engine.generate(PROMPT, 8) == tokens
        assert "launch_graph" in [name for name, _ in driver.calls]


def test_moving_experts_while_tokens_are_made(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 20)
    slots = 9

    def first(catalog: Catalog, request: Request) -> Placement:
        return drawn(1, 1, slots)(catalog, request)

    def others(catalog: Catalog, request: Request, seed: int) -> Placement:
        """The same but for the experts, since keys and values stay."""
        there, other = first(catalog, request), drawn(seed, 1, slots)(catalog, request)
        experts = {n: s for n, s in other.shares.items() if n.endswith(".experts")}
        part = replace(
            there.cards[0],
            experts=other.cards[0].experts,
            experts_nbytes=other.cards[0].experts_nbytes,
        )
        return replace(
            there,
            placement_id=seed,
            shares={**there.shares, **experts},
            prefill_shares={**(there.prefill_shares or {}), **experts},
            cards=(part,),
        )

    with fake_cards(monkeypatch), on_cards(model, first) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn in (2, 3):
            again = others(now.blueprint.catalog, now.request, turn)
            planner.script.append((8 * turn, again))
        for _ in range(50):
            assert engine.generate(PROMPT, 20) == tokens
            if len(planner.announced) == 3:
                break
        assert [placement for placement, _ in planner.announced] == [0, 2, 3]
        (part,), (there,) = now.placement.cards, now.crew.mover.card_homes
        assert {each for each in there.offsets if isinstance(each, int)} == set(
            now.blueprint.on_card(part)
        )
        kinds = lane_of(engine)._graphs._graphs  # type: ignore[union-attr]
        assert {kind.placement_id for kind in kinds} == {3}, "graphs go with their placement"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_experts_come_out_of_ram_and_go_back_to_be_brought(
    tiny_model: Callable[..., Path], is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read after the start, where RAM has a slot for each; through staging, too."""
    model = tiny_model(MANY)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 12)
    limits: dict[str, Any] = {} if is_pinned else {"pin_limit": 48 << 20}
    first = drawn(1, 1, brings=True)
    with fake_cards(monkeypatch, **limits) as (driver,), on_cards(model, first) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        assert (lane_of(engine).access.staging is None) == is_pinned
        assert engine.generate(PROMPT, 12) == tokens
        loaded = int(now.gauges.disk_statistics()[disk.LOAD_NBYTES])
        there = now.placement
        for turn in range(1, 4):  # there and back
            again = exchanged(now.blueprint.catalog, there) if turn % 2 else there
            assert turn % 2 == 0 or again.cards[0].experts != there.cards[0].experts
            planner.script.append((6 * turn, replace(again, placement_id=turn)))
        for _ in range(50):
            assert engine.generate(PROMPT, 12) == tokens
            if len(planner.announced) == 4:
                break
        assert [placement for placement, _ in planner.announced] == [0, 1, 2, 3]
        assert engine.generate(PROMPT, 12) == tokens
        assert computed_out_of_slots(engine)
        assert int(now.gauges.disk_statistics()[disk.LOAD_NBYTES]) == loaded
        assert read_nbytes(engine) == 0
        copies = [about for name, about in driver.calls if name == "copy"]
        assert any(Direction.D2H in about for about in copies)


def exchanged(catalog: Catalog, placement: Placement) -> Placement:
    """In each layer the first that is brought lives on the card, in place of one that did."""
    (part,) = placement.cards
    brought = catalog.experts_in(part.prefill_sweep)
    experts = tuple(
        (come[0], *held[1:]) if come and held else held
        for come, held in zip(brought, part.experts, strict=True)
    )
    return with_experts(catalog, placement, [experts])


def test_the_planner_fills_a_card_with_experts(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(MANY, num_experts=32, num_experts_per_tok=4)
    tokens = by_one_thread(model, OPTIONS, PROMPT, 12)
    catalog = cut(model, OPTIONS, ONE_THREAD).catalog
    experts = catalog.experts
    assert experts is not None
    dense = sum(block.held_nbytes for block in catalog.blocks)
    memory = 2 * dense + experts.total * experts.slot_nbytes // 2
    slow = replace(machine_with(1), cpu_bytes_per_s=1e8, cpu_flops=1e10)
    with (
        fake_cards(monkeypatch, base=inprocess.ThreadHost),
        running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            cards=(CardSettings(memory),),
            machine=slow,
        ) as engine,
    ):
        (card,) = engine.engine.placement.cards
        assert card.num_experts >= experts.total // 3
        assert card.total_nbytes <= memory
        assert computed_out_of_slots(engine), "those that have no room are brought for prompts"
        assert engine.generate(PROMPT, 12) == tokens
        assert engine.engine.gauges.expert_use().on_cards > 0


@pytest.mark.parametrize(
    ("family", "cards"), [("llama2", 1), ("llama2-tied", 1), ("llama2-tied", 2)]
)
def test_embeddings_on_a_card(
    tiny_model: Callable[..., Path], family: str, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors that attend find the angles of positions, too.

    Tied: it is the head's table. Where another card has half of that, rows are gathered from disk.
    """
    model = tiny_model(family)
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        tokens, logits = engine.generate(PROMPT), engine.logits(PROMPT)

    def first(catalog: Catalog, request: Request) -> Placement:
        placement = drawn(10, cards, embeds=True)(catalog, request)
        return placement if family == "llama2" else with_head_on_cards(catalog, placement)

    with fake_cards(monkeypatch, cards), on_cards(model, first, cards) as engine:
        shares = engine.engine.placement.shares
        assert any(
            share.lane == "cpu:0" for name in shares if "attn" in name for share in shares[name]
        )
        assert engine.generate(PROMPT) == tokens
        assert np.abs(engine.logits(PROMPT) - logits).max() <= TOLERANCE
        program = lane_of(engine)._programs[engine.engine.placement.placement_id, "decode"]
        (embed,) = [each for each in program.instructions if each.group == "embed"]
        assert bool(embed.resident) == (cards == 1)


def with_head_on_cards(catalog: Catalog, placement: Placement) -> Placement:
    """An equal part of the head on each card, and nothing of it in RAM."""
    head = catalog.group("lm_head")
    points = cut_points(catalog, head)
    ends = [points[len(points) * n // len(placement.cards)] for n in range(len(placement.cards))]
    bounds = list(pairwise([*ends, head.units]))
    share = {
        "lm_head": tuple(
            Share(part.lane, *bound) for part, bound in zip(placement.cards, bounds, strict=True)
        )
    }
    parts = []
    for part, (begin, end) in zip(placement.cards, bounds, strict=True):
        here = {n for n in head.blocks if begin <= catalog.blocks[n].first_unit < end}
        resident = (set(part.resident) - set(head.blocks)) | here
        parts.append(
            replace(
                part,
                resident=tuple(sorted(resident)),
                decode_sweep=tuple(n for n in part.decode_sweep if n not in head.blocks),
                prefill_sweep=tuple(n for n in part.prefill_sweep if n not in head.blocks),
            )
        )
    kept = enumerate(placement.resident)
    return replace(
        placement,
        shares={**placement.shares, **share},
        prefill_shares={**placement.shares_of("prefill"), **share},
        cards=tuple(parts),
        resident=tuple(is_kept and n not in head.blocks for n, is_kept in kept),
    )


def test_decode_steps_are_replayed_in_pieces(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits and writes between graphs; the same tokens where a driver captures nothing."""
    model = tiny_model(MANY)
    with fake_cards(monkeypatch) as (driver,), on_cards(model, drawn(2, 1)) as engine:
        tokens = engine.generate(PROMPT, 12)
        graphs = lane_of(engine)._graphs
        assert graphs is not None
        (kind,) = graphs._graphs
        assert (kind.num_decode, kind.num_logits) == (1, 1)
        before = len(driver.calls)
        assert engine.generate(PROMPT, 12) == tokens
        names = [name for name, _ in driver.calls[before:]]
        assert names.count("launch_graph") == 11 * len(graphs.of(kind)) > 0
        assert "begin_capture" not in names, "once is enough"
        assert "allocate" not in names
    with fake_cards(monkeypatch) as (driver,), on_cards(model, drawn(2, 1)) as engine:
        driver.failures["end_capture"] = "cudaErrorStreamCaptureInvalidated"
        assert engine.generate(PROMPT, 12) == tokens
        graphs = lane_of(engine)._graphs
        assert graphs is not None
        assert "Invalidated" in (graphs.why_not or "")
        assert "launch_graph" not in driver.names()


class Sizes(TorchDispatchMode):
    """The largest tensor that each kind of kernel has asked memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                nbytes = each.untyped_storage().nbytes()
                self.largest[str(func)] = max(nbytes, self.largest.get(str(func), 0))
        return result


@pytest.mark.parametrize(
    ("family", "seed", "has_more"),
    [("gpt-oss", 2, False), ("gpt-oss", 1, True), ("mistral-window", 2, False)],
)
def test_kernels_of_steps_ask_for_no_more_memory_than_at_the_start(
    tiny_model: Callable[..., Path],
    family: str,
    seed: int,
    has_more: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So what the allocator was left with serves them, and it need not ask a driver that waits."""
    sizes = {name: Sizes() for name in ("warm_up", "begin", "compute")}

    def watch(name: str) -> None:
        work = getattr(CardComputer, name)

        def watched(self: CardComputer, *args: Any) -> None:
            with sizes[name]:
                work(self, *args)

        monkeypatch.setattr(CardComputer, name, watched)

    for name in sizes:
        watch(name)
    model = tiny_model(family)
    options = Options(context=64, prefill_chunk=24)
    first = drawn(seed, 1, brings=has_more, sums=has_more)
    with fake_cards(monkeypatch), on_cards(model, first, options=options) as engine:
        before = dict(sizes["warm_up"].largest)
        assert len(engine.generate(PROMPT, 64 - len(PROMPT))) == 64 - len(PROMPT)
    assert sizes["warm_up"].largest == before
    for name in ("begin", "compute"):
        assert sizes[name].largest
        for kernel, nbytes in sizes[name].largest.items():
            assert nbytes <= before.get(kernel, 0), kernel


def test_pieces_end_where_somebody_waits() -> None:
    def instruction(group: str, num_waits: int = 0, is_awaited: bool = False) -> CardInstruction:
        wait = CounterWait(0, 0, 1)
        waits = (wait,) * num_waits
        return CardInstruction(group, 0, 1, waits, Crossings((), ()), (), (), 0, is_awaited)

    program = [
        instruction("a", 1),
        instruction("b"),
        instruction("c", is_awaited=True),
        instruction("eager"),
        instruction("d"),
        instruction("e", 1),
        instruction("f", is_awaited=True),
        instruction("g"),
    ]
    found = cut_segments(program, lambda each: each.group != "eager")
    assert found == [(0, 3), (4, 5), (5, 7), (7, 8)]
