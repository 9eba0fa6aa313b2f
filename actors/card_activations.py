"""Activations that a card and the arena exchange, by kernels that read and write it in place.

Never by a copy engine, where they would queue behind weights; the same goes for what a step is
about. What crosses when is in `exchange.py`; here is where it lies on both sides. Of a layer's
experts two things cross: what the router chose, here or elsewhere, and the rows of the pairs that
this card computes, each to its own place.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from shadowlane.actors.arena import RECORD_RING, Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.runtime import CardRuntime
from shadowlane.actors.scratch import gather_stride, route_layout
from shadowlane.ops import table as t
from shadowlane.ops.card.buffers import StepRows
from shadowlane.ops.card.operators import CardOperators
from shadowlane.ops.card.shares import Span, of_width

SHARED = (  # buffers that lanes exchange
    "residual",
    "cos",
    "sin",
    "qkv",
    "attended",
    "attended_chunk",
    "activated",
    "activated_chunk",
    "logits",
    "gather",
    "router",
    "routes",
    "expert_output",
    "expert_output_chunk",
)
ROW_FIELDS = ("tokens", "positions", "sequences")  # of a record, a number for each row
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Activations:
    """The arena's buffers as one card sees them; they must be pinned."""

    def __init__(
        self,
        runtime: CardRuntime,
        blueprint: Blueprint,
        layout: ArenaLayout,
        arena: Arena,
        pinned: PinnedMemory,
    ) -> None:
        self._blueprint, self._layout, self._arena = blueprint, layout, arena
        self._shared = {
            name: self._view(
                runtime, pinned, name, getattr(blueprint.scratch[layout.subchunks], name)
            )
            for name in SHARED
        }
        records = RECORD_RING * layout.record_nbytes
        self._records = runtime.view(pinned.mapped(arena.base + layout.records), records, None)
        self._numbers = arena.view(layout.route_numbers, np.int64, t.ROUTE_WORDS)

    def _view(
        self, runtime: CardRuntime, pinned: PinnedMemory, name: str, nbytes: int
    ) -> torch.Tensor:
        """uint8, flat."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        address = self._arena.base + self._layout.scratch[name]
        return runtime.view(pinned.mapped(address), nbytes, None)

    def close(self) -> None:
        self._shared = {}
        self._records = torch.empty(0)

    # -- kernels; call them where a stream is being given work

    def fetch_record(self, operators: CardOperators, step: int, rows: StepRows) -> None:
        """What a step is about."""
        inputs, counts = operators.inputs, dict.fromkeys(ROW_FIELDS, rows.num_rows)
        for name, count in {**counts, "logit_rows": rows.num_logits}.items():
            if count:
                getattr(inputs, name)[:count].copy_(self._field(step, name, count))
        inputs.pages.copy_(self._field(step, "pages", *inputs.pages.shape))
        for name in ("inv_freq", "scaling"):
            target: torch.Tensor = getattr(inputs, name)
            _copy(target.view(torch.int32), self._field(step, name, *target.shape))

    def _field(self, step: int, name: str, *shape: int) -> torch.Tensor:
        """Part of a step's record, int32; floats as they lie."""
        start = (step % RECORD_RING) * self._layout.record_nbytes + self._layout.record_offsets[
            name
        ]
        data = self._records[start : start + 4 * math.prod(shape)]
        return data.view(torch.int32).view(shape)

    def fetch(
        self, operators: CardOperators, group: str, spans: tuple[Span, ...], rows: StepRows
    ) -> None:
        """What a group of this card reads and others have written."""
        for span in spans:
            ours, theirs = self._places(operators, group, span, rows)
            _copy(ours, theirs)

    def leave(
        self, operators: CardOperators, group: str, spans: tuple[Span, ...], rows: StepRows
    ) -> None:
        """What others read of what a group of this card has written."""
        for span in spans:
            ours, theirs = self._places(operators, group, span, rows)
            _copy(theirs, ours)

    def fetch_choice(self, operators: CardOperators, layer: int, rows: StepRows) -> None:
        """What the router of a layer has chosen, into `route_ids`. layer: of those with experts."""
        theirs = self._route(layer, "ids", rows)
        operators.buffers.route_ids[rows.all].copy_(theirs)  # to another type

    def fetch_weights(self, operators: CardOperators, layer: int, rows: StepRows) -> None:
        """How much the chosen of a layer count, into `route_weights`."""
        ours = operators.buffers.route_weights[rows.all]
        _copy(ours.view(torch.int32), self._route(layer, "weights", rows))

    def route(self, layer: int, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the choice of a layer lies for others: ids, int32, and weights [rows, top_k]."""
        ids, weights = (self._route(layer, name, rows) for name in ("ids", "weights"))
        return ids, weights.view(torch.float32)

    def _route(self, layer: int, field: str, rows: StepRows) -> torch.Tensor:
        """A field of a layer's route for these rows, int32 [rows, top_k]; floats as they lie."""
        start, _, top_k = self._choice(layer, field)
        data = self._shared["routes"][start : start + 4 * rows.all.stop * top_k]
        return data.view(torch.int32).view(-1, top_k)[rows.all]

    def expert_outputs(self, operators: CardOperators) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows of pairs go: of decode rows, float32, and of a chunk's, compute type."""
        buffers = operators.buffers
        few, many = (
            self._shared[name].view(ours.dtype)[: ours.numel()].view(ours.shape)
            for name, ours in (
                ("expert_output", buffers.expert_output),
                ("expert_output_chunk", buffers.expert_output_chunk),
            )
        )
        return few, many

    # -- on the host

    @property
    def is_forced(self) -> bool:
        """Whether the engine writes choices in place of routers: in all steps, or in none."""
        return bool(self._numbers[t.ROUTE_FORCED])

    def choice(self, layer: int, rows: StepRows) -> np.ndarray:
        """What the router of a layer has chosen, once it has: int32 [rows, top_k], a copy."""
        start, scratch, top_k = self._choice(layer)
        return self._arena.view(scratch + start, np.int32, rows.all.stop, top_k)[rows.all].copy()

    def _choice(self, layer: int, field: str = "ids") -> tuple[int, int, int]:
        moe = self._blueprint.config.moe
        assert moe is not None, "only mixtures have routes"
        offsets = route_layout(self._blueprint.config, self._layout.step_rows)
        start = layer * self._layout.route_nbytes + offsets[field]
        return start, self._layout.scratch["routes"], moe.top_k

    # -- inside

    def _places(
        self, operators: CardOperators, group: str, span: Span, rows: StepRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of a buffer on the card, and in the arena, for the rows of a step; as ints."""
        buffer: torch.Tensor = getattr(operators.buffers, span.buffer)
        word = WORDS[buffer.element_size()]
        width = buffer.shape[1]
        if span.buffer.startswith("activated"):  # rows are as wide as the group has them
            parts = operators.groups[group]
            width = parts.parts[0].rows if parts.kind == "gate_up" else parts.parts[0].cols
        stride = gather_stride(self._blueprint.embedding) if span.buffer == "gather" else width
        ours = of_width(buffer.view(word), width)
        theirs = self._shared[span.buffer].view(word)
        theirs = theirs[: ours.shape[0] * stride].view(-1, stride)
        here, columns = _rows(span.buffer, rows), slice(span.first, span.last)
        return ours[here, columns], theirs[here, columns]


def _rows(buffer: str, rows: StepRows) -> slice:
    if buffer.endswith("_chunk"):
        return rows.chunk
    if buffer in ("attended", "activated"):
        return slice(rows.num_decode)
    return slice(rows.num_logits) if buffer == "logits" else rows.all


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if math.prod(target.shape):
        torch.bitwise_or(source, 0, out=target)
