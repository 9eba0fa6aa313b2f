"""What plans over cards cost: sides, crossings, links, the disk, the DRAM port."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from shadowlane.planner.hardware import CALM, Card, Hardware
from shadowlane.planner.hybrid import (
    STAGE_NBYTES,
    Load,
    Plan,
    Site,
    Work,
)
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_play import play, rates_of
from shadowlane.planner.hybrid_price import price_of
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, ROW_NBYTES, dense
from shadowlane.planner.hybrid_synthetic import small_model as model
from shadowlane.planner.hybrid_synthetic import uneven as instance


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


@pytest.mark.parametrize("disk", [5e9, 40e9])
def test_what_is_read_is_brought_piece_by_piece_behind_the_disk(disk: float) -> None:
    """Groups far larger than any ring: the slower of disk and link, not one after the other."""
    machine = replace(MACHINE, disk_bytes_per_s=disk, dram_bytes_per_s=200e9)
    loads = tuple(dense(f"{layer}", 8e9, layer) for layer in range(4))
    brought = (Site(0.0, 0.0, brought=1.0),) * 4
    slower_s = 32e9 / min(disk, CARD.h2d_bytes_per_s)
    took_s = seconds(loads, brought, machine)
    assert slower_s <= took_s <= slower_s * 1.1


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
    assert seconds(loads, sites, narrow) == pytest.approx(4e9 / 30.4e9 + card_s, rel=0.01)


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


def test_the_head_is_asked_for_the_last_row_of_a_prompt() -> None:
    head = Load("lm_head", "lm_head", None, 4e8, flops_per_row=16e8)
    whole = model(dense("a", 4e8), head)
    step_s = play(whole, Plan("", (ON_CPU, ON_CPU)), Work("prefill", rows=512), MACHINE).step_s
    assert step_s == pytest.approx(512 * 16e8 / 1e12 + 4e8 / 40e9, rel=1e-3)


def test_a_step_that_is_not_worth_playing_to_its_end_is_never_taken_for_a_faster_one() -> None:
    for seed in range(4):
        question = instance(seed, layers=3)
        for answer in (*by_hand(question).values(), search(question)):
            step_s = question.times(answer.plan).step_s
            for worth_s in (step_s * 0.3, step_s * 0.8, step_s * 0.999):
                assert question.times(answer.plan, worth_s).step_s >= worth_s
            assert question.times(answer.plan, step_s * 1.001).step_s == step_s


def test_like_layers_that_are_not_played_take_as_long_as_if_they_were() -> None:
    """Once with layers that are alike, once with layers that differ by nothing worth mention."""
    for vram, ram, brought in ((0.3, 0.7, 0.4), (0.0, 0.6, 0.0), (0.5, 0.3, 0.7), (0.2, 0.8, 0.0)):
        for size in (20e6, 90e6, 400e6):
            layers = [dense(f"{layer}.gate_up", size, layer) for layer in range(40)]
            unlike = [replace(load, nbytes=size * (1 + 1e-13 * i)) for i, load in enumerate(layers)]
            sites = (Site(vram, ram, brought),) * 25 + (Site(0.0, 1.0, 1.0),) * 15
            assert seconds(tuple(layers), sites) == pytest.approx(
                seconds(tuple(unlike), sites), rel=1e-9
            )


def test_the_processor_waits_for_what_it_reads_while_other_parts_are_brought() -> None:
    """Nothing is read ahead here: what comes of the first group, and then the second."""
    machine = replace(MACHINE, ring_nbytes=0.0, disk_bytes_per_s=1e9)
    loads = (dense("a", 400e6), dense("b", 400e6))
    read_s = 0.25 * 400e6 / 1e9
    for brought in (0.0, 0.5):
        site = Site(0.0, 0.75, brought)
        assert seconds(loads, (site, ON_CPU), machine) > read_s + 400e6 / 40e9


def test_a_card_waits_for_the_disk_only_for_what_comes_off_it() -> None:
    """Of what is brought RAM has all, or half; the processor has no part of its own to wait for."""
    machine = replace(MACHINE, disk_bytes_per_s=0.5e9)
    half = price_of(dense("a", 400e6), Site(0.0, 0.5, 0.5), Work(), rates_of(machine, CALM), _hit)
    whole = price_of(dense("a", 400e6), Site(0.0, 0.5, 1.0), Work(), rates_of(machine, CALM), _hit)
    assert (half.is_read_first, whole.is_read_first) == (False, True)
    assert half.read_nbytes == whole.read_nbytes == 200e6


def _hit(part: float) -> float:
    return part
