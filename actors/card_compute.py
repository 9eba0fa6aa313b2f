"""What a card's lane starts on its stream for one instruction: fetch, compute, leave.

Experts go one of two ways. For decode rows, where Triton runs, kernels look up on the card what the
router chose, in a table of the experts that are here; the host never knows. A chunk's products have
as many rows as chose the expert, which the host has to know before it starts them: there the lane's
thread waits for the router (a processor's counter, nothing of the card), and reads the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_activations import Activations
from shadowlane.actors.card_program import CardInstruction, CardProgram, LayerExperts, Weights
from shadowlane.actors.cuda.runtime import CardRuntime
from shadowlane.ops import table as t
from shadowlane.ops.card.buffers import CardGeometry, StepRows
from shadowlane.ops.card.experts import CardExpert
from shadowlane.ops.card.operators import CardOperators

if TYPE_CHECKING:
    from shadowlane.ops.card.kernels_triton import ExpertTable

GENERATIONS = 3  # placements that are held at the same time: in force, to come, on its way out


def make_operators(
    blueprint: Blueprint,
    layout: ArenaLayout,
    arena: Arena,
    runtime: CardRuntime,
) -> CardOperators:
    """A model's operators on a card, which holds no keys and values yet.

    The constants must be in the arena.
    """
    options = blueprint.options
    constants = {
        source.name: arena.view(
            layout.constant_offsets[source.name], np.float32, math.prod(source.shape)
        ).reshape(source.shape)
        for source in blueprint.constants
    }
    return CardOperators(
        blueprint.config,
        blueprint.groups,
        constants,
        CardGeometry(
            decode_rows=t.MAX_DECODE_ROWS,
            chunk_rows=layout.subchunks * options.prefill_chunk,
            logit_rows=options.step_logits,
            sequences=options.max_batch,
            pages_per_sequence=layout.max_pages,
            num_pages=layout.num_pages,
            page_tokens=blueprint.catalog.page_tokens,
        ),
        dtype=blueprint.dtype,
        device=runtime.device,
        embedding_layout=blueprint.embedding.layout,
        kv_layout=blueprint.kv_layout,
        rope_interleaved=blueprint.rope_interleaved,
        uses_triton=runtime.uses_triton,
    )


class ExpertTables:
    """Where the experts of each placement lie, in device memory that is taken before any step."""

    def __init__(self, device: torch.device, layers: int, experts: int) -> None:
        self._make = partial(torch.zeros, (layers, experts, 3), dtype=torch.int64, device=device)
        self._free = [self._make() for _ in range(GENERATIONS)]
        self._held: dict[int, torch.Tensor] = {}

    def hold(self, placement_id: int, places: np.ndarray) -> None:
        """places: int64 [layers, experts, 3], see `ExpertTable`."""
        table = self._free.pop() if self._free else self._make()
        table.copy_(torch.from_numpy(places))
        self._held[placement_id] = table

    def drop(self, placement_id: int) -> None:
        table = self._held.pop(placement_id, None)
        if table is not None:
            self._free.append(table)

    def of(self, placement_id: int, layer: int) -> torch.Tensor:
        return self._held[placement_id][layer]


class CardComputer:
    """The kernels of one card's instructions. Its methods start them on torch's current stream."""

    def __init__(
        self, operators: CardOperators, activations: Activations, memory: torch.Tensor
    ) -> None:
        """memory: all of the card's, in which experts lie."""
        self.operators = operators
        self._activations, self._memory = activations, memory
        moe = operators.config.moe
        layers, experts = (len(moe.sparse_layers), moe.num_experts) if moe else (0, 0)
        self.tables = ExpertTables(operators.device, layers, experts)

    def needs_choice(self, each: CardInstruction, rows: StepRows) -> bool:
        """Whether the host has to know what the router chose before it can compute this."""
        return each.experts is not None and not self._is_in_place(each.experts, rows)

    def may_capture(self, each: CardInstruction) -> bool:
        """Whether the kernels of a step without a chunk are the same in each step."""
        experts = each.experts
        if each.brought:
            return False
        if experts is not None and (experts.brought or not experts.is_aligned):
            return False
        return self.operators.reads_device_alone(each.group)

    def begin(self, step: int, rows: StepRows) -> None:
        """What all instructions of a step share."""
        self._activations.fetch_record(self.operators, step, rows)
        self.operators.begin(rows)

    def compute(
        self,
        placement_id: int,
        each: CardInstruction,
        weights: Weights,
        rows: StepRows,
        choice: np.ndarray | None = None,
    ) -> None:
        """choice: int32 [rows, top_k] of `needs_choice`."""
        operators, activations = self.operators, self._activations
        activations.fetch(operators, each.group, each.crossings.fetched, rows)
        if each.experts is None:
            operators.compute(each.group, each.first_unit, each.last_unit, weights.blocks, rows)
        else:
            is_first = each.experts.is_first
            if is_first:  # others of the layer's find there what it has left
                activations.fetch_choice(operators, each.experts.layer, rows)
            outputs = activations.expert_outputs(operators)
            self._experts(placement_id, each, weights, rows, choice, outputs, not is_first)
        activations.leave(operators, each.group, each.crossings.left, rows)

    def _is_in_place(self, experts: LayerExperts, rows: StepRows) -> bool:
        is_told = rows.num_prefill > 0 or not experts.is_aligned or bool(experts.brought)
        return self.operators.products.uses_triton and not is_told

    def _experts(
        self,
        placement_id: int,
        each: CardInstruction,
        weights: Weights,
        rows: StepRows,
        choice: np.ndarray | None,
        outputs: tuple[torch.Tensor, torch.Tensor] | None,
        is_sorted: bool = False,
    ) -> None:
        experts = each.experts
        assert experts is not None
        if not self._is_in_place(experts, rows):
            assert choice is not None, "the host must know what was chosen"
            found = weights.experts
            self.operators.experts(each.group, found, choice, rows, outputs, is_sorted)
            return
        table = self._table(placement_id, experts)
        self.operators.experts_in_place(
            each.group, table, rows, None if outputs is None else outputs[0]
        )

    def _table(self, placement_id: int, experts: LayerExperts) -> ExpertTable:
        from shadowlane.ops.card.kernels_triton import ExpertTable

        places = self.tables.of(placement_id, experts.layer)
        return ExpertTable(self._memory, places, experts.layouts)

    # -- before the first step

    def warm_up(
        self,
        placement_id: int,
        program: CardProgram,
        rows: StepRows,
        weights_of: Callable[[CardInstruction], Weights],
    ) -> None:
        """Start every kernel of a program once, with nothing fetched or left.

        What kernels take of the allocator's memory is there afterwards, and they are loaded: in a
        step both could wait for the card, and the card for us. Keys and values go to the spare
        page, and the rest is overwritten before it is read. weights_of: with anything in place of
        what an instruction is brought.
        """
        operators = self.operators
        geometry, count = operators.geometry, rows.num_rows
        spare = [operators.cache.spare] * geometry.pages_per_sequence
        last = geometry.pages_per_sequence * geometry.page_tokens - 1
        logit_rows = [0] * rows.num_logits
        at = [last] * count  # as far into a text as it gets
        operators.inputs.write([0] * count, at, [0] * count, logit_rows, {0: spare})
        operators.begin(rows)
        for each in program.instructions:
            weights = weights_of(each)
            if each.experts is None:
                units = each.first_unit, each.last_unit
                operators.compute(each.group, *units, weights.blocks, rows)
                continue
            choice = self._choose(weights.experts, rows)
            self._experts(placement_id, each, weights, rows, choice, None)

    def _choose(self, experts: Mapping[int, CardExpert], rows: StepRows) -> np.ndarray:
        """As many rows for experts that are here as there may be."""
        ids = self.operators.buffers.route_ids
        choice = np.zeros((rows.num_rows, ids.shape[1]), np.int32)
        for rank, expert in zip(range(ids.shape[1]), experts, strict=False):
            choice[:, rank] = expert
        for rank in range(ids.shape[1]):
            ids[: rows.num_rows, rank].fill_(int(choice[0, rank]))
        return choice
