"""What there is to place: the groups of one model in the order a step runs them, and their blocks.

A *group* is what one fused operator reads and the unit in which the planner thinks; a *block* is a
tile of rows, the unit of movement, of mathematics and of splits. Block heights are given here by
whoever read the file; no plan changes them, so no plan changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

GroupKind = Literal["embed", "qkv", "attn", "o", "gate_up", "down", "router", "experts", "lm_head"]


@dataclass(frozen=True, slots=True)
class Block:
    index: int  # position in Catalog.blocks
    group: str  # the group whose operator consumes it
    nbytes: int  # bytes of the weights themselves
    held_nbytes: int  # bytes it occupies in a tier and costs to read: the enclosing 4 KiB range
    first_unit: int  # it serves the units [first_unit, last_unit) of its group; the blocks of two
    last_unit: int  # parts that are used together (gate, up) may serve the same units
    expanded_nbytes: int = 0  # whole pages of a copy in the compute type, for prefill; 0: no use


@dataclass(frozen=True, slots=True)
class Group:
    name: str  # "12.qkv", "lm_head"
    kind: GroupKind
    layer: int | None
    layout: str  # of its largest part; "" where there are no weights
    # shares are given in these: 16 output rows each, or one KV head of `attn`; of `experts` one of
    # them, first those on cards, then those that come to cards, and at last the sum of what all of
    # them gave (`expert_units`)
    units: int
    cols: int  # inputs of each output row; 0 where there are no weights
    blocks: tuple[int, ...]  # indices into Catalog.blocks as consumed: by rising first_unit
    flops_per_row: int  # multiply-adds times two for one activation row


HitSource = Literal["assumed", "remembered", "measured"]


@dataclass(frozen=True, slots=True)
class HitCurve:
    """What part of a token's experts is expected in RAM; see `hit_rate.py`."""

    points: tuple[tuple[float, float], ...]  # (part of the experts in RAM, part of the choices that
    # find theirs there), rising, from (0, 0) to (1, 1)
    source: HitSource
    tokens: int = 0  # that it rests on


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a mixture: which of them a token needs is known only when it comes.

    Each is whole on a card, in a slot of RAM or on disk. They are no blocks of their groups, whose
    other parts (router, shared expert) are in RAM or on cards as all else. A placement names those
    that live on cards; which of the others are in RAM changes as they are chosen.
    """

    num_layers: int  # layers that have experts
    per_layer: int
    top_k: int  # chosen by each token in each layer
    nbytes: int  # weights of one expert, the mean
    held_nbytes: int  # what reading one costs: whole 4 KiB pages, the mean
    slot_nbytes: int  # room for any one of them
    hits: HitCurve | None = None  # what is known of its use; None: nothing
    # by layer, all experts, the most used first; empty: nothing is known, they go by number
    ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def total(self) -> int:
        return self.num_layers * self.per_layer

    def ranked(self, layer: int) -> tuple[int, ...]:
        """The experts of one layer, counted among those that have some, the most used first."""
        return self.ranks[layer] if self.ranks else tuple(range(self.per_layer))


def expert_units(per_layer: int) -> int:
    """Units of a group of routed experts: whoever has the last adds up what all of them gave."""
    return per_layer + 1


def router_of(experts: str) -> str:
    """The name of the group that chooses among a group of experts."""
    return experts.replace("experts", "router")


@dataclass(frozen=True, slots=True)
class Catalog:
    """A model as the planner sees it.

    Tied embeddings are one set of blocks: they belong to `lm_head`, and `embed` has none (its rows
    are gathered, one by one). An untied `embed` has blocks with `streamed=False` semantics: they
    may be resident, and are never part of a sweep.
    """

    model: str  # fingerprint of the files
    groups: tuple[Group, ...]  # execution order
    blocks: tuple[Block, ...]  # consumption order, `embed` blocks (if untied) first
    constants_nbytes: int  # norms, biases: always resident
    scratch_nbytes: int  # activations, logits, per-worker tiles
    slot_nbytes: int  # one ring slot: the largest streamed block, whole 4 KiB pages
    page_tokens: int  # tokens per KV page
    page_nbytes: int  # bytes of one KV page over all layers
    max_context: int  # tokens the model allows
    experts: Experts | None = None  # of a mixture
    subchunk_rows: int = 512  # of a prompt, multiplied together whatever the plan
    # (sub-chunks of the longest chunk, scratch bytes then), beyond one sub-chunk
    chunk_scratch: tuple[tuple[int, int], ...] = ()

    def with_subchunks(self, count: int) -> Catalog:
        """The same model with the scratch of chunks of `count` sub-chunks."""
        sizes = {1: self.scratch_nbytes, **dict(self.chunk_scratch)}
        if count not in sizes:
            allowed = ", ".join(str(each) for each in sizes)
            raise ValueError(f"subchunks must be one of {allowed} here; got {count}")
        return replace(self, scratch_nbytes=sizes[count], chunk_scratch=())

    @property
    def sparse_groups(self) -> tuple[Group, ...]:
        """The groups of routed experts, one for each layer that has some."""
        return tuple(group for group in self.groups if group.kind == "experts")

    def expert_number(self, layer: int, expert: int) -> int:
        """How a routed expert is counted where blocks and experts are meant: behind all blocks.

        layer: counted among those that have experts.
        """
        assert self.experts is not None, "only mixtures have routed experts"
        return len(self.blocks) + layer * self.experts.per_layer + expert

    def is_expert(self, number: int) -> bool:
        return number >= len(self.blocks)

    def experts_in(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """By layer, the routed experts among what is counted so, in the order given."""
        if self.experts is None:
            return ()
        found: list[list[int]] = [[] for _ in range(self.experts.num_layers)]
        for number in numbers:
            if self.is_expert(number):
                layer, expert = divmod(number - len(self.blocks), self.experts.per_layer)
                found[layer].append(expert)
        return tuple(map(tuple, found))

    def held_nbytes(self, number: int) -> int:
        """What a block, or behind all blocks a routed expert, takes up."""
        if not self.is_expert(number):
            return self.blocks[number].held_nbytes
        assert self.experts is not None, "only mixtures have routed experts"
        return self.experts.slot_nbytes

    def group(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r} in the catalog of {self.model}")
