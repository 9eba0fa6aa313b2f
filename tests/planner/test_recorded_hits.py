"""Recorded routing in two halves: what one promises and what the other brings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shadowlane.planner.hit_rate import upper_hull
from shadowlane.planner.hybrid import Load, Model
from shadowlane.planner.recorded_hits import RecordedHits
from shadowlane.planner.routing import NOBODY, Trace, synthesize


def mixture(layers: int = 2, experts: int = 10, top_k: int = 2) -> Model:
    loads = tuple(
        Load(f"{layer}.experts", "experts", layer, 1e6, 1e6, experts=experts, top_k=top_k)
        for layer in range(1, 1 + layers)  # a dense layer comes first
    )
    return Model("mixture", (Load("0.qkv", "qkv", 0, 1e6, 1e6), *loads), 1e3, 0.0, 4096)


def trace_of(choices: np.ndarray) -> Trace:
    """choices: [tokens, 2 layers, 2] of 10 experts."""
    trace = synthesize(num_tokens=len(choices), num_layers=2, num_experts=10, top_k=2)
    return replace(trace, choices=choices.astype(np.int16))


def halves(first: tuple[int, int], second: tuple[int, int]) -> Trace:
    return trace_of(
        np.concatenate([np.full((64, 2, 2), first), np.full((64, 2, 2), second)]),
    )


def test_the_first_half_says_who_is_hot_and_the_second_what_is_chosen() -> None:
    same = RecordedHits(halves((3, 7), (3, 7)), mixture())
    assert same.num_tokens == 64
    assert same.hits(1, 0.2, 0) == 1.0
    assert same.hits(2, 0.1, 5) == 0.5  # one of the two
    other = RecordedHits(halves((3, 7), (4, 8)), mixture())
    assert other.hits(1, 0.2, 0) == 0.0
    assert other.hits(1, 1.0, 0) == 1.0
    # What was promised stays as wrong as it is: nobody looked at the second half.
    assert other.promised(0.2) == same.promised(0.2) > 0.9


def test_tokens_come_round_again() -> None:
    first = np.full((64, 2, 2), (0, 1))
    second = np.stack([np.full((2, 2), (0, 1) if token % 2 else (8, 9)) for token in range(64)])
    found = RecordedHits(trace_of(np.concatenate([first, second])), mixture())
    rates = [found.hits(1, 0.2, step) for step in range(130)]
    assert rates[:4] == [0.0, 1.0, 0.0, 1.0]
    assert rates[64:130] == rates[:66]


def test_what_is_met_is_on_average_what_tokens_hit_and_never_bends_down() -> None:
    trace = synthesize(num_tokens=400, num_layers=2, num_experts=10, top_k=2)
    found = RecordedHits(trace, mixture())
    parts = [step / 20 for step in range(21)]
    for part in (0.1, 0.3, 0.7, 1.0):
        mean = np.mean(
            [found.hits(layer, part, step) for layer in (1, 2) for step in range(found.num_tokens)]
        )
        assert found.met(part) >= mean - 1e-9
        assert found.met(part) == pytest.approx(mean, abs=0.05)
    gains = np.diff([found.met(part) for part in parts])
    assert (np.diff(gains) < 1e-9).all()
    assert found.met(0.0) == 0.0
    assert found.met(1.0) == 1.0


def test_only_decode_tokens_are_met() -> None:
    trace = halves((3, 7), (4, 8))
    is_prefill = np.zeros(128, np.bool_)
    is_prefill[100:] = True
    assert RecordedHits(replace(trace, is_prefill=is_prefill), mixture()).num_tokens == 36


def test_whoever_chose_fewer_experts_is_counted_by_those() -> None:
    choices = np.full((128, 2, 2), (3, NOBODY))
    found = RecordedHits(trace_of(choices), mixture())
    assert found.hits(1, 0.1, 0) == 1.0


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (mixture(layers=3), "routing must be of 3 layers of 10 experts"),
        (mixture(experts=12), "routing must be of 2 layers of 12 experts"),
        (Model("dense", (Load("0.qkv", "qkv", 0, 1e6, 1e6),), 1e3, 0.0, 64), "dense has none"),
    ],
)
def test_traces_of_other_shapes_are_refused(model: Model, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        RecordedHits(halves((3, 7), (3, 7)), model)


def test_a_hull_keeps_what_no_line_between_others_is_above() -> None:
    points = [(0.0, 0.0), (0.25, 0.1), (0.5, 0.6), (0.75, 0.7), (1.0, 1.0)]
    assert upper_hull(points) == [(0.0, 0.0), (0.5, 0.6), (1.0, 1.0)]
