"""The memory that all lanes share, and where everything lies in it.

One anonymous file (`memfd_create`), mapped by every process through `/proc/<pid>/fd/<n>`: nothing
in /dev/shm, nothing on disk, nothing left behind when its owner dies. A control region (counters,
tickets, step records, spans) comes first; behind it the part that the RAM budget bounds.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.blueprint import PAGE, Blueprint
from shadowlane.actors.scratch import SHARED_BUFFERS, route_layout
from shadowlane.ops import table as t
from shadowlane.ops.emulated import LAW_NBYTES, LOADS_NBYTES
from shadowlane.planner.placement import CardPart, Placement, whole_pages
from shadowlane.planner.search import later_slots
from shadowlane.sizes import FreeRam, format_size, free_ram

DISK_COUNTER = t.MAX_LANES  # counters 0..MAX_LANES-1 are the compute lanes'
GATHER_COUNTER = t.MAX_LANES + 1
STEP_COUNTER = t.MAX_LANES + 2  # steps filled by the engine
READY_COUNTER = t.MAX_LANES + 3  # chosen experts that were in RAM, or have arrived
REQUEST_COUNTER = t.MAX_LANES + 4  # requests for missing experts, and guesses
SUMMED_COUNTER = t.MAX_LANES + 5  # the newest route whose experts are all computed
LINK_COUNTER = t.MAX_LANES + 6  # blocks brought to the first card; those of others follow
MOVE_COUNTER = LINK_COUNTER + t.MAX_CARDS  # blocks moved beside the sweep, onto each card
PROBE_COUNTER = MOVE_COUNTER + t.MAX_CARDS  # two of each card, for trying what its streams can do
TRY_COUNTER = PROBE_COUNTER + 2 * t.MAX_CARDS  # the same for those of its transfer lane
NUM_COUNTERS = TRY_COUNTER + 2 * t.MAX_CARDS
LANDING_NBYTES = 64 << 20  # where blocks lie between the disk and a card, as a rule
RECORD_RING = 8
DISK_STATISTICS = 32  # int64 fields
DISK_SPAN_RING = 1 << 15
DISK_SPAN_FIELDS = 5  # step, block, start_ns, end_ns, bytes
LINK_STATISTICS = 8  # int64 fields
LINK_SPAN_RING = 1 << 13
LINK_SPAN_FIELDS = 5  # step, block, start_ns, end_ns, bytes
MAX_PIECES_PER_GROUP = 4
MAX_NAME = 249  # bytes of the name of an anonymous file


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process needs to map the arena."""

    pid: int
    descriptor: int
    nbytes: int


class Arena:
    """A mapping of the shared memory in this process. `memory` is uint8 [nbytes]."""

    def __init__(self, descriptor: int, nbytes: int, handle: ArenaHandle) -> None:
        self._descriptor = descriptor
        # A lane that is opened again has no use for its old arena, and nobody to close it.
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        with suppress(OSError):  # large pages, where the system grants them to shared memory
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.handle = handle
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.base = int(self.memory.ctypes.data)

    @classmethod
    def create(cls, nbytes: int, of: str = "") -> Arena:
        """A new arena, all zero. Raises OSError where the system has no room for it.

        of: the model's path, which its name shows to `shadowlane ps`; the end of a long one.
        """
        name = os.fsencode(f"shadowlane {of}")
        if len(name) > MAX_NAME:
            name = b"shadowlane ..." + name[-(MAX_NAME - 14) :]
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)  # type: ignore[arg-type]
        os.ftruncate(descriptor, nbytes)
        return cls(descriptor, nbytes, ArenaHandle(os.getpid(), descriptor, nbytes))

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map the arena of another process (or of this one a second time)."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(descriptor, handle.nbytes, handle)

    def view(self, offset: int, kind: type[np.generic] | np.dtype, *shape: int) -> np.ndarray:
        """An array in the arena, without a copy."""
        count = math.prod(shape)
        nbytes = count * np.dtype(kind).itemsize
        return self.memory[offset : offset + nbytes].view(kind).reshape(shape)

    def resident_nbytes(self) -> int:
        """Bytes of the arena that hold pages now, as the kernel counts them."""
        return os.fstat(self._descriptor).st_blocks * 512

    def release(self, offset: int, nbytes: int) -> None:
        """Give the whole pages inside a range back to the system; they read as zero afterwards."""
        first = -(-offset // PAGE) * PAGE
        last = (offset + nbytes) // PAGE * PAGE
        if last > first:
            self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last array that views it goes."""
        self._closing()


def check_room(nbytes: int, free: FreeRam | None = None) -> None:
    """Raise MemoryError if so many bytes are not free now, here or in our control group.

    The system grants an arena of any size, and kills whoever touches a page that it has not got.
    """
    free = free_ram() if free is None else free
    if nbytes > free.free_nbytes:
        raise MemoryError(
            f"the plan needs {format_size(nbytes)} of RAM; {free.source} leaves "
            f"{format_size(free.free_nbytes)} (a smaller RAM budget streams more from disk)"
        )


@dataclass(frozen=True, slots=True)
class CardLayout:
    """Where things lie in a card's memory: in its own, whose offsets begin at 0; of an emulated
    card in the arena, behind what the RAM budget bounds."""

    lane: str
    ring: int
    num_slots: int
    slot_nbytes: int
    weights: int
    weights_nbytes: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets of all regions. `budget_start` up to the cards is what the RAM budget bounds."""

    abort: int
    spins: int  # MAX_LANES words, 64 bytes apart
    counters: int
    tickets: tuple[int, ...]  # per compute lane
    records: int
    record_nbytes: int
    record_offsets: dict[str, int]
    workers: tuple[int, ...]  # per compute lane: its first worker's region
    disk: int  # statistics and spans of the disk lane
    budget_start: int
    constants: int
    constant_offsets: dict[str, int]
    norm_eps: int
    swiglu: int  # limit and alpha, float32
    kv: int
    num_pages: int
    max_pages: int  # of one sequence
    step_rows: int  # the most that one step may have
    subchunks: int  # the most that a chunk of a prompt may have
    scratch: dict[str, int]
    worker_scratch: tuple[int, ...]  # per compute lane: its first worker's
    ring: int
    num_slots: int
    slot_nbytes: int
    weights: int
    weights_nbytes: int
    route_numbers: int  # the newest route's number, layers of the newest ones, flags: `table.py`
    route_nbytes: int  # of one sparse layer
    expert_slots: int
    num_expert_slots: int
    expanded: dict[int, int]  # block -> its copy in the compute type
    lanes: tuple[str, ...]  # compute lanes by their numbers
    is_emulated: bool  # their speed is that of a machine that is not here
    cards: tuple[CardLayout, ...]
    laws: tuple[int, ...]  # of compute lanes, links, disk: how fast they are, where emulated
    loads: int  # what links take from the DRAM port, where that is emulated
    links: tuple[int, ...]  # per card: statistics and spans of its link
    copy_rings: tuple[int, ...]  # per card that is here: what its link wants copied
    pinned: tuple[int, int]  # offset and bytes of all that a card's streams reach by themselves
    pinned_weights: tuple[int, int]  # ... and of what is copied to cards
    landing: int  # where blocks lie between the disk and a card that is here
    landing_nbytes: int
    nbytes: int

    def counter(self, number: int) -> int:
        return self.counters + number * t.COUNTER_NBYTES

    def card_of(self, lane: int) -> int | None:
        """Which card a compute lane is; None: it is a processor's."""
        names = [card.lane for card in self.cards]
        return names.index(self.lanes[lane]) if self.lanes[lane] in names else None


def plan_layout(
    blueprint: Blueprint,
    placement: Placement,
    *,
    is_emulated: bool = False,
    may_shrink: bool = False,
) -> ArenaLayout:
    """Lay out the arena for a placement. Its budgeted part has exactly `placement.total_nbytes`.

    is_emulated: lanes take the time of another machine, and its cards' memory is here too.
    may_shrink: the budget may, so that plans to come stream, as they may where cards are: beside it
    there is a ring for them, whose pages take nothing until then.
    """
    from shadowlane.actors.copy_ring import ring_nbytes  # which needs an arena itself
    from shadowlane.actors.held_heads import spare_nbytes

    threads = [lane.threads for lane in placement.lanes]
    config = blueprint.config
    max_pages = -(-placement.context_tokens // blueprint.catalog.page_tokens)
    step_rows = t.MAX_DECODE_ROWS + placement.subchunks * blueprint.options.prefill_chunk
    record = t.RecordLayout(
        rows=step_rows,
        logits=blueprint.options.step_logits,
        sequences=blueprint.options.max_batch,
        max_pages=max_pages,
        half_dim=config.head_dim // 2,
    ).offsets
    plan = blueprint.scratch[placement.subchunks]
    micro_batches = 1 if plan.halves_share else placement.subchunks  # the most there may be
    pieces = MAX_PIECES_PER_GROUP * micro_batches
    instructions = pieces * len(blueprint.groups) + len(blueprint.sources)
    cursor = 0

    def take(nbytes: int) -> int:
        nonlocal cursor
        start = cursor
        cursor += whole_pages(nbytes)
        return start

    abort = take(PAGE)
    counters = take(NUM_COUNTERS * t.COUNTER_NBYTES)
    tickets = tuple(take(instructions * t.TICKET_NBYTES) for _ in threads)
    records = take(RECORD_RING * record["nbytes"])
    workers = tuple(take(count * t.WORKER_NBYTES) for count in threads)
    route_numbers = take(t.ROUTE_WORDS * 8)
    disk = take((DISK_STATISTICS + DISK_SPAN_RING * DISK_SPAN_FIELDS) * 8)
    loads = take(LOADS_NBYTES)
    lawful = len(threads) + len(placement.cards) + 1
    first_law = take(lawful * LAW_NBYTES)
    laws = tuple(first_law + number * LAW_NBYTES for number in range(lawful))
    links = tuple(
        take((LINK_STATISTICS + LINK_SPAN_RING * LINK_SPAN_FIELDS) * 8) for _ in placement.cards
    )
    are_here = bool(placement.cards) and not is_emulated
    copy_rings = tuple(take(ring_nbytes()) for _ in placement.cards if are_here)
    budget_start = cursor
    constants = take(blueprint.catalog.constants_nbytes)
    offset = constants + 64
    constant_offsets = {}
    for source in blueprint.constants:
        constant_offsets[source.name] = offset
        offset += math.prod(source.shape) * 4  # a group's biases follow one another
    scratch = {name: take(getattr(plan, name)) for name in SHARED_BUFFERS}
    scratch |= plan.turn_offsets(take(plan.turn_nbytes))
    pinned = (0, cursor)
    # NOTE: an emulated card reads keys and values where the processor does; its part of the room
    # is its own and not of the RAM budget. Pages of heads that a card holds itself are never
    # touched, and so take none.
    on_cards = sum(card.kv_nbytes for card in placement.cards)
    kv = take(placement.kv_nbytes + on_cards)
    worker_scratch = tuple(take(count * plan.worker_nbytes) for count in threads)
    ring, num_slots = take(placement.slots_nbytes), placement.num_slots
    # Beside cards other blocks may live here later, as many as the budget has room for; the ring's
    # part of it, too, under a plan that reads nothing.
    all_weights = sum(whole_pages(block.held_nbytes) for block in blueprint.catalog.blocks)
    rest = (placement.ram - placement.total_nbytes + placement.slots_nbytes) // PAGE * PAGE
    spare = min(all_weights, placement.weights_nbytes + rest)
    weights_nbytes = placement.weights_nbytes
    if placement.cards:
        weights_nbytes = max(weights_nbytes, spare)
    weights = take(weights_nbytes)
    expert_slots = take(placement.experts_nbytes)
    expanded = {
        block: take(blueprint.catalog.blocks[block].expanded_nbytes) for block in placement.expanded
    }
    used = cursor - budget_start - on_cards
    expected = placement.total_nbytes + weights_nbytes - placement.weights_nbytes
    assert used == expected, (used, expected)
    may_stream = (may_shrink or bool(placement.cards)) and blueprint.experts is None
    if may_stream and not num_slots:
        num_slots = later_slots(placement.slot_nbytes)
        ring = take(num_slots * placement.slot_nbytes)
    largest = max((whole_pages(nbytes) for nbytes in blueprint.held_nbytes), default=0)
    landing_nbytes = max(LANDING_NBYTES, largest) if are_here else 0
    landing = take(landing_nbytes)
    first_copied = min(ring, weights)
    pinned_weights = (first_copied, cursor - first_copied)
    cards = tuple(
        _own_memory(card, spare_nbytes(blueprint))
        if are_here
        else CardLayout(
            lane=card.lane,
            ring=take(card.slots_nbytes),
            num_slots=card.num_slots,
            slot_nbytes=card.slot_nbytes,
            weights=take(card.budget - card.slots_nbytes),  # whatever may live there later
            weights_nbytes=card.budget - card.slots_nbytes,
        )
        for card in placement.cards
    )
    return ArenaLayout(
        abort=abort,
        spins=abort + 64,
        counters=counters,
        tickets=tickets,
        records=records,
        record_nbytes=record["nbytes"],
        record_offsets=record,
        workers=workers,
        disk=disk,
        budget_start=budget_start,
        constants=constants,
        constant_offsets=constant_offsets,
        norm_eps=constants,
        swiglu=constants + 4,
        kv=kv,
        num_pages=placement.kv_pages,
        max_pages=max_pages,
        step_rows=step_rows,
        subchunks=placement.subchunks,
        scratch=scratch,
        worker_scratch=worker_scratch,
        ring=ring,
        num_slots=num_slots,
        slot_nbytes=placement.slot_nbytes,
        weights=weights,
        weights_nbytes=weights_nbytes,
        route_numbers=route_numbers,
        expert_slots=expert_slots,
        num_expert_slots=placement.expert_slots,
        expanded=expanded,
        route_nbytes=route_layout(config, step_rows)["nbytes"] if config.moe else 0,
        lanes=tuple(lane.name for lane in placement.lanes),
        is_emulated=is_emulated,
        cards=cards,
        laws=laws,
        loads=loads,
        links=links,
        copy_rings=copy_rings,
        pinned=pinned,
        pinned_weights=pinned_weights,
        landing=landing,
        landing_nbytes=landing_nbytes,
        nbytes=cursor,
    )


def _own_memory(card: CardPart, spare: int) -> CardLayout:
    """Of a card that is here: its ring, then weights, keys and values, wherever there is room.

    spare: bytes for what a plan does not count of keys and values.
    """
    room = card.budget - card.slots_nbytes + spare
    return CardLayout(
        lane=card.lane,
        ring=0,
        num_slots=card.num_slots,
        slot_nbytes=card.slot_nbytes,
        weights=card.slots_nbytes,
        weights_nbytes=room // PAGE * PAGE,
    )
