"""Layouts that people tune by hand, as exact placements: what plans are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hybrid import Model, Plan
from shadowlane.planner.hybrid_hand import (
    PIPELINED,
    attention_gpu,
    by_hand,
    cpu_moe,
    layer_split,
    layer_stream,
    num_layers,
    split_moe,
)
from shadowlane.planner.hybrid_layouts import Question, Spread, TooLarge, settle
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.shortage import what_a_layout_lacks

EVERY_LAYER = 10**6  # what stands for all of them

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
        layers = min(layers, most_layers(question.model, strategy))  # more: all, as llama.cpp's
        plan = OF_LAYERS[strategy](question, layers)
    if plan is None:
        raise TooLarge(_too_large(question, strategy, layers))
    return plan


def most_layers(model: Model, strategy: str) -> int:
    """The largest number that a layout takes: the head is one more, but has no experts."""
    return num_layers(model) - strategy.startswith("cpu-moe")


def layers_note(model: Model, strategy: str, layers: int | None) -> tuple[str, ...]:
    """What is to be said of a number of layers that the model does not have."""
    if (
        strategy not in OF_LAYERS
        or layers is None
        or layers <= (most := most_layers(model, strategy))
    ):
        return ()
    if strategy.startswith("cpu-moe"):
        if layers == EVERY_LAYER:
            return ()
        return (f"n_cpu_moe {layers} is more than the {most} layers of the model: all of them",)
    return (
        f"gpu_layers {layers} is more than the {most} there are, {most - 1} layers and the head: "
        "all of them",
    )


def _too_large(question: Question, strategy: str, layers: int | None) -> str:
    """How much is wanted, how much there is, and what to change."""
    setting = "" if layers is None else f" {layers}"
    hints = ["a smaller ctx_size", "more gpu_memory or RAM"]
    if strategy in OF_ONE:
        return _does_not_fit(question, strategy, OF_ONE[strategy], hints)
    numbers = range(most_layers(question.model, strategy) + 1)
    fitting = [n for n in numbers if layers is not None and OF_LAYERS[strategy](question, n)]
    if fitting:
        nearest = min(fitting, key=lambda n: abs(n - (layers or 0)))
        hints.insert(0, f"{strategy} {nearest}")
    # without a number, what wants the least of cards
    least = numbers[-1] if strategy.startswith("cpu-moe") else 0
    wanted = least if layers is None else layers

    def of_layers(roomy: Question) -> Plan | None:
        return OF_LAYERS[strategy](roomy, wanted)

    return _does_not_fit(question, f"{strategy}{setting}", of_layers, hints)


def _does_not_fit(
    question: Question, name: str, made: Callable[[Question], Plan | None], hints: list[str]
) -> str:
    lacks = what_a_layout_lacks(question, made)
    *others, last = hints
    return (
        f"{name} must fit {question.machine.name}; it wants {lacks}: "
        f"take {', '.join(others)} or {last}"
    )


def _missing_for(question: Question, strategy: str) -> str | None:
    """What a layout cannot do without and is not there; None: all is there."""
    cards = len(question.machine.cards)
    if strategy != "cpu" and not cards:
        return f"a card; {question.machine.name} has none"
    if strategy in ("row-split", PIPELINED) and cards == 1:
        return f"several cards; {question.machine.name} has 1"
    if "cpu-moe" in strategy and not any(load.experts for load in question.model.loads):
        return "a mixture of experts; this model is none"
    return None
