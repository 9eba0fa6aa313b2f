"""Compiled loops for `expert_overhead.py`: all of a mixture's layer that is no product."""

from __future__ import annotations

from typing import Any

from shadowlane.ops import table as t
from shadowlane.ops.atomics import claim, complete, copy_bytes, now_ns
from shadowlane.ops.compiled import njit
from shadowlane.ops.expert_walk import add_experts, count_expert_items, expert_item
from shadowlane.ops.kernels import LAYOUT_F32
from shadowlane.ops.routes import route


@njit
def time_bookkeeping(
    base: int,
    geometry: Any,
    idle: Any,
    instructions: Any,
    items: Any,
    blocks: Any,
    row: Any,
    logits: int,
    ticket: int,
    scratch: int,
    steps: int,
    layers: int,
    spent: Any,
) -> None:
    """Choose, go through the items, and add up, in every layer of `steps` steps of one row.

    idle: the geometry of experts without rows, so that an item does all but its products; logits:
    a copy of the router's, which a choice overwrites; spent: int64 [3], ns of the three parts.
    """
    stride = 4 * geometry[t.ROUTER_STRIDE]
    for step in range(1, steps + 1):
        for layer in range(layers):
            row[t.SPARSE_LAYER] = layer
            copy_bytes(logits + layer * stride, base + row[t.OUTPUT], stride)
            began = now_ns()
            route(base, geometry, row, items, step, 1, 1)
            chosen = now_ns()
            number = (step - 1) * layers + layer + 1
            count = count_expert_items(geometry, row, 1)
            while True:
                item = claim(ticket, number, count)
                if item < 0:
                    break
                expert_item(base, idle, instructions, row, items, blocks, item, 1, 0, scratch)
                complete(ticket + 64, number, count)
            done = now_ns()
            add_experts(base, geometry, row, LAYOUT_F32, base + geometry[t.EXPERT_OUTPUT], 0, 1, 0)
            spent[0] += chosen - began
            spent[1] += done - chosen
            spent[2] += now_ns() - done
