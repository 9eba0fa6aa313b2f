"""Layouts by hand: what is said of one that does not fit, and of layers that are not there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shadowlane.planner.hand_placement import EVERY_LAYER, layers_note, plan_by_hand
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Work, model_of
from shadowlane.planner.hybrid_hand import by_hand, num_layers
from shadowlane.planner.hybrid_layouts import Question, TooLarge
from shadowlane.planner.placement import show_nbytes
from shadowlane.planner.synthetic import mixture_catalog

FAST = Card("fast", 64e6, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
MODEL = model_of(mixture_catalog(layers=3), "a mixture")


def question(vram: float) -> Question:
    card = replace(FAST, vram_nbytes=vram)
    machine = Hardware("machine", (card,), 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)
    return Question(MODEL, machine, Work(context=64, max_context=128))


def test_a_layout_that_does_not_fit_says_what_it_wants_and_what_there_is() -> None:
    """In figures that add up, with the number of layers that would do."""
    room = round(0.5 * sum(MODEL.wholes))
    asked = question(room)
    with pytest.raises(TooLarge) as told:
        plan_by_hand(asked, "cpu-moe", 0)
    text = str(told.value)
    assert f"there are {show_nbytes(room)} of" in text
    found = re.search(r"take cpu-moe (\d+), a smaller ctx_size or more gpu_memory or RAM$", text)
    assert found is not None, text
    nearest = int(found[1])
    plan_by_hand(asked, "cpu-moe", nearest)
    with pytest.raises(TooLarge):
        plan_by_hand(asked, "cpu-moe", nearest - 1)
    tiny = replace(asked, machine=replace(asked.machine, ram_nbytes=1e5, cards=()))
    with pytest.raises(TooLarge, match=r"^cpu must fit .*it wants in RAM keys .*, short by .*"):
        plan_by_hand(tiny, "cpu")
    with pytest.raises(TooLarge, match=r"^attention-gpu must fit .*it wants on cards weights"):
        plan_by_hand(question(1e5), "attention-gpu")


def test_more_layers_than_there_are_mean_all_and_are_told() -> None:
    model, asked = MODEL, question(1e9)
    layers = num_layers(model) - 1
    assert layers_note(model, "layer-split", layers + 1) == ()
    (note,) = layers_note(model, "layer-split", 200)
    assert f"gpu_layers 200 is more than the {layers + 1} there are, {layers} layers and" in note
    assert layers_note(model, "cpu-moe", layers) == ()
    (note,) = layers_note(model, "cpu-moe", layers + 1)
    assert f"n_cpu_moe {layers + 1} is more than the {layers} layers" in note
    assert layers_note(model, "cpu-moe", EVERY_LAYER) == (), "all were asked for"
    assert layers_note(model, "cpu", None) == ()
    for number in (layers + 1, EVERY_LAYER):
        assert plan_by_hand(asked, "cpu-moe", number).name == f"cpu-moe {layers}"
    assert f"cpu-moe {layers + 1}" not in {each.plan.name for each in by_hand(asked).values()}


# -- what is refused
