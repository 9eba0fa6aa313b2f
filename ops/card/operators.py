"""The operators of a lane on a graphics card: one method per kind of group.

A lane calls them instruction by instruction; each computes units first..last of a group (16 output
rows each, KV heads of `attn`) from blocks of weights that are on the card, and writes only its own
rows of the output, so that shares of a group meet without a reduction. What other lanes compute is
copied into the same buffers; `reads` and `writes` say what has to be where.

All of it is torch, so it runs on any of torch's devices; packed weights of decode rows go through
Triton where the device has it.

What may be captured in a CUDA graph: for a step without a chunk, every method but `experts` (the
host has to know which product comes next; `experts_in_place` is the form that may) and
`inputs.write`, once each has run outside of a capture. A graph is good for the same blocks, units
and `StepRows`; tokens, positions, pages, frequencies and routes are read from device memory. Rows
that pad a step belong to a sequence whose first page is `cache.spare`, at position 0. Methods for
a chunk know its place from the host, so they are called eagerly.

Results agree with the processor's within rounding, not bit by bit: products of another height may
be summed in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import rms_norm

from shadowlane.ops.card.attention import Attention, HeadConstants
from shadowlane.ops.card.buffers import DTYPES, CardBuffers, CardGeometry, StepInputs, StepRows
from shadowlane.ops.card.cache import Allocate, KvCache
from shadowlane.ops.card.experts import CardExpert, ExpertBiases, Experts, activate
from shadowlane.ops.card.packed_torch import expand
from shadowlane.ops.card.products import CardBlock, Products, has_triton
from shadowlane.ops.card.shares import (
    Span,
    buffers_read,
    cut_blocks,
    has_shared_gate,
    of_width,
    output_rows,
    pair_blocks,
    part_starts,
    spans_written,
)
from shadowlane.ops.decoder import DecoderConfig, GroupDescription
from shadowlane.ops.decoder_config import DType
from shadowlane.ops.layouts import LAYOUTS

if TYPE_CHECKING:
    from shadowlane.ops.card.kernels_triton import ExpertTable

LAYOUT_OF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class CardOperators:
    """One model's operators on one card, with their buffers and their part of the KV cache.

    `inputs` says what a step is about, `buffers` holds activations, `cache` keys and values.
    """

    def __init__(
        self,
        config: DecoderConfig,
        groups: Sequence[GroupDescription],
        constants: Mapping[str, torch.Tensor | np.ndarray],
        geometry: CardGeometry,
        *,
        dtype: DType,
        device: torch.device | str,
        embedding_layout: str,
        kv_layout: str | None = None,
        kv_heads: Mapping[int, tuple[int, int]] | None = None,
        rope_interleaved: bool = False,
        uses_triton: bool | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """constants: norms, biases and sinks by name, at least those of the groups called here.

        dtype: of a chunk's products. kv_layout: of the cache, by default that of `dtype`.
        kv_heads: by layer the KV heads [first, last) whose cache is here, by default none.
        uses_triton: by default where it runs. allocate: memory of the cache, by default torch's.
        Raises ValueError where heads do not fit the cache's layout.
        """
        self.device = torch.device(device)
        self.config, self.geometry, self.dtype = config, geometry, DTYPES[dtype]
        self.groups = {group.name: group for group in groups}
        triton = has_triton(self.device) if uses_triton is None else uses_triton
        self._embedding_layout = embedding_layout
        gather = LAYOUTS[embedding_layout].row_nbytes(config.hidden_size)
        self.buffers = CardBuffers(config, geometry, self.dtype, self.device, gather)
        self.inputs = StepInputs(geometry, config.head_dim // 2, self.device)
        layout = kv_layout or LAYOUT_OF[dtype]
        pages = (geometry.num_pages, geometry.page_tokens)
        self.cache = KvCache(*pages, config.head_dim, layout, self.device, allocate)
        self.cache.hold(kv_heads or {})
        self._constants = {
            name: torch.as_tensor(np.array(value, np.float32), device=self.device)
            if isinstance(value, np.ndarray)
            else value.to(self.device, torch.float32)
            for name, value in constants.items()
        }
        self.products = Products(self.device, self.dtype, triton)
        self._attention = Attention(
            config, self.buffers, self.inputs, self.cache, self.dtype, rope_interleaved, triton
        )
        self._experts: Experts | None = None
        if config.moe is not None:
            self._experts = Experts(config.moe, self.buffers, self.products)

    def reads(self, name: str) -> tuple[str, ...]:
        """Names of the buffers that a group reads; see `shares.py`."""
        return buffers_read(self.config, self.groups[name])

    def writes(self, name: str, first_unit: int, last_unit: int) -> tuple[Span, ...]:
        """What units first..last of a group write; see `shares.py`."""
        return spans_written(self.config, self.groups[name], first_unit, last_unit)

    # A step --------------------------------------------------------------------------------------

    def begin(self, rows: StepRows) -> None:
        """What all layers of a step share: the rotary angles of its rows."""
        self._attention.rotary(rows)

    def compute(
        self,
        name: str,
        first_unit: int,
        last_unit: int,
        blocks: Iterable[CardBlock],
        rows: StepRows,
    ) -> None:
        """Units first..last of a group of any kind but experts; blocks: those of its weights.

        Blocks may reach beyond the units, and more than are needed may be given. Of `embed` they
        are the table of embeddings, or none where its rows lie in `gather`.
        """
        group = self.groups[name]
        match group.kind:
            case "embed":
                self._embed(blocks, rows)
            case "attn":
                assert group.layer is not None
                constants = HeadConstants(
                    self._constant(group.q_norm),
                    self._constant(group.k_norm),
                    self._constant(group.sinks),
                )
                self._attention.attend(group.layer, first_unit, last_unit, rows, constants)
            case "gate_up":
                self._gate_up(group, first_unit, last_unit, blocks, rows)
            case "lm_head":
                self._lm_head(group, first_unit, last_unit, blocks, rows)
            case "experts":
                raise ValueError(f"{name}: experts are computed one by one; see `experts`")
            case _:
                self._linear(group, first_unit, last_unit, blocks, rows)

    @property
    def mixture(self) -> Experts:
        """The choice of experts, and the sum of what they give; not of dense models."""
        assert self._experts is not None, "only mixtures have experts"
        return self._experts

    def experts(
        self,
        name: str,
        resident: Mapping[int, CardExpert],
        ids: np.ndarray,
        rows: StepRows,
        outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
        is_sorted: bool = False,
    ) -> None:
        """The resident experts of a layer for the rows that chose them: ids, [rows, top_k].

        Leaves the output row of each of their pairs in `expert_output` (of a chunk's rows, in
        `expert_output_chunk`) or in what is given in their place, and touches no other. is_sorted:
        the call before was for other experts of the same layer, and for the same rows.
        """
        group = self.groups[name]
        inputs = self._inputs(group, rows)
        biases = self._expert_biases(group)
        self.mixture.compute(inputs, resident, ids, rows, biases, outputs, is_sorted)

    def experts_in_place(
        self, name: str, table: ExpertTable, rows: StepRows, output: torch.Tensor | None = None
    ) -> None:
        """As `experts`, for the decode rows alone: what they chose is read from `route_ids`.

        Which experts are in the table may change between replays of a captured graph. output: where
        the pairs' rows go in the end, in place of `expert_output`. Raises ValueError on a device
        without Triton.
        """
        if not self.products.uses_triton:
            raise ValueError(f"experts in place need Triton; got {self.device} without it")
        from shadowlane.ops.card.kernels_triton import compute_experts, leave_experts

        group, moe, buffers = self.groups[name], self.config.moe, self.buffers
        decode, _ = self._inputs(group, rows)
        assert moe is not None
        if decode is None:
            return
        biases = self._expert_biases(group)
        ids = buffers.route_ids[: rows.num_decode]
        compute_experts(
            table,
            ids,
            decode,
            buffers.expert_activated,
            buffers.expert_output,
            None if biases is None else (biases.gate, biases.up, biases.down),
            self._clamp,
        )
        if output is not None:  # rows whole, where the kernels above write a few numbers at a time
            leave_experts(table, ids, buffers.expert_output, output)

    def reads_device_alone(self, name: str) -> bool:
        """Whether a group's kernels for a step without a chunk differ from step to step by nothing
        but numbers in device memory, so that a graph of them may be replayed.

        Attention without Triton is cut to the length of the longest text; experts without it are
        chosen by the host.
        """
        kind = self.groups[name].kind
        if kind == "attn":
            return self.products.uses_triton and self.cache.layout != "q8_0"
        return kind != "experts" or self.products.uses_triton

    def likeliest(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of each row of complete logits, int64, and its logit, float32.

        Of equal ones the first. A logit that is no finite number has to be looked for by the host,
        whenever it takes the tokens over; see `sampling.py` for all other ways to choose.
        """
        largest, tokens = self.buffers.logits[: rows.num_logits].max(dim=-1)
        return tokens, largest

    # Kinds of groups -----------------------------------------------------------------------------

    def _embed(self, blocks: Iterable[CardBlock], rows: StepRows) -> None:
        hidden = self.config.hidden_size
        residual = self.buffers.residual[rows.all]
        table = list(blocks)
        if not table:
            gathered = self.buffers.gather[rows.all]
            residual.copy_(expand(self._embedding_layout, gathered, hidden))
            return
        tokens = self.inputs.tokens[rows.all]
        for block in table:
            place = tokens - block.output_row
            is_here = (place >= 0) & (place < block.num_rows)
            packed = block.rows(0, block.num_rows)[place.clamp(0, block.num_rows - 1)]
            values = expand(block.layout, packed, hidden)
            torch.where(is_here[:, None], values, residual, out=residual)

    def _linear(
        self,
        group: GroupDescription,
        first_unit: int,
        last_unit: int,
        blocks: Iterable[CardBlock],
        rows: StepRows,
    ) -> None:
        """qkv, o, down and router: products into their columns, or added to the residual stream."""
        name = {"qkv": "qkv", "router": "router"}.get(group.kind, "residual")
        output = getattr(self.buffers, name)[rows.first :]
        adds = name == "residual"
        decode, chunk = self._inputs(group, rows)
        factor = None
        if has_shared_gate(self.config, group):
            assert self.config.moe is not None
            factor = self.buffers.router[rows.first :, self.config.moe.num_experts, None]
        starts = part_starts(group)
        for block, first, last in cut_blocks(blocks, output_rows(group, first_unit, last_unit)):
            columns = slice(block.output_row + first, block.output_row + last)
            bias = self._bias(group, block.part, columns, starts[block.part])
            if decode is not None and factor is None:
                out = output[: rows.num_decode, columns]
                self.products.write_few(decode, block, first, last, out, bias, adds)
            left = None if factor is None else decode
            for found, at in self._multiplied(block, first, last, left, chunk, rows):
                if bias is not None:
                    found = found + bias
                place = output[at : at + len(found), columns]
                if factor is not None:
                    found = found * factor[at : at + len(found)]
                if adds:
                    place += found
                else:
                    place.copy_(found)

    def _multiplied(
        self,
        block: CardBlock,
        first: int,
        last: int,
        decode: torch.Tensor | None,
        chunk: torch.Tensor | None,
        rows: StepRows,
    ) -> Iterable[tuple[torch.Tensor, int]]:
        """(product, first of these rows that it is of), of decode rows and of sub-chunks."""
        if decode is not None:
            yield self.products.few(decode, block, first, last), 0
        if chunk is not None:
            for begin, end in rows.subchunks():
                product = self.products.many(chunk[begin:end], block, first, last)
                yield product, rows.num_decode + begin

    def _gate_up(
        self,
        group: GroupDescription,
        first_unit: int,
        last_unit: int,
        blocks: Iterable[CardBlock],
        rows: StepRows,
    ) -> None:
        """The activation of gate, times up. Blocks of the two need not have the same rows."""
        span = output_rows(group, first_unit, last_unit)
        cut = list(cut_blocks(blocks, span))
        decode, chunk = self._inputs(group, rows)
        if decode is not None and self._gate_up_fused(group, cut, decode):
            decode = None
        if decode is None and chunk is None:
            return
        halves = [
            torch.empty((rows.num_rows, span[1] - span[0]), device=self.device) for _ in range(2)
        ]
        for block, first, last in cut:
            columns = slice(block.output_row + first, block.output_row + last)
            bias = self._bias(group, block.part, columns, 0)
            here = slice(columns.start - span[0], columns.stop - span[0])
            for found, at in self._multiplied(block, first, last, decode, chunk, rows):
                place = halves[block.part][at : at + len(found), here]
                place.copy_(found if bias is None else found + bias)
        inner = group.parts[0].rows
        for inputs, at, output in (
            (decode, 0, of_width(self.buffers.activated, inner)),
            (chunk, rows.num_decode, of_width(self.buffers.activated_chunk, inner)[rows.chunk]),
        ):
            if inputs is not None:
                gate, up = (half[at : at + len(inputs)] for half in halves)
                place = output[: len(inputs), slice(*span)]
                place.copy_(activate(gate, up, self.config.moe))

    def _gate_up_fused(
        self,
        group: GroupDescription,
        cut: list[tuple[CardBlock, int, int]],
        decode: torch.Tensor,
    ) -> bool:
        """Decode rows by one kernel per pair of blocks; False where gate's and up's do not pair."""
        pairs = pair_blocks(cut)
        if not self.products.uses_triton or pairs is None:
            return False
        output = of_width(self.buffers.activated, group.parts[0].rows)[: len(decode)]
        for gate, up in pairs:
            start = gate[0].output_row + gate[1]
            columns = slice(start, start + gate[2] - gate[1])
            biases = tuple(self._bias(group, part, columns, 0) for part in range(2))
            place = output[:, columns]
            self.products.gate_up_few(decode, gate, up, place, biases, self._clamp)
        return True

    @property
    def _clamp(self) -> tuple[float, float] | None:
        """Limit and alpha of a clamped activation."""
        moe = self.config.moe
        return (moe.swiglu_limit, moe.swiglu_alpha) if moe and moe.swiglu_limit else None

    def _lm_head(
        self,
        group: GroupDescription,
        first_unit: int,
        last_unit: int,
        blocks: Iterable[CardBlock],
        rows: StepRows,
    ) -> None:
        """Logits of the rows whose logits are wanted, as decode rows are multiplied."""
        wanted = self.buffers.residual[self.inputs.logit_rows[: rows.num_logits]]
        inputs = self._normalised(group, wanted)
        for block, first, last in cut_blocks(blocks, output_rows(group, first_unit, last_unit)):
            columns = slice(block.output_row + first, block.output_row + last)
            for at in range(0, rows.num_logits, self.geometry.decode_rows):
                part = inputs[at : at + self.geometry.decode_rows]
                found = self.products.few(part, block, first, last)
                self.buffers.logits[at : at + len(found), columns] = found

    # What they share -----------------------------------------------------------------------------

    def _inputs(
        self, group: GroupDescription, rows: StepRows
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Decode rows, float32, and chunk rows, compute type; None where there are none."""
        buffers, decode = self.buffers, rows.num_decode
        if group.norm is not None:
            inputs = self._normalised(group, buffers.residual[rows.all])
            few, many = inputs[:decode], inputs[decode:].to(self.dtype)
        else:
            name = {"o": "attended", "down": "activated"}[group.kind]
            width = group.parts[0].cols
            few = of_width(getattr(buffers, name), width)[:decode]
            many = of_width(getattr(buffers, f"{name}_chunk"), width)[rows.chunk]
        return (few if decode else None), (many if rows.num_prefill else None)

    def _normalised(self, group: GroupDescription, rows: torch.Tensor) -> torch.Tensor:
        norm = self._constant(group.norm)
        return rms_norm(rows, (self.config.hidden_size,), norm, self.config.norm_eps)

    def _constant(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._constants[name]

    def _bias(
        self, group: GroupDescription, part: int, columns: slice, start: int
    ) -> torch.Tensor | None:
        """A part's bias for these columns of the output; `start`: the part's first column."""
        bias = self._constant(group.parts[part].bias)
        return None if bias is None else bias[columns.start - start : columns.stop - start]

    def _expert_biases(self, group: GroupDescription) -> ExpertBiases | None:
        if not group.expert_biases:
            return None
        return ExpertBiases(*(self._constants[name] for name in group.expert_biases))
