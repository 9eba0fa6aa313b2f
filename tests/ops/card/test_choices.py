"""What cards choose, in torch's operators and in Triton's, has the bits of what processors do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from card_choices import Chosen, by_processors, by_torch, by_triton, rows_of
from card_layouts import needs_interpreter

from shadowlane.ops.card import choices
from shadowlane.ops.exponential import exponential


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(4, 2), (8, 8), (60, 4), (128, 8)])
@pytest.mark.parametrize("choose", [by_torch, pytest.param(by_triton, marks=needs_interpreter)])
def test_cards_choose_with_the_bits_of_processors(
    choose: Callable[..., Chosen], count: int, top_k: int, normalises: bool
) -> None:
    logits = rows_of(count)[:: 15 if choose is by_triton else 1]  # interpreted, row by row
    ids, weights, gates = by_processors(logits, top_k, normalises)
    found = choose(logits, top_k, normalises)
    assert np.array_equal(found[0], ids)
    assert np.array_equal(found[1].view(np.int32), weights.view(np.int32))
    assert np.array_equal(found[2].view(np.int32), gates.view(np.int32))


def test_the_exponential_is_as_good_as_a_library_s() -> None:
    values = np.concatenate([-np.logspace(-12, 1.9, 3000), [-0.0, 0.0, -79.9]])
    found = np.array([exponential(each) for each in values])
    assert np.abs(found / np.exp(values) - 1.0).max() < 1e-15
    assert exponential(-81.0) == exponential(-np.inf) == 0.0
    assert exponential(np.nan) == exponential(3.0) == 1.0
    assert np.array_equal(choices.exponential(torch.from_numpy(values)).numpy(), found)
