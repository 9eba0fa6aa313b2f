"""Decode steps on torch's device without memory: shapes alone, no numbers.

An operator that asked for a value there, or took a tensor from the host, would fail; so what passes
may be captured in a graph, as far as that can be told without a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from card_model import read_shapes
from tiny import FAMILIES, MIXTURES

from shadowlane.ops.card import buffers, products
from shadowlane.ops.card.buffers import CardGeometry, StepRows
from shadowlane.ops.card.operators import CardOperators
from shadowlane.ops.card.products import CardBlock
from shadowlane.ops.card.shares import UNIT_ROWS

DEVICE = torch.device("meta")
ROWS = StepRows(3, num_logits=2)


class NoMirrors:
    """In place of inputs that are copied from the host."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        nbytes = sum(math.prod(shape) * buffers._itemsize(name) for name, shape in shapes.items())
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.device_views = buffers._views(memory, shapes)


@pytest.mark.parametrize("layout", ["bf16", "f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_decode_step_asks_for_no_value(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    monkeypatch.setattr(buffers, "_Mirrored", NoMirrors)
    config, groups, constants = read_shapes(tiny_model(family))
    heads = dict.fromkeys(range(config.num_layers), (0, config.num_kv_heads))
    operators = CardOperators(
        config, groups, constants, CardGeometry(4, 0, 4, 3, 6, 18),
        dtype="bfloat16", device=DEVICE, embedding_layout=layout, kv_heads=heads,
        uses_triton=False,
    )  # fmt: skip
    operators.begin(ROWS)
    for group in groups:
        if group.kind == "experts":
            assert config.moe is not None
            here = torch.zeros(config.moe.num_experts, dtype=torch.bool, device=DEVICE)
            others = operators.buffers.expert_output, operators.buffers.expert_output_chunk
            operators.mixture.take(here, [], ROWS, others)
            operators.mixture.add(ROWS)
            continue
        parts = group.parts[:1] if group.kind == "gate_up" else group.parts
        units = -(-sum(part.rows for part in parts) // UNIT_ROWS) or config.num_kv_heads
        operators.compute(group.name, 0, units, blocks(group, layout), ROWS)
        if group.kind == "router":
            operators.mixture.route(ROWS)
    tokens, largest = operators.likeliest(ROWS)
    assert tokens.shape == largest.shape == (2,)
    assert tokens.device == DEVICE


def blocks(group, layout: str) -> list[CardBlock]:
    found, start = [], 0
    for number, part in enumerate(group.parts):
        nbytes = part.rows * products.LAYOUTS[layout].row_nbytes(part.cols)
        data = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
        found.append(CardBlock(layout, data, part.rows, start, number))
        start += 0 if group.kind == "gate_up" else part.rows
    return found


def test_asking_for_a_value_would_be_found() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(3, device=DEVICE).max().item()
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=DEVICE) + torch.zeros(3)
