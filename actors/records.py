"""Step records: how the engine tells the lanes what one step is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import RECORD_RING, Arena, ArenaLayout
from shadowlane.ops import table as t


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a step."""

    token: int
    position: int
    slot: int  # of its sequence
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step: decode rows first, then the rows of at most one prompt chunk."""

    rows: tuple[Row, ...]
    num_decode: int
    same_sequence: bool  # the decode rows are consecutive tokens of one prompt

    @property
    def num_prefill(self) -> int:
        return len(self.rows) - self.num_decode

    @property
    def is_decode(self) -> bool:
        return self.num_prefill == 0

    @property
    def logit_rows(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row.wants_logits]

    @property
    def context(self) -> int:
        """Tokens attended by the longest sequence."""
        return max(row.position for row in self.rows) + 1


class RecordWriter:
    """Writes step records into the ring. Sequences hold their pages one behind the other."""

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        self._arena = arena
        self._layout = layout

    def write(
        self,
        step: int,
        placement_id: int,
        plan: StepPlan,
        disk_base: int,
        lane_bases: Sequence[int],
        frequencies: dict[int, tuple[np.ndarray, float]],
    ) -> None:
        """Fill the record of `step`; whoever publishes the step counter does so afterwards.

        frequencies: rotary frequencies (float32 [head_dim / 2]) and attention scaling by slot.
        """
        layout, arena = self._layout, self._arena
        record = layout.records + (step % RECORD_RING) * layout.record_nbytes
        offsets = layout.record_offsets
        rows = plan.rows
        header = arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
        header[t.STEP] = step
        header[t.PLACEMENT] = placement_id
        header[t.PHASE] = t.DECODE if plan.is_decode else t.PREFILL
        header[t.NUM_DECODE] = plan.num_decode
        header[t.NUM_PREFILL] = plan.num_prefill
        logit_rows = plan.logit_rows
        header[t.NUM_LOGITS] = len(logit_rows)
        header[t.SAME_SEQUENCE] = int(plan.same_sequence)
        header[t.DISK_BASE] = disk_base
        header[t.LANE_BASE : t.LANE_BASE + t.MAX_LANES] = 0
        header[t.LANE_BASE : t.LANE_BASE + len(lane_bases)] = lane_bases
        for name, values in (
            ("tokens", [row.token for row in rows]),
            ("positions", [row.position for row in rows]),
            ("sequences", [row.slot for row in rows]),
            ("logit_rows", logit_rows),
        ):
            arena.view(record + offsets[name], np.int32, len(values))[:] = values
        max_pages = layout.max_pages
        for slot, (inv_freq, scaling) in frequencies.items():
            pages = record + offsets["pages"] + slot * max_pages * 4
            first = slot * max_pages
            arena.view(pages, np.int32, max_pages)[:] = np.arange(first, first + max_pages)
            place = record + offsets["inv_freq"] + slot * len(inv_freq) * 4
            arena.view(place, np.float32, len(inv_freq))[:] = inv_freq
            arena.view(record + offsets["scaling"] + slot * 4, np.float32, 1)[0] = scaling
