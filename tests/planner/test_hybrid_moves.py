"""What has to be moved from one plan over cards to the next: which bytes, over which lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_moves import copied_part, moves
from shadowlane.planner.scenarios import Scenario, Stretch, evaluate

CARD = Card("card", 8e9, 1e9, 400e9, 40e12, 20e9, 10e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 4e9, 0.0, 5e9)
FIXED = 1e9
MODEL = Model(
    "model",
    (
        Load("a", "gate_up", 0, 4e9, 1e9),
        Load("b", "attn", 0, 0.0, 1e3, kv_nbytes_per_token=1e6),
    ),
    1e4,
    FIXED,
    65536,
)
QUESTION = Question(MODEL, MACHINE, Work(context=100, max_context=1000))
FULL = replace(QUESTION, machine=replace(MACHINE, ram_nbytes=FIXED + 1e9))  # RAM has room for a KV


def plan(weights: Site, kv: float = 0.0) -> Plan:
    return Plan("", (weights, Site(kv, 1.0 - kv, over=weights.over)))


def test_what_goes_to_a_card_comes_out_of_ram() -> None:
    found = moves(QUESTION, plan(Site(0.25, 0.75)), plan(Site(0.5, 0.5)))
    assert found.lanes() == {"h2d:0": 1e9, "d2h:0": 0.0, "disk:0": 0.0}
    assert found.seconds == pytest.approx(1e9 / 20e9)


def test_what_ram_does_not_hold_is_read_for_the_card() -> None:
    found = moves(QUESTION, plan(Site(0.25, 0.25)), plan(Site(0.75, 0.25)))
    # A quarter out of RAM, a quarter off the disk, and a quarter off the disk into RAM.
    assert found.lanes() == {"h2d:0": 2e9, "d2h:0": 0.0, "disk:0": 2e9}
    assert found.seconds == pytest.approx(2e9 / 5e9)
    assert found.nbytes == 4e9


def test_what_leaves_a_card_comes_back_where_ram_has_no_copy() -> None:
    """A gigabyte: over the link, which is faster than the disk, unless it is not."""
    old, new = plan(Site(0.5, 0.5)), plan(Site(0.25, 0.75))
    assert copied_part(FULL, old) == 0.0
    assert moves(FULL, old, new).lanes() == {"h2d:0": 0.0, "d2h:0": 1e9, "disk:0": 0.0}
    slow = replace(FULL, state=Conditions(link=0.4))
    assert moves(slow, old, new).lanes() == {"h2d:0": 0.0, "d2h:0": 0.0, "disk:0": 1e9}
    # What is on disk alone from then on is just dropped.
    assert moves(FULL, old, plan(Site(0.25, 0.5))).nbytes == 0.0


def test_ram_with_room_holds_copies() -> None:
    old, new = plan(Site(0.5, 0.5)), plan(Site(0.25, 0.75))
    half = replace(FULL, machine=replace(MACHINE, ram_nbytes=FIXED + 1e9 + 2e9 + 1e9))
    assert copied_part(half, old) == pytest.approx(0.5)
    assert moves(half, old, new).lanes() == pytest.approx(
        {"h2d:0": 0.0, "d2h:0": 0.5e9, "disk:0": 0.0}
    )
    roomy = replace(FULL, machine=replace(MACHINE, ram_nbytes=64e9))
    assert moves(roomy, old, new).nbytes == 0.0
    taken = replace(roomy, state=replace(CALM, ram_taken_nbytes=60e9))
    assert moves(taken, old, new).d2h_nbytes == (1e9,)


def test_keys_and_values_cross_either_way() -> None:
    """There is one copy of them: 100 MB by now, whatever there is room for."""
    off, on = plan(Site(0.5, 0.5), kv=0.0), plan(Site(0.5, 0.5), kv=1.0)
    assert moves(QUESTION, off, on).lanes() == {"h2d:0": 1e8, "d2h:0": 0.0, "disk:0": 0.0}
    assert moves(QUESTION, on, off).lanes() == {"h2d:0": 0.0, "d2h:0": 1e8, "disk:0": 0.0}


def test_from_card_to_card_goes_through_ram() -> None:
    two = replace(FULL, machine=replace(FULL.machine, cards=(CARD, CARD)))
    old, new = plan(Site(1.0, 0.0, over=(1.0, 0.0))), plan(Site(1.0, 0.0, over=(0.75, 0.25)))
    assert moves(two, old, new).lanes() == {
        "h2d:0": 0.0,
        "d2h:0": 1e9,
        "h2d:1": 1e9,
        "d2h:1": 0.0,
        "disk:0": 0.0,
    }


@st.composite
def sites(draw: st.DrawFn) -> Site:
    vram = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    ram = (1.0 - vram) * draw(st.sampled_from([0.0, 0.4, 1.0]))
    return Site(vram, ram, over=draw(st.sampled_from([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])))


@given(old=sites(), new=sites())
def test_all_that_is_new_anywhere_is_carried_there(old: Site, new: Site) -> None:
    """No byte appears from nowhere, and none is carried that was there."""
    two = replace(FULL, machine=replace(FULL.machine, cards=(CARD, CARD)))
    found = moves(two, plan(old), plan(new))
    nbytes = MODEL.loads[0].nbytes
    for card in range(2):
        more = new.vram * new.over[card] - old.vram * old.over[card]
        assert found.h2d_nbytes[card] == pytest.approx(max(0.0, more) * nbytes)
        assert found.d2h_nbytes[card] <= max(0.0, -more) * nbytes + 1.0
    # What memory holds afterwards was in it before or is read.
    grown = (new.vram + new.ram) - (old.vram + old.ram)
    assert found.disk_nbytes >= grown * nbytes - 1.0
    assert found.disk_nbytes <= (new.vram + new.ram) * nbytes + 1.0
    if old == new:
        assert found.nbytes == 0.0


def test_a_scenario_waits_for_what_has_to_leave() -> None:
    """Of 6 GB on the card 2 have to go at once, and RAM has no copy of them."""
    loads = tuple(Load(f"{i}.gate_up", "gate_up", i, 1e9, 4e9) for i in range(10))
    model = Model("model", loads, 1e4, 1e8, 65536)
    taken = Scenario("", (Stretch(100), Stretch(100, Conditions(vram_taken_nbytes=2e9))))
    times = {}
    for name, ram in (("small", 6.1e9), ("roomy", 64e9)):
        (outcome,) = evaluate(model, replace(MACHINE, ram_nbytes=ram), [taken])
        times[name] = outcome
    assert times["small"].moved_nbytes >= 2e9 * 0.9
    assert times["small"].changing_s > times["roomy"].changing_s
