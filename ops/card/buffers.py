"""What a card holds beside weights: the activations, and what a step is about.

Activations have the names, shapes and types that they have in the arena, so that rows cross
between the two as plain bytes. All of it is allocated once: addresses never change, and a graph
that was captured over them stays good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shadowlane.ops.decoder_config import DecoderConfig
from shadowlane.ops.micro_batch import chunk_part

MIRRORS = 8  # as many as there are step records
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class CardGeometry:
    """How much of everything one step may have; all positive, but for `chunk_rows`."""

    decode_rows: int  # most rows that go through the decode operators together
    chunk_rows: int  # most rows of a prompt's chunk; 0: none
    logit_rows: int  # most rows of a step whose logits are wanted
    sequences: int
    pages_per_sequence: int
    num_pages: int  # of the KV cache
    page_tokens: int = 32

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 0 if name == "chunk_rows" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as far as shapes depend on them: decode rows, then one prompt's chunk.

    In decode everything else that differs from step to step lies in device memory, so a graph is
    captured once per value of this.
    """

    num_decode: int
    num_prefill: int = 0
    num_logits: int = 0
    # Tokens that the longest of the decode rows may attend to, itself included: what attention
    # without Triton looks at. 0: as many as a sequence may have.
    context: int = 0
    chunk_sequence: int = 0
    chunk_start: int = 0  # position of the chunk's first row
    subchunk_rows: int = 0  # rows of the chunk that are multiplied together; 0: all of it
    # Where these rows begin in buffers of all rows of the step, and in those of the chunk alone;
    # neither is 0 in a micro-batch that has rows before it, and no decode rows.
    first: int = 0
    chunk_first: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.num_prefill

    @property
    def all(self) -> slice:
        """Of buffers of all rows of the step, the part that is about these."""
        return slice(self.first, self.first + self.num_rows)

    @property
    def chunk(self) -> slice:
        """The same of buffers of the chunk alone."""
        return slice(self.chunk_first, self.chunk_first + self.num_prefill)

    def micro_batch(self, number: int, count: int) -> StepRows:
        """The rows of one micro-batch of `count`, of all rows of a step; see `micro_batch.py`."""
        if count == 1:
            return self
        together = self.subchunk_rows or max(1, self.num_prefill)
        first, last = chunk_part(number, count, self.num_prefill, together)
        decode = self.num_decode if number == 0 else 0
        return replace(
            self,
            num_decode=decode,
            num_prefill=last - first,
            chunk_start=self.chunk_start + first,
            first=self.num_decode + first - decode,
            chunk_first=first,
        )

    def subchunks(self) -> list[tuple[int, int]]:
        """First row and end of each part of the chunk, counted from the first of these rows."""
        together = self.subchunk_rows or max(1, self.num_prefill)
        return [
            (first, min(first + together, self.num_prefill))
            for first in range(0, self.num_prefill, together)
        ]


class CardBuffers:
    """Activations by name. R = decode rows + chunk rows, k = experts that one row goes to.

    The decode rows come first in what has R rows; `*_chunk` hold the rows of a chunk alone.
    """

    def __init__(
        self,
        config: DecoderConfig,
        geometry: CardGeometry,
        dtype: torch.dtype,
        device: torch.device,
        gather_nbytes: int,
    ) -> None:
        """gather_nbytes: of one row of the table of embeddings as it lies in its file."""
        moe = config.moe
        rows, decode, chunk = geometry.rows, geometry.decode_rows, geometry.chunk_rows
        heads = config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        if moe is not None:
            is_sparse = len(moe.sparse_layers) == config.num_layers
            inner = moe.shared_inner if is_sparse else max(inner, moe.shared_inner)

        def zeros(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.residual = zeros(rows, config.hidden_size)
        self.qkv = zeros(rows, qkv)
        self.cos = zeros(rows, config.head_dim // 2)
        self.sin = zeros(rows, config.head_dim // 2)
        self.attended = zeros(decode, heads)
        self.attended_chunk = zeros(chunk, heads, kind=dtype)
        self.activated = zeros(decode, inner)
        self.activated_chunk = zeros(chunk, inner, kind=dtype)
        self.logits = zeros(geometry.logit_rows, config.vocab_size)
        self.gather = zeros(rows, gather_nbytes, kind=torch.uint8)
        experts, top_k, width = 0, 0, 0
        if moe is not None:
            experts = moe.num_experts + int(moe.has_shared_gate)
            top_k, width = moe.top_k, moe.inner
        self.router = zeros(rows, experts)
        self.route_ids = zeros(rows, top_k, kind=torch.int64)
        self.route_weights = zeros(rows, top_k)
        self.route_order = zeros(rows * top_k, kind=torch.int64)  # a part's pairs, by expert
        self.expert_activated = zeros(decode * top_k, width)
        self.expert_output = zeros(decode * top_k, config.hidden_size)
        self.expert_output_chunk = zeros(chunk * top_k, config.hidden_size, kind=dtype)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())


class StepInputs:
    """What a step record says, in device memory: written before a step, read by its operators.

    A step's values are one copy from a ring of mirrors on the host, pinned where there is a card:
    it queues behind what the stream is doing and waits for nothing. A mirror is used again
    MIRRORS steps later; whoever writes must not be that far ahead of the device.
    """

    def __init__(self, geometry: CardGeometry, half_dim: int, device: torch.device) -> None:
        sequences, rows = geometry.sequences, geometry.rows
        shapes = {
            "tokens": (rows,),
            "positions": (rows,),
            "sequences": (rows,),
            "logit_rows": (geometry.logit_rows,),
            "inv_freq": (sequences, half_dim),
            "scaling": (sequences,),
        }
        pages = {"pages": (sequences, geometry.pages_per_sequence)}
        self._step = _Mirrored(shapes, device)
        self._pages = _Mirrored(pages, device)
        here = self._step.device_views
        self.tokens, self.positions = here["tokens"], here["positions"]
        self.sequences, self.logit_rows = here["sequences"], here["logit_rows"]
        self.inv_freq, self.scaling = here["inv_freq"], here["scaling"]
        self.pages = self._pages.device_views["pages"]

    def write(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logit_rows: Sequence[int] = (),
        pages: Mapping[int, Sequence[int]] | None = None,
        frequencies: Mapping[int, tuple[np.ndarray, float]] | None = None,
    ) -> None:
        """Write one step's rows, and what has changed of its sequences.

        pages: page numbers of a sequence, in order of positions. frequencies: rotary frequencies,
        float32 [head_dim / 2], and attention scaling by sequence; see `ops/rope.py`. Raises
        ValueError where there is no room for so many.
        """
        mirror = self._step.next_mirror()
        for name, values in (
            ("tokens", tokens),
            ("positions", positions),
            ("sequences", sequences),
            ("logit_rows", logit_rows),
        ):
            _fill(mirror[name], values, name)
        for sequence, (inv_freq, scaling) in (frequencies or {}).items():
            mirror["inv_freq"][sequence] = inv_freq
            mirror["scaling"][sequence] = scaling
        self._step.send()
        if pages:
            mirror = self._pages.next_mirror()
            for sequence, numbers in pages.items():
                _fill(mirror["pages"][sequence], numbers, "pages")
            self._pages.send()


def _fill(target: np.ndarray, values: Sequence[int], name: str) -> None:
    if len(values) > len(target):
        raise ValueError(f"a step has room for {len(target)} {name}; got {len(values)}")
    target[: len(values)] = values


class _Mirrored:
    """Arrays one behind the other in device memory, and a ring of copies of them on the host."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Integers are int64; "inv_freq" and "scaling" are float32 and come last."""
        nbytes = sum(math.prod(shape) * _itemsize(name) for name, shape in shapes.items())
        is_pinned = device.type == "cuda"
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._mirrors = [
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(MIRRORS)
        ]
        self.device_views = _views(self._device, shapes)
        self._views = [
            {name: view.numpy() for name, view in _views(mirror, shapes).items()}
            for mirror in self._mirrors
        ]
        self._newest = 0

    def next_mirror(self) -> dict[str, np.ndarray]:
        """The arrays of the next mirror, with the values of the newest one."""
        before = self._mirrors[self._newest]
        self._newest = (self._newest + 1) % MIRRORS
        self._mirrors[self._newest].copy_(before)
        return self._views[self._newest]

    def send(self) -> None:
        self._device.copy_(self._mirrors[self._newest], non_blocking=True)


def _itemsize(name: str) -> int:
    return 4 if name in ("inv_freq", "scaling") else 8


def _views(memory: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * _itemsize(name)
        kind = torch.float32 if _itemsize(name) == 4 else torch.int64
        views[name] = memory[at : at + nbytes].view(kind).view(shape)
        at += nbytes
    return views
