"""Plans over cards made exact: what holds for any model, plan and budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hand_placement import OF_LAYERS, OF_ONE, place_by_hand, plan_by_hand
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, Prompts, Site, Work, kv_nbytes, model_of, stage_nbytes
from shadowlane.planner.hybrid_hand import num_layers
from shadowlane.planner.hybrid_layouts import Question, TooLarge
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.placement import (
    MIN_SLOTS,
    InfeasiblePlan,
    LaneSpec,
    Placement,
    Request,
    Share,
    whole_pages,
)
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.profile import Phase
from shadowlane.planner.sections import Carry, Cuts, cuts_of, parted
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.planner.validate import validate_phases

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PHASES: tuple[Phase, ...] = ("decode", "prefill")
FAST = Card("fast", 64e6, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
SLOW = replace(FAST, name="slow", vram_nbytes=24e6, vram_bytes_per_s=150e9, h2d_bytes_per_s=6e9)
PLENTY = 1 << 30


def machine(*cards: Card) -> Hardware:
    return Hardware("machine", cards, 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)


def lanes(cards: int, processors: int = 1) -> tuple[LaneSpec, ...]:
    names = [f"cpu:{each}" for each in range(processors)] + [f"gpu:{each}" for each in range(cards)]
    return tuple(LaneSpec(name, 1) for name in names)


def question_of(catalog: Catalog, *cards: Card, is_ours: bool = False) -> Question:
    model = model_of(catalog, "synthetic", is_ours=is_ours)
    return Question(model, machine(*cards), Work(context=64, max_context=128))


def everywhere(question: Question, site: Site, **others: Site) -> Plan:
    """One site for all groups, but for those of kinds named."""
    still = replace(site, brought=0.0, brought_prefill=0.0)
    sites = (
        others.get(load.kind, still if load.kind == "attn" else site)
        for load in question.model.loads
    )
    return Plan("by a test", tuple(sites))


def check(catalog: Catalog, placement: Placement) -> None:
    """What any placement keeps to."""
    assert placement.total_nbytes <= placement.ram
    for card in placement.cards:
        assert card.total_nbytes <= card.budget
        held = sum(catalog.blocks[index].held_nbytes for index in card.resident)
        assert card.weights_nbytes == held
    held = sum(b.held_nbytes for b in catalog.blocks if placement.resident[b.index])
    assert placement.weights_nbytes == held
    validate_phases(catalog, placement)
    on_cards = Counter(index for card in placement.cards for index in card.resident)
    streamed = set(placement.sweep)
    for block in catalog.blocks:
        assert on_cards[block.index] <= 1
        if block.group != "embed":  # whose rows can be gathered
            homes = on_cards[block.index] + placement.resident[block.index]
            assert homes + (block.index in streamed) >= 1
            assert not (homes and block.index in streamed)
    needed = sum(card.kv_nbytes for card in placement.cards) + placement.kv_nbytes
    assert needed >= placement.kv_pages * catalog.page_nbytes
    for group in catalog.groups:
        if group.kind == "embed":
            assert placement.shares[group.name] == (Share("cpu:0", 0, group.units),)
    check_experts(catalog, placement)
    assert all(share.lane != "cpu:1" for each in placement.shares.values() for share in each)


def check_experts(catalog: Catalog, placement: Placement) -> None:
    """Cards hold the most used ones of each layer, and who chooses adds up."""
    experts = catalog.experts
    if experts is None:
        assert not placement.experts_on_cards
        return
    for card in placement.cards:
        assert card.experts_nbytes == card.num_experts * experts.slot_nbytes
    for layer, group in enumerate(catalog.sparse_groups):
        counts = [len(card.experts_of(layer)) for card in placement.cards]
        held = sorted(each for card in placement.cards for each in card.experts_of(layer))
        assert held == sorted(experts.ranked(layer)[: sum(counts)])
        for phase in PHASES:
            (chooser,) = placement.shares_of(phase)[group.name.replace("experts", "router")]
            shares = placement.shares_of(phase)[group.name]
            assert shares[-1].lane == chooser.lane
            parts = {each.lane: each.last_unit - each.first_unit for each in shares}
            parts[chooser.lane] -= 1
            assert [parts.get(card.lane, 0) for card in placement.cards] == counts
            assert parts.get("cpu:0", 0) == experts.per_layer - sum(counts)
            assert set(parts) <= {"cpu:0", *(card.lane for card in placement.cards)}
            assert len(parts) == len(shares)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    tile_rows = draw(st.sampled_from([16, 48, 64, 128, 512]))
    make = draw(st.sampled_from([llama_catalog, llama_catalog, llama_catalog, mixture_catalog]))
    return make(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.sampled_from([64, 128, 256])),
        inner=draw(st.sampled_from([128, 336, 512])),
        heads_kv=draw(st.integers(1, 4)),
        vocab=draw(st.sampled_from([64, 512, 1008])),
        tile_rows=tile_rows,
        up_tile_rows=draw(st.sampled_from([None, 32])) if tile_rows in (16, 48, 64) else None,
        tied=draw(st.booleans()),
        page_tokens=draw(st.sampled_from([16, 64])),
        constants_nbytes=draw(st.integers(0, 20_000)),
        scratch_nbytes=draw(st.integers(0, 200_000)),
    )


parts = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.25]), st.floats(0.01, 0.99))


@st.composite
def sites(draw: st.DrawFn, cards: int, kept: float) -> Site:
    """kept: the part in RAM of what is not on cards."""
    vram = draw(parts)
    split = draw(parts) if cards > 1 else 1.0
    over = (split, 1.0 - split) if cards > 1 else (1.0,) * cards
    return Site(vram, (1.0 - vram) * kept, draw(parts), over, draw(parts))


@st.composite
def asked(draw: st.DrawFn) -> tuple[Catalog, Plan, Request, Question, dict[str, int]]:
    catalog = draw(catalogs())
    cards = draw(st.sampled_from([2, 1, 2, 1, 2, 0]))
    question = question_of(catalog, *(FAST, SLOW)[:cards], is_ours=draw(st.booleans()))
    whole = sum(block.held_nbytes for block in catalog.blocks)
    whole += catalog.experts.total * catalog.experts.slot_nbytes if catalog.experts else 0
    rooms = st.one_of(st.just(PLENTY), st.integers(whole // 4, 2 * whole), st.integers(0, whole))
    budgets = {f"gpu:{card}": draw(rooms) for card in range(cards)}
    kept = draw(st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.3, 0.0]))
    if not cards:
        plan = Plan("", tuple(Site(0.0, kept) for _ in question.model.loads))
    else:
        layers = draw(st.booleans())  # the same in all groups, or each its own
        one = draw(sites(cards, kept))
        plan = Plan(
            "",
            tuple(one if layers else draw(sites(cards, kept)) for _ in question.model.loads),
        )
    request = Request(
        ram=draw(st.one_of(st.just(PLENTY), st.integers(whole // 4, 2 * whole + 1_000_000))),
        lanes=lanes(cards, draw(st.integers(1, 2))),
        context=draw(st.sampled_from([None, 16, 100])),
        max_batch=draw(st.integers(1, 3)),
        num_slots=draw(st.sampled_from([None, None, 4, 7])),
    )
    return catalog, plan, request, question, budgets


Asked = tuple[Catalog, Plan, Request, Question, dict[str, int]]


def placed(question: Asked) -> Placement:
    catalog, plan, request, asked_of, budgets = question
    try:
        return place_on_cards(catalog, plan, request, asked_of, budgets=budgets)
    except InfeasiblePlan:
        assume(False)
        raise


@few
@given(asked())
def test_budgets_are_kept_and_programs_run_whatever_is_asked(question: Asked) -> None:
    check(question[0], placed(question))


@few
@given(asked())
def test_a_placement_is_the_plan_that_it_came_to(question: Asked) -> None:
    catalog, _, request, asked_of, budgets = question
    first = placed(question)
    plan = plan_of(catalog, first, asked_of.model)
    for site in plan.sites:
        assert 0.0 <= site.vram <= 1.0 + 1e-12
        assert site.vram + site.ram <= 1.0 + 1e-12
        assert sum(site.over) == pytest.approx(1.0)
    second = place_on_cards(catalog, plan, request, asked_of, budgets=budgets)
    assert replace(second, notes=()) == replace(first, notes=())


@few
@given(asked())
def test_with_room_for_all_a_plan_is_kept_to_half_a_piece(question: Asked) -> None:
    catalog, plan, request, asked_of, budgets = question
    request = replace(request, ram=PLENTY)
    budgets = dict.fromkeys(budgets, PLENTY)
    placement = place_on_cards(catalog, plan, request, asked_of, budgets=budgets)
    exact = plan_of(catalog, placement, asked_of.model)
    assert not any("do not fit" in note or "more than planned" in note for note in placement.notes)
    owed: Counter[str] = Counter()
    pieces: Counter[str] = Counter()
    for load, wanted, got in zip(asked_of.model.loads, plan.sites, exact.sites, strict=True):
        group = catalog.group(load.name)
        if group.kind == "router":
            continue
        if wanted.vram in (0.0, 1.0):
            assert got.vram == wanted.vram
        cuts = cuts_of(catalog, group)
        owed[load.kind] += (wanted.vram - got.vram) * cuts.total
        largest = max(b - a for a, b in zip(cuts.nbytes, cuts.nbytes[1:], strict=False))
        pieces[load.kind] = max(pieces[load.kind], largest)
    for kind, nbytes in owed.items():  # over all layers, not in each
        assert abs(nbytes) <= pieces[kind] / 2 + 1e-3


@pytest.mark.parametrize("mib", [3, 5, 7.5, 10, 14])
def test_a_budget_that_a_plan_fills_is_kept_without_a_word(mib: float) -> None:
    """Of our own plans nothing is left over but what whole blocks come to."""
    catalog = llama_catalog(layers=6, tile_rows=32)
    budget = round(mib * 2**20)
    question = question_of(catalog, replace(FAST, vram_nbytes=float(budget)), is_ours=True)
    plan = search(question).plan
    request = Request(ram=PLENTY, lanes=lanes(1), context=128)
    placement = place_on_cards(catalog, plan, request, question)
    assert placement.cards[0].total_nbytes <= budget
    assert not any("do not fit" in note for note in placement.notes)
    # ... and it is as fast as was promised
    promised_s = question.times(plan).step_s
    assert placement.predicted_step_s == pytest.approx(promised_s, rel=0.03)


@few
@given(asked())
def test_what_does_not_fit_names_a_sum_that_is_too_large(question: Asked) -> None:
    catalog, plan, request, asked_of, budgets = question
    least = replace(request, ram=1)
    with pytest.raises(InfeasiblePlan) as caught:
        place_on_cards(catalog, plan, least, asked_of, budgets=budgets)
    enough = replace(request, ram=caught.value.needed)
    if catalog.experts is None and request.num_slots is None:
        check(catalog, place_on_cards(catalog, plan, enough, asked_of, budgets=budgets))
    short = replace(request, ram=caught.value.needed - 1)
    with pytest.raises(InfeasiblePlan) as caught:
        place_on_cards(catalog, plan, short, asked_of, budgets=budgets)
    assert caught.value.deficit == 1


# -- one by one

LLAMA = llama_catalog(layers=4, hidden=256, inner=512, heads_kv=4, vocab=512, tile_rows=16)
ONE = question_of(LLAMA, FAST)
TWO = question_of(LLAMA, FAST, SLOW)
SHARED = (0.75, 0.25)


def place_one(plan: Plan, budget: int = PLENTY, ram: int = PLENTY) -> Placement:
    request = Request(ram=ram, lanes=lanes(1), context=64)
    placement = place_on_cards(LLAMA, plan, request, ONE, budgets={"gpu:0": budget})
    check(LLAMA, placement)
    return placement


def place_two(plan: Plan, **budgets: int) -> Placement:
    named = {f"gpu:{card}": budgets.get(f"card_{card}", PLENTY) for card in range(2)}
    request = Request(ram=PLENTY, lanes=lanes(2), context=64)
    placement = place_on_cards(LLAMA, plan, request, TWO, budgets=named)
    check(LLAMA, placement)
    return placement


def lanes_of(placement: Placement, group: str, phase: Phase = "decode") -> list[tuple[str, int]]:
    """(lane, units) as the group is shared."""
    shares = placement.shares_of(phase)[group]
    return [(share.lane, share.last_unit - share.first_unit) for share in shares]


def test_cards_come_first_then_what_is_brought_then_the_processor() -> None:
    plan = everywhere(TWO, Site(0.5, 0.5, 0.5, SHARED, 1.0))
    placement = place_two(plan)
    # 32 units in each `gate_up`, of which 16 live on cards and 8 come over links, of prompts all
    own = [("gpu:0", 12), ("gpu:1", 4)]
    assert lanes_of(placement, "0.gate_up") == [*own, ("gpu:0", 6), ("gpu:1", 2), ("cpu:0", 8)]
    assert lanes_of(placement, "0.gate_up", "prefill") == [*own, ("gpu:0", 12), ("gpu:1", 4)]
    assert lanes_of(placement, "0.attn") == [("gpu:0", 1), ("gpu:1", 1), ("cpu:0", 2)]
    fast, slow = placement.cards
    assert len(fast.prefill_sweep) > len(slow.prefill_sweep) > len(slow.decode_sweep) > 0
    assert placement.sweep == ()


def test_each_card_keeps_its_own_budget() -> None:
    whole = place_two(everywhere(TWO, Site(1.0, 0.0, 0.0, (0.5, 0.5))))
    large, small = (card.total_nbytes for card in whole.cards)
    tight = place_two(everywhere(TWO, Site(1.0, 0.0, 0.0, (0.5, 0.5))), card_1=small // 2)
    assert tight.cards[0].total_nbytes <= large
    assert small * 0.4 < tight.cards[1].total_nbytes <= small // 2
    assert any("gpu:1" in note for note in tight.notes)
    assert lanes_of(tight, "0.qkv") == lanes_of(whole, "0.qkv")  # the end of the model goes first
    assert lanes_of(tight, "lm_head")[-1][0] == "cpu:0"


def test_what_a_card_has_no_room_for_is_in_ram_and_then_on_disk() -> None:
    plan = everywhere(ONE, Site(1.0, 0.0))
    whole = place_one(plan)
    budget = whole.cards[0].total_nbytes * 3 // 4
    beside = place_one(plan, budget)
    assert budget * 0.95 < beside.cards[0].total_nbytes <= budget
    assert beside.sweep == ()
    spilled = beside.total_nbytes - whole.total_nbytes
    short = place_one(plan, budget, beside.total_nbytes - spilled // 2)
    assert short.sweep
    assert any("read from disk" in note for note in short.notes)
    groups = {LLAMA.blocks[index].group for index in short.sweep}
    off = {LLAMA.blocks[i].group for i in range(len(LLAMA.blocks))} - {
        LLAMA.blocks[i].group for i in short.cards[0].resident
    }
    assert len(groups) >= len(off)  # of each group that is off the card, the same part


def test_keys_and_values_are_where_their_heads_are_computed() -> None:
    pages = whole_pages(4 * LLAMA.page_nbytes)  # 64 tokens
    none = place_one(everywhere(ONE, Site(0.0, 1.0)))
    assert (none.cards[0].kv_nbytes, none.kv_nbytes) == (0, pages)
    half = place_one(everywhere(ONE, Site(0.0, 1.0), attn=Site(0.5, 0.5)))
    assert (half.cards[0].kv_nbytes, half.kv_nbytes) == (pages // 2, pages // 2)
    full = place_one(everywhere(ONE, Site(0.0, 1.0), attn=Site(1.0, 0.0)))
    assert (full.cards[0].kv_nbytes, full.kv_nbytes) == (pages, 0)
    assert full.cards[0].resident == ()


def test_a_ring_is_as_large_as_its_stage_and_no_larger_than_what_comes() -> None:
    stage = int(stage_nbytes(FAST)) // LLAMA.slot_nbytes
    everything = place_one(everywhere(ONE, Site(0.0, 1.0, 1.0, brought_prefill=1.0)))
    assert everything.cards[0].num_slots == min(stage, len(everything.cards[0].decode_sweep))
    few_come = everywhere(ONE, Site(0.0, 1.0), down=Site(0.0, 1.0, 0.05))
    assert place_one(few_come).cards[0].num_slots == max(
        MIN_SLOTS, len(place_one(few_come).cards[0].decode_sweep)
    )
    nothing = place_one(everywhere(ONE, Site(0.5, 0.5)))
    assert nothing.cards[0].num_slots == nothing.cards[0].slots_nbytes == 0
    small = replace(FAST, vram_nbytes=8 * 6 * LLAMA.slot_nbytes)
    question = question_of(LLAMA, small)
    request = Request(ram=PLENTY, lanes=lanes(1), context=64)
    plan = everywhere(question, Site(0.0, 1.0, 1.0))
    assert place_on_cards(LLAMA, plan, request, question).cards[0].num_slots == 6
    too_small = {"gpu:0": 3 * LLAMA.slot_nbytes}
    placement = place_on_cards(LLAMA, plan, request, question, budgets=too_small)
    assert placement.cards[0].decode_sweep == ()


def test_prompts_have_shares_of_their_own_beside_reads_from_disk() -> None:
    apart = everywhere(ONE, Site(0.25, 0.75, 0.25, brought_prefill=1.0))
    assert place_one(apart).prefill_shares is not None
    alike = everywhere(ONE, Site(0.25, 0.75, 0.5, brought_prefill=0.5))
    assert place_one(alike).prefill_shares is None
    reading = place_one(everywhere(ONE, Site(0.25, 0.5, 0.25, brought_prefill=2 / 3)))
    assert reading.sweep
    assert reading.prefill_shares is not None
    (card,) = reading.cards
    assert set(card.decode_sweep) < set(card.prefill_sweep)
    whole = place_one(everywhere(ONE, Site(0.25, 0.5, 0.25, brought_prefill=1.0)))
    assert whole.sweep == reading.sweep
    assert set(whole.sweep) < set(whole.cards[0].prefill_sweep)
    assert {share.lane for each in (whole.prefill_shares or {}).values() for share in each} == {
        "cpu:0",  # the embedding
        "gpu:0",
    }


def test_what_is_brought_is_first_what_is_in_ram_then_what_is_read() -> None:
    embedding = set(LLAMA.group("embed").blocks)
    for part, comes in ((0.2, "some"), (1.0, "all")):
        placement = place_one(everywhere(ONE, Site(0.25, 0.25, part)))
        brought, read = set(placement.cards[0].decode_sweep), set(placement.sweep)
        in_ram = {n for n, kept in enumerate(placement.resident) if kept}
        in_ram -= embedding.union(placement.cards[0].resident)
        assert read
        if comes == "all":
            assert brought == in_ram | read
        else:
            assert brought < in_ram


def test_tied_rows_are_in_ram_too_if_there_is_room() -> None:
    plan = everywhere(ONE, Site(1.0, 0.0))
    roomy = place_one(plan)
    head = LLAMA.group("lm_head").blocks
    assert set(head) <= set(roomy.cards[0].resident)
    assert all(roomy.resident[index] for index in head)
    without = roomy.total_nbytes - roomy.weights_nbytes
    tight = place_one(plan, ram=without)
    assert not any(tight.resident)
    assert tight.cards == roomy.cards
    assert any("gathered" in note for note in tight.notes)


def test_a_group_in_one_piece_goes_where_most_of_it_is_wanted() -> None:
    whole = llama_catalog(layers=1, hidden=64, inner=64, heads_kv=1, vocab=64, tile_rows=512)
    question = question_of(whole, FAST, SLOW)
    request = Request(ram=PLENTY, lanes=lanes(2))
    for part, over, lane in ((0.6, (0.7, 0.3), "gpu:0"), (0.9, (0.4, 0.6), "gpu:1")):
        site = Site(part, 1.0 - part, 0.0, over)
        placement = place_on_cards(whole, everywhere(question, site), request, question)
        assert lanes_of(placement, "0.o") == [(lane, 4)]
    off = everywhere(question, Site(0.4, 0.6, 0.0, (0.5, 0.5)))
    assert lanes_of(place_on_cards(whole, off, request, question), "0.o") == [("cpu:0", 4)]


def test_layers_make_up_for_each_other() -> None:
    """Four pieces in each `o`: 0.6 of all would be half of each, and a card would stay empty."""
    coarse = llama_catalog(layers=10, hidden=256, inner=256, heads_kv=1, vocab=64, tile_rows=64)
    question = question_of(coarse, FAST)
    request = Request(ram=PLENTY, lanes=lanes(1))
    plan = everywhere(question, Site(0.0, 1.0), o=Site(0.6, 0.4))
    placement = place_on_cards(coarse, plan, request, question)
    on_card = sum(lanes_of(placement, f"{layer}.o")[0][1] for layer in range(10))
    assert on_card == 24 * 4  # of 40 pieces of four units


# -- by hand


@pytest.mark.parametrize("strategy", [*OF_LAYERS, *OF_ONE])
def test_layouts_by_hand_are_exact_placements(strategy: str) -> None:
    request = Request(ram=PLENTY, lanes=lanes(2))
    if "cpu-moe" in strategy:
        with pytest.raises(TooLarge):
            place_by_hand(LLAMA, strategy, request, TWO)
        return
    placement = place_by_hand(LLAMA, strategy, request, TWO)
    check(LLAMA, placement)
    assert placement.strategy.startswith(strategy.split(",")[0])
    exact = plan_of(LLAMA, placement, TWO.model)
    assert placement.predicted_step_s == pytest.approx(TWO.times(exact).step_s)


def test_a_layer_split_has_whole_layers_on_cards() -> None:
    request = Request(ram=PLENTY, lanes=lanes(1), context=64)
    placement = place_by_hand(LLAMA, "layer-split", request, ONE, layers=2)
    check(LLAMA, placement)
    for group in LLAMA.groups:
        lane = "gpu:0" if group.layer in (0, 1) else "cpu:0"
        assert placement.shares[group.name] == (Share(lane, 0, group.units),)
    streamed = place_by_hand(LLAMA, "layer-stream", request, ONE, layers=2)
    brought = {LLAMA.blocks[index].group for index in streamed.cards[0].decode_sweep}
    assert brought == {g.name for g in LLAMA.groups if g.blocks and g.layer not in (0, 1)}


def test_the_experts_of_more_layers_than_there_are_are_those_of_all() -> None:
    question = question_of(mixture_catalog(), FAST)
    most = num_layers(question.model)
    whole = plan_by_hand(question, "cpu-moe", most)
    assert plan_by_hand(question, "cpu-moe", 10 * most).sites == whole.sites
    sites = zip(question.model.loads, whole.sites, strict=True)
    assert all(site.vram == 0.0 for load, site in sites if load.experts)
    every = plan_by_hand(ONE, "layer-split", num_layers(ONE.model))
    assert plan_by_hand(ONE, "layer-split", 99).sites == every.sites


def test_layouts_that_are_none_or_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="layout by hand must be one of"):
        plan_by_hand(ONE, "all on disk")
    with pytest.raises(ValueError, match="layers must be at least 0; got -1"):
        plan_by_hand(ONE, "layer-split", -1)
    with pytest.raises(ValueError, match="takes no number of layers"):
        plan_by_hand(ONE, "attention-gpu", 1)
    small = question_of(LLAMA, replace(FAST, vram_nbytes=1e6))
    with pytest.raises(TooLarge, match=r"layer-split 4 must fit .*, short by .*layer-split 0, "):
        plan_by_hand(small, "layer-split", 4)
    with pytest.raises(TooLarge, match=r"^row-split needs several cards; .* has 1$"):
        plan_by_hand(ONE, "row-split")
    with pytest.raises(TooLarge, match=r"^cpu-moe needs a mixture of experts; this model is"):
        plan_by_hand(ONE, "cpu-moe")
    for layers in (0, 3, 99):  # as --cpu-moe and --n-cpu-moe ask for it
        with pytest.raises(TooLarge, match=r"^cpu-moe needs a mixture of experts"):
            plan_by_hand(ONE, "cpu-moe", layers)
    none = replace(ONE, machine=replace(ONE.machine, cards=()))
    with pytest.raises(TooLarge, match=r"^attention-gpu needs a card; .* has none$"):
        plan_by_hand(none, "attention-gpu")


# -- what is refused


@pytest.mark.parametrize(
    "names",
    [("cpu:0",), ("gpu:0", "cpu:0"), ("cpu:0", "gpu:1"), ("gpu:0",), ("cpu:0", "gpu:0", "gpu:1")],
)
def test_lanes_are_those_of_the_machine(names: tuple[str, ...]) -> None:
    request = Request(ram=PLENTY, lanes=tuple(LaneSpec(name, 1) for name in names))
    with pytest.raises(ValueError, match="lanes must be"):
        place_on_cards(LLAMA, everywhere(ONE, Site(0.0, 1.0)), request, ONE)


def test_budgets_pins_and_shares_that_do_not_suit_are_refused() -> None:
    plan = everywhere(ONE, Site(0.0, 1.0))
    request = Request(ram=PLENTY, lanes=lanes(1))
    with pytest.raises(ValueError, match="budgets must name gpu:0; got gpu:1"):
        place_on_cards(LLAMA, plan, request, ONE, budgets={"gpu:1": 0})
    with pytest.raises(ValueError, match="pin 'down' must name a card in use"):
        place_on_cards(LLAMA, plan, replace(request, pins={"down": "gpu:1"}), ONE)
    with pytest.raises(ValueError, match="must be shared by 2 cards"):
        place_on_cards(LLAMA, plan, Request(ram=PLENTY, lanes=lanes(2)), TWO)


def test_the_least_of_a_mixture_is_its_dense_part_and_some_experts() -> None:
    catalog = mixture_catalog()
    question = question_of(catalog, FAST)
    plan = everywhere(question, Site(0.5, 0.5), experts=Site(0.5, 0.5))
    request = Request(ram=PLENTY, lanes=lanes(1))
    placement = place_on_cards(catalog, plan, request, question)
    check(catalog, placement)
    assert catalog.experts is not None
    assert placement.expert_slots == catalog.experts.total
    with pytest.raises(InfeasiblePlan) as caught:
        place_on_cards(catalog, plan, replace(request, ram=1), question)
    least = place_on_cards(catalog, plan, replace(request, ram=caught.value.needed), question)
    check(catalog, least)
    assert least.expert_slots == catalog.experts.top_k + 2


def test_what_our_lanes_read_and_bring_is_what_was_planned_for() -> None:
    """Part of it is on disk: prompts bring what single tokens do, and the search knows it."""
    catalog = llama_catalog(layers=8, hidden=512, inner=2048, heads_kv=4, vocab=2048)
    model = model_of(catalog, "synthetic", is_ours=True)
    work = Work(context=64, max_context=128)
    card = replace(FAST, vram_nbytes=0.3 * model.nbytes, crossing_s=1e-6)
    here = replace(machine(card), ram_nbytes=0.6 * model.nbytes + model.fixed_ram_nbytes)
    prompts = Prompts(Work("prefill", 64, 1, 64, 128), 0.5)
    question = Question(model, here, work, prompts=prompts)
    answer = search(question)
    assert any(site.vram + site.ram < 0.99 for site in answer.plan.sites)
    assert all(site.brought == site.brought_prefill for site in answer.plan.sites)
    request = Request(ram=int(here.ram_nbytes), lanes=lanes(1), context=128)
    placement = place_on_cards(catalog, answer.plan, request, question)
    assert placement.sweep
    assert not any("prompts" in note for note in placement.notes)
    exact = plan_of(catalog, placement, model)
    assert answer.prompt_times is not None
    prompt_s = question.times(exact, work=prompts.work).step_s
    assert prompt_s == pytest.approx(answer.prompt_times.step_s, rel=0.15)


def test_our_keys_and_values_take_whole_pages_of_all_tokens() -> None:
    catalog = llama_catalog(layers=2)
    windows = (16, None)
    ours, theirs = (model_of(catalog, "", windows, is_ours=each) for each in (True, False))
    work = Work(max_context=catalog.page_tokens + 1)
    attns = [load for load in ours.loads if load.kind == "attn"]
    assert sum(kv_nbytes(load, work) for load in attns) == 2 * catalog.page_nbytes
    assert [load.attended(1000) for load in attns] == [16, 1000]  # what is read is as it was
    assert sum(kv_nbytes(load, work) for load in theirs.loads) < catalog.page_nbytes * 1.1


def test_cards_that_share_experts_are_as_full_as_planned() -> None:
    """An even share of each layer would be too much for one card, and RAM would have what the other
    has room for."""
    catalog = mixture_catalog(num_experts=8, layers=12)
    assert catalog.experts is not None
    over = (0.45, 0.55)
    question = question_of(catalog, FAST, FAST)
    shared = Site(1.0, 0.0, over=over)
    plan = everywhere(question, Site(0.0, 1.0, over=over), experts=shared)
    total = catalog.experts.total
    rooms = [(round(part * total) + 1) * catalog.experts.slot_nbytes for part in over]
    request = Request(ram=PLENTY, lanes=lanes(2))
    budgets = {f"gpu:{card}": room for card, room in enumerate(rooms)}
    placement = place_on_cards(catalog, plan, request, question, budgets=budgets)
    counts = [part.num_experts for part in placement.cards]
    assert sum(counts) == total
    assert counts == [pytest.approx(part * total, abs=1) for part in over]
    assert not placement.notes


def test_a_card_without_a_share_is_not_given_what_rounding_owes() -> None:
    cuts = Cuts(*(tuple(range(9)) for _ in range(4)))
    carry = Carry()
    for _ in range(6):
        first, second, last = parted(cuts, 0, 8, [0.2, 0.2, 1.0], carry, "experts")
        assert first == second
        assert last == 8
