"""A model over cards, processor, RAM and disk, at the grain of groups: plans and their seconds.

Each group is a `Load`. A plan gives each a `Site`: which part of it lives on a card and which in
RAM (the rest is only on disk), once for all phases; and, for each phase, which part of what is not
on the card is brought and computed there. What is on the card and what is not are computed at the
same time, so a part between 0 and 1 is a split by rows. Experts are counted instead of rows.

`hybrid_play.py` plays a plan through; `hybrid_search.py` finds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shadowlane.planner.catalog import Catalog, GroupKind
from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hit_rate import assumed, interpolate
from shadowlane.planner.profile import Phase

ACTIVATION_NBYTES = 2  # of an element that crosses the link
STAGE_NBYTES = 256e6  # most room on a card for what is brought there, in pieces of a few MiB
STAGE_PART = 8  # and at most this part of its memory
DISK_RING_NBYTES = 256e6  # most room in RAM for what is read ahead, where anything is only on disk
DISK_RING_PART = 8  # and at most this part of what RAM has for weights, as placements have it

NOTHING = 1e-9  # a part that is none but for rounding

HitRate = Callable[[float], float]  # part of a layer's experts, the hottest -> part of the choices


@dataclass(frozen=True, slots=True)
class Load:
    """What planning needs to know of one group."""

    name: str
    kind: GroupKind
    layer: int | None
    nbytes: float  # weights; of one expert where there are experts
    flops_per_row: float  # for attention, times the tokens attended; for experts, all chosen ones
    kv_nbytes_per_token: float = 0.0  # attention only
    window: int | None = None  # tokens that attention looks back at most, its own included
    page_tokens: int = 0  # keys and values of all tokens are kept, in such pages; 0: of the window
    experts: int = 0  # of this layer
    top_k: int = 0
    home: str | None = None  # where the user pinned it: "gpu:<n>", "cpu", "disk"; see `pins.py`
    # how our own lanes do it, see `model_of`:
    # who chose adds up what all sides give; none of it is brought but, where it `comes`, for
    # prompts: then all experts or a fixed part of them, whatever routers choose
    is_joined: bool = False
    is_undivided: bool = False  # one side computes all of it: a router, see `chooser`
    comes: bool = False
    # experts on cards that are here: of a prompt the host has to know what was chosen before it
    # starts any, which a card that chooses has to tell it
    is_told: bool = False

    @property
    def card(self) -> int | None:
        """The card it is pinned to."""
        if self.home is None or not self.home.startswith("gpu:"):
            return None
        return int(self.home.removeprefix("gpu:"))

    def attended(self, context: int) -> int:
        """Of so many tokens, those whose keys and values attention reads, and needs to keep."""
        return context if self.window is None else min(context, self.window)

    def kept(self, context: int) -> int:
        """Of so many tokens, those whose keys and values have room, used or not."""
        if not self.page_tokens:
            return self.attended(context)
        return -(-context // self.page_tokens) * self.page_tokens

    @property
    def whole_nbytes(self) -> float:
        """What the group's weights take up where all of them live."""
        return self.nbytes * max(1, self.experts)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    loads: tuple[Load, ...]  # in execution order, without the embedding, whose rows are gathered
    row_nbytes: float  # activation of one row, as it crosses a link
    fixed_ram_nbytes: float  # embedding rows, constants, scratch
    max_context: int
    # What follows from the loads: for each a number, the same for those that differ in name and
    # layer alone; where each layer begins and ends; and of experts the undivided router.
    alike: tuple[int, ...] = field(init=False, repr=False, compare=False)
    layers: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    routers: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    wholes: tuple[float, ...] = field(init=False, repr=False, compare=False)  # `whole_nbytes`
    has_pins: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers: dict[Load, int] = {}
        alike = [
            numbers.setdefault(replace(load, name="", layer=None), len(numbers))
            for load in self.loads
        ]
        starts = [
            index
            for index, load in enumerate(self.loads)
            if not index or load.layer != self.loads[index - 1].layer
        ]
        undivided = {load.layer: at for at, load in enumerate(self.loads) if load.is_undivided}
        routers = [undivided.get(load.layer) if load.experts else None for load in self.loads]
        object.__setattr__(self, "alike", tuple(alike))
        object.__setattr__(self, "routers", tuple(routers))
        object.__setattr__(self, "wholes", tuple(load.whole_nbytes for load in self.loads))
        object.__setattr__(self, "has_pins", any(load.home is not None for load in self.loads))
        object.__setattr__(
            self, "layers", tuple(zip(starts, [*starts[1:], len(self.loads)], strict=True))
        )

    @property
    def nbytes(self) -> float:
        return sum(self.wholes)


def model_of(
    catalog: Catalog,
    name: str,
    windows: Sequence[int | None] = (),
    *,
    is_ours: bool = False,
    cards_here: bool = False,
    brings_experts: bool = False,
) -> Model:
    """The groups of a catalog as loads. windows: of each layer; none given: no layer has one.

    is_ours: as our own lanes run it. One of them, a card's or the processor's, computes a layer's
    router and adds up its experts. Experts come over no link for an answer, since a router chooses
    too late, and for prompts if `brings_experts`. cards_here: not emulated. Of keys and values all
    are kept, in whole pages, however far layers look back.
    """
    attns = sum(1 for group in catalog.groups if group.kind == "attn")
    kv_nbytes = catalog.page_nbytes / catalog.page_tokens / max(1, attns)
    loads: list[Load] = []
    gathered = 0.0
    for group in catalog.groups:
        blocks = [catalog.blocks[index] for index in group.blocks]
        nbytes = float(sum(each.held_nbytes if is_ours else each.nbytes for each in blocks))
        if group.kind == "embed":
            gathered = nbytes
            continue
        experts = catalog.experts if group.kind == "experts" else None
        loads.append(
            Load(
                name=group.name,
                kind=group.kind,
                layer=group.layer,
                nbytes=experts.nbytes if experts else nbytes,
                flops_per_row=group.flops_per_row,
                kv_nbytes_per_token=kv_nbytes if group.kind == "attn" else 0.0,
                window=windows[group.layer or 0] if group.kind == "attn" and windows else None,
                experts=experts.per_layer if experts else 0,
                top_k=experts.top_k if experts else 0,
                page_tokens=catalog.page_tokens if is_ours and group.kind == "attn" else 0,
            )
        )
        if is_ours:
            loads[-1] = by_our_lanes(loads[-1], comes=brings_experts, is_told=cards_here)
    cols = next(group.cols for group in catalog.groups if group.kind == "qkv")
    fixed = gathered + catalog.constants_nbytes + catalog.scratch_nbytes
    row_nbytes = cols * ACTIVATION_NBYTES
    return Model(name, tuple(loads), row_nbytes, fixed, catalog.max_context)


def by_our_lanes(load: Load, *, comes: bool = True, is_told: bool = False) -> Load:
    """As lanes of ours run it, see `model_of`. comes, is_told: of experts."""
    has_experts = load.experts > 0
    return replace(
        load,
        is_undivided=load.kind == "router",
        is_joined=has_experts,
        comes=comes and has_experts,
        is_told=is_told and has_experts,
    )


def whole_on(vram: float, over: Sequence[float]) -> int | None:
    """The card that holds all of a load, by its part on cards and how they share that."""
    if vram < 1.0 - NOTHING:
        return None
    return next((card for card, part in enumerate(over) if part >= 1.0 - NOTHING), None)


def chooser(model: Model, sites: Sequence[Site], index: int) -> int:
    """Who chooses among the experts of load `index`, and adds up what they give, as a side: 0 for
    the processor, 1 for the first card."""
    router = model.routers[index]
    if router is None:
        return 0
    card = whole_on(sites[router].vram, sites[router].over)
    return 0 if card is None else 1 + card


def assumed_hits(model: Model) -> HitRate:
    """How often the hottest experts are chosen, where nobody has run it; see `hit_rate.py`."""
    mixture = next((load for load in model.loads if load.experts), None)
    if mixture is None:
        return lambda part: part
    points = assumed(mixture.experts, mixture.top_k).points
    return lambda part: interpolate(points, part)


def known_hits(catalog: Catalog, model: Model) -> HitRate:
    """The same, from earlier runs of it where they are remembered."""
    hits = catalog.experts.hits if catalog.experts else None
    if hits is None:
        return assumed_hits(model)
    return lambda part: interpolate(hits.points, part)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step carries, and for how long a context room is kept."""

    phase: Phase = "decode"
    rows: int = 1  # activation rows
    sequences: int = 1
    context: int = 512  # tokens attended, per sequence
    max_context: int = 4096  # tokens whose keys and values must find room, per sequence


DECODE = Work()


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prefill that a placement has to serve beside decode."""

    work: Work  # of one step
    per_step: float  # such steps for each step of decode


def rows_at_once(plan: Plan, work: Work) -> int:
    """Rows of a micro-batch, or of the step where it is not cut."""
    return -(-work.rows // plan.micro_batches) if work.phase == "prefill" else work.rows


def rows_of(load: Load, work: Work) -> int:
    """Rows that a load computes: of a prompt the head is asked for the last one only."""
    is_last_only = load.kind == "lm_head" and work.phase == "prefill"
    return work.sequences if is_last_only else work.rows


def flops_of(load: Load, work: Work) -> float:
    """Operations of all of a load in a step."""
    flops = load.flops_per_row * rows_of(load, work)
    return flops * load.attended(work.context) if load.kind == "attn" else flops


@dataclass(frozen=True, slots=True)
class Site:
    """Where one load lives and who computes it. Parts of the whole: rows, KV heads or experts.

    Homes are the same in all phases; what is brought is not.
    """

    vram: float  # part on cards
    ram: float  # part in RAM; what is on neither is read from disk in every step
    brought: float = 0.0  # in decode: part of what is not on cards that is brought to them, and
    # computed there
    over: tuple[float, ...] = (1.0,)  # how cards share what they hold or are brought; sums to 1
    brought_prefill: float = 0.0  # as `brought`, in prefill

    def brought_in(self, phase: Phase) -> float:
        return self.brought if phase == "decode" else self.brought_prefill


@dataclass(frozen=True, slots=True)
class Plan:
    """One placement, with what each phase brings over links.

    micro_batches: into which each step of prefill is cut, where it brings and reads nothing: they
    follow each other through the layers, so that lanes that have different layers work at once.
    """

    name: str
    sites: tuple[Site, ...]  # one for each load
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that a plan takes up."""

    vram: tuple[float, ...]  # per card, with the stage for what any phase brings
    ram: float  # with the ring for what is only on disk
    stages: tuple[float, ...]  # of `vram`, on each card
    ring: float  # of `ram`


def demand(
    model: Model, plan: Plan, work: Work, machine: Hardware, state: Conditions = CALM
) -> Demand:
    cards = machine.cards
    vram = [0.0] * len(cards)
    brings = [False] * len(cards)
    ram = model.fixed_ram_nbytes
    reads = False
    kvs = all_kv_nbytes(model, work)
    has_slots = machine.experts_nbytes is not None
    for load, whole, kv, site in zip(model.loads, model.wholes, kvs, plan.sites, strict=True):
        if not (has_slots and load.experts):
            ram += whole * site.ram
        ram += kv * (1.0 - site.vram)
        reads = reads or (whole > 0.0 and site.vram + site.ram < 1.0 - NOTHING)
        moved = site.brought > 0.0 or site.brought_prefill > 0.0
        if moved or site.vram:
            for card, part in enumerate(site.over[: len(cards)]):
                vram[card] += (whole + kv) * site.vram * part
                brings[card] |= moved and part > 0.0
    stages = tuple(
        more_for_stage(card) if each else 0.0 for card, each in zip(cards, brings, strict=True)
    )
    # A mixture's ring is laid out with its slots, and the embedding has what they leave.
    ring = disk_ring_nbytes(model, machine, state) if reads and not has_slots else 0.0
    held = tuple(have + stage for have, stage in zip(vram, stages, strict=True))
    return Demand(held, ram + ring, stages, ring)


def kv_nbytes(load: Load, work: Work) -> float:
    """Room for the keys and values of one load, whether used yet or not."""
    return load.kv_nbytes_per_token * load.kept(work.max_context) * work.sequences


def all_kv_nbytes(model: Model, work: Work) -> list[float]:
    """`kv_nbytes` of each load."""
    known: dict[int, float] = {}
    for kind, load in zip(model.alike, model.loads, strict=True):
        if kind not in known:
            known[kind] = kv_nbytes(load, work)
    return [known[kind] for kind in model.alike]


def held_kv_nbytes(load: Load, work: Work) -> float:
    """Of the keys and values of one load, those that are there by now."""
    return load.kv_nbytes_per_token * load.attended(work.context) * work.sequences


def read_kv_nbytes(load: Load, work: Work) -> float:
    """Of the keys and values of one load, what a step reads: one of a prompt is of one sequence."""
    sequences = work.sequences if work.phase == "decode" else 1
    return load.kv_nbytes_per_token * load.attended(work.context) * sequences


def fits(model: Model, plan: Plan, work: Work, machine: Hardware, state: Conditions = CALM) -> bool:
    need = demand(model, plan, work, machine, state)
    for card, nbytes in zip(machine.cards, need.vram, strict=True):
        if nbytes > vram_room(card, state) * (1 + 1e-9):
            return False
    return need.ram <= ram_room(machine, state) * (1 + 1e-9)


def stage_nbytes(card: Card) -> float:
    """Room on a card for what is brought there, where anything is."""
    if card.ring_nbytes is not None:
        return card.ring_nbytes
    return min(STAGE_NBYTES, card.vram_nbytes / STAGE_PART)


def more_for_stage(card: Card) -> float:
    """What of `vram_room` a plan needs that brings anything: none of it where a ring is there."""
    return 0.0 if card.ring_nbytes is not None else stage_nbytes(card)


def disk_ring_nbytes(model: Model, machine: Hardware, state: Conditions = CALM) -> float:
    """Room in RAM for what is read ahead, where anything is."""
    if machine.ring_nbytes is not None:
        return machine.ring_nbytes
    room = ram_room(machine, state) - model.fixed_ram_nbytes
    return min(DISK_RING_NBYTES, max(0.0, room) / DISK_RING_PART)


def vram_room(card: Card, state: Conditions = CALM) -> float:
    """Bytes for what lives on a card; beside its ring where one is laid out."""
    held = card.reserved_nbytes + (card.ring_nbytes or 0.0)
    return max(0.0, card.vram_nbytes - held - state.vram_taken_nbytes)


def ram_room(machine: Hardware, state: Conditions = CALM) -> float:
    """Bytes for what lives in RAM; beside slots for experts where they are laid out."""
    held = machine.reserved_nbytes + (machine.experts_nbytes or 0.0)
    return max(0.0, machine.ram_nbytes - held - state.ram_taken_nbytes)
