"""What a card's lane starts on its stream for one instruction: fetch, compute, leave.

Experts go one of two ways. For decode rows, where Triton runs, kernels look up on the card what the
router chose, in a table of the experts that are here; the host never knows. A chunk's products have
as many rows as chose the expert, which the host has to know before it starts them: there the lane's
thread waits until the router has chosen, a processor's or its own card's, and reads the choice.

What a card's router chose stays for that card's experts, and is left in the arena for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_activations import Activations
from shadowlane.actors.card_program import (
    CardInstruction,
    CardProgram,
    CounterWait,
    LayerExperts,
    LayerSum,
    Weights,
    summed,
)
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


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Of one placement, on the device."""

    places: torch.Tensor  # int64 [layers, experts, 3], see `ExpertTable`
    here: torch.Tensor  # bool [2, layers, experts], in decode and in prefill, see `summed`


class ExpertTables:
    """Where the experts of each placement are, in device memory that is taken before any step."""

    def __init__(self, device: torch.device, layers: int, experts: int) -> None:
        self._shape, self._device = (layers, experts), device
        self._free = [self._make() for _ in range(GENERATIONS)]
        self._held: dict[int, ExpertPlaces] = {}

    def _make(self) -> ExpertPlaces:
        shape = self._shape
        return ExpertPlaces(
            torch.zeros((*shape, 3), dtype=torch.int64, device=self._device),
            torch.zeros((2, *shape), dtype=torch.bool, device=self._device),
        )

    def hold(self, placement_id: int, places: np.ndarray, programs: Sequence[CardProgram]) -> None:
        """places: see `ExpertPlaces`; programs: for decode and for prefill."""
        table = self._free.pop() if self._free else self._make()
        table.places.copy_(torch.from_numpy(places))
        here = np.stack([summed(each, *self._shape) for each in programs])
        table.here.copy_(torch.from_numpy(here))
        self._held[placement_id] = table

    def drop(self, placement_id: int) -> None:
        table = self._held.pop(placement_id, None)
        if table is not None:
            self._free.append(table)

    def of(self, placement_id: int) -> ExpertPlaces:
        return self._held[placement_id]


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

    def needs_choice(self, each: CardInstruction, rows: StepRows) -> tuple[int, CounterWait] | None:
        """The layer of which the host has to know what its router chose, and when that has chosen;
        None where it computes this without."""
        if each.experts is not None and not self._is_in_place(each.experts, rows):
            return each.experts.layer, each.experts.choice.made
        if each.sum is not None and each.sum.has_others and rows.num_prefill:
            return each.sum.layer, each.sum.choice.made
        return None

    def may_capture(self, each: CardInstruction) -> bool:
        """Whether the kernels of a step without a chunk are the same in each step."""
        if each.sum is not None:
            return True
        if each.brought:
            return False
        if each.experts is not None and (each.experts.brought or not each.experts.is_aligned):
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
        if each.experts is not None:
            is_first = each.experts.is_first
            if is_first and not each.experts.choice.is_here:  # others of the layer's find it there
                activations.fetch_choice(operators, each.experts.layer, rows)
            outputs = None if each.experts.stays else activations.expert_outputs(operators)
            self._experts(placement_id, each, weights, rows, choice, outputs, not is_first)
        elif each.sum is not None:
            if not each.sum.choice.is_here:
                activations.fetch_choice(operators, each.sum.layer, rows)
                activations.fetch_weights(operators, each.sum.layer, rows)
            outputs = activations.expert_outputs(operators)
            self._add_up(placement_id, each.sum, rows, choice, outputs)
        else:
            operators.compute(each.group, each.first_unit, each.last_unit, weights.blocks, rows)
            if each.routes is not None:
                self._route(each.routes, rows)
        activations.leave(operators, each.group, each.crossings.left, rows)

    def _route(self, layer: int, rows: StepRows) -> None:
        left = self._activations.route(layer, rows)
        if self._activations.is_forced:
            self.operators.mixture.take_route(rows, *left)
        else:
            self.operators.mixture.route(rows, left)

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

    def _add_up(
        self,
        placement_id: int,
        layer: LayerSum,
        rows: StepRows,
        choice: np.ndarray | None,
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """outputs: where other lanes leave the rows of theirs."""
        if layer.has_others:
            num_others: list[int] = []
            if rows.num_prefill:
                assert choice is not None, "the host must know what was chosen"
                is_other = ~layer.here[choice[rows.num_decode :]]
                num_others = [int(is_other[first:last].sum()) for first, last in rows.subchunks()]
            here = self.tables.of(placement_id).here[int(rows.num_prefill > 0), layer.layer]
            self.operators.mixture.take(here, num_others, rows, outputs)
        self.operators.mixture.add(rows)

    def _table(self, placement_id: int, experts: LayerExperts) -> ExpertTable:
        from shadowlane.ops.card.kernels_triton import ExpertTable

        places = self.tables.of(placement_id).places[experts.layer]
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
        first = (each for each in program.instructions if each.part[0] == 0)  # of a chunk's parts
        for each in first:
            weights = weights_of(each)
            if each.sum is not None:
                outputs = operators.buffers.expert_output, operators.buffers.expert_output_chunk
                ids = operators.buffers.route_ids
                choice = np.full((rows.num_rows, ids.shape[1]), each.sum.here.argmin())
                ids.fill_(int(each.sum.here.argmin()))  # as many of others as there may be
                self._add_up(placement_id, each.sum, rows, choice, outputs)
                continue
            if each.experts is None:
                units = each.first_unit, each.last_unit
                operators.compute(each.group, *units, weights.blocks, rows)
                if each.routes is not None:
                    left = self._activations.route(each.routes, rows)
                    operators.mixture.take_route(rows, *left)
                    operators.mixture.route(rows, left)
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
