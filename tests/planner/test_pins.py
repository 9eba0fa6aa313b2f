"""Where groups are pinned: what may be asked for, and that every plan keeps to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import CardPlanner, check_over_cards, first_over_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Work, model_of
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.pins import catalog_homes, check_pins_fit, homes_of, pinned
from shadowlane.planner.placement import InfeasiblePlan, LaneSpec, Placement, Request
from shadowlane.planner.program import build_programs
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.planner.validate import validate

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CARD = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
LLAMA = llama_catalog(layers=4)
MIXTURE = mixture_catalog(layers=3)
GROUPS = [(group.name, group.kind) for group in LLAMA.groups]
STRATEGIES = ("auto", "layer-split", "layer-stream", "attention-gpu", "cpu")


def machine(cards: int) -> Hardware:
    return Hardware("a machine", (CARD,) * cards, 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9)


def request(
    catalog: Catalog, pins: dict[str, str], *, cards: int = 1, part: float = 0.5
) -> Request:
    weights = sum(block.held_nbytes for block in catalog.blocks)
    if catalog.experts is not None:
        weights += catalog.experts.total * catalog.experts.held_nbytes
    names = ("cpu:0", *(f"gpu:{card}" for card in range(cards)))
    return Request(
        ram=4 << 30,
        lanes=tuple(LaneSpec(name, 1) for name in names),
        context=256,
        machine=machine(cards),
        cards=(round(part * weights),) * cards,
        pins=pins,
    )


def check(catalog: Catalog, placement: Placement, pins: dict[str, str]) -> None:
    """Each pinned group lives and is computed at home."""
    for phase in ("decode", "prefill"):
        programs = build_programs(catalog, placement, phase)
        validate(catalog, placement, programs, phase)
    parts = {part.lane: part for part in placement.cards}
    layers = [group.name for group in catalog.sparse_groups]
    homes = catalog_homes(catalog, pins, len(placement.cards))
    for name, home in homes.items():
        group = catalog.group(name)
        lanes = {
            share.lane
            for phase in ("decode", "prefill")
            for share in placement.shares_of(phase)[name]  # type: ignore[arg-type]
        }
        if group.kind == "experts":
            on_cards = {each.lane: each.experts_of(layers.index(name)) for each in placement.cards}
            counts = {lane: len(experts) for lane, experts in on_cards.items() if experts}
            per_layer = catalog.experts.per_layer if catalog.experts else 0
            assert counts == ({} if home == "cpu" else {home: per_layer})
        elif home in parts:
            assert lanes == {home}
            assert set(group.blocks) <= set(parts[home].resident)
        elif home == "cpu":
            assert lanes == {"cpu:0"}
            assert all(placement.resident[index] for index in group.blocks)
        else:
            assert not any(placement.resident[index] for index in group.blocks)
            assert not set(group.blocks) & {i for part in parts.values() for i in part.resident}


@st.composite
def pinnings(draw: st.DrawFn) -> tuple[dict[str, str], int]:
    """Homes of some kinds of groups and of single ones that do not contradict."""
    cards = draw(st.integers(1, 2))
    homes = ["cpu", "disk", *(f"gpu:{card}" for card in range(cards))]
    of_kinds = {
        rf"\.{kind}$": draw(st.sampled_from([*homes, None])) for kind in ("qkv", "down", "o")
    }
    of_one = {
        "^2.gate_up": draw(st.sampled_from([*homes, None])),
        "^(0|3).attn": draw(st.sampled_from([homes[0], *homes[2:], None])),
        "lm_head": draw(st.sampled_from([*homes, None])),
    }
    return {pattern: home for pattern, home in (of_kinds | of_one).items() if home}, cards


@few
@given(pinnings(), st.sampled_from(STRATEGIES), st.sampled_from([0.7, 1.5]))
def test_every_plan_keeps_to_pins(
    pinning: tuple[dict[str, str], int], strategy: str, part: float
) -> None:
    pins, cards = pinning
    asked = replace(request(LLAMA, pins, cards=cards, part=part), strategy=strategy)
    placement = first_over_cards(LLAMA, asked)
    check(LLAMA, placement, pins)
    assert all(part.total_nbytes <= part.budget for part in placement.cards)
    assert placement.total_nbytes <= asked.ram


@pytest.mark.parametrize(
    "pins",
    [
        {"experts": "cpu"},
        {"1.experts": "gpu:0"},
        {"^0": "gpu:0", "^[12].*experts": "cpu"},
        {"attn|qkv": "gpu:0", "experts": "cpu"},
    ],
)
def test_experts_of_a_layer_are_pinned_together(pins: dict[str, str]) -> None:
    check(MIXTURE, first_over_cards(MIXTURE, request(MIXTURE, pins)), pins)


ROUTERS: list[dict[str, str]] = [
    {"router": "gpu:0"},
    {"^1.router": "gpu:1", "experts": "cpu", "^1.(qkv|o)$": "cpu"},
    {"^0": "gpu:1", "^2.router": "cpu"},
]


@pytest.mark.parametrize("strategy", ["auto", "cpu", "cpu-moe", "layer-split"])
@pytest.mark.parametrize("pins", ROUTERS)
def test_routers_are_pinned_to_cards(pins: dict[str, str], strategy: str) -> None:
    asked = replace(request(MIXTURE, pins, cards=2, part=1.5), strategy=strategy)
    placement = first_over_cards(MIXTURE, asked)
    check(MIXTURE, placement, pins)
    on_cards = {name for name in placement.shares if name.endswith("router")} & {
        name for name, home in catalog_homes(MIXTURE, pins, 2).items() if home.startswith("gpu:")
    }
    assert on_cards, "or the test shows nothing"


@pytest.mark.parametrize(("strategy", "layers"), [("layer-split", 3), ("cpu-moe", 1)])
def test_pins_come_before_a_number_of_layers(strategy: str, layers: int) -> None:
    pins = {"^2": "gpu:0", "^0.down": "cpu"}
    asked = request(MIXTURE, pins, part=1.5)
    asked = replace(asked, strategy=strategy, strategy_layers=layers)
    placement = first_over_cards(MIXTURE, asked)
    check(MIXTURE, placement, pins)
    lanes = {share.lane for share in placement.shares["1.down"]}
    assert lanes == {"gpu:0"}, "what is not pinned is where the layout has it"


def test_layouts_by_hand_and_ours_are_compared_under_the_same_pins() -> None:
    homes = {"0.qkv": "gpu:0", "1.gate_up": "cpu", "2.down": "disk"}
    model = pinned(model_of(LLAMA, "synthetic"), homes)
    question = Question(model, machine(1), Work(context=64, max_context=128))
    plans = [answer.plan for answer in by_hand(question).values()] + [search(question).plan]
    for plan in plans:
        sites = {load.name: site for load, site in zip(model.loads, plan.sites, strict=True)}
        assert (sites["0.qkv"].vram, sites["1.gate_up"].ram) == (1.0, 1.0), plan.name
        assert (sites["2.down"].vram, sites["2.down"].ram) == (0.0, 0.0), plan.name
        assert question.fits(plan)


def test_pins_stay_while_memory_is_taken_and_what_is_left_beside_them_moves() -> None:
    pins = {"^0": "gpu:0", "^1.down": "cpu"}
    asked = request(LLAMA, pins, part=0.8)
    planner = CardPlanner(LLAMA, asked)
    placement = _obeyed(planner, planner.handle(ev.EngineStarted()))
    assert placement is not None
    taken = round(0.4 * asked.cards[0])
    smaller = _obeyed(planner, _first_step(planner, placement, ev.MemoryLeft(taken)))
    assert smaller is not None
    check(LLAMA, smaller, pins)
    assert smaller.cards[0].total_nbytes <= asked.cards[0] - taken
    commands = planner.handle(ev.MemoryLeft(asked.cards[0]))
    assert [type(command) for command in commands] == [ev.Note], "pins cannot be met any more"
    assert "the plan stays as it is" in commands[0].text  # type: ignore[union-attr]


def _first_step(planner: CardPlanner, placement: Placement, event: ev.Event) -> list[ev.Command]:
    busy = {"cpu:0": 0.001, "gpu:0": 0.001, "h2d:0": 0.0, "disk:0": 0.0}
    step = ev.StepRetired(1, placement.placement_id, "decode", 1, 100, 0.002, busy)
    planner.handle(step)
    return planner.handle(event)


def _obeyed(planner: CardPlanner, commands: list[ev.Command]) -> Placement | None:
    """The newest placement, when all that was asked for is done at once."""
    newest: Placement | None = None
    todo = list(commands)
    while todo:
        command = todo.pop(0)
        if isinstance(command, ev.PublishPlacement):
            newest = command.placement
            links = [card.link for card in newest.cards]
            for lane in [*(each.name for each in newest.lanes), *links, "disk:0"]:
                todo += planner.handle(ev.PlacementAcknowledged(lane, newest.placement_id))
        elif isinstance(command, ev.AnnouncePlacement):
            todo += planner.handle(ev.PlacementAnnounced(command.placement_id, 2))
    return newest


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"nowhere": "cpu"}, r"'nowhere' must match a group \(0.qkv, .*lm_head\); it matches none"),
        ({"[": "cpu"}, "must be a regular expression; got '\\['"),
        ({"down": "gpu:1"}, r"'down' must name a card in use \(gpu:0\); got gpu:1"),
        ({"attn": "disk"}, "disk may hold: keys and values are in memory"),
        ({"embed": "gpu:0"}, "gpu:0 may hold: processors compute the embedding"),
        (
            {"down": "cpu", "^1": "gpu:0"},
            "pins must agree: 'down' wants 1.down on cpu, '\\^1' on gpu:0",
        ),
    ],
)
def test_pins_that_cannot_be_are_refused_by_name(pins: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        homes_of(GROUPS, pins, 1)


def test_one_pattern_may_match_more_than_its_home_holds() -> None:
    homes = homes_of(GROUPS, {".": "gpu:0"}, 1)
    assert set(homes) == {name for name, kind in GROUPS if kind != "embed"}
    assert "0.attn" not in homes_of(GROUPS, {"^0": "disk"}, 1)


@few
@given(pinnings(), st.sampled_from([0.02, 0.1, 0.7]), st.sampled_from([3 << 20, 1 << 30]))
def test_what_can_be_planned_is_told_without_a_search(
    pinning: tuple[dict[str, str], int], part: float, ram: int
) -> None:
    pins, cards = pinning
    asked = replace(request(LLAMA, pins, cards=cards, part=part), ram=ram)
    told = []
    for ask in (first_over_cards, check_over_cards):
        try:
            ask(LLAMA, asked)
            told.append("")
        except ValueError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_pins_that_do_not_fit_are_named_with_the_sum() -> None:
    with pytest.raises(ValueError, match=r"pins must fit gpu:0: weights .* short by"):
        first_over_cards(LLAMA, request(LLAMA, {".": "gpu:0"}))
    small = replace(request(LLAMA, {"down|gate_up": "cpu"}), ram=2 << 20)
    with pytest.raises(InfeasiblePlan, match=r"the pins do not fit: .*pinned weights"):
        first_over_cards(LLAMA, small)


def test_what_fits_to_the_byte_is_not_refused() -> None:
    model = pinned(model_of(LLAMA, "synthetic"), {"0.qkv": "gpu:0"})
    nbytes = next(load.whole_nbytes for load in model.loads if load.name == "0.qkv")
    exact = replace(machine(1), cards=(replace(CARD, vram_nbytes=nbytes),))
    check_pins_fit(model, Work(), exact)
    less = replace(machine(1), cards=(replace(CARD, vram_nbytes=nbytes - 1),))
    with pytest.raises(ValueError, match="short by 1 B"):
        check_pins_fit(model, Work(), less)


def test_the_dense_parts_of_a_mixture_cannot_be_pinned_to_disk() -> None:
    with pytest.raises(ValueError, match=r"pin 'qkv' must name .*: dense parts of a mixture"):
        first_over_cards(MIXTURE, request(MIXTURE, {"qkv": "disk"}))
