"""Layouts that people tune by hand, as exact placements: what plans are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hybrid import Plan
from shadowlane.planner.hybrid_layouts import (
    PIPELINED,
    Question,
    Spread,
    TooLarge,
    attention_gpu,
    by_hand,
    cpu_moe,
    layer_split,
    layer_stream,
    num_layers,
    settle,
    split_moe,
)
from shadowlane.planner.placement import Placement, Request

# Those with a number of layers; of the others there is one.
OF_LAYERS: Mapping[str, Callable[[Question, int], Plan | None]] = {
    "layer-split": layer_split,
    "layer-split, KV in RAM": lambda question, layers: layer_split(question, layers, kv=False),
    PIPELINED: lambda question, layers: layer_split(question, layers, pipelined=True),
    "row-split": lambda question, layers: layer_split(question, layers, across=True),
    "layer-stream": layer_stream,
    "cpu-moe": cpu_moe,
    "cpu-moe, KV in RAM": lambda question, layers: cpu_moe(question, layers, kv=False),
    "layer-split + cpu-moe": split_moe,
}
OF_ONE: Mapping[str, Callable[[Question], Plan | None]] = {
    "cpu": lambda question: settle(
        question, "cpu", Spread.nowhere(question.model, len(question.machine.cards))
    ),
    "attention-gpu": attention_gpu,
}


def place_by_hand(
    catalog: Catalog,
    strategy: str,
    request: Request,
    question: Question,
    *,
    layers: int | None = None,
    placement_id: int = 0,
    budgets: Mapping[str, int] | None = None,
) -> Placement:
    """The layout that users of other engines would set up, with the same care for budgets as ours.

    layers: of a layout that counts them; None: as many as are best for `question`.

    Raises ValueError for what is no layout, TooLarge where it does not fit, InfeasiblePlan.
    """
    plan = plan_by_hand(question, strategy, layers)
    return place_on_cards(
        catalog, plan, request, question, placement_id=placement_id, budgets=budgets
    )


def plan_by_hand(question: Question, strategy: str, layers: int | None = None) -> Plan:
    """See `place_by_hand`."""
    if strategy not in OF_LAYERS and strategy not in OF_ONE:
        known = "; ".join((*OF_ONE, *OF_LAYERS))
        raise ValueError(f"a layout by hand must be one of {known}; got {strategy!r}")
    if (needed := _missing_for(question, strategy)) is not None:
        raise TooLarge(f"{strategy} needs {needed}")
    if layers is None:
        answer = by_hand(question).get(strategy)
        plan = None if answer is None else answer.plan
    elif strategy in OF_ONE:
        raise ValueError(f"{strategy} takes no number of layers; got {layers}")
    else:
        if layers < 0:
            raise ValueError(f"layers must be at least 0; got {layers}")
        layers = min(layers, num_layers(question.model))  # more: all, as llama.cpp has it
        plan = OF_LAYERS[strategy](question, layers)
    if plan is None:
        setting = "" if layers is None else f" {layers}"
        raise TooLarge(f"{strategy}{setting} must fit {question.machine.name}; it does not")
    return plan


def _missing_for(question: Question, strategy: str) -> str | None:
    """What a layout cannot do without and is not there; None: all is there."""
    cards = len(question.machine.cards)
    if strategy != "cpu" and not cards:
        return f"a card; {question.machine.name} has none"
    if strategy == "row-split" and cards == 1:
        return f"several cards; {question.machine.name} has 1"
    if "cpu-moe" in strategy and not any(load.experts for load in question.model.loads):
        return "a mixture of experts; this model is none"
    return None
