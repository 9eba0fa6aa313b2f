"""A placement: where each block lives, in which order the others come round, and who computes what.

Plain data. The search for a good one is in `search.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.profile import Phase

DISK_LANE = "disk:0"
MIN_SLOTS = 4  # two being read, two being consumed (a gate and an up block)
PAGE_NBYTES = 4096
HOMES = re.compile(r"gpu:\d+|cpu|disk")  # that a pin may name

# Copies of packed weights in the compute type, which prefill reads in place of expanding them:
# none; in RAM that is left over, if prompts gain enough; as many as fit, whatever they gain.
Expand = Literal["never", "spare", "always"]


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A compute lane as asked for: `cpu:<n>` or `gpu:<n>`. Its threads, of a card those that
    stand in for it."""

    name: str
    threads: int

    def __post_init__(self) -> None:
        if not self.name.startswith(("cpu:", "gpu:")):
            raise ValueError(f"a compute lane must be named cpu:<n> or gpu:<n>; got {self.name!r}")
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
    pins: Mapping[str, str] = field(default_factory=dict)  # pattern of group names -> home
    expand: Expand = "never"
    subchunks: int | None = None  # most sub-chunks of a prompt that one step carries; None: chosen
    micro_batches: int | None = None  # most groups in which these go through cards; None: chosen
    machine: Hardware | None = None  # with cards: all that is known of its speed
    cards: tuple[int, ...] = ()  # bytes of each card's memory
    cards_here: bool = False  # they are here, not emulated: see `Load.is_told`
    strategy: str = "auto"  # with cards: searched for, or a layout by hand
    strategy_layers: int | None = None  # of a layout that counts layers; None: as many as are best
    replan: bool = True
    headroom: int | None = None  # bytes that `ram` left free, for others; None: it was named

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
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1; got {self.micro_batches}")
        for pattern, home in self.pins.items():
            if not HOMES.fullmatch(home):
                raise ValueError(f"pin {pattern!r} must name gpu:<n>, cpu or disk; got {home!r}")
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
class Stream:
    """What one lane brings in every step, in the order of its use, through a ring of slots."""

    lane: str  # that brings it: "disk:0" into RAM, "h2d:0" onto a card
    sweep: tuple[int, ...]  # blocks
    num_slots: int


@dataclass(frozen=True, slots=True)
class CardPart:
    """What one card holds under a placement. Sizes are bytes of its memory, in whole pages."""

    lane: str  # "gpu:0"
    resident: tuple[int, ...]  # blocks that live there, by rising index
    decode_sweep: tuple[int, ...]  # blocks that come over its link in each decode step
    # ... in each step with rows of a prompt; here routed experts come, too, counted behind all
    # blocks (`Catalog.expert_number`): out of their slots of RAM, or as the disk reads them
    prefill_sweep: tuple[int, ...]
    num_slots: int  # of the ring that they come into; 0 where nothing comes
    slot_nbytes: int
    budget: int
    weights_nbytes: int
    slots_nbytes: int
    kv_nbytes: int
    # routed experts that live there, by layer, counted among those that have some; none: empty
    experts: tuple[tuple[int, ...], ...] = ()
    experts_nbytes: int = 0

    @property
    def link(self) -> str:
        """The lane that brings what comes: "h2d:0"."""
        return link_of(self.lane)

    @property
    def total_nbytes(self) -> int:
        """Never more than `budget`."""
        return self.weights_nbytes + self.slots_nbytes + self.kv_nbytes + self.experts_nbytes

    def experts_of(self, layer: int) -> tuple[int, ...]:
        return self.experts[layer] if self.experts else ()

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.experts))

    def stream(self, phase: Phase) -> Stream:
        sweep = self.decode_sweep if phase == "decode" else self.prefill_sweep
        return Stream(self.link, sweep, self.num_slots)


def expert_shares(
    counts: Mapping[str, int],
    processor: str,
    units: int,
    adds_up: str | None = None,
    *,
    brought: Mapping[str, int] | None = None,
) -> tuple[Share, ...]:
    """Who computes the routed experts of a layer: cards, by how many live there and how many come
    to them, each a share of its own, and a processor, which has the others.

    adds_up: the lane with the last unit, the sum, whose shares are the last; None: the processor.
    """
    adds_up = adds_up or processor
    come = brought or {}
    parts = [*counts.items(), *come.items()]
    parts.append((processor, units - 1 - sum(count for _, count in parts)))
    parts.sort(key=lambda part: part[0] == adds_up)
    if parts[-1][0] != adds_up:
        raise ValueError(f"adds_up must be one of the lanes that compute; got {adds_up}")
    found: list[Share] = []
    at = 0
    for lane, count in parts:
        if count:
            found.append(Share(lane, at, at + count))
            at += count
    if found and found[-1].lane == adds_up:
        return (*found[:-1], found[-1]._replace(last_unit=units))
    return (*found, Share(adds_up, at, units))


def link_of(card: str) -> str:
    """gpu:1 -> h2d:1: the lane that copies to a card."""
    return f"h2d:{card.removeprefix('gpu:')}"


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
    # group -> shares by rising unit, which cover it exactly; in steps with rows of a prompt, too,
    # unless those have shares of their own
    shares: Mapping[str, tuple[Share, ...]]
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
    # groups in which the sub-chunks of a chunk go through the layers, one behind the other, so that
    # lanes which have a part of the layers each work at the same time; 1: all together
    micro_batches: int = 1
    cards: tuple[CardPart, ...] = ()
    prefill_shares: Mapping[str, tuple[Share, ...]] | None = None  # None: those of decode
    # routed experts that cards are brought and that have no slot in RAM: in each step with rows of
    # a prompt they stream, counted behind all blocks, in the order in which links take them
    prefill_sweep: tuple[int, ...] = ()

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

    def shares_of(self, phase: Phase) -> Mapping[str, tuple[Share, ...]]:
        return (
            self.shares
            if phase == "decode" or self.prefill_shares is None
            else (self.prefill_shares)
        )

    @property
    def has_prefill_programs(self) -> bool:
        """Whether steps with rows of a prompt have programs of their own."""
        return self.prefill_shares is not None or self.micro_batches > 1

    def micro_batches_in(self, phase: Phase) -> int:
        return 1 if phase == "decode" else self.micro_batches

    def experts_out_of_ram(self, catalog: Catalog) -> set[int]:
        """The routed experts, by their numbers, that keep slots in RAM to be brought to cards."""
        come = {n for card in self.cards for n in card.prefill_sweep if catalog.is_expert(n)}
        return come.difference(self.prefill_sweep)

    def disk_stream(self, phase: Phase) -> Stream:
        """What the disk reads in a step: for processors, or for links to bring."""
        sweep = self.sweep if phase == "decode" else self.sweep + self.prefill_sweep
        return Stream(DISK_LANE, sweep, self.num_slots)

    def stream_of(self, lane: str, phase: Phase) -> Stream:
        """What comes to a compute lane in a step: over its card's link, or off the disk."""
        for card in self.cards:
            if card.lane == lane:
                return card.stream(phase)
        return Stream(DISK_LANE, self.sweep, self.num_slots)

    def number_of(self, lane: str) -> int:
        """The place of a compute lane among all: the number of its counter."""
        return [each.name for each in self.lanes].index(lane)

    @property
    def experts_on_cards(self) -> int:
        return sum(card.num_experts for card in self.cards)

    @property
    def active_lanes(self) -> tuple[str, ...]:
        """Lanes with a share in any group, in the order of `lanes`."""
        every = [*self.shares.values(), *(self.prefill_shares or {}).values()]
        named = {share.lane for shares in every for share in shares}
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
