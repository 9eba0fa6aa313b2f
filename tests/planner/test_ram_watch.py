"""Budgets that nobody named give way when RAM is short, and grow back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import CardPlanner
from shadowlane.planner.cost import CostModel
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.ram_watch import CALM_S, WAIT_S, RamRead, RamWatch
from shadowlane.planner.search import later_slots, place
from shadowlane.planner.shadow import PlannerState
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

MIB = 1 << 20
GIB = 1 << 30
CATALOG = llama_catalog(layers=6, hidden=1024, inner=2048)


def test_a_budget_shrinks_when_little_is_free_and_grows_back_when_there_is_room() -> None:
    watch = RamWatch(16 * GIB, 2 * GIB)
    assert watch.read(RamRead(0.0, 1 * GIB), 12 * GIB) is None, "half of the headroom is no need"
    why = watch.read(RamRead(2.0, 300 * MIB), 12 * GIB)
    assert why is not None
    assert why.startswith("RAM is short (300.0 MiB free): the budget is now ")
    assert watch.budget == 11 * GIB, "below what the plan takes, by a sixteenth of all"
    assert watch.read(RamRead(4.0, 300 * MIB), 12 * GIB) is None, "the change has to show first"
    assert watch.read(RamRead(3.0 + WAIT_S, 100 * MIB), 11 * GIB) is not None
    assert watch.budget == 10 * GIB
    for at_s in (20.0, 40.0):
        assert watch.read(RamRead(at_s, 1 * GIB), 10 * GIB) is None, "what shrank would not fit"
    assert watch.read(RamRead(50.0, 4 * GIB), 10 * GIB) is None, "for how long nobody knows"
    why = watch.read(RamRead(50.0 + CALM_S, 4 * GIB), 10 * GIB)
    assert why is not None
    assert "free again" in why
    assert watch.budget == 13 * GIB, "one is left free"
    assert watch.read(RamRead(120.0, 20 * GIB), 13 * GIB) is None
    assert watch.read(RamRead(120.0 + CALM_S, 20 * GIB), 13 * GIB) is not None
    assert watch.budget == 16 * GIB, "never above what it was"
    assert watch.read(RamRead(300.0, 20 * GIB), 14 * GIB) is None


def test_tasks_that_wait_for_memory_count_whatever_is_free() -> None:
    watch = RamWatch(16 * GIB, 2 * GIB)
    why = watch.read(RamRead(0.0, 3 * GIB, stalled=25.0), 16 * GIB)
    assert why is not None
    assert "tasks waited for memory 25 % of the time" in why
    assert watch.budget == 15 * GIB
    assert watch.read(RamRead(50.0, 8 * GIB, stalled=2.0), 15 * GIB) is None
    assert watch.read(RamRead(90.0, 8 * GIB, stalled=2.0), 15 * GIB) is None, "not calm yet"


def test_what_cannot_be_planned_is_not_asked_for_again_before_there_is_room() -> None:
    watch = RamWatch(4 * GIB, 2 * GIB)
    assert watch.read(RamRead(0.0, 0), 1 * GIB) is not None
    watch.refuse()
    assert watch.budget == 4 * GIB
    assert watch.taken == 0
    assert watch.read(RamRead(60.0, 0), 1 * GIB) is None


@given(
    st.integers(64 * MIB, 64 * GIB),
    st.lists(st.tuples(st.integers(0, 70 * GIB), st.floats(0, 100)), max_size=60),
)
def test_a_budget_stays_between_a_page_and_what_was_asked(
    asked: int, found: list[tuple[int, float]]
) -> None:
    watch = RamWatch(asked, 2 * GIB)
    for number, (free, stalled) in enumerate(found):
        before = watch.budget
        why = watch.read(RamRead(7.0 * number, free, stalled), before)
        assert 4096 <= watch.budget <= asked
        assert (why is None) == (watch.budget == before)


# -- planners


def acknowledge(
    planner: PlannerState | CardPlanner, commands: list[ev.Command], step: int
) -> Placement | None:
    """The newest placement that was asked for, made the one in force."""
    newest: Placement | None = None
    todo = list(commands)
    while todo:
        command = todo.pop(0)
        if isinstance(command, ev.PublishPlacement):
            newest = command.placement
            lanes = [each.name for each in newest.lanes]
            lanes += [card.link for card in newest.cards]
            for lane in [*lanes, DISK_LANE]:
                todo += planner.handle(ev.PlacementAcknowledged(lane, newest.placement_id))
        elif isinstance(command, ev.AnnouncePlacement):
            todo += planner.handle(ev.PlacementAnnounced(command.placement_id, step))
    if newest is not None:
        busy = dict.fromkeys([each.name for each in newest.lanes], 0.001) | {DISK_LANE: 0.0}
        busy |= {card.link: 0.0 for card in newest.cards}
        retired = ev.StepRetired(step, newest.placement_id, "decode", 1, 10, 0.002, busy)
        acknowledge(planner, planner.handle(retired), step + 1)
    return newest


def looked(at_s: float, free: int) -> ev.RamLooked:
    return ev.RamLooked(RamRead(at_s, free))


def test_the_plan_streams_what_the_budget_gave_away_and_keeps_it_again() -> None:
    weights = sum(block.held_nbytes for block in CATALOG.blocks)
    request = Request(ram=2 * weights, context=128, headroom=32 * MIB)
    planner = PlannerState(CATALOG, request)
    first = acknowledge(planner, planner.handle(ev.EngineStarted()), 1)
    assert first is not None
    assert not first.sweep
    commands = planner.handle(looked(0.0, MIB))
    assert isinstance(commands[0], ev.PublishPlacement)
    assert commands[0].reason.startswith("RAM is short")
    second = acknowledge(planner, commands, 10)
    assert second is not None
    assert second.sweep
    assert second.num_slots == later_slots(CATALOG.slot_nbytes)
    assert second.total_nbytes <= first.total_nbytes - 15 * MIB, "so that half a headroom is free"
    for at_s in (20.0, 21.0 + CALM_S):
        commands = planner.handle(looked(at_s, 4 * weights))
    third = acknowledge(planner, commands, 20)
    assert third is not None
    assert not third.sweep
    assert planner.request.ram == request.ram


def test_a_budget_whose_plan_the_engine_refuses_is_taken_back() -> None:
    weights = sum(block.held_nbytes for block in CATALOG.blocks)
    planner = PlannerState(CATALOG, Request(ram=2 * weights, context=128, headroom=32 * MIB))
    acknowledge(planner, planner.handle(ev.EngineStarted()), 1)
    (command,) = planner.handle(looked(0.0, MIB))
    assert isinstance(command, ev.PublishPlacement)
    planner.handle(ev.PlacementRefused(command.placement.placement_id, "another ring"))
    assert planner.request.ram == 2 * weights
    assert planner.handle(looked(60.0, MIB)) == [], "nor is a smaller one tried"


def test_a_named_budget_stays() -> None:
    planner = PlannerState(CATALOG, Request(ram=1 << 30, context=128))
    acknowledge(planner, planner.handle(ev.EngineStarted()), 1)
    assert planner.handle(looked(0.0, 0)) == []


def test_what_cannot_shrink_says_so_once() -> None:
    catalog = mixture_catalog()
    planner = PlannerState(catalog, Request(ram=1 << 30, context=64, headroom=GIB))
    acknowledge(planner, planner.handle(ev.EngineStarted()), 1)
    (note,) = planner.handle(looked(0.0, MIB))
    assert isinstance(note, ev.Note)
    assert "the budget cannot change: a running engine keeps its experts" in note.text
    assert planner.handle(looked(60.0, MIB)) == []
    assert planner.request.ram == 1 << 30


def test_a_plan_over_cards_gives_way_too() -> None:
    catalog = llama_catalog(layers=16, hidden=2048, inner=8192)
    weights = sum(block.held_nbytes for block in catalog.blocks)
    card = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
    request = Request(
        ram=2 * weights,
        lanes=(LaneSpec("cpu:0", 1), LaneSpec("gpu:0", 1)),
        context=128,
        machine=Hardware("a machine", (card,), 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9),
        cards=(weights // 3,),
        headroom=GIB,
    )
    planner = CardPlanner(catalog, request)
    first = acknowledge(planner, planner.handle(ev.EngineStarted()), 1)
    assert first is not None
    commands = planner.handle(looked(0.0, MIB))
    assert isinstance(commands[0], ev.Note)
    assert commands[0].text.startswith("RAM is short")
    second = acknowledge(planner, commands, 10)
    assert second is not None
    assert second.total_nbytes <= 0.76 * first.total_nbytes
    for at_s in (20.0, 21.0 + CALM_S):
        commands = planner.handle(looked(at_s, 4 * weights))
    third = acknowledge(planner, commands, 20)
    assert third is not None
    assert third.total_nbytes >= 0.95 * first.total_nbytes
    by_hand = CardPlanner(catalog, replace(request, strategy="cpu"))
    acknowledge(by_hand, by_hand.handle(ev.EngineStarted()), 1)
    assert by_hand.handle(looked(0.0, MIB)) == [], "layouts by hand stay as they are"


def test_a_ring_that_comes_later_is_one_that_place_can_choose() -> None:
    slots = later_slots(CATALOG.slot_nbytes)
    weights = sum(block.held_nbytes for block in CATALOG.blocks)
    request = Request(ram=weights, context=128, num_slots=slots)
    assert place(CATALOG, request, CostModel(None)).num_slots in (0, slots)
