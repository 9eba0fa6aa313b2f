"""Catalogs of models that exist nowhere: to plan, simulate and test without any file."""

from __future__ import annotations

from dataclasses import replace

from shadowlane.planner.catalog import Block, Catalog, Experts, Group, GroupKind, expert_units
from shadowlane.planner.placement import PAGE_NBYTES, whole_pages

UNIT_ROWS = 16
HEAD_DIM = 64
ELEMENT_NBYTES = 2  # bfloat16


def llama_catalog(
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
    constants_nbytes: int = 10_000,
    scratch_nbytes: int = 100_000,
    expanded: int = 0,
    subchunk_rows: int = 512,
    subchunk_nbytes: int | None = None,
) -> Catalog:
    """A Llama-shaped model in bfloat16, cut into tiles of `tile_rows` rows.

    up_tile_rows: another height for the tiles of the up projection, as two formats in one group
    would give. Every block is held with one 4 KiB page more than its own, as if it lay unaligned.
    expanded: how often the bytes of a block an expanded copy takes; 0: none is of any use.
    subchunk_nbytes: scratch of each further sub-chunk of a prompt's chunk, of which there may be
    eight then; None: chunks are one.
    """
    blocks: list[Block] = []
    groups: list[Group] = []

    def add(
        name: str, kind: GroupKind, layer: int | None, rows: int, cols: int, *tiles: int
    ) -> None:
        spans = sorted(
            (first, min(rows, first + tile), part)
            for part, tile in enumerate(tiles)
            for first in range(0, rows, tile)
        )
        first_block = len(blocks)
        for first, last, _part in spans:
            nbytes = (last - first) * cols * ELEMENT_NBYTES
            held = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES
            units = first // UNIT_ROWS, -(-last // UNIT_ROWS)
            copy = 0 if kind in ("embed", "lm_head") else expanded * held
            blocks.append(Block(len(blocks), name, nbytes, held, *units, copy))
        groups.append(
            Group(
                name=name,
                kind=kind,
                layer=layer,
                layout="bf16",
                units=-(-rows // UNIT_ROWS),
                cols=cols,
                blocks=tuple(range(first_block, len(blocks))),
                flops_per_row=2 * rows * cols * len(tiles),
            )
        )

    if tied:
        groups.append(Group("embed", "embed", None, "bf16", -(-vocab // UNIT_ROWS), hidden, (), 0))
    else:
        add("embed", "embed", None, vocab, hidden, tile_rows)
    for layer in range(layers):
        qkv_rows = hidden + 2 * heads_kv * HEAD_DIM
        add(f"{layer}.qkv", "qkv", layer, qkv_rows, hidden, tile_rows)
        groups.append(Group(f"{layer}.attn", "attn", layer, "", heads_kv, 0, (), 4 * hidden))
        add(f"{layer}.o", "o", layer, hidden, hidden, tile_rows)
        up_rows = up_tile_rows or tile_rows
        add(f"{layer}.gate_up", "gate_up", layer, inner, hidden, tile_rows, up_rows)
        add(f"{layer}.down", "down", layer, hidden, inner, tile_rows)
    add("lm_head", "lm_head", None, vocab, hidden, tile_rows)
    streamed = [block.held_nbytes for block in blocks if block.group != "embed"]
    return Catalog(
        model="synthetic",
        groups=tuple(groups),
        blocks=tuple(blocks),
        constants_nbytes=constants_nbytes,
        scratch_nbytes=scratch_nbytes,
        slot_nbytes=max(streamed),
        page_tokens=page_tokens,
        page_nbytes=page_tokens * layers * heads_kv * HEAD_DIM * 2 * ELEMENT_NBYTES,
        max_context=max_context,
        subchunk_rows=subchunk_rows,
        chunk_scratch=()
        if subchunk_nbytes is None
        else tuple((n, scratch_nbytes + (n - 1) * subchunk_nbytes) for n in (2, 4, 8)),
    )


def mixture_catalog(
    *,
    num_experts: int = 16,
    top_k: int = 4,
    expert_inner: int = 256,
    layers: int = 4,
    hidden: int = 512,
    **llama: int,
) -> Catalog:
    """The same with a router and routed experts beside each MLP, which is the shared expert then.

    The router's weights are left out: they are too small to matter to a plan.
    """
    dense = llama_catalog(layers=layers, hidden=hidden, **llama)  # type: ignore[arg-type]
    groups: list[Group] = []
    for group in dense.groups:
        if group.kind == "gate_up":
            layer = group.layer
            flops = 2 * top_k * 3 * expert_inner * hidden
            groups.append(Group(f"{layer}.router", "router", layer, "bf16", 1, hidden, (), 0))
            units = expert_units(num_experts)
            groups.append(
                Group(f"{layer}.experts", "experts", layer, "bf16", units, hidden, (), flops)
            )
        groups.append(group)
    nbytes = 3 * expert_inner * hidden * ELEMENT_NBYTES
    held = whole_pages(nbytes)
    experts = Experts(layers, num_experts, top_k, nbytes, held, held)
    return replace(dense, groups=tuple(groups), experts=experts)
