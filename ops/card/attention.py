"""Attention on a card, over the cached pages of the KV heads that it holds.

Decode rows: page numbers and positions are read from device memory, and nothing depends on them
but values, so the operator may be captured; without Triton it looks at `context` tokens, whatever
a sequence has of them. A chunk: torch's attention, over keys and values gathered from their pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from shadowlane.ops.card.buffers import CardBuffers, StepInputs, StepRows
from shadowlane.ops.card.cache import KvCache
from shadowlane.ops.decoder_config import DecoderConfig

QUERY_ROWS = 256  # rows of a chunk that share a mask, where there has to be one


@dataclass(frozen=True, slots=True)
class HeadConstants:
    """What a layer's attention reads beside its inputs: float32 on the device, or None."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None  # a logit per query head


class Attention:
    """Attention of all layers of one model on one card."""

    def __init__(
        self,
        config: DecoderConfig,
        buffers: CardBuffers,
        inputs: StepInputs,
        cache: KvCache,
        dtype: torch.dtype,
        rope_interleaved: bool,
        uses_triton: bool,
    ) -> None:
        self._config, self._buffers, self._inputs, self._cache = config, buffers, inputs, cache
        self._dtype, self._interleaved, self._uses_triton = dtype, rope_interleaved, uses_triton
        self._grouped = config.num_heads // config.num_kv_heads

    def rotary(self, rows: StepRows) -> None:
        """cos and sin of every row's position, times the attention scaling of the rope type."""
        count, inputs, buffers = rows.num_rows, self._inputs, self._buffers
        sequences = inputs.sequences[:count]
        angles = inputs.positions[:count, None].float() * inputs.inv_freq[sequences]
        scaling = inputs.scaling[sequences, None]
        torch.mul(angles.cos(), scaling, out=buffers.cos[:count])
        torch.mul(angles.sin(), scaling, out=buffers.sin[:count])

    def attend(
        self, layer: int, first: int, last: int, rows: StepRows, constants: HeadConstants
    ) -> None:
        """KV heads first..last of a layer: new keys and values stored, all rows attended."""
        queries, keys, values = self._heads(first, last, rows, constants)
        self._store(layer, first, keys, values, rows)
        columns = slice(
            first * self._grouped * self._config.head_dim,
            last * self._grouped * self._config.head_dim,
        )
        sinks = constants.sinks
        if sinks is not None:
            sinks = sinks[first * self._grouped : last * self._grouped].view(-1, self._grouped)
        decode = rows.num_decode
        if decode:
            found = self._attend_decode(layer, first, last, queries[:decode], sinks, rows)
            self._buffers.attended[:decode, columns] = found.flatten(1)
        for begin, end in rows.subchunks():
            part = queries[decode + begin : decode + end]
            found = self._attend_chunk(layer, first, part, sinks, rows, begin)
            self._buffers.attended_chunk[rows.chunk][begin:end, columns] = found.flatten(1)

    def _heads(
        self, first: int, last: int, rows: StepRows, constants: HeadConstants
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, KV heads, grouped, dim], k and v [rows, KV heads, dim]; q and k rotated."""
        config, dim = self._config, self._config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        q, k, v = self._buffers.qkv[rows.all].split(
            (heads * dim, kv_heads * dim, kv_heads * dim), dim=1
        )
        q = self._normalised(q, constants.q_norm)
        k = self._normalised(k, constants.k_norm)
        q = q[:, first * self._grouped : last * self._grouped]
        q = self._rotated(q, rows).unflatten(1, (-1, self._grouped))
        return q, self._rotated(k[:, first:last], rows), v.unflatten(1, (-1, dim))[:, first:last]

    def _normalised(self, rows: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normalised where the family does so."""
        dim, eps = self._config.head_dim, self._config.norm_eps
        if norm is None:
            return rows.unflatten(1, (-1, dim))
        if self._config.full_width_qk_norm:
            return rms_norm(rows, (rows.shape[1],), norm, eps).unflatten(1, (-1, dim))
        return rms_norm(rows.unflatten(1, (-1, dim)), (dim,), norm, eps)

    def _rotated(self, heads: torch.Tensor, rows: StepRows) -> torch.Tensor:
        cos = self._buffers.cos[rows.all, None]
        sin = self._buffers.sin[rows.all, None]
        if self._interleaved:
            one, two = heads[..., 0::2], heads[..., 1::2]
            turned = (one * cos - two * sin, two * cos + one * sin)
            return torch.stack(turned, dim=-1).flatten(-2)
        one, two = heads.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    def _store(
        self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor, rows: StepRows
    ) -> None:
        inputs, tokens = self._inputs, self._cache.page_tokens
        positions = inputs.positions[rows.all]
        page = inputs.pages[inputs.sequences[rows.all], positions // tokens]
        self._cache.store(layer, first, keys, values, page, positions % tokens)

    def _attend_decode(
        self,
        layer: int,
        first: int,
        last: int,
        queries: torch.Tensor,
        sinks: torch.Tensor | None,
        rows: StepRows,
    ) -> torch.Tensor:
        """queries: [rows, KV heads, grouped, dim]; the same shape comes back."""
        inputs, config, count = self._inputs, self._config, rows.num_decode
        positions, sequences = inputs.positions[:count], inputs.sequences[:count]
        scale, window = config.head_dim**-0.5, config.windows[layer]
        if self._uses_triton and self._cache.layout != "q8_0":
            from shadowlane.ops.card.attention_triton import attend_pages

            heads = self._cache.heads(layer, first, last)
            tables = (inputs.pages, sequences, positions)
            return attend_pages(queries, heads, *tables, sinks, window, scale)
        pages = inputs.pages[sequences]  # [rows, pages]
        if rows.context:
            pages = pages[:, : -(-rows.context // self._cache.page_tokens)]
        keys = self._cache.gather(layer, first, last, 0, pages).float()
        values = self._cache.gather(layer, first, last, 1, pages).float()
        scores = torch.einsum("rhgd,rhtd->rhgt", queries * scale, keys)
        tokens = torch.arange(keys.shape[2], device=keys.device)
        behind = positions[:, None] - tokens
        hidden = behind < 0
        if window is not None:
            hidden |= behind >= window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        if sinks is not None:
            more = sinks[None, :, :, None].expand(count, -1, -1, 1)
            shares = torch.cat((scores, more), dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return torch.einsum("rhgt,rhtd->rhgd", shares, values)

    def _attend_chunk(
        self,
        layer: int,
        first: int,
        queries: torch.Tensor,
        sinks: torch.Tensor | None,
        rows: StepRows,
        at: int,
    ) -> torch.Tensor:
        """Rows of a chunk from its row `at`: [rows, KV heads, grouped, dim], compute type."""
        count, heads = queries.shape[:2]
        query_at = rows.chunk_start + at
        window, tokens = self._config.windows[layer], self._cache.page_tokens
        start = 0 if window is None else max(0, query_at - window + 1)
        page, end = start // tokens, query_at + count
        pages = self._inputs.pages[rows.chunk_sequence, page : -(-end // tokens)]
        keys, values = (
            self._cache.gather(layer, first, first + heads, value, pages)
            .to(self._dtype)[:, start - page * tokens : end - page * tokens]
            .repeat_interleave(self._grouped, dim=0)[None]
            for value in range(2)
        )
        q = queries.flatten(1, 2).transpose(0, 1).to(self._dtype)[None]  # [1, heads, rows, dim]
        if window is None and sinks is None:
            mask = causal_lower_right(count, end)  # for which torch has kernels that need no mask
            found = scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            return found[0].transpose(0, 1)
        if sinks is not None:  # one more key, of zeros: its score is what the mask adds
            keys, values = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
        parts = []
        for part in range(0, count, QUERY_ROWS):
            stop = min(part + QUERY_ROWS, count)
            mask = self._mask(query_at + part, query_at + stop, start, end, window, sinks)
            parts.append(scaled_dot_product_attention(q[:, :, part:stop], keys, values, mask))
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    def _mask(
        self,
        first: int,
        last: int,
        start: int,
        end: int,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """What tokens first..last see of start..end: [rows, keys], with sinks [1, heads, ...]."""
        device = self._buffers.qkv.device
        queries = torch.arange(first, last, device=device)[:, None]
        behind = queries - torch.arange(start, end, device=device)
        seen = behind >= 0
        if window is not None:
            seen &= behind < window
        if sinks is None:
            return seen
        added = torch.zeros(seen.shape, dtype=self._dtype, device=device)
        added = added.masked_fill(~seen, -torch.inf).expand(sinks.numel(), -1, -1)
        more = sinks.reshape(-1, 1, 1).expand(-1, last - first, 1).to(self._dtype)
        return torch.cat((added, more), dim=-1)[None]
