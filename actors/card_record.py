"""What a step is about, as a card's lane reads it from the step's record in the arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import RECORD_RING, Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.ops import table as t
from shadowlane.ops.card.buffers import StepRows
from shadowlane.ops.card.operators import CardOperators
from shadowlane.planner.profile import Phase


@dataclass(frozen=True, slots=True)
class CardStep:
    """One step's record. What may change while it runs is `live` alone."""

    header: np.ndarray  # int64, a copy
    live: np.ndarray  # int64, in the arena
    rows: StepRows
    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    logit_rows: list[int]
    pages: dict[int, list[int]]  # of each sequence that has rows
    frequencies: dict[int, tuple[np.ndarray, float]]  # rotary, float32 [head_dim / 2]; scaling

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

    def begin(self, operators: CardOperators) -> None:
        """Bring all of it to the card; where a stream is being given work."""
        operators.inputs.write(
            self.tokens,
            self.positions,
            self.sequences,
            self.logit_rows,
            self.pages,
            self.frequencies,
        )
        operators.begin(self.rows)


def read_step(arena: Arena, layout: ArenaLayout, blueprint: Blueprint, step: int) -> CardStep:
    """The record of a step that has been filled."""
    record = layout.records + (step % RECORD_RING) * layout.record_nbytes
    offsets = layout.record_offsets
    live = arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
    header = live.copy()
    decode, prefill = int(header[t.NUM_DECODE]), int(header[t.NUM_PREFILL])
    logits, count = int(header[t.NUM_LOGITS]), decode + prefill

    def ints(name: str, length: int) -> list[int]:
        found: list[int] = arena.view(record + offsets[name], np.int32, length).tolist()
        return found

    positions, sequences = ints("positions", count), ints("sequences", count)
    slots, half = blueprint.options.max_batch, blueprint.config.head_dim // 2
    pages = ints("pages", slots * layout.max_pages)
    inv_freq = arena.view(record + offsets["inv_freq"], np.float32, slots, half).copy()
    scaling = arena.view(record + offsets["scaling"], np.float32, slots).tolist()
    used = sorted(set(sequences))
    return CardStep(
        header=header,
        live=live,
        rows=StepRows(
            num_decode=decode,
            num_prefill=prefill,
            num_logits=logits,
            context=max((position + 1 for position in positions[:decode]), default=0),
            chunk_sequence=sequences[decode] if prefill else 0,
            chunk_start=positions[decode] if prefill else 0,
            subchunk_rows=int(header[t.SUBCHUNK_ROWS]) if prefill else 0,
        ),
        tokens=ints("tokens", count),
        positions=positions,
        sequences=sequences,
        logit_rows=ints("logit_rows", logits),
        pages={n: pages[n * layout.max_pages : (n + 1) * layout.max_pages] for n in used},
        frequencies={n: (inv_freq[n], scaling[n]) for n in used},
    )
