"""Catalogs for tests: a Llama-shaped model of any size, and hypothesis' choice of odd ones."""

from __future__ import annotations

from hypothesis import strategies as st

from shadowlane.planner.catalog import Block, Catalog, Group, GroupKind
from shadowlane.planner.placement import LaneSpec, Request

PAGE = 4096


def make_catalog(
    *,
    layers: int = 4,
    hidden: int = 512,
    inner: int = 1024,
    heads_kv: int = 2,
    vocab: int = 2048,
    tile_rows: int = 128,
    up_tile_rows: int | None = None,
    tied: bool = True,
    max_context: int = 2048,
    page_tokens: int = 16,
    constants: int = 10_000,
    scratch: int = 100_000,
) -> Catalog:
    """bfloat16, 16 rows per unit; the up projection may have tiles of another height than gate."""
    blocks: list[Block] = []
    groups: list[Group] = []

    def add(
        name: str,
        kind: GroupKind,
        layer: int | None,
        rows: int,
        cols: int,
        tiles: tuple[int, ...],
    ) -> None:
        units = rows // 16
        spans = sorted(
            (first, min(rows, first + tile), part)
            for part, tile in enumerate(tiles)
            for first in range(0, rows, tile)
        )
        mine = []
        for first, last, _part in spans:
            nbytes = (last - first) * cols * 2
            held = (nbytes + PAGE - 1) // PAGE * PAGE + PAGE
            mine.append(len(blocks))
            blocks.append(Block(len(blocks), name, nbytes, held, first // 16, last // 16))
        groups.append(
            Group(name, kind, layer, "bf16", units, cols, tuple(mine), 2 * rows * cols * len(tiles))
        )

    if tied:
        groups.append(Group("embed", "embed", None, "bf16", vocab // 16, hidden, (), 0))
    else:
        add("embed", "embed", None, vocab, hidden, (tile_rows,))
    head_dim = 64
    for layer in range(layers):
        qkv_rows = hidden + 2 * heads_kv * head_dim
        add(f"{layer}.qkv", "qkv", layer, qkv_rows, hidden, (tile_rows,))
        groups.append(Group(f"{layer}.attn", "attn", layer, "", heads_kv, 0, (), 4 * hidden))
        add(f"{layer}.o", "o", layer, hidden, hidden, (tile_rows,))
        tiles = (tile_rows, up_tile_rows or tile_rows)
        add(f"{layer}.gate_up", "gate_up", layer, inner, hidden, tiles)
        add(f"{layer}.down", "down", layer, hidden, inner, (tile_rows,))
    add("lm_head", "lm_head", None, vocab, hidden, (tile_rows,))
    streamed = [
        blocks[index].held_nbytes
        for group in groups
        if group.kind != "embed"
        for index in group.blocks
    ]
    return Catalog(
        model="test",
        groups=tuple(groups),
        blocks=tuple(blocks),
        constants_nbytes=constants,
        scratch_nbytes=scratch,
        slot_nbytes=max(streamed),
        page_tokens=page_tokens,
        page_nbytes=page_tokens * layers * heads_kv * head_dim * 2 * 2,
        max_context=max_context,
    )


def weights_nbytes(catalog: Catalog) -> int:
    return sum(block.held_nbytes for block in catalog.blocks)


def two_lanes() -> tuple[LaneSpec, ...]:
    return (LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1))


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    tile_rows = draw(st.sampled_from([16, 48, 64, 128, 512]))
    return make_catalog(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.sampled_from([64, 128, 256])),
        inner=draw(st.sampled_from([128, 336, 512])),
        heads_kv=draw(st.integers(1, 3)),
        vocab=draw(st.sampled_from([64, 512, 1008])),
        tile_rows=tile_rows,
        up_tile_rows=draw(st.sampled_from([None, tile_rows, 32])) if tile_rows <= 64 else None,
        tied=draw(st.booleans()),
        max_context=draw(st.sampled_from([48, 512, 4096])),
        page_tokens=draw(st.sampled_from([16, 64])),
        constants=draw(st.integers(0, 20_000)),
        scratch=draw(st.integers(0, 200_000)),
    )


@st.composite
def requests(draw: st.DrawFn, catalog: Catalog) -> Request:
    """From far too little to more than enough."""
    whole = weights_nbytes(catalog) + catalog.scratch_nbytes + catalog.constants_nbytes
    context = draw(st.sampled_from([None, None, 1, 32, catalog.max_context]))
    return Request(
        ram=draw(st.integers(1, 3 * whole)),
        lanes=tuple(LaneSpec(f"cpu:{i}", i + 1) for i in range(draw(st.integers(1, 3)))),
        context=context,
        max_batch=draw(st.integers(1, 3)),
        num_slots=draw(st.sampled_from([None, None, 4, 5, 7, 16])),
    )
