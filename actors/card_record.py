"""What a step is about, as a card's lane reads it from the step's record in the arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import RECORD_RING, Arena, ArenaLayout
from shadowlane.ops import table as t
from shadowlane.ops.card.buffers import StepRows
from shadowlane.planner.profile import Phase


@dataclass(frozen=True, slots=True)
class CardStep:
    """One step's record. What may change while it runs is `live` alone."""

    number: int
    header: np.ndarray  # int64, a copy
    live: np.ndarray  # int64, in the arena
    rows: StepRows

    @property
    def placement_id(self) -> int:
        return int(self.header[t.PLACEMENT])

    @property
    def phase(self) -> Phase:
        return "decode" if self.header[t.PHASE] == t.DECODE else "prefill"

    @property
    def is_void(self) -> bool:
        """Nobody wants it any more."""
        return bool(self.live[t.IS_VOID])


def read_step(arena: Arena, layout: ArenaLayout, step: int) -> CardStep:
    """The record of a step that has been filled: what of it the host has to know."""
    record = layout.records + (step % RECORD_RING) * layout.record_nbytes
    offsets = layout.record_offsets
    live = arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
    header = live.copy()
    decode, prefill = int(header[t.NUM_DECODE]), int(header[t.NUM_PREFILL])

    def ints(name: str) -> list[int]:
        found = arena.view(record + offsets[name], np.int32, decode + prefill)
        return [int(each) for each in found]

    positions = ints("positions")
    rows = StepRows(
        num_decode=decode,
        num_prefill=prefill,
        num_logits=int(header[t.NUM_LOGITS]),
        context=max((position + 1 for position in positions[:decode]), default=0),
        chunk_sequence=ints("sequences")[decode] if prefill else 0,
        chunk_start=positions[decode] if prefill else 0,
        subchunk_rows=int(header[t.SUBCHUNK_ROWS]) if prefill else 0,
    )
    return CardStep(step, header, live, rows)
