"""Lowering: a symbolic program of the planner becomes the table that `ops/walker.py` runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from shadowlane.actors.arena import (
    DISK_COUNTER,
    GATHER_COUNTER,
    LINK_COUNTER,
    ArenaLayout,
)
from shadowlane.actors.blueprint import UNIT_ROWS, Blueprint
from shadowlane.actors.expert_sources import MatrixFormat
from shadowlane.actors.lowered_experts import (
    expert_fields,
    expert_tables,
    expert_tiles,
    routing_card,
)
from shadowlane.actors.scratch import (
    LAYOUT_OF,
    gather_stride,
    quantised_inputs,
    quantised_stride,
)
from shadowlane.ops import table as t
from shadowlane.ops.decoder import GroupDescription
from shadowlane.ops.dots import DIRECT_LAYOUTS
from shadowlane.ops.expand import expand_row_address
from shadowlane.ops.kernels import matvec_address
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.table import LoweredProgram
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import ComputeInstruction, Program, part_of, units_of_experts

PIECES_LEFT_PER_WORKER = 2  # a decode item is this part of what is left: even half a core keeps up
MIN_CHUNK_NBYTES = 32 << 10
KINDS = {
    "embed": t.EMBED,
    "qkv": t.LINEAR,
    "attn": t.ATTENTION,
    "o": t.LINEAR,
    "gate_up": t.GATE_UP,
    "down": t.LINEAR,
    "router": t.ROUTER,
    "experts": t.EXPERTS,
    "lm_head": t.LM_HEAD,
}


def make_geometry(
    blueprint: Blueprint,
    layout: ArenaLayout,
    lane: int,
    num_workers: int,
    card: int | None = None,
    *,
    is_emulated: bool = False,
) -> np.ndarray:
    """What is the same for all programs of a lane: int64 [GEOMETRY_FIELDS], see `table.py`.

    lane: its number among all compute lanes; card: its number among cards, None: a processor's.
    """
    config, plan = blueprint.config, blueprint.scratch[layout.subchunks]
    starts = [0, *accumulate(plan.worker_regions)]
    record = layout.record_offsets
    brings = {  # what is streamed comes off the disk, or over the card's link
        t.BRINGS_COUNTER: DISK_COUNTER,
        t.SWEEP_BASE: t.DISK_BASE,
        t.RING: layout.ring,
        t.SLOT_NBYTES: layout.slot_nbytes,
        t.NUM_SLOTS: max(1, layout.num_slots),
    }
    if card is not None:
        brings = {
            t.BRINGS_COUNTER: LINK_COUNTER + card,
            t.SWEEP_BASE: t.LINK_BASE + card,
            t.RING: layout.cards[card].ring,
            t.SLOT_NBYTES: layout.cards[card].slot_nbytes,
            t.NUM_SLOTS: max(1, layout.cards[card].num_slots),
        }
    fields = {
        **brings,
        t.EMULATION: layout.laws[lane] if is_emulated else -1,
        t.EMULATED_LOADS: layout.loads,
        t.THIS_CARD: -1 if card is None else card,
        t.ABORT: layout.abort,
        t.COUNTERS: layout.counters,
        t.LANE: lane,
        t.GATHER_COUNTER: GATHER_COUNTER,
        t.TICKETS: layout.tickets[lane],
        t.SPIN_NS: layout.spins + 64 * lane,
        t.WORKERS: layout.workers[lane],
        t.NUM_WORKERS: num_workers,
        t.HIDDEN: config.hidden_size,
        t.NUM_HEADS: config.num_heads,
        t.NUM_KV_HEADS: config.num_kv_heads,
        t.HEAD_DIM: config.head_dim,
        t.ROPE_INTERLEAVED: int(blueprint.rope_interleaved),
        t.NORM_EPS: layout.norm_eps,
        t.KV: layout.kv,
        t.KV_LAYOUT: LAYOUTS[blueprint.kv_layout].id,
        t.KV_ROW_NBYTES: LAYOUTS[blueprint.kv_layout].row_nbytes(config.head_dim),
        t.KV_EXPAND: expand_row_address(blueprint.kv_layout),
        t.PAGE_TOKENS: blueprint.catalog.page_tokens,
        t.NUM_PAGES: layout.num_pages,
        t.X: layout.scratch["residual"],
        t.QKV: layout.scratch["qkv"],
        t.COS: layout.scratch["cos"],
        t.SIN: layout.scratch["sin"],
        t.GATHER: layout.scratch["gather"],
        t.GATHER_STRIDE: gather_stride(blueprint.embedding),
        t.SCRATCH: layout.worker_scratch[lane],
        t.SCRATCH_NBYTES: plan.worker_nbytes,
        t.SCRATCH_INPUT: starts[1],
        t.SCRATCH_QUANTISED: starts[2],
        t.QUANTISED_NBYTES: quantised_stride(blueprint.config),
        t.SCRATCH_OUTPUT: starts[3],
        t.SCRATCH_SCORES: starts[4],
        t.SCRATCH_TILE: starts[5],
        t.SCRATCH_SECOND_TILE: starts[14] if plan.worker_second_tile else starts[5],
        t.SCRATCH_NORMALISED: starts[6],
        t.SCRATCH_PRODUCTS: starts[7],
        t.SCRATCH_QUERIES: starts[8],
        t.SCRATCH_CACHED: starts[9],
        t.SCRATCH_MASK: starts[10],
        t.SCRATCH_WORDS: starts[11],
        t.CONTEXT: blueprint.context_limit,
        t.RECORD_TOKENS: record["tokens"],
        t.RECORD_POSITIONS: record["positions"],
        t.RECORD_SEQUENCES: record["sequences"],
        t.RECORD_LOGIT_ROWS: record["logit_rows"],
        t.RECORD_PAGES: record["pages"],
        t.RECORD_INV_FREQ: record["inv_freq"],
        t.RECORD_SCALING: record["scaling"],
        t.MAX_PAGES: layout.max_pages,
        t.COMPUTE_LAYOUT: LAYOUTS[LAYOUT_OF[blueprint.dtype]].id,
        t.SCRATCH_SPARE: starts[2] + quantised_inputs(blueprint.options) * quantised_stride(config),
        t.SCRATCH_GATHERED: starts[12],
        t.SCRATCH_ACTIVATED: starts[13],
        t.WHOLE_HEAD_NORM: int(config.full_width_qk_norm),
        **expert_fields(blueprint, layout),
    }
    geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
    assert set(fields) == set(range(t.GEOMETRY_FIELDS)), "every field of the geometry is set"
    for field, value in fields.items():
        geometry[field] = value
    return geometry


def lower(
    blueprint: Blueprint,
    layout: ArenaLayout,
    placement: Placement,
    program: Program,
    homes: Mapping[int, int],
    num_workers: int,
    copies: Collection[int] = (),
    phase: Phase = "decode",
) -> LoweredProgram:
    """The tables of one compute lane.

    homes: arena offset of the enclosing range of each block that is resident where this lane
    reads, by block index; behind all blocks, of each expert that lives on this card.
    copies: blocks that prefill reads from their expanded copies.
    """
    config = blueprint.config
    stream = placement.stream_of(program.lane, phase)
    ordinals = {block: ordinal for ordinal, block in enumerate(stream.sweep)}
    blocks = np.array(
        [
            *(
                _block_row(
                    blueprint,
                    index,
                    homes.get(index),
                    ordinals.get(index, -1),
                    layout.expanded[index] if index in copies else -1,
                )
                for index in range(len(blueprint.sources))
            ),
            *_expert_rows(blueprint),
        ],
        np.int64,
    ).reshape(-1, t.BLOCK_COLUMNS)
    by_name = {group.name: number for number, group in enumerate(blueprint.groups)}
    items: list[tuple[int, ...]] = []
    tables = expert_tables(blueprint, placement, homes, items, phase)
    instructions = np.full((len(program.instructions), t.INSTRUCTION_COLUMNS), -1, np.int64)
    for ordinal, instruction in enumerate(program.instructions):
        assert isinstance(instruction, ComputeInstruction)
        number = by_name[instruction.group]
        row = instructions[ordinal]
        row[t.ORDINAL] = ordinal
        group = blueprint.catalog.groups[number]
        part = part_of(group, instruction, placement.micro_batches_in(phase))
        row[t.MICRO_BATCH], row[t.MICRO_BATCHES] = part
        row[t.GROUP] = number
        _fill(row, blueprint, layout, blueprint.groups[number])
        for wait in instruction.waits:
            if wait.lane != stream.lane:
                row[t.PEER_WAIT + placement.number_of(wait.lane)] = wait.rel
        if instruction.last_unit == group.units:
            row[t.JOINS] = int(bool(instruction.joins))
        for wait in instruction.joins:
            row[t.JOIN_WAIT + placement.number_of(wait.lane)] = wait.rel
        row[t.CARD_EXPERTS] = tables.get(int(row[t.SPARSE_LAYER]), -1)
        kind = group.kind
        if kind == "embed":
            row[t.TILE_START] = blueprint.embedding_blocks[0]
            row[t.BLOCK_ROWS] = blueprint.embedding_block_rows
            row[t.GATHERED] = int(any(index not in homes for index in blueprint.embedding_blocks))
            row[t.ITEM_START], row[t.ITEM_COUNT], row[t.TILE_COUNT] = 0, 1, 0
        elif kind == "attn":
            row[t.ITEM_START] = instruction.first_unit
            row[t.ITEM_COUNT] = instruction.last_unit - instruction.first_unit
            row[t.TILE_START], row[t.TILE_COUNT] = 0, 0
            # few KV heads over several workers leave some idle: their query heads are shared out
            grouped = config.num_heads // config.num_kv_heads
            row[t.HEAD_SPLITS] = grouped if row[t.ITEM_COUNT] % num_workers else 1
        elif kind == "experts":
            row[t.ITEM_START], row[t.ITEM_COUNT], row[t.TILE_START] = 0, 0, len(items)
            if layout.card_of(placement.number_of(program.lane)) is not None:
                layer = int(row[t.SPARSE_LAYER])
                units = units_of_experts(blueprint.catalog, placement, phase, program.lane, layer)
                items.extend(expert_tiles(blueprint, layer, instruction, units, homes, ordinals))
            elif routing_card(layout, placement, phase, instruction.group):
                row[t.CARD_CHOSE] = 1
            row[t.TILE_COUNT] = len(items) - row[t.TILE_START]
            row[t.EXPERT_CHUNKS] = _expert_chunks(blueprint, row[t.SPARSE_LAYER], num_workers)
        else:
            row[t.ITEM_START] = len(items)
            items.extend(_chunks(blueprint, number, instruction, num_workers))
            row[t.ITEM_COUNT] = len(items) - row[t.ITEM_START]
            row[t.TILE_START] = len(items)
            items.extend(_tiles(blueprint, number, instruction))
            row[t.TILE_COUNT] = len(items) - row[t.TILE_START]
        _weigh(row, blueprint, items, program.lane, instruction)
        here, before = [t.LAYER, t.MICRO_BATCH], instructions[ordinal - 1]
        row[t.IS_FIRST] = int(not ordinal or any(before[here] != row[here]))
    _link_routers(instructions)
    return LoweredProgram(
        placement_id=placement.placement_id,
        instructions=instructions,
        items=np.array(items, np.int64).reshape(len(items), t.ITEM_COLUMNS),
        blocks=blocks,
    )


def _weigh(
    row: np.ndarray,
    blueprint: Blueprint,
    items: Sequence[tuple[int, ...]],
    lane: str,
    instruction: ComputeInstruction,
) -> None:
    """What an instruction reads and computes, for lanes whose speed is emulated."""
    group = blueprint.catalog.groups[row[t.GROUP]]
    part = (instruction.last_unit - instruction.first_unit) / group.units
    row[t.READS_NBYTES], row[t.READS_KV] = 0, 0
    row[t.FLOPS] = round(group.flops_per_row * part)
    if group.kind == "attn":
        heads = instruction.last_unit - instruction.first_unit
        key = LAYOUTS[blueprint.kv_layout].row_nbytes(blueprint.config.head_dim)
        row[t.READS_KV] = 2 * heads * key
    elif group.kind == "experts":
        assert blueprint.experts is not None
        assert blueprint.config.moe is not None
        row[t.READS_NBYTES] = blueprint.experts.catalog.nbytes
        row[t.FLOPS] = group.flops_per_row // blueprint.config.moe.top_k
    elif group.kind != "embed":
        first = int(row[t.ITEM_START])
        for item in items[first : first + int(row[t.ITEM_COUNT])]:
            for block in (item[t.BLOCK], item[t.SECOND_BLOCK]):
                if block >= 0:
                    row[t.READS_NBYTES] += item[t.NUM_ROWS] * blueprint.sources[block].row_nbytes
    row[t.CROSSINGS] = max((_crossings(lane, wait.lane) for wait in instruction.waits), default=0)


def _crossings(here: str, there: str) -> int:
    """How often an activation crosses a link from one compute lane to another."""
    kinds = {here.split(":")[0], there.split(":")[0]}
    if kinds == {"cpu", "gpu"}:
        return 1
    return 2 if kinds == {"gpu"} else 0  # from card to card through RAM


def _link_routers(instructions: np.ndarray) -> None:
    """Let each layer's experts know the router of the next, where both are this lane's.

    So one lane looks ahead, or none.
    """
    routers = {
        int(row[t.SPARSE_LAYER]): ordinal
        for ordinal, row in enumerate(instructions)
        if row[t.KIND] == t.ROUTER
    }
    for row in instructions:
        if row[t.KIND] == t.EXPERTS:
            row[t.NEXT_ROUTER] = routers.get(int(row[t.SPARSE_LAYER]) + 1, -1)


def _expert_rows(blueprint: Blueprint) -> list[tuple[int, ...]]:
    """Three rows per sparse layer, behind those of the blocks: formats of gate, up and down."""
    layers = blueprint.experts.formats if blueprint.experts else ()
    return [_expert_row(matrix) for formats in layers for matrix in formats]


def _expert_row(matrix: MatrixFormat) -> tuple[int, ...]:
    columns = {
        t.OFFSET: -1,
        t.SWEEP_ORDINAL: -1,
        t.SKEW: 0,
        t.BLOCK_FIRST_ROW: 0,
        t.BLOCK_NUM_ROWS: matrix.rows,
        t.ROW_NBYTES: matrix.row_nbytes,
        t.EXPANDED: -1,
        **_format_columns(matrix.layout),
    }
    return tuple(columns[column] for column in range(t.BLOCK_COLUMNS))


def _format_columns(layout: str) -> dict[int, int]:
    return {
        t.LAYOUT: LAYOUTS[layout].id,
        t.OPERATOR: matvec_address(layout),
        t.EXPAND: expand_row_address(layout),
        t.IS_PACKED: int(layout not in DIRECT_LAYOUTS),
    }


def _expert_chunks(blueprint: Blueprint, sparse_layer: int, num_workers: int) -> int:
    """Decode items of each half of an expert: one for each worker, no taller than a tile may be."""
    assert blueprint.experts is not None
    gate, _, down = blueprint.experts.formats[sparse_layer]
    least = -(-max(gate.rows, down.rows) // t.MAX_BLOCK_ROWS)
    by_size = max(1, gate.rows * gate.row_nbytes // MIN_CHUNK_NBYTES)
    return max(least, min(num_workers, by_size))


def _block_row(
    blueprint: Blueprint, index: int, home: int | None, ordinal: int, expanded: int
) -> tuple[int, ...]:
    source = blueprint.sources[index]
    columns = {
        t.OFFSET: -1 if home is None else home + source.skew,
        t.SWEEP_ORDINAL: ordinal,
        t.SKEW: source.skew,
        t.BLOCK_FIRST_ROW: source.first_row,
        t.BLOCK_NUM_ROWS: source.num_rows,
        t.ROW_NBYTES: source.row_nbytes,
        t.EXPANDED: expanded,
        **_format_columns(source.layout),
    }
    return tuple(columns[column] for column in range(t.BLOCK_COLUMNS))


def _fill(
    row: np.ndarray, blueprint: Blueprint, layout: ArenaLayout, group: GroupDescription
) -> None:
    """The columns that depend on the group alone."""
    config, scratch, constants = blueprint.config, layout.scratch, layout.constant_offsets
    rows = sum(part.rows for part in group.parts)
    row[t.KIND] = KINDS[group.kind]
    row[t.LAYER] = -1 if group.layer is None else group.layer
    row[t.COLS] = group.parts[0].cols if group.parts else config.hidden_size
    row[t.ROWS] = group.parts[0].rows if group.kind == "gate_up" else rows
    row[t.NORM_WEIGHT] = constants[group.norm] if group.norm else -1
    bias = group.parts[0].bias if group.parts else None
    row[t.BIAS] = constants[bias] if bias else -1
    row[t.QUANTISES] = int(
        any(
            blueprint.sources[index].layout not in DIRECT_LAYOUTS
            for index in blueprint.catalog.groups[row[t.GROUP]].blocks
        )
    )
    moe = config.moe
    is_sparse = moe is not None and group.layer in moe.sparse_layers
    if moe is not None and is_sparse:
        sparse = moe.sparse_layers.index(group.layer or 0)
        row[t.SPARSE_LAYER] = sparse
        row[t.EXPERT_BLOCKS] = len(blueprint.sources) + 3 * sparse
        if group.kind == "down" and moe.has_shared_gate:
            row[t.SHARED_GATE] = scratch["router"] + 4 * moe.num_experts
    if group.kind == "experts":
        assert blueprint.experts is not None
        gate, up, _ = blueprint.experts.formats[row[t.SPARSE_LAYER]]
        row[t.QUANTISES] = int(any(each.layout not in DIRECT_LAYOUTS for each in (gate, up)))
        for matrix, name in enumerate(group.expert_biases):
            row[t.EXPERT_BIASES + matrix] = constants[name]
    row[t.EPILOGUE] = t.ADD if group.kind in ("o", "down") else t.STORE
    buffers = {
        "embed": ("residual", "residual", "residual", "residual"),
        "qkv": ("residual", "residual", "qkv", "qkv"),
        "attn": ("qkv", "qkv", "attended", "attended_chunk"),
        "o": ("attended", "attended_chunk", "residual", "residual"),
        "gate_up": ("residual", "residual", "activated", "activated_chunk"),
        "down": ("activated", "activated_chunk", "residual", "residual"),
        "router": ("residual", "residual", "router", "router"),
        "experts": ("residual", "residual", "residual", "residual"),
        "lm_head": ("residual", "residual", "logits", "logits"),
    }[group.kind]
    for column, name in zip(
        (t.INPUT, t.PREFILL_INPUT, t.OUTPUT, t.PREFILL_OUTPUT), buffers, strict=True
    ):
        row[column] = scratch[name]
    window = config.windows[group.layer] if group.layer is not None else None
    row[t.WINDOW] = window or 0
    row[t.Q_NORM] = constants[group.q_norm] if group.q_norm else -1
    row[t.K_NORM] = constants[group.k_norm] if group.k_norm else -1
    row[t.SINKS] = constants[group.sinks] if group.sinks else -1


def _columns(blueprint: Blueprint, number: int) -> list[tuple[int, int]]:
    """(block, second block) of a group by rising output row; -1 where there is no second."""
    indices = blueprint.catalog.groups[number].blocks
    if blueprint.groups[number].kind == "gate_up":
        return list(zip(indices[::2], indices[1::2], strict=True))
    return [(index, -1) for index in indices]


def _chunks(
    blueprint: Blueprint, number: int, instruction: ComputeInstruction, num_workers: int
) -> list[tuple[int, ...]]:
    """Decode items: the share cut into pieces that shrink towards its end.

    A long piece runs at the speed of memory, a short one at the end keeps the workers level: each
    is a fraction of what is left (guided self-scheduling, Polychronopoulos and Kuck 1987).
    """
    first, last = instruction.first_unit * UNIT_ROWS, instruction.last_unit * UNIT_ROWS
    items = []
    for block, second in _columns(blueprint, number):
        source = blueprint.sources[block]
        at = max(first, source.output_row)
        end = min(last, source.output_row + source.num_rows)
        least = MIN_CHUNK_NBYTES // source.row_nbytes
        while at < end:
            fair = (last - at) // (PIECES_LEFT_PER_WORKER * num_workers)
            height = max(UNIT_ROWS, max(fair, least) // UNIT_ROWS * UNIT_ROWS)
            height = min(height, end - at)
            items.append((block, second, at - source.output_row, height, at))
            at += height
    return items


def _tiles(
    blueprint: Blueprint, number: int, instruction: ComputeInstruction
) -> list[tuple[int, ...]]:
    """Prefill items: whole blocks, each with the instruction that holds its first unit."""
    items = []
    for block, second in _columns(blueprint, number):
        source = blueprint.sources[block]
        unit = source.output_row // UNIT_ROWS
        if instruction.first_unit <= unit < instruction.last_unit:
            items.append((block, second, 0, source.num_rows, source.output_row))
    return items
