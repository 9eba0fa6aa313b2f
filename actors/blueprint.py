"""From weight files to what can be planned: groups cut into blocks, and the catalog of them.

A block's height depends on shapes and layouts alone, so that no plan changes a product's bits. It
aims at 4 MiB: a disk gives its full bandwidth from 2 MiB on, and products of fewer rows are slower.
But there are no fewer than a few tiles per matrix, so that the workers of a lane share a prefill
evenly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shadowlane.actors.expert_sources import ExpertPlan, layouts_of, plan_experts
from shadowlane.actors.file_range import FileRange
from shadowlane.actors.scratch import LAYOUT_OF, ScratchPlan, is_in_place, plan_scratch
from shadowlane.actors.spec import READ_DEPTH, DataType, KvType, Options
from shadowlane.ops.decoder import (
    DecoderConfig,
    GroupDescription,
    check_tensors,
    describe_groups,
    read_decoder,
)
from shadowlane.ops.dots import DIRECT_LAYOUTS
from shadowlane.ops.files import ModelFiles, TensorSource, open_model
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.table import (
    FEW_ROWS,
    MAX_BLOCK_ROWS,
    MAX_DECODE_ROWS,
)
from shadowlane.planner.catalog import Block, Catalog, Group, expert_units
from shadowlane.planner.context import DEFAULT_CONTEXT
from shadowlane.planner.placement import PAGE_NBYTES, CardPart, whole_pages

PAGE = PAGE_NBYTES
UNIT_ROWS = 16
BLOCK_NBYTES = 4 << 20
MIN_TILE_ROWS = 256
MAX_TILES_OF_SMALL = 4
PAGE_TOKENS = 32
MAX_SUBCHUNKS = 16  # of a chunk of a prompt


@dataclass(frozen=True, slots=True)
class BlockSource(FileRange):
    """Where a block's bytes lie in its file, and which rows of its tensor and group they are."""

    layout: str
    row_nbytes: int
    first_row: int  # of the tensor
    num_rows: int
    output_row: int  # first row of the group's output that it computes
    part: int  # index of the tensor in the group

    @property
    def cols(self) -> int:
        layout = LAYOUTS[self.layout]
        return self.row_nbytes // layout.block_nbytes * layout.block_elements


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model cut into blocks, with everything a lane needs to run it."""

    root: Path
    fingerprint: str
    config: DecoderConfig
    groups: tuple[GroupDescription, ...]
    sources: tuple[BlockSource, ...]  # by block index
    catalog: Catalog
    constants: tuple[TensorSource, ...]  # norms and biases, in the order they are laid out
    dtype: DataType
    kv_layout: str
    rope_interleaved: bool
    embedding: TensorSource
    embedding_block_rows: int
    embedding_blocks: tuple[int, ...]
    scratch: Mapping[int, ScratchPlan]  # by the most sub-chunks of a chunk
    options: Options
    workers: int
    context_limit: int  # longest context that scratch has room for
    notes: tuple[str, ...]
    unexpected: tuple[str, ...]  # tensors of the file that nothing uses
    experts: ExpertPlan | None  # of a mixture

    def expert_number(self, layer: int, expert: int) -> int:
        """How a routed expert is counted where blocks and experts are meant: behind all blocks.

        layer: counted among those that have experts.
        """
        return self.catalog.expert_number(layer, expert)

    def on_card(self, part: CardPart) -> list[int]:
        """The numbers of all that lives on a card under a placement: blocks, then experts."""
        return [
            *part.resident,
            *(
                self.expert_number(layer, expert)
                for layer, experts in enumerate(part.experts)
                for expert in experts
            ),
        ]

    @property
    def held_nbytes(self) -> list[int]:
        """What each block takes up, and behind them each routed expert."""
        experts = self.catalog.experts
        slots = [experts.slot_nbytes] * experts.total if experts else []
        return [*(source.held_nbytes for source in self.sources), *slots]

    @property
    def few_rows(self) -> int:
        """Rows of a prompt up to which it goes through the compiled kernels, like decode rows.

        Packed weights would have to be expanded for torch, which pays for more rows only.
        """
        packed = sum(each.nbytes for each in self.sources if each.layout not in DIRECT_LAYOUTS)
        whole = sum(each.nbytes for each in self.sources)
        return MAX_DECODE_ROWS if 2 * packed > whole else FEW_ROWS

    @property
    def layouts(self) -> set[str]:
        """Of all weights: what operators are needed for."""
        found = {source.layout for source in self.sources}
        return found | (layouts_of(self.experts.formats) if self.experts else set())


def block_rows(rows: int, row_nbytes: int) -> int:
    """Height of the blocks of a matrix, in whole units."""
    by_size = max(1, BLOCK_NBYTES // row_nbytes)
    count = max(
        -(-rows // by_size),
        min(MAX_TILES_OF_SMALL, rows // MIN_TILE_ROWS),
        -(-rows // MAX_BLOCK_ROWS),
        1,
    )
    height = -(-rows // count)
    return -(-height // UNIT_ROWS) * UNIT_ROWS


def read_blueprint(
    path: Path,
    options: Options,
    workers: int,
    *,
    are_cards: bool = False,
    is_elsewhere: bool = False,
) -> tuple[Blueprint, ModelFiles]:
    """Open a model and cut it. Reads headers only.

    are_cards: among the lanes. is_elsewhere: for a machine that is described, not for this one.

    Raises ModelError for files that do not fit together, ValueError for options out of range.
    """
    files = open_model(path)
    cut = cut_model(files, options, workers, are_cards=are_cards, is_elsewhere=is_elsewhere)
    return cut, files


def cut_model(
    files: ModelFiles,
    options: Options,
    workers: int,
    layers: int | None = None,
    *,
    are_cards: bool = False,
    is_elsewhere: bool = False,
) -> Blueprint:
    """Cut opened files. `layers`: only the first so many, for measurements."""
    config = read_decoder(files)
    unexpected = check_tensors(config, files.tensors)
    if layers is not None:
        layers = min(layers, config.num_layers)
        config = first_layers(config, layers)
    if options.context is not None and not 1 <= options.context <= config.max_context:
        raise ValueError(
            f"ctx_size must be between 1 and the model's {config.max_context}; "
            f"got {options.context}"
        )
    if not 1 <= options.max_batch <= FEW_ROWS:
        raise ValueError(f"max_batch must be between 1 and {FEW_ROWS}; got {options.max_batch}")
    context_limit = options.context or min(config.max_context, DEFAULT_CONTEXT)
    descriptions = describe_groups(config)
    flags = {"bf16", "fphp"} if is_elsewhere else processor_flags()
    dtype, notes = choose_dtype(files, config, options.dtype, flags)

    experts = plan_experts(config, files)
    sources: list[BlockSource] = []
    blocks: list[Block] = []
    groups: list[Group] = []
    embedding_height, embedding_blocks = 0, ()
    embedding_name = "model.embed_tokens.weight"
    for description in descriptions:
        first = len(sources)
        cut = _cut_group(description, files.tensors)
        for source in cut:
            first_unit = source.output_row // UNIT_ROWS
            last_unit = -(-(source.output_row + source.num_rows) // UNIT_ROWS)
            blocks.append(
                Block(
                    len(blocks),
                    description.name,
                    source.nbytes,
                    source.held_nbytes,
                    first_unit,
                    last_unit,
                    _expanded_nbytes(description, source, LAYOUT_OF[dtype]),
                )
            )
        sources.extend(cut)
        indices = tuple(range(first, len(sources)))
        groups.append(_catalog_group(description, config, files.tensors, experts, indices))
        if any(part.tensor == embedding_name for part in description.parts):
            embedding_blocks, embedding_height = indices, cut[0].num_rows
    streamed = [
        source.held_nbytes
        for source, block in zip(sources, blocks, strict=True)
        if block.group != "embed"
    ]
    constants = tuple(files.tensors[name] for name in _constant_names(descriptions))
    scratch = {
        count: plan_scratch(
            config,
            sources,
            files.tensors[embedding_name],
            options,
            dtype,
            context_limit,
            count,
            READ_DEPTH * experts.buffer_nbytes if experts else 0,
            are_cards=are_cards,
        )
        for count in _subchunk_counts(config, options, context_limit)
    }
    kv_layout = choose_kv(options.kv, dtype, config.head_dim)
    page_nbytes = (
        config.num_layers
        * 2
        * config.num_kv_heads
        * PAGE_TOKENS
        * LAYOUTS[kv_layout].row_nbytes(config.head_dim)
    )
    catalog = Catalog(
        model=files.fingerprint,
        groups=tuple(groups),
        blocks=tuple(blocks),
        constants_nbytes=whole_pages(sum(_constant_nbytes(each) for each in constants) + 64),
        scratch_nbytes=scratch[1].shared_nbytes + workers * scratch[1].worker_nbytes,
        slot_nbytes=max(streamed),
        page_tokens=PAGE_TOKENS,
        page_nbytes=page_nbytes,
        max_context=context_limit,
        experts=experts.catalog if experts else None,
        subchunk_rows=options.prefill_chunk,
        chunk_scratch=tuple(
            (count, plan.shared_nbytes + workers * plan.worker_nbytes)
            for count, plan in scratch.items()
            if count > 1
        ),
    )
    return Blueprint(
        root=files.root,
        fingerprint=files.fingerprint,
        config=config,
        groups=descriptions,
        sources=tuple(sources),
        catalog=catalog,
        constants=constants,
        dtype=dtype,
        kv_layout=kv_layout,
        rope_interleaved=files.rope_pairing == "interleaved",
        embedding=files.tensors[embedding_name],
        embedding_block_rows=embedding_height,
        embedding_blocks=embedding_blocks,
        scratch=scratch,
        options=options,
        workers=workers,
        context_limit=context_limit,
        notes=notes,
        unexpected=tuple(unexpected),
        experts=experts,
    )


def _subchunk_counts(config: DecoderConfig, options: Options, context: int) -> list[int]:
    """How many sub-chunks a chunk may have, where a prompt may be longer than half of it.

    NOTE: where rotary frequencies depend on how much of a text a step has seen, they would depend
    on the length of its chunk, and so would tokens: there a chunk is one sub-chunk.
    """
    counts = [1]
    while not config.rope.depends_on_length and counts[-1] * 2 <= MAX_SUBCHUNKS:
        if counts[-1] * max(1, options.prefill_chunk) >= context:
            break
        counts.append(counts[-1] * 2)
    return counts


def first_layers(config: DecoderConfig, count: int) -> DecoderConfig:
    """The same decoder cut off after so many layers."""
    moe = config.moe
    if moe is not None:
        left = tuple(layer for layer in moe.sparse_layers if layer < count)
        moe = replace(moe, sparse_layers=left) if left else None
    return replace(config, num_layers=count, windows=config.windows[:count], moe=moe)


def choose_dtype(
    files: ModelFiles, config: DecoderConfig, asked: DataType | None, flags: Collection[str]
) -> tuple[DataType, tuple[str, ...]]:
    """The type of prefill products, and what to tell the user about it. flags: of the processor."""
    has_bf16 = not {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}.isdisjoint(flags)
    has_f16 = not {"avx512_fp16", "fphp", "asimdhp"}.isdisjoint(flags)
    if asked is None:
        if files.kind == "gguf":
            return ("bfloat16" if has_bf16 else "float32"), ()
        asked = config.dtype
    if asked not in LAYOUT_OF:
        raise ValueError(f"dtype must be one of {', '.join(LAYOUT_OF)}; got {asked}")
    if asked == "float16" and not has_f16:
        return asked, ("float16 is slow on this processor: bfloat16 or float32 are faster",)
    if asked == "bfloat16" and not has_bf16:
        return asked, ("bfloat16 prefill is slow on this processor: float32 is faster",)
    return asked, ()


def choose_kv(asked: KvType | None, dtype: DataType, head_dim: int) -> str:
    """The layout of one cached key or value. Raises ValueError where heads do not fit it."""
    if asked is None:
        return LAYOUT_OF[dtype]
    if asked != "q8_0":
        raise ValueError(f"kv must be q8_0; got {asked!r}")
    if head_dim % LAYOUTS[asked].block_elements:
        raise ValueError(
            f"kv q8_0 needs heads of a multiple of {LAYOUTS[asked].block_elements}; "
            f"this model's have {head_dim}"
        )
    return asked


def processor_flags() -> set[str]:
    """Instruction set extensions as the kernel names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def _cut_group(
    description: GroupDescription, tensors: dict[str, TensorSource]
) -> list[BlockSource]:
    """The blocks of a group in the order in which they are consumed."""
    widest = max(
        (LAYOUTS[tensors[part.tensor].layout].row_nbytes(part.cols) for part in description.parts),
        default=0,
    )
    columns: list[list[BlockSource]] = []
    output_row = 0
    for number, part in enumerate(description.parts):
        source = tensors[part.tensor]
        row_nbytes = LAYOUTS[source.layout].row_nbytes(part.cols)
        height = block_rows(part.rows, widest)
        start_row = 0 if description.kind == "gate_up" else output_row
        columns.append(
            [
                BlockSource(
                    path=source.path,
                    offset=source.offset + first * row_nbytes,
                    nbytes=min(height, part.rows - first) * row_nbytes,
                    layout=source.layout,
                    row_nbytes=row_nbytes,
                    first_row=first,
                    num_rows=min(height, part.rows - first),
                    output_row=start_row + first,
                    part=number,
                )
                for first in range(0, part.rows, height)
            ]
        )
        output_row += part.rows
    if description.kind == "gate_up":  # the same rows of both are used together
        return [block for pair in zip(*columns, strict=True) for block in pair]
    return [block for column in columns for block in column]


def _expanded_nbytes(description: GroupDescription, source: BlockSource, compute: str) -> int:
    """Bytes of a block's copy in the compute type; 0 where prefill multiplies with it as it is.

    Rows of `embed` are gathered, those of `lm_head` go through the compiled kernels alone.
    """
    if description.kind in ("embed", "lm_head") or is_in_place(source, compute):
        return 0
    return whole_pages(source.num_rows * LAYOUTS[compute].row_nbytes(source.cols))


def _catalog_group(
    description: GroupDescription,
    config: DecoderConfig,
    tensors: dict[str, TensorSource],
    experts: ExpertPlan | None,
    indices: tuple[int, ...],
) -> Group:
    if description.kind == "attn":
        heads = config.num_heads * config.head_dim
        return Group(
            description.name, "attn", description.layer, "", config.num_kv_heads, 0, (), 4 * heads
        )
    moe = config.moe
    if description.kind == "experts" and moe is not None and experts is not None:
        sparse = moe.sparse_layers.index(description.layer or 0)
        layout = experts.formats[sparse][0].layout
        flops = 2 * moe.top_k * 3 * moe.inner * config.hidden_size
        hidden = config.hidden_size
        units = expert_units(moe.num_experts)
        return Group(
            description.name, "experts", description.layer, layout, units, hidden, (), flops
        )
    parts = description.parts
    rows = sum(part.rows for part in parts)
    output_rows = parts[0].rows if description.kind == "gate_up" else rows
    largest = max(parts, key=lambda part: part.rows * part.cols, default=None)
    return Group(
        name=description.name,
        kind=description.kind,
        layer=description.layer,
        layout=tensors[largest.tensor].layout if largest else "",
        units=max(1, -(-output_rows // UNIT_ROWS)),
        cols=largest.cols if largest else 0,
        blocks=indices,
        flops_per_row=2 * sum(part.rows * part.cols for part in parts)
        if description.kind != "embed"
        else 0,
    )


def _constant_names(descriptions: tuple[GroupDescription, ...]) -> list[str]:
    names: list[str] = []
    for group in descriptions:
        for name in (group.norm, group.q_norm, group.k_norm, group.sinks):
            if name:
                names.append(name)
        names.extend(part.bias for part in group.parts if part.bias)
        names.extend(group.expert_biases)
    return names


def _constant_nbytes(source: TensorSource) -> int:
    """Constants are held as float32."""
    return math.prod(source.shape) * 4
