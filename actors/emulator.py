"""Makes the lanes of an engine as fast as those of a machine that is not here.

Writes the law of each lane into the arena (`ops/emulated.py` says what it means) and changes it
when other programs are to take something. What the hardware file does not know is hidden here: each
rate is off by a factor that planners have to learn.
"""

from __future__ import annotations

import numpy as np

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.emulation import (
    JITTER,
    Hidden,
    true_machine,
)
from shadowlane.actors.spec import Emulated
from shadowlane.ops import emulated as law
from shadowlane.planner.hardware import CALM, Conditions, Hardware


class Emulator:
    """See the module."""

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        emulated: Emulated,
        row_nbytes: float,
        slowed: float,
    ) -> None:
        """row_nbytes: of one row of activations, as it crosses a link."""
        self.slowed = slowed
        hidden = Hidden.drawn(emulated.seed) if emulated.is_hidden else Hidden()
        self.machine: Hardware = true_machine(emulated.hardware, hidden)
        self._seed = emulated.seed
        self._small_nbytes = emulated.small_nbytes
        self._layout = layout
        self._row_nbytes = row_nbytes
        self._laws = [arena.view(at, np.float64, law.LAW_FIELDS) for at in layout.laws]
        self.set(CALM)

    def set(self, state: Conditions) -> None:
        """From now on other programs leave this. Memory that they take is not told to lanes."""
        machine = self.machine
        lanes, cards = self._layout.lanes, machine.cards
        processors = sum(lane.startswith("cpu:") for lane in lanes)
        crossing_s = max((card.crossing_s for card in cards), default=0.0)
        crossing_rate = min((card.d2h_bytes_per_s for card in cards), default=1.0) * state.link
        for number, name in enumerate(lanes):
            if name.startswith("cpu:"):
                self._write(
                    number,
                    {
                        law.BYTES_PER_S: machine.cpu_bytes_per_s / processors,
                        law.FLOPS_PER_S: machine.cpu_flops / processors,
                        law.LAUNCH_S: machine.cpu_launch_s,
                        law.FIRST_LAUNCHES: 1.0,
                        law.OTHER_LAUNCHES: 1.0,
                        law.CROSSING_S: crossing_s,
                        law.CROSSING_BYTES_PER_S: crossing_rate,
                        law.PORT_BYTES_PER_S: machine.dram_bytes_per_s / processors,
                        law.TAKEN: 1.0 - state.cpu,
                    },
                )
                continue
            card = cards[self._layout.card_of(number) or 0]
            self._write(
                number,
                {
                    law.BYTES_PER_S: card.vram_bytes_per_s * state.gpu,
                    law.FLOPS_PER_S: card.flops * state.gpu,
                    law.LAUNCH_S: card.launch_s,
                    law.FIRST_LAUNCHES: law.FIRST_OF_LAYER,
                    law.OTHER_LAUNCHES: law.REST_OF_LAYER,
                    law.CROSSING_S: card.crossing_s,
                    law.CROSSING_BYTES_PER_S: card.h2d_bytes_per_s * state.link,
                },
            )
        links = [
            (card.h2d_bytes_per_s * state.link, law.CHUNK_S)
            for card in cards[: len(self._layout.cards)]
        ]
        for number, (rate, launch_s) in enumerate(
            [*links, (machine.disk_bytes_per_s * state.disk, 0.0)], len(lanes)
        ):
            self._write(number, {law.BYTES_PER_S: rate, law.LAUNCH_S: launch_s})

    def overrun_s(self) -> dict[str, float]:
        """By lane: seconds that this machine's kernels took beyond what was to be emulated."""
        return {
            name: float(fields[law.OVERRUN_S]) / self.slowed
            for name, fields in zip(self._layout.lanes, self._laws, strict=False)
        }

    def _write(self, number: int, values: dict[int, float]) -> None:
        fields = self._laws[number]
        common = {
            law.SLOWED: self.slowed,
            law.JITTER: JITTER,
            law.SEED: float(self._seed * 64 + number),
            law.ROW_NBYTES: self._row_nbytes,
            law.SMALL_NBYTES: self._small_nbytes,
        }
        for field, value in (common | values).items():
            fields[field] = value
