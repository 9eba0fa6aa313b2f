"""Routed experts on emulated cards: the same tokens wherever each of them is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import OPTIONS, drawn, machine_with
from inprocess import AMPLE, ONE_THREAD, by_one_thread, cancelling, collect, cut, running
from mixture_files import model_of_family
from test_experts_run import MANY, read_nbytes
from tiny import tiny_tokens

from shadowlane.actors import disk_lane as disk
from shadowlane.actors import engine as engines
from shadowlane.actors.lowering import lower, make_geometry
from shadowlane.actors.scratch import route_layout
from shadowlane.actors.spec import CardSettings, Emulated
from shadowlane.actors.transfer_lane import MOVED_NBYTES
from shadowlane.ops import emulated as law
from shadowlane.ops import table as t
from shadowlane.planner.brought_experts import disk_order
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import CardPart, Placement, Request, Share
from shadowlane.planner.program import build_programs
from shadowlane.planner.routing import synthesize
from shadowlane.planner.routing_files import read_trace, write_trace
from shadowlane.planner.search import SPARE_EXPERTS

PROMPT = tiny_tokens(41)
FAMILIES = ["mixtral", MANY, "qwen2-moe", "gpt-oss", "published"]


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


def drawn_on(
    seed: int,
    cards: int,
    slots: int | None = None,
    cores: Sequence[Sequence[int]] = ONE_THREAD,
    *,
    brings: bool = False,
    reads: bool = False,
    routes: bool = True,
) -> dict[str, Any]:
    """Settings of an engine over so many cards, with everything shared out at random.

    routes: routers and sums of experts, too.
    """
    return {
        "ram": AMPLE,
        "cores": cores,
        "first": drawn(seed, cards, slots, brings=brings, reads=reads, routes=routes),
        "cards": (CardSettings(1 << 30),) * cards,
        "emulated": Emulated(machine_with(cards), seed=seed),
    }


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_experts_on_cards_give_the_same_tokens(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, cards: int
) -> None:
    model = model_of_family(tiny_model, tmp_path, family)
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(PROMPT, 20)
        logits = engine.logits(PROMPT)
    few = experts.top_k + SPARE_EXPERTS
    for seed, slots in enumerate((None, few, None, few)):
        with running(model, options=OPTIONS, **drawn_on(seed, cards, slots)) as engine:
            placement = engine.engine.placement
            assert engine.generate(PROMPT, 20) == expected
            assert engine.generate(PROMPT, 20) == expected
            assert np.array_equal(engine.logits(PROMPT), logits)
            use = engine.engine.gauges.expert_use()
            assert bool(use.on_cards) == bool(placement.experts_on_cards)
            if placement.expert_slots == experts.total:
                assert read_nbytes(engine) == 0, "what is on cards is not asked for"
                assert use.resident == use.chosen


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_brought_for_prompts_give_the_same_tokens(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, cards: int
) -> None:
    """Out of their slots in RAM, where few others or all of them have one, too."""
    model = model_of_family(tiny_model, tmp_path, family)
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(PROMPT, 20)
        logits = engine.logits(PROMPT)
    few = experts.top_k + SPARE_EXPERTS
    num_brought = 0
    for seed, slots in enumerate((None, few + 2, None, (few + experts.total) // 2)):
        settings = drawn_on(seed, cards, slots, brings=True)
        with running(model, options=OPTIONS, **settings) as engine:
            now = engine.engine
            num_brought += len(brought_by(engine))
            assert engine.generate(PROMPT, 20) == expected
            assert engine.generate(PROMPT, 20) == expected
            assert np.array_equal(engine.logits(PROMPT), logits)
            if now.placement.expert_slots == experts.total:
                assert read_nbytes(engine) == 0
    assert num_brought > 0


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_read_to_be_brought_give_the_same_tokens(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, cards: int
) -> None:
    """Off the disk through a ring in RAM that is smaller than a layer's experts, chunk by chunk."""
    model = model_of_family(tiny_model, tmp_path, family)
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(PROMPT, 20)
        logits = engine.logits(PROMPT)
    few = experts.top_k + SPARE_EXPERTS
    num_read = 0
    for seed, slots in enumerate((few, few + 2, (few + experts.total) // 2)):
        settings = drawn_on(seed, cards, slots, reads=True)
        with running(model, options=OPTIONS, **settings) as engine:
            now = engine.engine
            in_a_step = len(now.placement.prefill_sweep)
            num_read += in_a_step
            assert engine.generate(PROMPT, 20) == expected
            assert engine.generate(PROMPT, 20) == expected
            assert np.array_equal(engine.logits(PROMPT), logits)
            swept = int(now.gauges.disk_statistics()[disk.SWEEP_NBYTES])
            assert bool(swept) == bool(in_a_step)
    assert num_read > 0


@pytest.mark.parametrize("seed", range(2))
def test_reading_others_while_tokens_are_made_changes_none(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    """Plans change in the middle of prompts and of answers; requests share steps."""
    model = tiny_model(MANY)
    options = replace(OPTIONS, max_batch=3)
    prompts = [tiny_tokens(20 + 17 * number)[number:] for number in range(3)]
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = [engine.generate(prompt, 12) for prompt in prompts]
    with running(model, options=options, **drawn_on(seed, 2, 9, reads=True)) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        num_read = len(now.placement.prefill_sweep)
        for turn in range(1, 5):  # what keeps its slots must have had them
            again = drawn(10 * seed + turn, 2, 9, reads=True)(now.blueprint.catalog, now.request)
            come = set(again.prefill_sweep) | again.experts_out_of_ram(now.blueprint.catalog)
            again = replace(
                again,
                placement_id=turn,
                prefill_sweep=disk_order(
                    now.blueprint.catalog, [part.prefill_sweep for part in again.cards], come
                ),
            )
            planner.script.append((3 * turn, again))
        for _ in range(50):
            together = [engine.submit(prompt, 12) for prompt in prompts]
            assert [collect(sequence) for sequence in together] == alone
            if len(planner.announced) == 5:
                break
            num_read += len(now.placement.prefill_sweep)
        assert [placement for placement, _ in planner.announced] == [0, 1, 2, 3, 4]
        assert [engine.generate(prompt, 12) for prompt in prompts] == alone
        assert num_read > 0


def reading_all(catalog: Catalog, request: Request) -> Placement:
    """The card is brought all experts for prompts, and does nothing else."""
    placement = drawn(2, 1, 6, reads=True)(catalog, request)
    (part,), experts = placement.cards, catalog.experts
    assert experts is not None
    come = tuple(
        catalog.expert_number(layer, expert)
        for layer in range(experts.num_layers)
        for expert in range(experts.per_layer)
    )
    part = replace(part, resident=(), experts=(), decode_sweep=(), prefill_sweep=come, kv_nbytes=0)
    alone = {group.name: (Share("cpu:0", 0, group.units),) for group in catalog.groups}
    units = experts.per_layer
    shared = Share("gpu:0", 0, units), Share("cpu:0", units, units + 1)
    return replace(
        placement,
        resident=(True,) * len(placement.resident),
        cards=(part,),
        prefill_sweep=come,
        shares=alone,
        prefill_shares={**alone, **{group.name: shared for group in catalog.sparse_groups}},
    )


def test_a_prompt_that_is_cancelled_leaves_nobody_waiting(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards are through before links, which are somewhere in what the disk reads."""
    model = tiny_model(MANY, num_experts=32)
    prompt = tiny_tokens(40)
    expected = by_one_thread(model, OPTIONS, prompt, 8)
    monkeypatch.setattr(engines, "CHECK_NS", 1)
    slow = replace(machine_with(1), disk_bytes_per_s=1e7)
    settings = {**drawn_on(2, 1, 6), "first": reading_all, "emulated": Emulated(slow, slowed=1.0)}
    with running(model, options=OPTIONS, **settings) as engine:
        for _ in cancelling(engine, prompt, 8):
            assert engine.generate(prompt, 8) == expected


@pytest.mark.parametrize("seed", range(2))
def test_bringing_others_while_tokens_are_made_changes_none(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    """What leaves a card may be brought next, and what was brought may come to stay."""
    model = tiny_model(MANY)
    expected = by_one_thread(model, OPTIONS, PROMPT, 20)
    with running(model, options=OPTIONS, **drawn_on(10 * seed, 2, brings=True)) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        num_brought = len(brought_by(engine))
        for turn in range(1, 4):
            again = drawn(10 * seed + turn, 2, brings=True)(now.blueprint.catalog, now.request)
            planner.script.append((3 * turn, replace(again, placement_id=turn)))
        for _ in range(50):
            assert engine.generate(PROMPT, 20) == expected
            if len(planner.announced) == 4:
                break
            num_brought += len(brought_by(engine))
        assert [placement for placement, _ in planner.announced] == [0, 1, 2, 3]
        assert engine.generate(PROMPT, 20) == expected
        assert num_brought > 0
        assert list(now.crew.mover._sources) in ([], [3]), "others may lose their slots again"


def test_what_a_processor_computes_for_a_card_that_adds_up_is_its_own(
    tiny_model: Callable[..., Path],
) -> None:
    """Experts are counted where they are computed, whoever adds them up."""
    adders = set()
    for seed in range(4):
        with running(tiny_model(MANY), options=OPTIONS, **drawn_on(seed, 1)) as engine:
            now = engine.engine
            engine.generate(PROMPT, 5)
            adders.add(now.placement.shares["0.experts"][-1].lane)
            use, experts = now.lane_use_now(), now.blueprint.catalog.experts
            assert experts is not None
            of_experts = use.lanes["gpu:0"][1] - now.multiplied.of_blocks[1]
            of_answers, of_prompts = use.experts.on_cards, now.multiplied.prompt_on_cards[0]
            assert of_experts == (of_answers + of_prompts) * experts.nbytes
    assert adders == {"cpu:0", "gpu:0"}


def brought_by(engine: Any) -> list[int]:
    """The experts that the placement in force brings, by their numbers."""
    now = engine.engine
    first = len(now.blueprint.sources)
    return [n for part in now.placement.cards for n in part.prefill_sweep if n >= first]


def test_requests_that_share_steps(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(MANY)
    options = replace(OPTIONS, max_batch=4)
    experts = cut(model, options, ONE_THREAD).catalog.experts
    assert experts is not None
    prompts = [tiny_tokens(20 + 7 * number)[number:] for number in range(4)]
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = [engine.generate(prompt, 12) for prompt in prompts]
    few = experts.top_k + SPARE_EXPERTS
    for seed in (5, 6):
        with running(model, options=options, **drawn_on(seed, 2, few)) as engine:
            together = [engine.submit(prompt, 12) for prompt in prompts]
            assert [collect(sequence) for sequence in together] == alone


@pytest.mark.parametrize("seed", range(2))
def test_moving_experts_while_tokens_are_made_changes_none(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    """What leaves a card is read into RAM when it is chosen; what nobody needs is dropped."""
    model = tiny_model(MANY)
    expected = by_one_thread(model, OPTIONS, PROMPT, 20)
    slots = 9
    with running(model, options=OPTIONS, **drawn_on(10 * seed, 2, slots)) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        for turn in range(1, 4):
            again = drawn(10 * seed + turn, 2, slots, routes=turn != 2)(
                now.blueprint.catalog, now.request
            )
            planner.script.append((3 * turn, replace(again, placement_id=turn)))
        for _ in range(50):
            assert engine.generate(PROMPT, 20) == expected
            if len(planner.announced) == 4:
                break
        assert [placement for placement, _ in planner.announced] == [0, 1, 2, 3]
        for part, there in zip(now.placement.cards, now.crew.mover.card_homes, strict=True):
            assert set(there.offsets) == set(now.blueprint.on_card(part))


@pytest.mark.parametrize("seed", range(2))
def test_experts_come_out_of_ram_and_go_back_where_it_has_room(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    """Nothing is read from the file after the start, neither for cards nor for routes."""
    model = tiny_model(MANY)
    expected = by_one_thread(model, OPTIONS, PROMPT, 20)
    with running(model, options=OPTIONS, **drawn_on(10 * seed, 2)) as engine:
        planner, now = engine.planner, engine.engine
        assert planner is not None
        first = now.placement
        experts = now.blueprint.catalog.experts
        assert experts is not None
        assert engine.generate(PROMPT, 20) == expected
        loaded = int(now.gauges.disk_statistics()[disk.LOAD_NBYTES])
        for turn in range(1, 7):  # there and back: what has left a card is in RAM
            cards = swapped(first, experts.per_layer) if turn % 2 else first.cards
            again = replace(first, placement_id=turn, cards=cards)
            planner.script.append((3 * turn, again))
        for _ in range(80):
            assert engine.generate(PROMPT, 20) == expected
            if len(planner.announced) == 7:
                break
        assert [placement for placement, _ in planner.announced] == list(range(7))
        assert int(now.gauges.disk_statistics()[disk.LOAD_NBYTES]) == loaded
        assert read_nbytes(engine) == 0
        moved = sum(int(now.gauges._links[f"h2d:{card}"][MOVED_NBYTES]) for card in range(2))
        assert moved > 0


def swapped(placement: Placement, per_layer: int) -> tuple[CardPart, ...]:
    """In each layer as many experts on each card, but those that were on none where there are."""
    parts = [list(map(list, part.experts)) for part in placement.cards]
    layers = max(map(len, parts))
    for layer in range(layers):
        held = {expert for part in parts if part for expert in part[layer]}
        free = [expert for expert in range(per_layer) if expert not in held]
        for part in parts:
            for number in range(len(part[layer]) if part else 0):
                if free:
                    part[layer][number] = free.pop()
    return tuple(
        replace(card, experts=tuple(map(tuple, part)) if part else ())
        for card, part in zip(placement.cards, parts, strict=True)
    )


def test_experts_on_a_card_follow_what_routers_choose(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The planner's own doing, and the same tokens."""
    model = tiny_model(MANY, num_experts=32, num_experts_per_tok=4)
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    experts = blueprint.catalog.experts
    assert experts is not None
    routes = tmp_path / "routes.jsonl"
    write_trace(
        routes,
        synthesize(
            num_tokens=2000,
            num_layers=experts.num_layers,
            num_experts=experts.per_layer,
            top_k=experts.top_k,
            skew=((0.1, 0.5), (0.25, 0.9)),
            seed=5,
        ),
    )
    with running(model, options=OPTIONS, cores=ONE_THREAD, replay_routing=routes) as engine:
        expected = [engine.generate(PROMPT, 60) for _ in range(60)]
    dense = sum(block.held_nbytes for block in blueprint.catalog.blocks)
    memory = 2 * dense + experts.total * experts.slot_nbytes // 3
    slow = replace(machine_with(1), cpu_bytes_per_s=1e7, cpu_flops=1e10)
    with running(
        model,
        ram=AMPLE,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(memory),),
        emulated=Emulated(slow, seed=3, slowed=1.0, small_nbytes=0.0),
        replay_routing=routes,
    ) as engine:
        now = engine.engine
        first, after = now.placement, 0
        for answer in expected:
            assert engine.generate(PROMPT, 60) == answer
            assert now.shadow.is_open, now.shadow.notes
            decisions = "; ".join(now.shadow.decisions)
            if "routers choose other experts" in decisions:
                after += now.placement.cards[0].experts != first.cards[0].experts
            if after == 3:
                break
        assert after == 3, decisions
        assert read_nbytes(engine) == 0


def test_replayed_routing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(MANY)
    trace = tmp_path / "routes.jsonl"
    with running(model, options=OPTIONS, cores=ONE_THREAD, trace_routing=trace) as engine:
        engine.generate(PROMPT, 20)
    with running(model, options=OPTIONS, cores=ONE_THREAD, replay_routing=trace) as engine:
        expected = engine.generate(PROMPT, 20)
    settings = drawn_on(3, 1, 12)
    again = tmp_path / "again.jsonl"
    with running(
        model, options=OPTIONS, replay_routing=trace, trace_routing=again, **settings
    ) as engine:
        assert engine.generate(PROMPT, 20) == expected
    assert np.array_equal(read_trace(again).choices, read_trace(trace).choices)


def test_the_planner_fills_a_card_with_experts(tiny_model: Callable[..., Path]) -> None:
    """As many as its budget has room for; tokens stay, whatever is re-planned then."""
    model = tiny_model(MANY, num_experts=32, num_experts_per_tok=4)
    expected = by_one_thread(model, OPTIONS, PROMPT, 20)
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    experts = blueprint.catalog.experts
    assert experts is not None
    dense = sum(block.held_nbytes for block in blueprint.catalog.blocks)
    memory = 2 * dense + experts.total * experts.slot_nbytes // 2
    slow = replace(machine_with(1), cpu_bytes_per_s=1e8, cpu_flops=1e10)
    with running(
        model,
        ram=AMPLE,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(memory),),
        emulated=Emulated(slow, seed=3, is_hidden=True, slowed=2.0, small_nbytes=1e4),
    ) as engine:
        now = engine.engine
        (card,) = now.placement.cards
        assert card.num_experts >= experts.total // 3
        assert card.total_nbytes <= memory
        for _ in range(10):
            assert engine.generate(PROMPT, 20) == expected
        assert now.shadow.is_open, now.shadow.notes
        use = now.gauges.expert_use()
        assert use.on_cards > 0
        assert now.expert_heat() is not None, "what is chosen is watched, for the next run"


def test_the_planner_has_experts_read_for_a_card(tiny_model: Callable[..., Path]) -> None:
    """Where RAM has not a slot for each, and the processor would hold prompts up."""
    model = tiny_model(MANY, num_experts=64, num_experts_per_tok=4)
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(PROMPT, 20)
        everything = engine.engine.placement.total_nbytes
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    experts = blueprint.catalog.experts
    assert experts is not None
    dense = sum(block.held_nbytes for block in blueprint.catalog.blocks)
    slow = replace(machine_with(1), cpu_flops=1e8)
    with running(
        model,
        ram=everything - experts.total * experts.slot_nbytes // 2,
        options=OPTIONS,
        cores=ONE_THREAD,
        cards=(CardSettings(2 * dense + 16 * experts.slot_nbytes),),
        emulated=Emulated(slow, seed=3, slowed=1.0, small_nbytes=0.0),
    ) as engine:
        now = engine.engine
        first = now.placement
        assert first.prefill_sweep
        assert first.expert_slots < experts.total
        for _ in range(5):
            assert engine.generate(PROMPT, 20) == expected
        assert now.shadow.is_open, now.shadow.notes
        assert int(now.gauges.disk_statistics()[disk.SWEEP_NBYTES]) > 0


def test_an_emulated_lane_takes_the_time_of_the_experts_that_it_computes(
    tiny_model: Callable[..., Path],
) -> None:
    """Of each layer's newest route, without scatter: each lane those in its list, and no others."""
    model = tiny_model(MANY)
    with running(model, options=OPTIONS, **drawn_on(1, 2)) as engine:
        engine.generate(PROMPT, 4)
        now = engine.engine
        arena, layout, blueprint = now.arena, now.layout, now.blueprint
        experts = blueprint.catalog.experts
        assert experts is not None
        assert arena is not None
        offsets = route_layout(blueprint.config, layout.step_rows)
        programs = build_programs(blueprint.catalog, now.placement)
        record = arena.base + layout.records
        laws = np.zeros(law.LAW_FIELDS)
        laws[law.BYTES_PER_S], laws[law.FLOPS_PER_S] = 1e9, 1e18
        calm = np.zeros(law.LOADS)
        taken = np.zeros((len(layout.lanes), experts.num_layers))
        for lane, name in enumerate(layout.lanes):
            geometry = make_geometry(blueprint, layout, lane, 1, layout.card_of(lane))
            lowered = lower(blueprint, layout, now.placement, programs[name], {}, 1)
            for row in lowered.instructions:
                if row[t.KIND] == t.EXPERTS:
                    taken[lane, row[t.SPARSE_LAYER]] = law.work_s(
                        arena.base,
                        geometry,
                        row,
                        lowered.items,
                        record,
                        laws.ctypes.data,
                        calm.ctypes.data,
                    )
        for layer in range(experts.num_layers):
            at = layout.scratch["routes"] + layer * offsets["nbytes"] + offsets["starts"]
            starts = arena.view(at, np.int32, experts.per_layer + 1)
            chosen = set(np.flatnonzero(np.diff(starts)).tolist())
            held = [chosen.intersection(card.experts_of(layer)) for card in now.placement.cards]
            counts = np.array([len(chosen) - sum(map(len, held)), *map(len, held)])
            assert np.allclose(taken[:, layer], counts * experts.nbytes / 1e9)
        assert (taken[1:] > 0).any()


@pytest.mark.parametrize("brings", [False, True])
def test_experts_of_prompts_are_counted_for_who_computed_them(
    tiny_model: Callable[..., Path], tmp_path: Path, brings: bool
) -> None:
    """The processor and the card together have multiplied all that was chosen."""
    routing = tmp_path / "routes.jsonl"
    settings = drawn_on(3, 1, brings=brings)
    with running(tiny_model(MANY), options=OPTIONS, trace_routing=routing, **settings) as run:
        now = run.engine
        sequence = run.submit(PROMPT, 3)  # chunks of 24 and 17 rows, then two of one
        collect(sequence)
        experts = now.blueprint.catalog.experts
        assert experts is not None
        dense = now.multiplied.in_a_step(now.placement)
        use = sequence.lane_use
        routed = {
            lane.name: use[lane.name][1] - 4 * nbytes
            for lane, nbytes in zip(now.lanes, dense, strict=True)
        }
    chosen = [len(ids) for step in read_trace(routing).passes() for _, ids in step.routes]
    assert sum(routed.values()) == sum(chosen) * experts.nbytes
    assert routed["gpu:0"] > 2 * max(chosen) * experts.nbytes, "of prompts, too"


def test_a_card_that_is_brought_nothing_holds_no_sweep_up(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two cards one has a link at work: what was read ahead serves the next chunk."""

    def beside_another(catalog: Catalog, request: Request) -> Placement:
        placement = reading_all(catalog, request)
        idle = replace(placement.cards[0], lane="gpu:1", prefill_sweep=())
        return replace(placement, lanes=request.lanes, cards=(*placement.cards, idle))

    model = tiny_model(MANY)
    expected = by_one_thread(model, OPTIONS, PROMPT, 4)
    settings = {**drawn_on(2, 2, 6), "first": beside_another}
    with running(model, options=OPTIONS, **settings) as engine:
        crew = engine.engine.crew
        started: list[str] = []
        start = crew._start_sweep

        def note(*args: Any, **named: Any) -> Any:
            started.append(named["phase"])
            return start(*args, **named)

        monkeypatch.setattr(crew, "_start_sweep", note)
        for _ in range(2):
            assert engine.generate(PROMPT, 4) == expected
    assert len(PROMPT) > OPTIONS.prefill_chunk
    assert started.count("prefill") == 2, "one for each prompt, whatever its chunks"
