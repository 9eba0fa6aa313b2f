"""The table a compute lane runs from: what the columns of its rows of int64 mean.

A program is lowered once per placement and lane into three arrays, `instructions`, `items` and
`blocks`; `geometry` holds what is the same for all programs of a model; a *step record* in the
arena says which tokens one step is about. Offsets are relative to the arena, never addresses,
except OPERATOR and EXPAND, which are code addresses of the process that lowered the table.

One instruction is one fused operator of one group. Its work is cut into items (decode) or tiles
(prefill: whole blocks), which the workers of a lane take from a shared ticket one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np

MAX_LANES: Final = 8  # compute lanes that a table can wait for
MAX_CARDS: Final = 4  # whose links have counters
MAX_DECODE_ROWS: Final = 16  # rows that the compiled kernels take together, of packed weights;
FEW_ROWS: Final = 8  # of others: from here on, torch's products are faster
WORDS_NBYTES: Final = 4096  # what a call of torch needs; see `aten.py`
PANEL_ROWS: Final = 256  # of a block in prefill, expanded and multiplied together
QUERY_ROWS: Final = 256  # of a chunk, in one call of attention
MAX_BLOCK_ROWS: Final = 1024  # tallest tile

# kinds of instruction
EMBED: Final = 0
LINEAR: Final = 1
GATE_UP: Final = 2
ATTENTION: Final = 3
LM_HEAD: Final = 4
ROUTER: Final = 5  # logits of all experts; who finishes it chooses for every row, see `routes.py`
EXPERTS: Final = 6  # the chosen experts of one layer, in the order in which they are ready

# what a LINEAR does with its result
STORE: Final = 0
ADD: Final = 1  # add to the residual stream

# phases of a step
DECODE: Final = 0  # at most MAX_DECODE_ROWS rows, compiled from end to end
PREFILL: Final = 1  # one chunk of a prompt, beside up to MAX_DECODE_ROWS decode rows; it is made of
# sub-chunks of a fixed height, which alone decides how products and attention are cut

# instructions[i, ...]
KIND: Final = 0
GROUP: Final = 1  # index in the catalog, for spans
LAYER: Final = 2
COLS: Final = 3  # inputs of a row
ROWS: Final = 4  # output rows of the whole group
ITEM_START: Final = 5  # decode items; of ATTENTION: the first KV head
ITEM_COUNT: Final = 6
TILE_START: Final = 7  # prefill items; of EMBED: the first block of the table of embeddings
TILE_COUNT: Final = 8
INPUT: Final = 9  # float32 [decode rows, COLS]
PREFILL_INPUT: Final = 10  # compute type [prefill rows, COLS]
OUTPUT: Final = 11  # float32 [rows, ROWS]; of GATE_UP: float32 [decode rows, ROWS]
PREFILL_OUTPUT: Final = 12  # compute type; of GATE_UP and ATTENTION
NORM_WEIGHT: Final = 13  # float32 [COLS], -1: the input is used as it is
BIAS: Final = 14  # float32 [ROWS] (GATE_UP: [2 * ROWS]), -1: none
EPILOGUE: Final = 15
WINDOW: Final = 16  # sliding window in tokens; 0: full attention
Q_NORM: Final = 17  # float32 [head_dim], -1: none
K_NORM: Final = 18
BLOCK_ROWS: Final = 19  # EMBED: rows of each block of the table of embeddings
GATHERED: Final = 20  # EMBED: 1 if rows may have to come through the gather buffer
HEAD_SPLITS: Final = 21  # ATTENTION: decode items per KV head, each with its part of the queries
ORDINAL: Final = 22  # this instruction's number in the lane's program: counter = base + ORDINAL + 1
QUANTISES: Final = 23  # 1: some of its blocks are packed, so its inputs are quantised
SPARSE_LAYER: Final = 24  # ROUTER, EXPERTS: number of the layer among those with experts
EXPERT_BLOCKS: Final = 25  # EXPERTS: three rows of `blocks`: gate, up and down of each of them
EXPERT_CHUNKS: Final = 26  # EXPERTS: decode items of each half (gate and up, down) of an expert
SHARED_GATE: Final = 27  # LINEAR of a shared expert: where its rows' factors begin; -1: none
EXPERT_BIASES: Final = 28  # EXPERTS: three offsets, of gate, up, down: a row per expert, -1
NEXT_ROUTER: Final = 31  # EXPERTS: instruction of the next layer's router, -1: unknown here
SINKS: Final = 32  # ATTENTION: a logit per query head that takes part in each softmax, -1: none
# of a lane whose speed is emulated; see `emulated.py`
READS_NBYTES: Final = 33  # weights that it reads; EXPERTS: of one expert
READS_KV: Final = 34  # ATTENTION: keys and values of one token
FLOPS: Final = 35  # of one row; ATTENTION: of one row and token attended; EXPERTS: of one of both
CROSSINGS: Final = 36  # between processor and cards, before its input is there
IS_FIRST: Final = 37  # 1: the lane's first instruction in its layer
# ROUTER, EXPERTS: item of the layer's expert 0 in a table of those that live on cards, see CARD;
CARD_EXPERTS: Final = 38  # -1: none of them does
# EXPERTS: 1: this lane adds up what it and others compute, see JOIN_WAIT; 0: it computes all;
JOINS: Final = 39  # -1: another lane adds up
# EXPERTS: 1: a card has chosen, and left nothing of a route but ids and weights, see `take_route`;
CARD_CHOSE: Final = 40  # -1: whoever chose has made a whole route
MICRO_BATCH: Final = 41  # which of the chunk's its rows are, and of how many; see `micro_batch.py`
MICRO_BATCHES: Final = 42
PEER_WAIT: Final = 43  # MAX_LANES columns: instructions of lane k that must have retired, -1: none
JOIN_WAIT: Final = PEER_WAIT + MAX_LANES  # the same, before EXPERTS are added up
INSTRUCTION_COLUMNS: Final = JOIN_WAIT + MAX_LANES

# items[j, ...]
BLOCK: Final = 0
SECOND_BLOCK: Final = 1  # GATE_UP: the block of `up` with the same rows
ROW_IN_BLOCK: Final = 2
NUM_ROWS: Final = 3
FIRST_ROW: Final = 4  # of the group's output
ITEM_COLUMNS: Final = 5
# ... of a table of experts on cards, one item for each expert of a layer
CARD: Final = 0  # the number of its card, -1: it lives on none
CARD_HOME: Final = 1  # where it lies in this card's memory, as in a slot; -1: not this lane's

# ... of EXPERTS on a card, prefill items: one for each expert that the instruction computes
EXPERT: Final = 0
EXPERT_HOME: Final = 1  # where it lies in the card's memory, as in a slot; -1: it is brought
EXPERT_ORDINAL: Final = 2  # its place in the sweep; -1: it lives there

# blocks[b, ...]
OFFSET: Final = 0  # in the arena, of the first byte of the weights; -1: streamed
SWEEP_ORDINAL: Final = 1  # place in the sweep; -1: resident
SKEW: Final = 2  # bytes from the start of a slot to the first byte of the weights
BLOCK_FIRST_ROW: Final = 3  # of the tensor
BLOCK_NUM_ROWS: Final = 4
ROW_NBYTES: Final = 5
LAYOUT: Final = 6
OPERATOR: Final = 7  # code address: rows of this layout times float32 inputs
EXPAND: Final = 8  # code address: one row to float32
IS_PACKED: Final = 9  # 1: the operator takes quantised inputs, see `packed.py`
EXPANDED: Final = 10  # offset of a copy in the compute type, rows close together; -1: none
BLOCK_COLUMNS: Final = 11

# geometry[...]
(
    ABORT,
    COUNTERS,  # lane k's counter is at COUNTERS + k * COUNTER_NBYTES
    LANE,  # number of this lane
    BRINGS_COUNTER,  # numbers of other counters in the same array: who brings what is streamed
    GATHER_COUNTER,
    TICKETS,  # this lane's: two words (taken, done) per instruction, TICKET_NBYTES apart
    SPIN_NS,  # offset of the word that says how long this lane's waits may spin
    WORKERS,  # WORKER_NBYTES per worker: statistics and span ring
    NUM_WORKERS,
    RING,
    SLOT_NBYTES,
    NUM_SLOTS,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    ROPE_INTERLEAVED,
    NORM_EPS,  # offset of a float32
    KV,
    KV_LAYOUT,
    KV_ROW_NBYTES,  # one head's key or value of one token
    KV_EXPAND,  # code address of `expand_row` for a packed KV_LAYOUT
    PAGE_TOKENS,
    NUM_PAGES,
    X,  # float32 [rows, HIDDEN]: the residual stream
    QKV,  # float32 [rows, (heads + 2 * kv heads) * head_dim]
    COS,  # float32 [rows, head_dim / 2]
    SIN,
    GATHER,  # embedding rows read from disk, GATHER_STRIDE apart
    GATHER_STRIDE,
    SCRATCH,  # SCRATCH_NBYTES per worker of this lane
    SCRATCH_NBYTES,
    SCRATCH_INPUT,  # normalised inputs, float32, in a worker's scratch
    SCRATCH_QUANTISED,  # the same inputs quantised, QUANTISED_NBYTES apart; see `packed.py`
    QUANTISED_NBYTES,
    SCRATCH_OUTPUT,  # two float32 [MAX_DECODE_ROWS, MAX_BLOCK_ROWS]
    SCRATCH_SCORES,  # float32 [heads per kv head, context + 1]
    SCRATCH_TILE,  # an expanded panel in the compute type
    SCRATCH_SECOND_TILE,  # one more, of `up`; where a chunk is one sub-chunk the same place
    SCRATCH_NORMALISED,  # of a chunk, in the compute type [chunk, HIDDEN]
    SCRATCH_PRODUCTS,  # two [sub-chunk, rows of a tile or panel]
    SCRATCH_QUERIES,  # [heads per kv head, QUERY_ROWS, HEAD_DIM]
    SCRATCH_CACHED,  # keys, then values: [CONTEXT + 1, HEAD_DIM] each
    SCRATCH_MASK,  # [QUERY_ROWS, CONTEXT + 1]
    SCRATCH_WORDS,  # WORDS_NBYTES of `aten.py`
    CONTEXT,  # tokens that SCRATCH_SCORES has room for
    RECORD_TOKENS,  # offsets inside a step record
    RECORD_POSITIONS,
    RECORD_SEQUENCES,
    RECORD_LOGIT_ROWS,
    RECORD_PAGES,
    RECORD_INV_FREQ,
    RECORD_SCALING,
    MAX_PAGES,  # of one sequence
    COMPUTE_LAYOUT,  # id of the compute type
    # of a mixture of experts; 0 in dense models
    NUM_EXPERTS,
    TOP_K,
    EXPERT_INNER,  # width of one expert
    NORMALISES_TOP_K,  # 1: weights are a softmax of the chosen alone
    ROUTER_STRIDE,  # float32 of one row of the router's output
    ROUTES,  # ROUTE_NBYTES per sparse layer; see `RouteLayout`
    ROUTE_NBYTES,
    ROUTE_IDS,  # offsets inside a route
    ROUTE_WEIGHTS,
    ROUTE_STARTS,
    ROUTE_PAIRS,
    ROUTE_ORDER,
    ROUTE_MISSING,
    ROUTE_HALVES,
    ROUTE_WHOLES,
    ROUTE_GUESSES,
    ROUTE_NUMBER,  # offset of the int64 that counts routes, then of ROUTE_RING layers by number
    EXPERT_WORDS,  # int64 per expert; see `routes.py`
    EXPERT_PLACES,  # int32 [experts, 3]: where gate, up and down begin in the slot of an expert
    EXPERT_SLOTS,
    EXPERT_NBYTES,  # of one slot
    READY_COUNTER,
    REQUEST_COUNTER,  # requests for missing experts, and guesses
    SUMMED_COUNTER,
    EXPERT_ACTIVATED,  # float32 [decode rows * TOP_K, EXPERT_INNER]
    EXPERT_OUTPUT,  # float32 [decode rows * TOP_K, HIDDEN]
    EXPERT_OUTPUT_CHUNK,  # compute type [chunk * TOP_K, HIDDEN]
    SCRATCH_SPARE,  # room for one more quantised input, and behind it for MAX_DECODE_ROWS
    SCRATCH_GATHERED,  # compute type [sub-chunk, HIDDEN]: inputs of one expert
    SCRATCH_ACTIVATED,  # compute type [sub-chunk, EXPERT_INNER]
    SWIGLU,  # offset of two float32, limit and alpha of a clamped SwiGLU; -1: silu
    WHOLE_HEAD_NORM,  # 1: q and k are normalised over all their heads together
    SWEEP_BASE,  # field of the step record: blocks brought before this step's sweep
    EMULATION,  # offset of this lane's law, see `emulated.py`; -1: it takes the time it takes
    EMULATED_LOADS,  # offset of what links and disk take from the DRAM port
    THIS_CARD,  # the number of the card that this lane is, -1: a processor's
    GEOMETRY_FIELDS,
) = range(92)

# a step record begins with these int64
STEP: Final = 0
PLACEMENT: Final = 1
PHASE: Final = 2
NUM_DECODE: Final = 3
NUM_PREFILL: Final = 4
NUM_LOGITS: Final = 5
SAME_SEQUENCE: Final = 6  # decode rows are consecutive tokens of one sequence
DISK_BASE: Final = 7  # blocks retired by the disk lane before this step's sweep
SUBCHUNK_ROWS: Final = 8  # prefill rows that are multiplied together; the last may be fewer
IS_VOID: Final = 9  # set while a prefill step runs: nobody wants it any more
LANE_BASE: Final = 10  # MAX_LANES fields: instructions retired by each lane before this step
LINK_BASE: Final = LANE_BASE + MAX_LANES  # MAX_CARDS fields: blocks brought to each card
RECORD_HEADER_FIELDS: Final = LINK_BASE + MAX_CARDS

# a route begins with these int64
ROUTE_SEQUENCE: Final = 0  # the number of this route, from 1; each choice of a layer is one
NUM_CHOSEN: Final = 1  # different experts, without those that live on cards
NUM_RESIDENT: Final = 2  # of these, in RAM when they were chosen
READY_BASE: Final = 3  # READY_COUNTER before the first of them was ready
NUM_FINISHED: Final = 4  # computed for all rows
ROUTE_STEP: Final = 5
ALL_RESIDENT: Final = 6  # over all decode steps since the start: NUM_RESIDENT, and NUM_CHOSEN
ALL_CHOSEN: Final = 7
IS_DECODE: Final = 8  # 1: of a decode step
GUESS_FOR: Final = 9  # the route, yet to come, of this layer that `guesses` are about
ALL_ON_CARDS: Final = 10  # as ALL_CHOSEN, which does not count them
# MAX_CARDS + 1 fields: places in `order` at which each card's begin, behind those of NUM_CHOSEN.
# Written where any expert of the layer lives on a card; zero before that.
CARD_PLACES: Final = 11
ROUTE_HEADER_FIELDS: Final = 16
ROUTE_RING: Final = 1024  # newest routes whose layers are known
# behind ROUTE_NUMBER and its ring, int64: 1 if the engine has chosen for the rows of the next step
ROUTE_FORCED: Final = 1 + ROUTE_RING
LOOKS_AHEAD: Final = 2 + ROUTE_RING  # 1 if the next layer's experts are to be guessed
NEWEST_REQUEST: Final = 3 + ROUTE_RING  # the newest route that misses experts
NEWEST_GUESS: Final = 4 + ROUTE_RING  # number of the sparse layer + 1 of the newest guess
STARVED: Final = 5 + ROUTE_RING  # a bed: the disk lane sleeps here until a slot may be emptied
ROUTE_WORDS: Final = 6 + ROUTE_RING
SLOT_BITS: Final = 24  # of an expert's word: slot + 1, or 0; above them the route that used it last

NUM_BEDS: Final = 64  # of a counter's sleepers, see `atomics.py`
COUNTER_NBYTES: Final = 64 + 8 * NUM_BEDS
TICKET_NBYTES: Final = 128

# per worker: statistics, then a ring of spans
BUSY_NS: Final = 0
WAIT_NS: Final = 1
DISK_WAIT_NS: Final = 2
RUN_DELAY_NS: Final = 4  # runnable but not running, as the kernel counts it
NUM_SPANS: Final = 3  # spans written since the start; the ring keeps the last SPAN_RING of them
TIMED_STEP: Final = 5  # of a card: the newest step of which all spans have been written
WORKER_HEADER_NBYTES: Final = 128
SPAN_RING: Final = 1 << 15
SPAN_FIELDS: Final = 5  # step, group, start_ns, end_ns, ns waited in between: the rest is work
WORKER_NBYTES: Final = WORKER_HEADER_NBYTES + SPAN_RING * SPAN_FIELDS * 8


def _offsets(header_fields: int, sizes: dict[str, int]) -> dict[str, int]:
    """Byte offsets of 4-byte arrays, one behind the other after a header of int64, and "nbytes"."""
    offset = header_fields * 8
    result = {}
    for name, count in sizes.items():
        result[name] = offset
        offset += count * 4
    result["nbytes"] = -(-offset // 64) * 64
    return result


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Offsets of the arrays in a step record. `rows` is the most rows one step may have."""

    rows: int
    logits: int
    sequences: int
    max_pages: int
    half_dim: int

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each array, and "nbytes" for the whole record."""
        sizes = {
            "tokens": self.rows,
            "positions": self.rows,
            "sequences": self.rows,
            "logit_rows": self.logits,
            "pages": self.sequences * self.max_pages,
            "inv_freq": self.sequences * self.half_dim,
            "scaling": self.sequences,
        }
        return _offsets(RECORD_HEADER_FIELDS, sizes)


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """Offsets of the arrays in a route: what the rows of one step chose in one layer."""

    rows: int
    num_experts: int
    top_k: int

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each array, and "nbytes" for all of them. A *pair* is row * top_k + rank.

        ids, weights: [rows, top_k] by rank; pairs: sorted by expert, those of expert e from
        starts[e] to starts[e + 1]; order: experts as they became ready, then those on each card;
        missing: those to be read;
        halves, wholes: items done of the expert at each place in `order`; guesses: what the next
        route of this layer may choose.
        """
        pairs = self.rows * self.top_k
        sizes = {
            "ids": pairs,
            "weights": pairs,
            "starts": self.num_experts + 1,
            "pairs": pairs,
            "order": self.num_experts,
            "missing": self.num_experts,
            "halves": self.num_experts,
            "wholes": self.num_experts,
            "guesses": self.top_k,
        }
        return _offsets(ROUTE_HEADER_FIELDS, sizes)


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """What one lane runs under one placement; the columns are those above."""

    placement_id: int
    instructions: np.ndarray  # int64 [instructions, INSTRUCTION_COLUMNS]
    items: np.ndarray  # int64 [items, ITEM_COLUMNS]
    blocks: np.ndarray  # int64 [blocks, BLOCK_COLUMNS]
