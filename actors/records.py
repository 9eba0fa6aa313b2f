"""Step records: how the engine tells the lanes what one step is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import RECORD_RING, Arena, ArenaLayout
from shadowlane.ops import table as t
from shadowlane.planner.profile import Phase


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
    subchunk_rows: int | None = None  # rows of the chunk multiplied together; None: all of it

    @property
    def num_prefill(self) -> int:
        return len(self.rows) - self.num_decode

    @property
    def is_decode(self) -> bool:
        return self.num_prefill == 0

    @property
    def phase(self) -> Phase:
        return "decode" if self.is_decode else "prefill"

    @property
    def logit_rows(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row.wants_logits]

    @property
    def context(self) -> int:
        """Tokens attended by the longest sequence."""
        return max(row.position for row in self.rows) + 1


def record_offset(layout: ArenaLayout, step: int) -> int:
    """Where in the arena the record of a step is, until eight steps later."""
    return layout.records + step % RECORD_RING * layout.record_nbytes


def record_header(arena: Arena, layout: ArenaLayout, step: int) -> np.ndarray:
    """The fields of its header, int64 [RECORD_HEADER_FIELDS]."""
    return arena.view(record_offset(layout, step), np.int64, t.RECORD_HEADER_FIELDS)


class RecordWriter:
    """Writes step records into the ring. Sequences hold their pages one behind the other.

    NOTE: lanes idle while a record is written, so its arrays are made once.
    """

    def __init__(self, arena: Arena, layout: ArenaLayout, slots: int) -> None:
        self._records = [
            _Record(arena, layout, layout.records + place * layout.record_nbytes, slots)
            for place in range(RECORD_RING)
        ]

    def write(
        self,
        step: int,
        placement_id: int,
        plan: StepPlan,
        disk_base: int,
        lane_bases: Sequence[int],
        link_bases: Sequence[int],
        frequencies: dict[int, tuple[np.ndarray, float]],
    ) -> None:
        """Fill the record of `step`; whoever publishes the step counter does so afterwards.

        frequencies: rotary frequencies (float32 [head_dim / 2]) and attention scaling by slot.
        """
        record, rows = self._records[step % RECORD_RING], plan.rows
        logit_rows = plan.logit_rows
        header = [0] * t.RECORD_HEADER_FIELDS
        header[t.STEP] = step
        header[t.PLACEMENT] = placement_id
        header[t.PHASE] = t.DECODE if plan.is_decode else t.PREFILL
        header[t.NUM_DECODE] = plan.num_decode
        header[t.NUM_PREFILL] = plan.num_prefill
        header[t.NUM_LOGITS] = len(logit_rows)
        header[t.SAME_SEQUENCE] = int(plan.same_sequence)
        header[t.SUBCHUNK_ROWS] = plan.subchunk_rows or max(1, plan.num_prefill)
        header[t.DISK_BASE] = disk_base
        header[t.LANE_BASE : t.LANE_BASE + len(lane_bases)] = lane_bases
        header[t.LINK_BASE : t.LINK_BASE + len(link_bases)] = link_bases
        # NOTE: the step comes first: a worker that is late must not take the rest for its own.
        record.header[t.STEP] = step
        record.header[:] = header
        record.tokens[: len(rows)] = [row.token for row in rows]
        record.positions[: len(rows)] = [row.position for row in rows]
        record.sequences[: len(rows)] = [row.slot for row in rows]
        record.logit_rows[: len(logit_rows)] = logit_rows
        for slot, (inv_freq, scaling) in frequencies.items():
            record.inv_freq[slot] = inv_freq
            record.scaling[slot] = scaling

    def make_void(self, step: int) -> None:
        """Tell the lanes that nobody wants what is left of a prefill step."""
        self._records[step % RECORD_RING].header[t.IS_VOID] = 1


class _Record:
    """The arrays of one place in the ring."""

    def __init__(self, arena: Arena, layout: ArenaLayout, record: int, slots: int) -> None:
        offsets = layout.record_offsets

        def view(name: str, kind: type[np.generic], *shape: int) -> np.ndarray:
            return arena.view(record + offsets[name], kind, *shape)

        def room(name: str) -> int:
            """How many words of 32 bits lie before whatever comes next."""
            end = min(offset for offset in offsets.values() if offset > offsets[name])
            return (end - offsets[name]) // 4

        self.header = arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
        self.tokens, self.positions, self.sequences, self.logit_rows = (
            view(name, np.int32, room(name))
            for name in ("tokens", "positions", "sequences", "logit_rows")
        )
        self.inv_freq = view("inv_freq", np.float32, slots, room("inv_freq") // slots)
        self.scaling = view("scaling", np.float32, slots)
        pages = slots * layout.max_pages
        view("pages", np.int32, pages)[:] = np.arange(pages)
