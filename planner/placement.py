"""A placement: where each block lives, in which order the others come round, and who computes what.

Plain data. The search for a good one is in `search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

DISK_LANE = "disk:0"
MIN_SLOTS = 4  # two being read, two being consumed (a gate and an up block)
PAGE_NBYTES = 4096

# Tiers served today. `vram:<n>` joins them with the GPU lanes; a pin names one of these.
Tier = Literal["disk", "ram"]

# Copies of packed weights in the compute type, which prefill reads in place of expanding them:
# none; in RAM that is left over, if prompts gain enough; as many as fit, whatever they gain.
Expand = Literal["never", "spare", "always"]


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A compute lane as asked for: `cpu:<n>`. `gpu:<n>` is refused until such lanes exist."""

    name: str
    threads: int

    def __post_init__(self) -> None:
        if not self.name.startswith("cpu:"):
            raise ValueError(f"a compute lane must be named cpu:<n>; got {self.name!r}")
        if self.threads < 1:
            raise ValueError(f"threads of {self.name} must be at least 1; got {self.threads}")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. None means: the planner chooses."""

    ram: int  # bytes; the hard ceiling of the arena: weights, KV, scratch, slots, constants
    lanes: tuple[LaneSpec, ...] = (LaneSpec("cpu:0", 1),)
    context: int | None = None  # tokens of each sequence; None: a default that may shrink
    max_batch: int = 1  # sequences that may run at the same time
    num_slots: int | None = None
    pins: Mapping[str, Tier] = field(default_factory=dict)  # pattern of group names -> tier
    expand: Expand = "never"
    subchunks: int | None = None  # most sub-chunks of a prompt that one step carries; None: chosen

    def __post_init__(self) -> None:
        if self.ram < 1:
            raise ValueError(f"ram must be positive; got {self.ram}")
        if not self.lanes:
            raise ValueError("at least one compute lane is needed; got none")
        names = [lane.name for lane in self.lanes]
        if len(set(names)) != len(names):
            raise ValueError(f"compute lanes must have different names; got {names}")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context must be positive; got {self.context}")
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1; got {self.max_batch}")
        if self.num_slots is not None and self.num_slots < MIN_SLOTS:
            raise ValueError(f"num_slots must be at least {MIN_SLOTS}; got {self.num_slots}")
        if self.subchunks is not None and self.subchunks < 1:
            raise ValueError(f"subchunks must be at least 1; got {self.subchunks}")
        for pattern, tier in self.pins.items():
            if tier not in ("disk", "ram"):
                raise ValueError(f"pin {pattern!r} must name disk or ram; got {tier!r}")
        if self.expand not in get_args(Expand):
            raise ValueError(
                f"expand must be one of {', '.join(get_args(Expand))}; got {self.expand!r}"
            )


class Share(NamedTuple):
    """The units [first_unit, last_unit) of a group that one lane computes; never empty."""

    lane: str
    first_unit: int
    last_unit: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One whole plan. All sizes are bytes of the arena, in whole 4 KiB pages per part."""

    placement_id: int
    strategy: str  # the candidate that won: "all resident", "spread", "first layers", ...
    lanes: tuple[LaneSpec, ...]  # all that exist, also those without any share
    resident: tuple[bool, ...]  # per block of the catalog
    sweep: tuple[int, ...]  # blocks that stream, in consumption order; never of `embed`
    num_slots: int  # of the ring; 0 where nothing streams
    slot_nbytes: int  # of one slot
    context_tokens: int  # of each sequence
    kv_pages: int  # over all sequences
    shares: Mapping[str, tuple[Share, ...]]  # group -> shares by rising unit; covers it exactly
    ram: int  # the budget it was made for
    weights_nbytes: int  # resident blocks as held
    slots_nbytes: int
    kv_nbytes: int
    scratch_nbytes: int
    constants_nbytes: int
    read_nbytes_per_step: int  # what the sweep reads each step
    predicted_step_s: float  # one decode step at batch 1
    notes: tuple[str, ...] = ()  # what was decided for the user and why
    expert_slots: int = 0  # routed experts of a mixture that RAM has room for
    experts_nbytes: int = 0  # of these slots
    expanded: tuple[int, ...] = ()  # blocks with a copy in the compute type, by rising index
    expanded_nbytes: int = 0  # of these copies
    subchunks: int = 1  # the most of a prompt that one step carries, and reads the weights for
    beside_subchunks: int = 1  # ... where tokens of other sequences wait for the step

    @property
    def total_nbytes(self) -> int:
        """Bytes of the whole arena; never more than `ram`."""
        return (
            self.weights_nbytes
            + self.experts_nbytes
            + self.slots_nbytes
            + self.kv_nbytes
            + self.scratch_nbytes
            + self.constants_nbytes
            + self.expanded_nbytes
        )

    @property
    def active_lanes(self) -> tuple[str, ...]:
        """Lanes with a share in any group, in the order of `lanes`."""
        named = {share.lane for shares in self.shares.values() for share in shares}
        return tuple(lane.name for lane in self.lanes if lane.name in named)


class InfeasiblePlan(ValueError):
    """No placement fits. `parts` are the bytes that cannot be avoided, by name."""

    def __init__(self, what: str, parts: Mapping[str, int], budget: int) -> None:
        self.parts = dict(parts)
        self.needed = sum(parts.values())
        self.budget = budget
        self.deficit = self.needed - budget
        terms = " + ".join(f"{name} {show_nbytes(nbytes)}" for name, nbytes in parts.items())
        super().__init__(
            f"{what}: {terms} = {show_nbytes(self.needed)}; the RAM budget is "
            f"{show_nbytes(budget)}, short by {show_nbytes(self.deficit)}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_infeasible, (self.args[0], self.parts, self.budget)


def _rebuild_infeasible(message: str, parts: Mapping[str, int], budget: int) -> InfeasiblePlan:
    """Unpickle: exceptions travel between actors, and the constructor takes other arguments."""
    error = InfeasiblePlan("", parts, budget)
    error.args = (message,)
    return error


def show_nbytes(nbytes: int) -> str:
    """Bytes for reading, in binary units with three or four digits: "93.8 MiB", "512 B"."""
    sign, value = "-" if nbytes < 0 else "", float(abs(nbytes))
    if value < 1024:
        return f"{nbytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":  # what would be shown as 1024 is one of the next
            break
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{sign}{value:.{digits}f} {unit}"


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole 4 KiB pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
