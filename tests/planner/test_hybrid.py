"""Plans over cards, processor, RAM and disk: what they cost, and how good the search is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hybrid import (
    DISK_RING_NBYTES,
    STAGE_NBYTES,
    Load,
    Model,
    Plan,
    Site,
    Work,
    demand,
    fits,
)
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_changes import MECHANISMS
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    TooLarge,
    by_hand,
    cpu_moe,
    layer_split,
    settle,
)
from shadowlane.planner.hybrid_play import play
from shadowlane.planner.hybrid_search import knapsack, search
from shadowlane.planner.scenarios import Scenario, Stretch, evaluate

CARD = Card("card", 8e9, 1e9, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 4e9, 5e9)
ROW_NBYTES = 10_000.0
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # it would take minutes


def model(*loads: Load) -> Model:
    return Model("model", loads, ROW_NBYTES, fixed_ram_nbytes=1e8, max_context=65536)


def dense(name: str, nbytes: float, layer: int = 0) -> Load:
    return Load(name, "gate_up", layer, nbytes, flops_per_row=4 * nbytes)


def crossing_s(card: Card = CARD) -> float:
    return card.crossing_s + ROW_NBYTES / card.h2d_bytes_per_s


def seconds(loads: tuple[Load, ...], sites: tuple[Site, ...], machine: Hardware = MACHINE) -> float:
    return play(model(*loads), Plan("", sites), Work(), machine).step_s


ON_CARD, ON_CPU = Site(1.0, 0.0), Site(0.0, 1.0)


def test_the_processor_reads_at_its_rate_and_pays_each_launch() -> None:
    loads = (dense("a", 400e6), dense("b", 800e6))
    assert seconds(loads, (ON_CPU, ON_CPU)) == pytest.approx(1200e6 / 40e9 + 2 * 2e-6)


def test_a_card_pays_one_crossing_in_and_none_between_neighbours() -> None:
    loads = (dense("a", 400e6), dense("b", 800e6))
    on_card_s = 1200e6 / 400e9 + 2 * 5e-6
    # The tokens start at the processor; where they are chosen does not matter: no way back.
    assert seconds(loads, (ON_CARD, ON_CARD)) == pytest.approx(crossing_s() + on_card_s)


def test_the_way_back_goes_at_its_own_rate() -> None:
    slow_back = replace(MACHINE, cards=(replace(CARD, d2h_bytes_per_s=1e8),))
    loads = (dense("a", 400e6), dense("b", 400e6))
    more_s = seconds(loads, (ON_CARD, ON_CPU), slow_back) - seconds(loads, (ON_CARD, ON_CPU))
    assert more_s == pytest.approx(ROW_NBYTES / 1e8 - ROW_NBYTES / 20e9)


def test_each_change_of_side_is_a_crossing() -> None:
    loads = (dense("a", 400e6), dense("b", 400e6), dense("c", 400e6))
    sides_s = 2 * (400e6 / 400e9 + 5e-6) + 400e6 / 40e9 + 2e-6
    expected = crossing_s() + sides_s + 2 * crossing_s()
    assert seconds(loads, (ON_CARD, ON_CPU, ON_CARD)) == pytest.approx(expected)


def test_a_group_divided_between_both_sides_takes_as_long_as_the_longer() -> None:
    loads = (dense("a", 440e6),)
    parted = seconds(loads, (Site(10 / 11, 1 / 11),))
    cpu_s = 40e6 / 40e9 + 2e-6
    card_s = crossing_s() + 400e6 / 400e9 + 5e-6
    # It ends on the card, where only the processor's part has to come.
    assert parted == pytest.approx(max(cpu_s + crossing_s(), card_s))


def test_what_is_brought_ahead_bounds_the_step_by_the_link() -> None:
    loads = tuple(dense(str(index), 200e6, index) for index in range(8))
    brought = tuple(Site(0.0, 1.0, 1.0) for _ in loads)
    link_s = 8 * 200e6 / 20e9
    assert seconds(loads, brought) == pytest.approx(link_s, rel=0.05)
    assert seconds(loads, brought) >= link_s


def test_a_ring_that_is_full_holds_the_link_up() -> None:
    """Between two things to bring a long time passes: only the ring's bytes come meanwhile."""
    long, short = dense("long", 8e9), dense("short", 1e9, 1)
    step_s = seconds((long, short), (ON_CPU, Site(0.0, 1.0, 1.0)))
    rest_s = (1e9 - STAGE_NBYTES) / 20e9
    assert step_s >= 8e9 / 40e9 + rest_s * 0.9


def test_what_is_on_disk_is_read_every_step() -> None:
    loads = tuple(dense(str(index), 500e6, index) for index in range(4))
    assert seconds(loads, tuple(Site(0.0, 0.5) for _ in loads)) == pytest.approx(
        4 * 250e6 / 5e9, rel=0.1
    )


def test_what_the_disk_writes_to_ram_takes_the_port_once() -> None:
    """2 GB/s of it: of a port of 45 the cores are left all that they can do, of one of 40, 38."""
    loads = tuple(dense(str(index), 4e9, index) for index in range(4))
    partly_read = tuple(Site(0.0, 0.95) for _ in loads)
    port = replace(MACHINE, dram_bytes_per_s=45e9)
    assert seconds(loads, partly_read, port) == pytest.approx(16e9 / 40e9, rel=0.01)
    narrow = replace(MACHINE, dram_bytes_per_s=40e9)
    # 0.8 GB in the 0.4 s of the first look
    assert seconds(loads, partly_read, narrow) == pytest.approx(16e9 / 38e9, rel=0.01)


def test_cores_share_the_dram_port_with_what_is_brought() -> None:
    """60 GB/s for both: with 20 taken by the link there are 40 left; of a port of 45, 25."""
    loads = tuple(dense(str(index), 4e8 if index % 2 else 2e8, index) for index in range(20))
    sites = tuple(ON_CPU if index % 2 else Site(0.0, 1.0, 1.0) for index in range(20))
    narrow = replace(MACHINE, dram_bytes_per_s=45e9)
    card_s = 10 * (2e8 / 400e9 + 5e-6 + 2 * crossing_s())
    assert seconds(loads, sites) == pytest.approx(4e9 / 40e9 + card_s, rel=0.01)
    # 2 GB in the 0.107 s of the first look: 18.7 GB/s, of which cores lose 13.7
    assert seconds(loads, sites, narrow) == pytest.approx(4e9 / 26.3e9 + card_s, rel=0.02)


def test_experts_of_one_row_take_the_mean_of_the_longer_branch() -> None:
    """Against dice: 4 experts of 16, each on the card in 5 of 10 cases."""
    experts = Load("e", "experts", 0, 20e6, 4 * 4 * 20e6, experts=16, top_k=4)
    question = Question(model(experts), MACHINE, hit_rate=lambda part: min(1.0, 2 * part))
    step_s = question.times(Plan("", (Site(0.25, 0.75),))).step_s
    random = Random(0)
    total = 0.0
    for _ in range(20_000):
        hits = sum(random.random() < 0.5 for _ in range(4))
        card_s = crossing_s() + 5e-6 + hits * 20e6 / 400e9 + crossing_s() if hits else 0.0
        cpu_s = (4 - hits) * 20e6 / 40e9 + 2e-6 if hits < 4 else 0.0
        total += max(card_s, cpu_s)
    assert step_s == pytest.approx(total / 20_000, rel=0.05)


def test_most_rows_of_a_chunk_choose_every_expert() -> None:
    experts = Load("e", "experts", 0, 20e6, 4 * 4 * 20e6, experts=16, top_k=4)
    chunk = Work("prefill", rows=512)
    question = Question(model(experts), MACHINE, chunk, hit_rate=lambda part: 1.0)
    step_s = question.times(Plan("", (Site(0.0, 1.0, brought_prefill=1.0),))).step_s
    assert step_s == pytest.approx(16 * 20e6 / 20e9, rel=0.35)  # all of them come over the link


def test_two_cards_divide_a_group_and_pay_the_way_between_them() -> None:
    two = replace(MACHINE, cards=(CARD, CARD))
    loads = (dense("a", 800e6), dense("b", 800e6))
    both = Site(1.0, 0.0, 0.0, (0.5, 0.5))
    alone = Site(1.0, 0.0, 0.0, (1.0, 0.0))
    each_s = 400e6 / 400e9 + 5e-6
    expected = crossing_s() + each_s + 2 * crossing_s() + each_s + crossing_s()
    assert seconds(loads, (both, both), two) == pytest.approx(expected, rel=1e-6)
    assert seconds(loads, (both, both), two) < seconds(loads, (alone, alone), two)


def test_demand_counts_keys_and_values_where_they_are() -> None:
    attn = Load("0.attn", "attn", 0, 0.0, 100.0, kv_nbytes_per_token=1000.0)
    whole = model(attn, dense("0.gate_up", 1e9))
    work = Work(max_context=10_000, sequences=2)
    both = demand(whole, Plan("", (Site(0.25, 0.75), Site(0.5, 0.5, 0.5))), work, (CARD,))
    assert both.vram[0] == pytest.approx(0.25 * 2e7 + 0.5e9 + STAGE_NBYTES)
    assert both.ram == pytest.approx(1e8 + 0.75 * 2e7 + 0.5e9)


def test_what_is_read_ahead_has_room_in_ram() -> None:
    whole = model(dense("a", 1e9))
    assert demand(whole, Plan("", (Site(0.0, 0.6),)), Work(), ()).ram == pytest.approx(
        1e8 + 0.6e9 + DISK_RING_NBYTES
    )
    small = replace(MACHINE, cards=(), ram_nbytes=4e9 + 1e8 + 0.9e9)
    plan = search(Question(whole, small)).plan
    assert plan.sites[0].ram == pytest.approx(0.9 - DISK_RING_NBYTES / 1e9)


def test_taken_memory_is_not_there_to_plan_with() -> None:
    whole = model(dense("a", 6.5e9))
    plan = Plan("", (ON_CARD,))
    assert fits(whole, plan, Work(), MACHINE)
    assert not fits(whole, plan, Work(), MACHINE, Conditions(vram_taken_nbytes=1e9))


def test_a_context_that_fits_nowhere_is_said() -> None:
    attn = Load("0.attn", "attn", 0, 0.0, 100.0, kv_nbytes_per_token=1e6)
    question = Question(model(attn, dense("a", 1e9)), MACHINE, Work(max_context=100_000))
    with pytest.raises(TooLarge, match="100000 tokens"):
        search(question)


def test_layers_go_to_the_fastest_card_first_and_then_to_the_next() -> None:
    slow = replace(CARD, name="slow", vram_bytes_per_s=200e9)
    two = replace(MACHINE, cards=(slow, CARD))
    loads = tuple(dense(f"{layer}.gate_up", 2e9, layer) for layer in range(6))
    plan = layer_split(Question(model(*loads), two), 6)
    assert plan is not None
    assert [site.over for site in plan.sites] == [(0.0, 1.0)] * 3 + [(1.0, 0.0)] * 3


def test_rows_between_cards_are_tuned_by_hand_too() -> None:
    two = replace(MACHINE, cards=(CARD, replace(CARD, vram_bytes_per_s=200e9)))
    loads = tuple(dense(f"{layer}.gate_up", 1e9, layer) for layer in range(4))
    hand = by_hand(Question(model(*loads), two))
    assert {site.over for site in hand["row-split"].plan.sites} == {(2 / 3, 1 / 3)}
    # 4 GB at 600 GB/s; one card after the other takes longer.
    assert hand["row-split"].times.step_s == pytest.approx(4e9 / 600e9, rel=0.1)
    assert hand["row-split"].times.step_s < hand["layer-split"].times.step_s
    assert "row-split" not in by_hand(Question(model(*loads), MACHINE))


def test_cpu_moe_leaves_only_experts() -> None:
    experts = tuple(
        Load(f"{layer}.experts", "experts", layer, 1e7, 1e7, experts=16, top_k=2)
        for layer in range(3)
    )
    plan = cpu_moe(Question(model(dense("0.gate_up", 1e8), *experts), MACHINE), 2)
    assert plan is not None
    assert [site.vram for site in plan.sites] == [1.0, 0.0, 0.0, 1.0]


def test_the_head_is_asked_for_the_last_row_of_a_prompt() -> None:
    head = Load("lm_head", "lm_head", None, 4e8, flops_per_row=16e8)
    whole = model(dense("a", 4e8), head)
    step_s = play(whole, Plan("", (ON_CPU, ON_CPU)), Work("prefill", rows=512), MACHINE).step_s
    assert step_s == pytest.approx(512 * 16e8 / 1e12 + 4e8 / 40e9, rel=1e-3)


# -- bounds


def test_no_plan_beats_the_bound_by_what_it_gives_the_processor() -> None:
    """Of a prompt, experts have fewer operations per byte than the rest: they suit the cores."""
    loads: list[Load] = []
    for layer in range(40):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(Load(f"{layer}.experts", "experts", layer, 1e7, 8e7, experts=16, top_k=2))
    card = replace(CARD, vram_nbytes=1e9 + 2e9 + STAGE_NBYTES, flops=200e12)
    machine = replace(MACHINE, cards=(card,), cpu_flops=6e12)
    question = Question(model(*loads), machine, Work("prefill", rows=512))
    plan = Plan("", (ON_CARD, Site(0.0, 1.0, brought_prefill=0.54)) * 40)
    assert question.fits(plan)
    bound = hybrid_bounds(question)
    assert bound.resource_s <= bound.path_s <= question.times(plan).step_s


def test_a_card_need_not_hold_all_that_fits_it() -> None:
    """One no faster than the cores: half and half is best, though all of it would fit."""
    machine = replace(MACHINE, cards=(replace(CARD, vram_bytes_per_s=40e9),))
    question = Question(model(dense("a", 4e9)), machine)
    plan = Plan("", (Site(0.5, 0.5),))
    assert hybrid_bounds(question).path_s <= question.times(plan).step_s


def test_what_the_disk_brings_takes_the_dram_port_twice_and_no_more() -> None:
    """Written and read: 4 GB in RAM and 4 on disk are 12 GB through a port of 12 GB/s."""
    machine = replace(
        MACHINE,
        cards=(),
        ram_nbytes=4e9 + 1e8 + 4e9,
        dram_bytes_per_s=12e9,
        disk_bytes_per_s=50e9,
    )
    question = Question(model(dense("a", 8e9)), machine)
    assert hybrid_bounds(question).resource_s == pytest.approx(1.0)


def test_what_layouts_by_hand_leave_in_ram_is_brought_for_prompts() -> None:
    loads: list[Load] = []
    for layer in range(16):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(Load(f"{layer}.experts", "experts", layer, 5e7, 4e8, experts=16, top_k=2))
    prompt = Question(model(*loads), MACHINE, Work("prefill", rows=512))
    found = by_hand(prompt)["cpu-moe"]
    assert found.plan.name.endswith(", streamed")
    # Experts that are not on the card come over the link: the cores would take ten times as long.
    off = sum(
        load.nbytes * 16 * (1 - site.vram)
        for load, site in zip(loads, found.plan.sites, strict=True)
    )
    assert off / 20e9 <= found.times.step_s < 1.3 * off / 20e9
    assert not by_hand(replace(prompt, work=Work()))["cpu-moe"].plan.name.endswith("streamed")


# -- the search


def instance(seed: int, layers: int) -> Question:
    """A model of a few uneven layers on a machine of its own."""
    random = Random(seed)
    loads: list[Load] = []
    for layer in range(layers):
        scale = random.choice((1, 2))
        for kind, nbytes in (("qkv", 60e6), ("attn", 0.0), ("o", 40e6), ("gate_up", 200e6)):
            size = nbytes * scale
            kv = random.choice((2e4, 8e4)) if kind == "attn" else 0.0
            flops = 16384.0 if kind == "attn" else 4 * size
            loads.append(Load(f"{layer}.{kind}", kind, layer, size, flops, kv))  # type: ignore[arg-type]
    loads.append(Load("lm_head", "lm_head", None, 150e6, 600e6))
    link = random.choice((6e9, 12e9, 25e9))
    cpu = random.choice((20e9, 40e9, 60e9))
    whole = model(*loads)
    card = replace(
        CARD,
        vram_nbytes=1e9 + STAGE_NBYTES + whole.nbytes * random.uniform(0.1, 0.9),
        h2d_bytes_per_s=link,
        crossing_s=random.choice((5e-6, 20e-6, 200e-6)),
    )
    port = cpu * random.choice((1.1, 1.6))
    machine = replace(MACHINE, cards=(card,), cpu_bytes_per_s=cpu, dram_bytes_per_s=port)
    context = random.choice((128, 4096))
    return Question(whole, machine, Work(context=context, max_context=4096))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_close_to_the_best_of_all_whole_placements(seed: int) -> None:
    """Exact on nine loads: every one on the card, in RAM, or brought."""
    question = instance(seed, layers=2)
    found = search(question).times.step_s
    ways = []
    for load in question.model.loads:
        ways.append(
            ((0.0, 0.0), (1.0, 0.0))
            if load.kind == "attn"
            else ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        )
    best = float("inf")
    nowhere = Spread.nowhere(question.model, 1)
    for choice in itertools.product(*ways):
        spread = Spread([vram for vram, _ in choice], nowhere.over)
        plan = settle(question, "", spread, {"decode": [brought for _, brought in choice]})
        if plan is None:
            continue
        if fits(question.model, plan, question.work, question.machine):
            best = min(best, question.times(plan).step_s)
    assert found <= best * 1.03


@pytest.mark.parametrize("seed", range(6))
def test_annealing_from_the_plan_finds_little(seed: int) -> None:
    question = instance(seed, layers=3)
    answer = search(question)
    assert answer.times.step_s <= annealed(question, answer, 1500) * 1.03


def annealed(question: Question, start: Answer, tries: int) -> float:
    """Seconds of the best plan found by random changes that may first make it worse."""
    random = Random(1)
    spread = Spread.of(start.plan)
    brought = [site.brought for site in start.plan.sites]
    now = best = start.times.step_s
    loads = question.model.loads
    for turn in range(tries):
        vram, moved = list(spread.vram), list(brought)
        for _ in range(random.choice((1, 2, 3))):
            index = random.randrange(len(loads))
            if loads[index].kind == "attn":
                vram[index] = random.choice((0.0, 1.0))
            elif random.random() < 0.6:
                vram[index] = random.choice((0.0, 1.0, random.random()))
            else:
                moved[index] = random.choice((0.0, 1.0, random.random()))
        changed = Spread(vram, spread.over)
        plan = settle(question, "", changed, {"decode": moved})
        if plan is None or not fits(question.model, plan, question.work, question.machine):
            continue
        step_s = question.times(plan).step_s
        if step_s < now * (1 + 0.02 * random.random() * (1 - turn / tries)):
            spread, brought, now = changed, moved, step_s
            best = min(best, step_s)
    return best


machines = st.builds(
    lambda rates, vram, ram, crossing: replace(
        MACHINE,
        cards=tuple(
            replace(CARD, vram_nbytes=1e9 + vram, vram_bytes_per_s=rate, crossing_s=crossing)
            for rate in rates
        ),
        ram_nbytes=4e9 + 3e8 + ram,
    ),
    st.lists(st.sampled_from([200e9, 400e9, 900e9]), max_size=3),
    st.floats(0, 3e9),
    st.floats(0, 4e9),
    st.sampled_from([1e-6, 20e-6, 200e-6]),
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    loads: list[Load] = []
    has_experts = draw(st.booleans())
    for layer in range(draw(st.integers(1, 4))):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(
            Load(f"{layer}.attn", "attn", layer, 0.0, 1e4, draw(st.sampled_from([1e3, 2e4])))
        )
        if has_experts:
            loads.append(Load(f"{layer}.router", "router", layer, 1e6, 2e6))
            loads.append(Load(f"{layer}.experts", "experts", layer, 1e7, 8e7, experts=16, top_k=2))
        else:
            loads.append(Load(f"{layer}.gate_up", "gate_up", layer, draw(st.floats(1e7, 8e8)), 1e9))
    loads.append(Load("lm_head", "lm_head", None, 1e8, 4e8))
    return model(*loads)


works = st.sampled_from(
    [Work(), Work(context=4096), Work(rows=4, sequences=4), Work("prefill", rows=512, context=256)]
)
states = st.sampled_from(
    [CALM, Conditions(cpu=0.4), Conditions(link=0.3, gpu=0.5), Conditions(vram_taken_nbytes=1e9)]
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=NO_SHRINKING,
)
@given(whole=models(), machine=machines, work=works, state=states)
def test_any_plan_found_fits_and_beats_hands_but_no_bound(
    whole: Model, machine: Hardware, work: Work, state: Conditions
) -> None:
    question = Question(whole, machine, work, state, hit_rate=lambda part: part**0.5)
    hand = by_hand(question)
    assume(hand)
    answer = search(question, rivals=hand)
    assert fits(whole, answer.plan, work, machine, state)
    for rival in hand.values():
        assert answer.times.step_s <= rival.times.step_s
    bound = hybrid_bounds(question)
    # The part of keys and values on cards is tried on a grid: a bound to a part in a thousand.
    assert bound.resource_s <= bound.path_s <= answer.times.step_s * 1.001
    for name, busy_s in answer.times.busy_s.items():
        assert busy_s <= answer.times.step_s * (1 + 1e-6), name
    for site in answer.plan.sites:
        assert sum(site.over) == pytest.approx(1.0)
        assert -1e-9 <= site.vram <= 1 + 1e-9
        assert site.vram + site.ram <= 1 + 1e-9


def test_a_bound_lets_cores_take_what_is_cheap_to_compute() -> None:
    """Few operations for many bytes on one side, the opposite on the other: no average of them."""
    slow = replace(MACHINE, cpu_flops=3e11, cards=(replace(CARD, vram_nbytes=2e9),))
    wide = Load("0.qkv", "qkv", 0, 1e9, 1e9)
    deep = Load("0.gate_up", "gate_up", 0, 2e8, 4e10)
    question = Question(model(wide, deep), slow)
    assert hybrid_bounds(question).path_s <= search(question).times.step_s * 1.001


def test_more_mechanisms_never_make_a_plan_slower() -> None:
    question = instance(3, layers=3)
    hand = by_hand(question)
    plain = min(answer.times.step_s for answer in hand.values())
    for name in MECHANISMS:
        assert search(question, rivals=hand, using=(name,)).times.step_s <= plain


def test_a_step_that_is_not_worth_playing_to_its_end_is_never_taken_for_a_faster_one() -> None:
    for seed in range(4):
        question = instance(seed, layers=3)
        for answer in (*by_hand(question).values(), search(question)):
            step_s = question.times(answer.plan).step_s
            for worth_s in (step_s * 0.3, step_s * 0.8, step_s * 0.999):
                assert question.times(answer.plan, worth_s).step_s >= worth_s
            assert question.times(answer.plan, step_s * 1.001).step_s == step_s


def test_the_knapsack_is_exact_where_sizes_are_even() -> None:
    """Without crossings worth mention it keeps what saves most per byte."""
    card = replace(CARD, vram_nbytes=1e9 + 3.02e9, crossing_s=1e-9)
    loads = tuple(
        Load(f"{layer}.gate_up", "gate_up", layer, 1e9, flops)
        for layer, flops in enumerate((1e9, 9e11, 1e9, 9e11, 9e11, 1e9))
    )
    plan = knapsack(Question(model(*loads), replace(MACHINE, cards=(card,))))
    assert plan is not None
    assert [site.vram for site in plan.sites] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_crossings_keep_the_knapsack_together() -> None:
    card = replace(CARD, vram_nbytes=1e9 + 2.01e9, crossing_s=5e-3)
    loads = tuple(dense(f"{layer}.gate_up", 1e9, layer) for layer in range(4))
    plan = knapsack(Question(model(*loads), replace(MACHINE, cards=(card,))))
    assert plan is not None
    assert [site.vram for site in plan.sites] in ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0])


# -- scenarios


def test_changing_is_never_worse_than_keeping_and_moves_cost() -> None:
    question = instance(4, layers=3)
    scenarios = (
        Scenario("calm", (Stretch(100), Stretch(100))),
        Scenario("load", (Stretch(400), Stretch(400, Conditions(cpu=0.2)))),
        Scenario("short", (Stretch(400), Stretch(1, Conditions(vram_taken_nbytes=2e8)))),
    )
    calm, load, short = evaluate(question.model, question.machine, scenarios)
    assert calm.gain == pytest.approx(0.0)
    assert calm.moved_nbytes == 0.0
    for outcome in (load, short):
        assert outcome.changing_s <= outcome.kept_s <= outcome.first_s * (1 + 1e-9)
    assert load.first_s > load.changing_s
