"""Emulated worlds: their law, their hidden figures, and the shadow in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from shadowlane.actors.emulation import WARM_LOSES, Hidden, Span, World, true_machine
from shadowlane.actors.run_report import at_hits_of
from shadowlane.planner.card_planner import first_over_cards
from shadowlane.planner.cost import CostModel
from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_moves import Migration
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_shadow import HybridShadow, MemoryTaken
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import mixture_catalog

CARD = Card("card", 4e9, 1e9, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 48e9, 64e9, 4e9, 5e9)
WORK = Work()
MODEL = Model(
    "model",
    tuple(
        Load(f"{layer}.{kind}", kind, layer, nbytes, 4 * nbytes)
        for layer in range(12)
        for kind, nbytes in (("qkv", 1e8), ("gate_up", 4e8), ("down", 2e8))
    ),
    10_000.0,
    1e8,
    65536,
)
ON_CPU = Plan("", tuple(Site(0.0, 1.0) for _ in MODEL.loads))
BROUGHT = Plan("", tuple(Site(0.0, 1.0, 0.3) for _ in MODEL.loads))


def seconds(plan: Plan, state: Conditions = CALM, hidden: Hidden | None = None) -> float:
    world = World(MODEL, MACHINE, hidden)
    world.state = state
    return mean(world.step(plan, WORK).seconds for _ in range(20))


def test_the_same_seed_is_the_same_world() -> None:
    one, other = (World(MODEL, MACHINE, Hidden.drawn(3), seed=3) for _ in range(2))
    assert [one.step(BROUGHT, WORK) for _ in range(5)] == [
        other.step(BROUGHT, WORK) for _ in range(5)
    ]
    assert Hidden.drawn(3) != Hidden.drawn(4)


def test_a_calm_world_without_secrets_is_near_what_is_predicted_and_not_the_same() -> None:
    question = Question(MODEL, MACHINE, WORK)
    for answer in by_hand(question).values():
        measured = seconds(answer.plan)
        assert measured == pytest.approx(answer.times.step_s, rel=0.15)
        assert measured != answer.times.step_s


def test_hidden_factors_are_felt() -> None:
    assert seconds(ON_CPU, hidden=Hidden(cpu=0.7)) == pytest.approx(seconds(ON_CPU) / 0.7, rel=0.05)
    assert true_machine(MACHINE, Hidden(cpu=1.3)).dram_bytes_per_s >= 40e9 * 1.3


def test_crossings_are_told_by_who_waits_for_them() -> None:
    world = World(MODEL, MACHINE, Hidden(crossing=1.5))
    true = world.machine.cards[0]
    one_s = true.crossing_s + MODEL.row_nbytes / true.h2d_bytes_per_s
    halves, on_card = (
        Plan("", tuple(Site(part, 1.0 - part) for _ in MODEL.loads)) for part in (0.5, 1.0)
    )
    for plan, lanes in ((halves, {"gpu:0"}), (on_card, {"gpu:0"}), (ON_CPU, set())):
        told = world.step(plan, Work()).crossings_s
        assert set(told) == lanes
        assert list(told.values()) == pytest.approx([one_s] * len(lanes), rel=0.1)


def test_a_neighbour_on_the_cores_takes_its_part_in_whole_pieces() -> None:
    assert seconds(ON_CPU, Conditions(cpu=0.5)) == pytest.approx(2 * seconds(ON_CPU), rel=0.1)


def test_links_take_from_what_the_cores_read() -> None:
    """48 GB/s for both: the cores' 40 beside a link of 12 become 36."""
    world = World(MODEL, MACHINE)
    step = world.step(BROUGHT, WORK)
    alone = 0.7 * 8.4e9 / 40e9
    assert step.busy_s["cpu:0"] > alone * 1.05


def test_a_move_takes_what_links_have_left_and_never_starves() -> None:
    world = World(MODEL, MACHINE)
    idle = world.step(ON_CPU, WORK, Migration((1e9,), (0.0,), 0.0, 0.1))
    assert idle.moved_nbytes == pytest.approx(1e9)
    all_brought = Plan("", tuple(Site(0.0, 1.0, 1.0) for _ in MODEL.loads))
    busy = world.step(all_brought, WORK, Migration((9e9,), (0.0,), 0.0, 1.0))
    assert 0.0 < busy.moved_nbytes < 9e9
    assert busy.seconds > world.step(all_brought, WORK).seconds * 1.1


def test_the_slowest_lane_of_a_move_holds_the_others_up() -> None:
    world = World(MODEL, MACHINE)
    step = world.step(ON_CPU, WORK, Migration((1e9,), (1e9,), 4e9, 0.8))
    # 0.21 s of a step at 5 GB/s from the disk, and a quarter of a step more
    assert step.moved_nbytes == pytest.approx(6e9 * step.seconds * 5e9 / 4e9, rel=0.02)


def test_a_step_waits_for_what_has_to_leave_at_once() -> None:
    world = World(MODEL, MACHINE)
    world.state = Conditions(link=0.5)
    waited = world.wait_for(Migration((0.0,), (1.2e9,), 0.0, 0.0))
    assert waited == pytest.approx(0.2, rel=0.1)
    assert world.now_s == waited


@pytest.mark.parametrize("seed", range(3))
def test_the_shadow_recovers_what_busy_cores_cost(seed: int) -> None:
    """In worlds whose rates it does not know, whose law it does not know."""
    hidden = Hidden.drawn(seed, 0.2)
    question = Question(MODEL, MACHINE, WORK)
    kept = search(question).plan
    taken = Conditions(cpu=0.3)

    def run(shadow: HybridShadow | None) -> tuple[float, float]:
        world = World(MODEL, MACHINE, hidden, seed=seed)
        paces = []
        for state in (CALM, taken):
            world.state = state
            steps = []
            for _ in range(120):
                plan = kept if shadow is None else shadow.plan
                moving = None if shadow is None else shadow.moving
                step = world.step(plan, WORK, moving)
                steps.append(step.seconds)
                if shadow is not None:
                    shadow.handle(step)
            paces.append(mean(steps[60:]))
        return paces[0], paces[1]

    calm_kept, taken_kept = run(None)
    calm, disturbed = run(HybridShadow(MODEL, MACHINE, WORK, plan=kept))
    assert calm <= calm_kept * 1.02
    assert disturbed < taken_kept * 0.9


def test_the_shadow_gives_memory_back_while_running() -> None:
    world = World(MODEL, MACHINE)
    shadow = HybridShadow(MODEL, MACHINE, WORK)
    for _ in range(20):
        step = world.step(shadow.plan, WORK, shadow.moving)
        shadow.handle(step)
    shadow.handle(MemoryTaken(1.5e9))
    world.state = replace(CALM, vram_taken_nbytes=1.5e9)
    for _ in range(20):
        assert shadow.question.fits(shadow.plan)
        step = world.step(shadow.plan, WORK, shadow.moving)
        shadow.handle(step)


def test_spans_are_what_lanes_were_busy_with() -> None:
    """And asking for them changes nothing."""
    half = Plan("", tuple(Site(0.3, 0.5, 0.4) for _ in MODEL.loads))  # the rest is on disk
    spans: list[Span] = []
    step = World(MODEL, MACHINE, seed=1).step(half, WORK, spans=spans)
    assert step == World(MODEL, MACHINE, seed=1).step(half, WORK)
    busy = dict.fromkeys(step.busy_s, 0.0)
    for span in spans:
        busy[span.lane] += span.end_s - span.start_s
        assert 0.0 <= span.start_s < span.end_s <= step.seconds * (1 + 1e-9)
    assert busy == pytest.approx(step.busy_s)
    assert min(busy.values()) > 0.0
    for lane in busy:
        its = [span for span in spans if span.lane == lane]
        for before, after in pairwise(its):
            assert after.start_s >= before.end_s - 1e-9  # one thing at a time
    assert {span.group for span in spans} == {load.name for load in MODEL.loads}


def test_recorded_choices_are_met_one_after_the_other() -> None:
    class Alternating:
        def hits(self, layer: int, part: float, step: int) -> float:
            return float(step % 2) if part else 0.0

    experts = tuple(
        Load(f"{layer}.experts", "experts", layer, 1e8, 4e8, experts=8, top_k=2)
        for layer in range(4)
    )
    mixture = Model("mixture", experts, 10_000.0, 1e8, 4096)
    plan = Plan("", tuple(Site(0.5, 0.5) for _ in experts))
    world = World(mixture, MACHINE, routes=Alternating())
    missed, hit, again = (world.step(plan, WORK).busy_s for _ in range(3))
    assert missed["gpu:0"] == hit["cpu:0"] == 0.0
    assert hit["gpu:0"] > 0.0
    assert again["cpu:0"] == pytest.approx(missed["cpu:0"], rel=0.1)


def test_cards_that_have_worked_for_long_are_slower() -> None:
    card = Plan("", tuple(Site(1.0, 0.0) for _ in MODEL.loads))
    cold, warm = (World(MODEL, MACHINE, is_warm=is_warm) for is_warm in (False, True))
    ratio = warm.step(card, WORK).seconds / cold.step(card, WORK).seconds
    assert ratio == pytest.approx(1 / (1 - WARM_LOSES), rel=0.01)
    assert warm.card_rate == 1 - WARM_LOSES


def test_what_hits_would_have_made_of_a_prediction_is_not_told_with_cards() -> None:
    """A profile is of the processor that is here: its seconds are not those of cards."""
    catalog = mixture_catalog(num_experts=32, expert_inner=4096, hidden=2048, layers=4)
    lanes = (LaneSpec("cpu:0", 4), LaneSpec("gpu:0", 1))
    asked = Request(ram=4 << 30, lanes=lanes, context=1024, machine=MACHINE, cards=(1 << 30,))
    placement = first_over_cards(catalog, asked)
    assert at_hits_of(catalog, placement, None) is None
    asked = Request(ram=4 << 30, lanes=lanes[:1], context=1024)
    placement = place(catalog, asked, CostModel(None))
    assert at_hits_of(catalog, placement, None) == pytest.approx(
        placement.predicted_step_s, rel=0.01
    )


def test_what_others_add_up_comes_to_them_first() -> None:
    """All experts are on the card: it costs two crossings more where the processor adds them up."""
    loads: list[Load] = []
    for layer in range(4):
        loads.append(Load(f"{layer}.router", "router", layer, 1e6, 1e6, is_undivided=True))
        loads.append(
            Load(f"{layer}.experts", "experts", layer, 1e6, 1e6, experts=8, top_k=2, is_joined=True)
        )
        loads.append(Load(f"{layer}.down", "down", layer, 1e6, 1e6))
    here = Model("model", tuple(loads), 10_000.0, 0.0, 4096)
    free = replace(here, loads=tuple(replace(load, is_joined=False) for load in loads))
    site, away = Site(1.0, 0.0), Site(0.0, 1.0)
    machine = replace(MACHINE, cards=(replace(MACHINE.cards[0], crossing_s=1e-3),))

    def step_s(model: Model, router: Site) -> float:
        return World(model, machine).step(Plan("", (router, site, site) * 4), Work()).seconds

    assert step_s(here, site) == pytest.approx(step_s(free, site), rel=0.02)
    assert step_s(here, away) - step_s(free, away) == pytest.approx(2 * 4 * 1e-3, rel=0.2)
