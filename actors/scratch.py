"""How much memory activations take: what all lanes share, and what each worker has for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shadowlane.actors.spec import DataType, Options
from shadowlane.ops.decoder import DecoderConfig
from shadowlane.ops.files import TensorSource
from shadowlane.ops.layouts import LAYOUTS, quantised_nbytes
from shadowlane.ops.table import (
    MAX_BLOCK_ROWS,
    MAX_DECODE_ROWS,
    PANEL_ROWS,
    QUERY_ROWS,
    WORDS_NBYTES,
    RouteLayout,
)
from shadowlane.planner.placement import whole_pages

LAYOUT_OF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # of a compute type


class Rows(Protocol):
    """What matters here of a block of weights."""

    layout: str
    offset: int
    num_rows: int
    row_nbytes: int


SHARED_BUFFERS = (
    "residual",
    "cos",
    "sin",
    "attended",
    "activated",
    "logits",
    "gather",
    "router",
    "routes",
    "expert_words",
    "expert_places",
    "expert_activated",
    "expert_output",
    "arranging",
)
# Two halves of a layer that never run at the same time, since all lanes wait for each other at each
# group: what one half leaves here is dead in the other, and they share the space. Not where a chunk
# may be several micro-batches: one of them may be in one half and another in the other.
TURN_BUFFERS = (("qkv", "attended_chunk"), ("activated_chunk", "expert_output_chunk"))


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """Bytes of each activation buffer.

    chunk = prefill rows of a step, R = those and MAX_DECODE_ROWS, sub-chunk = those that are
    multiplied together.
    """

    residual: int  # f32 [R, hidden]
    qkv: int  # f32 [R, q + k + v]
    cos: int  # f32 [R, head_dim / 2]
    sin: int
    attended: int  # f32 [MAX_DECODE_ROWS, heads * head_dim]
    attended_chunk: int  # compute type [chunk, heads * head_dim]
    activated: int  # f32 [MAX_DECODE_ROWS, intermediate]
    activated_chunk: int  # compute type [chunk, intermediate]
    logits: int  # f32 [logit rows of a step, vocabulary]
    gather: int  # [R, embedding row]
    worker_input: int  # one worker's scratch: normalised inputs
    worker_quantised: int  # the same for packed weights
    worker_output: int  # results of a chunk of rows
    worker_expand: int  # dot results and expanded rows; attention queries
    worker_scores: int
    worker_tile: int  # a panel of a packed block in the compute type
    worker_second_tile: int  # ... of `up`, which is kept beside that of `gate` for all sub-chunks
    worker_normalised: int  # of a chunk, in the compute type
    worker_products: int  # of a sub-chunk
    worker_queries: int
    worker_cached: int  # keys and values of one head
    worker_mask: int
    worker_words: int
    # of a mixture; 0 in dense models. E = experts, k = chosen by a row
    router: int  # f32 [R, E (+ 1)]
    routes: int  # of all sparse layers, see `RouteLayout`
    expert_words: int  # int64 [experts of all layers]
    expert_places: int  # int32 [experts of all layers, 3]
    expert_activated: int  # f32 [MAX_DECODE_ROWS * k, expert's width]
    expert_output: int  # f32 [MAX_DECODE_ROWS * k, hidden]
    expert_output_chunk: int  # compute type [chunk * k, hidden]
    arranging: int  # buffers of the disk lane, where experts lie scattered in their files
    worker_gathered: int  # the rows of a sub-chunk that go to one expert
    worker_activated: int
    halves_share: bool = True  # see TURN_BUFFERS

    @property
    def worker_regions(self) -> tuple[int, ...]:
        """Bytes of each part of one worker's scratch, whole pages, as they lie."""
        return tuple(
            whole_pages(size)
            for size in (
                self.worker_expand,
                self.worker_input,
                self.worker_quantised,
                self.worker_output,
                self.worker_scores,
                self.worker_tile,
                self.worker_normalised,
                self.worker_products,
                self.worker_queries,
                self.worker_cached,
                self.worker_mask,
                self.worker_words,
                self.worker_gathered,
                self.worker_activated,
                self.worker_second_tile,
            )
        )

    @property
    def worker_nbytes(self) -> int:
        return sum(self.worker_regions)

    @property
    def shared_nbytes(self) -> int:
        lasting = sum(whole_pages(getattr(self, name)) for name in SHARED_BUFFERS)
        return lasting + self.turn_nbytes

    @property
    def turn_nbytes(self) -> int:
        """Bytes of the buffers of both halves of a layer."""
        halves = [sum(map(self._room, names)) for names in TURN_BUFFERS]
        return max(halves) if self.halves_share else sum(halves)

    def turn_offsets(self, start: int) -> dict[str, int]:
        """Where the buffers of both halves lie, from `start` on."""
        found: dict[str, int] = {}
        at = start
        for names in TURN_BUFFERS:
            at = start if self.halves_share else at
            for name in names:
                found[name] = at
                at += self._room(name)
        return found

    def _room(self, name: str) -> int:
        return whole_pages(getattr(self, name))


def is_in_place(source: Rows, compute: str) -> bool:
    """Whether torch multiplies with a block as it lies, for this layout of the compute type."""
    return source.layout == compute and not source.offset % LAYOUTS[compute].block_nbytes


def plan_scratch(
    config: DecoderConfig,
    sources: Sequence[Rows],
    embedding: TensorSource,
    options: Options,
    dtype: DataType,
    context: int,
    subchunks: int = 1,
    arranging: int = 0,
    *,
    are_cards: bool = False,
) -> ScratchPlan:
    """subchunks: of the longest chunk, each of `options.prefill_chunk` rows.

    are_cards: among lanes, which may have layers each, so that chunks may be several micro-batches.
    """
    subchunk = options.prefill_chunk
    chunk = subchunks * subchunk
    rows = MAX_DECODE_ROWS + chunk
    element = 4 if dtype == "float32" else 2
    heads_width = config.num_heads * config.head_dim
    qkv_width = heads_width + 2 * config.num_kv_heads * config.head_dim
    inner = widest_inner(config)
    expert = config.moe.inner if config.moe else 0
    widest = max(config.hidden_size, inner, expert, heads_width)
    grouped = config.num_heads // config.num_kv_heads
    compute = LAYOUT_OF[dtype]
    in_place = [source.num_rows for source in sources if is_in_place(source, compute)]
    expanded = [
        min(source.num_rows, PANEL_ROWS)
        * LAYOUTS[source.layout].block_elements
        * (source.row_nbytes // LAYOUTS[source.layout].block_nbytes)
        * element
        for source in sources
        if not is_in_place(source, compute)
    ]
    if not subchunk >= 1:
        raise ValueError(f"prefill_chunk must be at least 1; got {subchunk}")
    if options.logit_rows < 1:
        raise ValueError(f"logit_rows must be at least 1; got {options.logit_rows}")
    tile = max([*expanded, *_expert_panels(config, element)], default=0)
    return ScratchPlan(
        residual=rows * config.hidden_size * 4,
        qkv=rows * qkv_width * 4,
        cos=rows * config.head_dim // 2 * 4,
        sin=rows * config.head_dim // 2 * 4,
        attended=MAX_DECODE_ROWS * heads_width * 4,
        attended_chunk=chunk * heads_width * element,
        activated=MAX_DECODE_ROWS * inner * 4,
        activated_chunk=chunk * inner * element,
        logits=options.step_logits * config.vocab_size * 4,
        gather=rows * gather_stride(embedding),
        worker_input=max(MAX_DECODE_ROWS, options.step_logits) * config.hidden_size * 4,
        # one more for `down` of an expert, and those of a chunk's rows that go to one expert
        worker_quantised=(quantised_inputs(options) + 1 + MAX_DECODE_ROWS)
        * quantised_stride(config),
        worker_output=2 * MAX_DECODE_ROWS * MAX_BLOCK_ROWS * 4,
        worker_expand=256 + max(4 * widest, (3 + 2 * grouped) * config.head_dim) * 4,
        worker_scores=grouped * (context + 1) * 4,
        worker_tile=tile,
        worker_second_tile=tile if subchunks > 1 else 0,
        worker_normalised=max(chunk * element, 4) * config.hidden_size,
        worker_products=2 * subchunk * max([PANEL_ROWS, *in_place]) * element,
        worker_queries=grouped * min(QUERY_ROWS, subchunk) * config.head_dim * element,
        worker_cached=2 * (context + 1) * config.head_dim * element,
        worker_mask=min(QUERY_ROWS, subchunk) * (context + 1) * element,
        worker_words=WORDS_NBYTES,
        arranging=arranging,
        halves_share=not are_cards or subchunks == 1,
        **_expert_buffers(config, rows, chunk, subchunk, element),
    )


def _expert_panels(config: DecoderConfig, element: int) -> list[int]:
    """Bytes of the largest panel of an expert, expanded; direct ones may lie at odd addresses."""
    if config.moe is None:
        return []
    inner, hidden = config.moe.inner, config.hidden_size
    return [
        min(PANEL_ROWS, inner) * hidden * element,
        min(PANEL_ROWS, hidden) * inner * element,
    ]


def _expert_buffers(
    config: DecoderConfig, rows: int, chunk: int, subchunk: int, element: int
) -> dict[str, int]:
    """Bytes of the buffers that only a mixture has; see `ScratchPlan`."""
    moe = config.moe
    layers = len(moe.sparse_layers) if moe else 0
    total = layers * moe.num_experts if moe else 0
    top_k, inner = (moe.top_k, moe.inner) if moe else (0, 0)
    return {
        "router": rows * router_stride(config) * 4,
        "routes": layers * route_layout(config, rows)["nbytes"] if moe else 0,
        "expert_words": total * 8,
        "expert_places": total * 3 * 4,
        "expert_activated": MAX_DECODE_ROWS * top_k * inner * 4,
        "expert_output": MAX_DECODE_ROWS * top_k * config.hidden_size * 4,
        "expert_output_chunk": chunk * top_k * config.hidden_size * element,
        # a decode row that looks ahead has its inputs, and its logits, in buffers of a chunk
        "worker_gathered": max(
            subchunk * config.hidden_size * element, (router_stride(config) + top_k) * 4
        )
        if moe
        else 0,
        "worker_activated": max(subchunk * element, MAX_DECODE_ROWS * 4) * inner,
    }


def router_stride(config: DecoderConfig) -> int:
    """Values of one row of the router's output: a logit per expert, and the shared expert's."""
    return config.moe.num_experts + int(config.moe.has_shared_gate) if config.moe else 0


def route_layout(config: DecoderConfig, rows: int) -> dict[str, int]:
    """Offsets inside a route of so many rows; see `RouteLayout`."""
    assert config.moe is not None
    return RouteLayout(rows, config.moe.num_experts, config.moe.top_k).offsets


def widest_inner(config: DecoderConfig) -> int:
    """Width of the widest MLP that every token goes through."""
    moe = config.moe
    if moe is None or len(moe.sparse_layers) < config.num_layers:
        return max(config.intermediate_size, moe.shared_inner if moe else 0)
    return moe.shared_inner


def quantised_inputs(options: Options) -> int:
    """Inputs of one instruction that may be quantised at the same time."""
    return max(MAX_DECODE_ROWS, options.step_logits)


def quantised_stride(config: DecoderConfig) -> int:
    """Bytes between quantised inputs of the widest operator."""
    heads_width = config.num_heads * config.head_dim
    inner = max(widest_inner(config), config.moe.inner if config.moe else 0)
    return quantised_nbytes(max(config.hidden_size, inner, heads_width))


def gather_stride(embedding: TensorSource) -> int:
    """Bytes between the rows of the gather buffer."""
    return -(-LAYOUTS[embedding.layout].row_nbytes(embedding.shape[1]) // 64) * 64
