"""Attention over pages in Triton, interpreted, against a plain softmax over a row's tokens."""

from __future__ import annotations

import pytest
import torch
from card_layouts import needs_interpreter

pytestmark = needs_interpreter
triton_kernels = pytest.importorskip("shadowlane.ops.card.attention_triton", reason="needs triton")


# the fewer programs, the more tokens one after the other: 16 splits, and 4 of three tiles each
@pytest.mark.parametrize(("heads", "programs"), [(1, 256), (2, 32)])
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("window", [None, 9, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_row_sees_its_own_tokens(
    heads: int,
    programs: int,
    dim: int,
    window: int | None,
    has_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of three sequences, two of them of one; a first token, full pages, many splits."""
    monkeypatch.setattr(triton_kernels, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    page_tokens, grouped = 8, 3
    positions = torch.tensor([0, 7, 150, 151])
    sequences = torch.tensor([2, 0, 1, 1])
    table = torch.randperm(3 * 20, generator=generator).view(3, 20)
    every = randn(60, 2, heads + 2, page_tokens, dim)
    pages = every[:, :, 1 : 1 + heads]  # the cache holds more heads than are asked for
    queries = randn(4, heads, grouped, dim)
    sinks = randn(heads, grouped) if has_sinks else None
    found = triton_kernels.attend_pages(
        queries, pages, table, sequences, positions, sinks, window, dim**-0.5
    )
    for row in range(4):
        length = int(positions[row]) + 1
        start = max(0, length - window) if window else 0
        mine = pages[table[sequences[row]]].permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = mine[:, :, start:length]
        scores = torch.einsum("hgd,htd->hgt", queries[row], keys) * dim**-0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, :, None]), dim=-1)
        shares = scores.softmax(-1)[..., : length - start]
        expected = torch.einsum("hgt,htd->hgd", shares, values)
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)
