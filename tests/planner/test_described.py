"""A machine of which there is only a file, priced without cards and with them: the same seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.described import profile_of
from shadowlane.planner.hardware import Card, Hardware, with_small_matrices
from shadowlane.planner.hybrid import Plan, Site, Work, model_of
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.search import place
from shadowlane.planner.simulate import simulate
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

CARD = Card("a card", 8e9, 1e9, 400e9, 40e12, 20e9, 20e9, 5e-6, 20e-6)
MACHINE = Hardware("a machine", (), 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 2e9)
CATALOG = llama_catalog(layers=4, hidden=1024, inner=4096, vocab=8192)
CONTEXT = 512


def decode_s(machine: Hardware, ram: int = 1 << 30, lanes: int = 1) -> float:
    """Of the best plan without cards."""
    processors = tuple(LaneSpec(f"cpu:{number}", 2) for number in range(lanes))
    cost = CostModel(profile_of(machine, CATALOG, processors))
    request = Request(ram=ram, lanes=processors, context=CONTEXT)
    placement = place(CATALOG, request, cost)
    return simulate(CATALOG, placement, cost, workload=Workload("decode", 1, CONTEXT)).step_s


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_takes_as_long_as_with_cards_that_have_nothing(lanes: int) -> None:
    model = model_of(CATALOG, "a model")
    plan = Plan("cpu", tuple(Site(0.0, 1.0) for _ in model.loads))
    question = Question(model, MACHINE, Work(context=CONTEXT, max_context=CONTEXT))
    assert decode_s(MACHINE, lanes=lanes) == pytest.approx(question.times(plan).step_s, rel=0.02)


@pytest.mark.parametrize(
    ("name", "ram"), [("cpu_bytes_per_s", 1 << 30), ("disk_bytes_per_s", 30 << 20)]
)
def test_what_the_file_says_is_what_counts(name: str, ram: int) -> None:
    half = replace(MACHINE, **{name: getattr(MACHINE, name) / 2})
    assert decode_s(half, ram) == pytest.approx(2 * decode_s(MACHINE, ram), rel=0.1)


def test_experts_are_read_as_often_as_they_are_chosen() -> None:
    catalog = mixture_catalog()
    lane = LaneSpec("cpu:0", 1)
    profile = profile_of(MACHINE, catalog, [lane])
    table = CostModel(profile).table(catalog, [lane], streaming=False)
    experts = catalog.experts
    assert experts is not None
    index = next(i for i, group in enumerate(catalog.groups) if group.kind == "experts")
    read_s = experts.top_k * experts.nbytes / MACHINE.cpu_bytes_per_s
    assert table.full_s["cpu:0"][index] == pytest.approx(read_s)
    assert "everything" not in CostModel(profile).unmeasured(catalog, [lane])


def test_a_small_matrix_reaches_half_of_a_rate() -> None:
    """Beside what each group costs anyway, on every lane."""
    nbytes = 1.5e6
    bent = with_small_matrices(replace(MACHINE, cards=(CARD,)), nbytes)
    for own_s, more_s, rate in (
        (MACHINE.cpu_launch_s, bent.cpu_launch_s, MACHINE.cpu_bytes_per_s),
        (CARD.launch_s, bent.cards[0].launch_s, CARD.vram_bytes_per_s),
    ):
        assert nbytes / (more_s - own_s + nbytes / rate) == pytest.approx(rate / 2)
    assert with_small_matrices(MACHINE, 0.0) == MACHINE
