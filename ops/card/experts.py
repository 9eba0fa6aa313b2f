"""The experts of a mixture on a card: the choice, the experts that are here, the sum.

A *pair* is a row and one of the experts it goes to, number row * top_k + rank. Each resident
expert's output row is left where its pair is, and nobody else's is touched: what other lanes
compute is copied to its place, and then everything is added up in the router's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shadowlane.ops.card.buffers import CardBuffers, StepRows
from shadowlane.ops.card.choices import NUMBERS, choose, sigmoid
from shadowlane.ops.card.products import CardBlock, Products
from shadowlane.ops.moe_config import MoeConfig


@dataclass(frozen=True, slots=True)
class CardExpert:
    """One expert's matrices on the card: gate and up [inner, hidden], down [hidden, inner]."""

    gate: CardBlock
    up: CardBlock
    down: CardBlock


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Stacked biases of a layer's experts, float32 [experts, rows]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def activate(gate: torch.Tensor, up: torch.Tensor, moe: MoeConfig | None) -> torch.Tensor:
    """What stands between the two halves of an MLP: silu, or GPT-OSS's clamped form."""
    if moe is None or not moe.swiglu_limit:
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=moe.swiglu_limit)
    up = up.clamp(-moe.swiglu_limit, moe.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(gate * moe.swiglu_alpha)


class Experts:
    """Routes and experts of all layers of one model on one card."""

    def __init__(self, moe: MoeConfig, buffers: CardBuffers, products: Products) -> None:
        self._moe, self._buffers, self._products = moe, buffers, products
        self._numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=buffers.router.device)

    def route(self, rows: StepRows, left: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Choose for every row, from `router`: into `route_ids` and `route_weights`, by rank.

        The same bits as in `ops/routes.py`. The logit of the shared expert's gate becomes its
        factor. left: where ids, int32, and weights go as well: [rows, top_k] each.
        """
        moe, buffers = self._moe, self._buffers
        router, normalises = buffers.router[rows.all], moe.norm_topk or moe.softmax_chosen
        ids, weights = buffers.route_ids[rows.all], buffers.route_weights[rows.all]
        if self._products.uses_triton:
            from shadowlane.ops.card.choices_triton import choose_experts

            where = (ids, weights, left or (ids, weights), self._numbers)
            choose_experts(router, moe.num_experts, *where, normalises=normalises)
            return
        choose(router[:, : moe.num_experts], ids, weights, normalises=normalises)
        self.open_gates(rows)
        if left is not None:
            left[0].copy_(ids)
            left[1].copy_(weights)

    def take_route(
        self,
        rows: StepRows,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Go where somebody else has chosen; all count alike. ids: int32; weights: to be left."""
        buffers = self._buffers
        self.open_gates(rows)
        buffers.route_ids[rows.all].copy_(ids)
        buffers.route_weights[rows.all].fill_(1.0 / self._moe.top_k)
        weights.copy_(buffers.route_weights[rows.all])

    def open_gates(self, rows: StepRows) -> None:
        """Make the factor of a shared expert of the logit of its gate, where it has one."""
        if self._moe.has_shared_gate:
            gates = self._buffers.router[rows.all, self._moe.num_experts :]
            gates.copy_(sigmoid(gates))

    def compute(
        self,
        inputs: tuple[torch.Tensor | None, torch.Tensor | None],
        resident: Mapping[int, CardExpert],
        ids: np.ndarray,
        rows: StepRows,
        biases: ExpertBiases | None,
        outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
        is_sorted: bool = False,
    ) -> None:
        """The experts that are here, with the rows that chose them.

        inputs: the normalised decode rows, float32, and chunk rows, compute type; ids: what
        `route_ids` holds, [rows, top_k], on the host, where the next product depends on it.
        outputs: in place of `expert_output` and `expert_output_chunk`, of the same types.
        is_sorted: other experts of this layer have been computed for these rows just before.
        """
        buffers, top_k = self._buffers, self._moe.top_k
        few, many = outputs or (buffers.expert_output, buffers.expert_output_chunk)
        decode, chunk = inputs
        parts: list[slice] = []
        if decode is not None:
            parts.append(slice(0, rows.num_decode))
        if chunk is not None:
            at = rows.num_decode
            parts += [slice(at + first, at + last) for first, last in rows.subchunks()]
        if not is_sorted:
            self._sort_pairs(parts, buffers.route_ids[rows.all])
        for part in parts:
            if part.stop <= rows.num_decode:
                assert decode is not None
                self._rows(decode, part, resident, ids, biases, few, False)
                continue
            assert chunk is not None
            first, last = part.start - rows.num_decode, part.stop - rows.num_decode
            here = many[(rows.chunk_first + first) * top_k :]
            self._rows(chunk[first:last], part, resident, ids, biases, here, True)

    def _sort_pairs(self, parts: Sequence[slice], ids: torch.Tensor) -> None:
        """Put the pairs of each part in the order of their experts, on the device.

        ids: [rows, top_k], of all parts.
        """
        top_k = self._moe.top_k
        for part in parts:
            order = self._buffers.route_order[part.start * top_k : part.stop * top_k]
            order.copy_(ids[part].flatten().argsort(stable=True))

    def _rows(
        self,
        inputs: torch.Tensor,
        part: slice,
        resident: Mapping[int, CardExpert],
        ids: np.ndarray,
        biases: ExpertBiases | None,
        outputs: torch.Tensor,
        is_chunk: bool,
    ) -> None:
        """Part of these rows; `outputs` begins with the pairs of its first.

        Pairs are in the order of their experts on the device, and counted on the host: nothing is
        copied, so nothing waits for what is ahead in the stream.
        """
        multiply, top_k = self._products.many if is_chunk else self._products.few, self._moe.top_k
        order = self._buffers.route_order[part.start * top_k : part.stop * top_k]
        counts = np.bincount(ids[part].reshape(-1), minlength=self._moe.num_experts)
        ends = counts.cumsum().tolist()
        for expert in np.flatnonzero(counts).tolist():
            if expert not in resident:
                continue
            pairs = order[ends[expert] - counts[expert] : ends[expert]]
            gathered = inputs[pairs // top_k]
            one = resident[expert]
            gate = multiply(gathered, one.gate, 0, one.gate.num_rows)
            up = multiply(gathered, one.up, 0, one.up.num_rows)
            if biases is not None:
                gate, up = gate + biases.gate[expert], up + biases.up[expert]
            activated = activate(gate, up, self._moe).to(inputs.dtype)
            found = multiply(activated, one.down, 0, one.down.num_rows)
            if biases is not None:
                found = found + biases.down[expert]
            outputs[pairs] = found.to(outputs.dtype)

    def take(
        self,
        here: torch.Tensor,
        num_others: Sequence[int],
        rows: StepRows,
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """The rows of pairs whose experts others compute, into `expert_output` and its like.

        here: bool [experts] on the device, those that are computed here; num_others: pairs of
        others in each sub-chunk. outputs: where all leave the rows of theirs, of decode rows, and
        of a chunk's. Of decode rows all cross, so that nobody has to count them.
        """
        buffers, top_k, decode = self._buffers, self._moe.top_k, rows.num_decode
        ids, chunk = buffers.route_ids[rows.all], buffers.expert_output_chunk
        few, many = outputs
        if decode:
            is_here = here[ids[:decode]].flatten()[:, None]
            ours = buffers.expert_output[: decode * top_k]
            torch.where(is_here, ours, few[: decode * top_k], out=ours)
        for (first, last), count in zip(rows.subchunks(), num_others, strict=True):
            is_here = here[ids[decode + first : decode + last]].flatten()
            pairs = is_here.to(torch.uint8).argsort(stable=True)[:count]
            pairs += (rows.chunk_first + first) * top_k
            chunk[pairs] = many[pairs]

    def add(self, rows: StepRows) -> None:
        """Add the experts' outputs of all rows to the residual stream, by rank."""
        buffers, top_k, decode = self._buffers, self._moe.top_k, rows.num_decode
        chunk = buffers.expert_output_chunk[rows.chunk_first * top_k :]
        for first, count, outputs in (
            (rows.first, decode, buffers.expert_output),
            (rows.first + decode, rows.num_prefill, chunk),
        ):
            by_rank = outputs[: count * top_k].unflatten(0, (count, top_k))
            weights = buffers.route_weights[first : first + count]
            for rank in range(top_k):
                weighed = by_rank[:, rank].float() * weights[:, rank, None]
                buffers.residual[first : first + count] += weighed
