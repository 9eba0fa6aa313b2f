"""What no plan over cards can beat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.hybrid import (
    STAGE_NBYTES,
    Load,
    Plan,
    Site,
    Work,
)
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, dense
from shadowlane.planner.hybrid_synthetic import small_model as model


def test_no_plan_beats_the_bound_by_what_it_gives_the_processor() -> None:
    """Of a prompt, experts have fewer operations per byte than the rest: they suit the cores."""
    loads: list[Load] = []
    for layer in range(40):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(Load(f"{layer}.experts", "experts", layer, 1e7, 8e7, experts=16, top_k=2))
    card = replace(CARD, vram_nbytes=1e9 + 2e9 + STAGE_NBYTES, flops=200e12)
    machine = replace(MACHINE, cards=(card,), cpu_flops=6e12)
    question = Question(model(*loads), machine, Work("prefill", rows=512))
    plan = Plan("", (Site(1.0, 0.0), Site(0.0, 1.0, brought_prefill=0.54)) * 40)
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


def test_a_bound_lets_cores_take_what_is_cheap_to_compute() -> None:
    """Few operations for many bytes on one side, the opposite on the other: no average of them."""
    slow = replace(MACHINE, cpu_flops=3e11, cards=(replace(CARD, vram_nbytes=2e9),))
    wide = Load("0.qkv", "qkv", 0, 1e9, 1e9)
    deep = Load("0.gate_up", "gate_up", 0, 2e8, 4e10)
    question = Question(model(wide, deep), slow)
    assert hybrid_bounds(question).path_s <= search(question).times.step_s * 1.001


def test_a_bound_gives_cores_no_more_than_there_is_of_what_suits_them() -> None:
    """Of a prompt the head is asked for one row; all else has hundreds of operations per byte."""
    loads = [Load(f"{layer}.qkv", "qkv", layer, 1e9, 4e9) for layer in range(8)]
    loads.append(Load("lm_head", "lm_head", None, 1e8, 4e8))
    slow = replace(MACHINE, cpu_flops=1e11, cards=(replace(CARD, vram_nbytes=2e9),))
    question = Question(model(*loads), slow, Work("prefill", rows=512))
    on_cards = 2e9 - CARD.reserved_nbytes
    seconds = hybrid_bounds(question).resource_s
    # What is not on the card and the cores have no time for comes over the link.
    by_cores = slow.cpu_flops * seconds / (512 * 4)
    assert seconds >= (8.1e9 - on_cards - 1e8 - by_cores) / CARD.h2d_bytes_per_s * 0.999
    assert seconds <= search(question).times.step_s


def test_a_machine_without_cards_has_bounds_whatever_the_sizes_add_up_to() -> None:
    loads = [Load(f"{layer}.qkv", "qkv", layer, 1e9 / (3 + layer), 4e9 / 7) for layer in range(9)]
    question = Question(model(*loads), replace(MACHINE, cards=()), Work("prefill", rows=64))
    bound = hybrid_bounds(question)
    assert 0.0 < bound.resource_s <= bound.path_s <= search(question).times.step_s
