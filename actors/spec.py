"""What crosses from a client to the engine and back, as plain data.

Apart from everything that acts on it, so that a client pays for no kernel, model or array library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shadowlane.ops.table import FEW_ROWS
from shadowlane.planner.hardware import Conditions, Hardware, with_small_matrices
from shadowlane.planner.placement import Expand

PREFILL_CHUNK = 512
SPIN_US = 50  # a spin shorter than a wake-up puts both sides of a barrier to sleep in turn
SMALL = 1.5e6  # bytes of a matrix that reaches half of a rate, on machines as they are
READ_DEPTH = 4  # reads in flight: four threads reach what the disk gives

DataType = Literal["float32", "bfloat16", "float16"]
KvType = Literal["q8_0"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose that shapes the model in memory, before any plan."""

    dtype: DataType | None = None  # compute type; None: the file's, or the fastest
    kv: KvType | None = None  # how keys and values are cached; None: in the compute type
    context: int | None = None
    max_batch: int = 1
    logit_rows: int = FEW_ROWS  # rows of logits that one step may give to one request
    prefill_chunk: int = PREFILL_CHUNK

    @property
    def step_logits(self) -> int:
        """The most rows of logits that one step gives to all requests together.

        Up to FEW_ROWS rows of a request that wants them all are a step of their own; a longer
        chunk may share its step with a row of every other sequence.
        """
        if self.logit_rows <= FEW_ROWS:
            return max(self.logit_rows, self.max_batch)
        return self.logit_rows + self.max_batch - 1


@dataclass(frozen=True, slots=True)
class CardSettings:
    """One card as it is to be used."""

    memory: int  # bytes that weights, what is brought, and keys and values may take
    uuid: str = ""  # of one that is here


@dataclass(frozen=True, slots=True)
class Emulated:
    """A machine that is not here, whose speed lanes are to have."""

    hardware: Hardware
    seed: int = 0
    is_hidden: bool = False  # rates are off from what the file says, each by a factor of its own
    slowed: float | None = None  # seconds here for one emulated second; None: chosen by the plan
    small_nbytes: float = SMALL  # a matrix of this size reaches half of a rate
    script: tuple[tuple[int, Conditions], ...] = ()  # what is left from so many decode steps on

    @property
    def planned(self) -> Hardware:
        """What planners are told of it: the file's figures, and what small matrices cost."""
        return with_small_matrices(self.hardware, self.small_nbytes)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a model is to be run; sizes in bytes."""

    ram: int
    cores: tuple[tuple[int, ...], ...]  # per compute lane, one core per worker
    depth: int = READ_DEPTH
    direct: bool = True
    prefetch: bool = True
    num_slots: int | None = None
    expand: Expand = "never"  # copies of packed weights in the compute type, for prefill
    subchunks: int | None = None  # the most of a prompt that one step carries; None: planned
    micro_batches: int | None = (
        None  # the most groups in which these go through cards; None: planned
    )
    replan: bool = True  # False: the first plan stays, whatever is measured
    shares: tuple[float, ...] | None = None  # rows of each compute lane, any scale; None: planned
    trace_routing: Path | None = None  # of a mixture: write what its routers choose to this file
    replay_routing: Path | None = None  # ... and let them choose what this file says
    expert_policy: str | None = None  # a name of POLICIES that stays; None: they compete
    cards: tuple[CardSettings, ...] = ()
    emulated: Emulated | None = None  # the machine whose speed lanes are to have
    machine: Hardware | None = None  # with cards that are here: what was measured of this one
    strategy: str = "auto"  # of placing groups over cards: searched for, or a layout by hand
    strategy_layers: int | None = None  # of a layout that counts layers; None: the best number
    headroom: int | None = None  # what `ram` left free, for others; None: the budget was named
    pins: tuple[tuple[str, str], ...] = ()  # pattern of names of groups, home; see planner/pins.py
    spin_us: int = (
        SPIN_US  # what a wait may spin before it sleeps, until the planner says otherwise
    )

    @property
    def are_cards_here(self) -> bool:
        """Not emulated: their memory is their own, and what lived there dies with their lanes."""
        return bool(self.cards) and self.emulated is None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to serve and how."""

    root: Path
    options: Options
    settings: EngineSettings
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer as it is written."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
