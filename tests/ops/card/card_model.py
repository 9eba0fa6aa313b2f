"""Weight files as blocks on a device, and whole steps by the operators of one card or of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from plain_forward import load_experts

from shadowlane.ops.card.buffers import CardGeometry, StepRows
from shadowlane.ops.card.experts import CardExpert
from shadowlane.ops.card.operators import CardOperators
from shadowlane.ops.card.products import CardBlock
from shadowlane.ops.card.shares import UNIT_ROWS
from shadowlane.ops.decoder import (
    EMBEDDING,
    DecoderConfig,
    ExpertMatrix,
    GroupDescription,
    describe_groups,
    expected_tensors,
    read_decoder,
    read_experts,
)
from shadowlane.ops.decoder_config import DType
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files import ModelFiles, TensorSource, open_model
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.rope import inv_freq
from shadowlane.ops.scattered_experts import has_scattered_experts

if TYPE_CHECKING:
    from shadowlane.ops.card.kernels_triton import ExpertTable

BLOCK_ROWS = 48
PAGE_TOKENS = 8
TOLERANCE = 1e-4  # float32 against float32, largest difference of any logit
CHUNKS = [21, 1, 1, 9, 1, 1, 1, 1]


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    worst = np.abs(ours - theirs).max(axis=1)
    assert worst.max() <= tolerance, f"row {worst.argmax()} is off by {worst.max()}"


@dataclass
class CardModel:
    """A model's weights on a device, cut into blocks of BLOCK_ROWS rows."""

    config: DecoderConfig
    files: ModelFiles
    groups: tuple[GroupDescription, ...]
    blocks: dict[str, list[CardBlock]]
    experts: dict[int, dict[int, CardExpert]]  # layer -> expert
    constants: dict[str, np.ndarray]
    device: str
    embedding_layout: str
    gather: torch.Tensor = field(repr=False)  # the table of embeddings, row by row, on the host


def load_model(path: Path, device: str = "cpu") -> CardModel:
    files = open_model(path)
    config = read_decoder(files)
    groups = describe_groups(config)
    blocks = {group.name: _blocks(group, files, device) for group in groups}
    constants = {
        name: _constant(source)
        for name, source in files.tensors.items()
        if len(source.shape) == 1 or name.endswith("_bias")
    }
    embedding = files.tensors[EMBEDDING]
    table = _bytes(embedding).reshape(embedding.shape[0], -1)
    return CardModel(
        config, files, groups, blocks, _experts(config, files, device), constants, device,
        embedding.layout, torch.from_numpy(table),
    )  # fmt: skip


def _bytes(source: TensorSource) -> np.ndarray:
    return np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)


def _constant(source: TensorSource) -> np.ndarray:
    count = source.nbytes // LAYOUTS[source.layout].block_nbytes
    values = expand_rows(source.layout, _bytes(source), 1, count)
    return values[0, :: source.step].reshape(source.shape)


def _block(
    layout: str, raw: np.ndarray, device: str, rows: int, output_row: int = 0, part: int = 0
) -> CardBlock:
    # at an odd place, as blocks may lie in a slot
    skew = 3 if layout not in ("f32", "f16", "bf16") else 0
    memory = torch.zeros(raw.size + skew, dtype=torch.uint8, device=device)
    memory[skew:] = torch.from_numpy(raw)
    return CardBlock(layout, memory[skew:], rows, output_row, part)


def _blocks(group: GroupDescription, files: ModelFiles, device: str) -> list[CardBlock]:
    found, start = [], 0
    for number, part in enumerate(group.parts):
        source = files.tensors[part.tensor]
        raw = _bytes(source).reshape(part.rows, -1)
        for first in range(0, part.rows, BLOCK_ROWS):
            rows = raw[first : first + BLOCK_ROWS]
            at = first if group.kind == "gate_up" else start + first
            found.append(_block(source.layout, rows.reshape(-1), device, len(rows), at, number))
        start += part.rows
    return found


def _experts(
    config: DecoderConfig, files: ModelFiles, device: str
) -> dict[int, dict[int, CardExpert]]:
    if config.moe is None:
        return {}
    layers: list[list[CardExpert]] = []
    if has_scattered_experts(config, files.tensors):
        for values in load_experts(config, files):
            layers.append([CardExpert(*(_plain(each, device) for each in one)) for one in values])
    else:
        for experts in read_experts(config, files):
            layers.append(
                [
                    CardExpert(*(_matrix(each, device) for each in (one.gate, one.up, one.down)))
                    for one in experts
                ]
            )
    return {
        layer: dict(enumerate(experts))
        for layer, experts in zip(config.moe.sparse_layers, layers, strict=True)
    }


def _plain(values: torch.Tensor, device: str) -> CardBlock:
    """A matrix that has been arranged from its file, in float32."""
    raw = values.contiguous().numpy().view(np.uint8).reshape(-1)
    return _block("f32", raw, device, len(values))


def _matrix(matrix: ExpertMatrix, device: str) -> CardBlock:
    raw = np.fromfile(matrix.path, np.uint8, matrix.nbytes, offset=matrix.offset)
    return _block(matrix.layout, raw, device, matrix.rows)


def read_shapes(
    path: Path,
) -> tuple[DecoderConfig, tuple[GroupDescription, ...], dict[str, np.ndarray]]:
    """A model's configuration, its groups, and constants that are all 1."""
    config = read_decoder(open_model(path))
    constants = {
        name: np.ones(shape, np.float32)
        for name, shape in expected_tensors(config).items()
        if len(shape) == 1 or name.endswith("_bias")
    }
    return config, describe_groups(config), constants


class CardRun:
    """A model run by one card, or by several that share each group and exchange their parts."""

    def __init__(
        self,
        model: CardModel,
        dtype: DType,
        cards: int = 1,
        *,
        sequences: int = 3,
        pages: int = 12,
        uses_triton: bool | None = None,
        kv_layout: str | None = None,
        in_place_experts: bool = False,
    ) -> None:
        self.model, self.lengths = model, [0] * sequences
        self.in_place_experts = in_place_experts
        geometry = CardGeometry(8, 32, 32, sequences, pages, sequences * pages, PAGE_TOKENS)
        heads = model.config.num_kv_heads
        self.cards = [
            CardOperators(
                model.config,
                model.groups,
                model.constants,
                geometry,
                dtype=dtype,
                device=model.device,
                embedding_layout=model.embedding_layout,
                kv_layout=kv_layout,
                kv_heads={
                    layer: self._share(heads, number, cards)
                    for layer in range(model.config.num_layers)
                },
                rope_interleaved=model.files.rope_pairing == "interleaved",
                uses_triton=uses_triton,
            )
            for number in range(cards)
        ]
        # pages of each sequence, not one behind the other
        order = np.random.default_rng(11).permutation(sequences * pages).reshape(sequences, pages)
        for card in self.cards:
            card.inputs.write([], [], [], pages=dict(enumerate(order)))

    @staticmethod
    def _share(units: int, number: int, cards: int) -> tuple[int, int]:
        return units * number // cards, units * (number + 1) // cards

    def step(
        self,
        decode: Sequence[tuple[int, int]] = (),
        chunk: Sequence[int] = (),
        chunk_sequence: int = 0,
        subchunk_rows: int = 0,
    ) -> np.ndarray:
        """decode: (sequence, token) of each row; logits of all rows, float32 [rows, vocabulary]."""
        start = self.lengths[chunk_sequence]
        sequences = [sequence for sequence, _ in decode] + [chunk_sequence] * len(chunk)
        tokens = [token for _, token in decode] + list(chunk)
        positions = []
        for sequence in sequences:
            positions.append(self.lengths[sequence])
            self.lengths[sequence] += 1
        count = len(tokens)
        rows = StepRows(
            len(decode),
            len(chunk),
            count,
            max([position + 1 for position in positions[: len(decode)]], default=0),
            chunk_sequence,
            start,
            subchunk_rows,
        )
        frequencies = {
            sequence: inv_freq(self.model.config.rope, self.lengths[sequence])
            for sequence in set(sequences)
        }
        for card in self.cards:
            card.inputs.write(tokens, positions, sequences, range(count), frequencies=frequencies)
            card.begin(rows)
            card.buffers.gather[:count] = self.model.gather[tokens].to(card.device)
        for group in self.model.groups:
            self._run(group, rows)
        return self.cards[0].buffers.logits[:count].cpu().numpy().copy()

    def _run(self, group: GroupDescription, rows: StepRows) -> None:
        if group.kind == "experts":
            self._experts(group, rows)
            return
        units = self.model.config.num_kv_heads
        if group.kind != "attn":
            parts = group.parts[:1] if group.kind == "gate_up" else group.parts
            units = max(1, -(-sum(part.rows for part in parts) // UNIT_ROWS))
        if group.kind in ("embed", "router"):
            # one card has the table, the other gathered rows; routers are whole
            for number, card in enumerate(self.cards):
                blocks = self.model.blocks[group.name]
                if group.kind == "embed" and number == 0:
                    blocks = []
                card.compute(group.name, 0, units, blocks, rows)
                if group.kind == "router":
                    card.mixture.route(rows)
            return
        shares = [self._share(units, number, len(self.cards)) for number in range(len(self.cards))]
        for card, (first, last) in zip(self.cards, shares, strict=True):
            card.compute(group.name, first, last, self.model.blocks[group.name], rows)
        for source, share in zip(self.cards, shares, strict=True):
            for span in source.writes(group.name, *share):
                for target in self.cards:
                    if target is not source:
                        _copy(source, target, span.buffer, slice(span.first, span.last), group)

    def _table(self, group: GroupDescription, held: dict[int, CardExpert]) -> ExpertTable:
        """The held experts one behind the other, somewhere in memory that begins with others."""
        from shadowlane.ops.card.kernels_triton import ExpertTable

        places = torch.full((self.model.config.moe.num_experts, 3), -1, dtype=torch.int64)
        layouts = ("f32", "f32", "f32")
        parts, at = [torch.zeros(64, dtype=torch.uint8, device=self.model.device)], 64
        for expert, one in held.items():
            matrices = (one.gate, one.up, one.down)
            layouts = tuple(each.layout for each in matrices)
            for number, each in enumerate(matrices):
                places[expert, number] = at
                parts.append(each.data)
                at += each.data.numel()
        return ExpertTable(torch.cat(parts), places.to(self.model.device), layouts)

    def _experts(self, group: GroupDescription, rows: StepRows) -> None:
        all_experts = self.model.experts[group.layer]
        outputs = ("expert_output", "expert_output_chunk")
        ids = self.cards[0].buffers.route_ids[: rows.num_rows].cpu().numpy()
        count = len(self.cards)
        resident = [
            {expert: one for expert, one in all_experts.items() if expert % count == number}
            for number in range(count)
        ]
        for card, held in zip(self.cards, resident, strict=True):
            for name in outputs:
                getattr(card.buffers, name).fill_(float("nan"))  # so that nothing old is taken
            if self.in_place_experts and rows.num_prefill == 0:
                card.experts_in_place(group.name, self._table(group, held), rows)
            else:
                card.experts(group.name, held, ids, rows)
        for source, held in zip(self.cards, resident, strict=True):
            for target in self.cards:
                if target is source:
                    continue
                for name, part in zip(
                    outputs, (ids[: rows.num_decode], ids[rows.num_decode :]), strict=True
                ):
                    pairs = np.flatnonzero(np.isin(part.reshape(-1), list(held)))
                    theirs = getattr(source.buffers, name)
                    getattr(target.buffers, name)[pairs] = theirs[pairs]
        for card in self.cards:
            card.mixture.add(rows)


def _copy(
    source: CardOperators, target: CardOperators, name: str, columns: slice, group: GroupDescription
) -> None:
    theirs, ours = (getattr(card.buffers, name) for card in (source, target))
    if name.startswith("activated"):  # as wide as the group, whatever others need
        width = group.parts[0].rows
        theirs, ours = (
            each.view(-1)[: each.shape[0] * width].view(-1, width) for each in (theirs, ours)
        )
    ours[:, columns] = theirs[:, columns]


def logits(
    run: CardRun,
    tokens: Sequence[int],
    chunks: Sequence[int] = CHUNKS,
    subchunk_rows: int = 0,
) -> np.ndarray:
    """Of one text in chunks: those of one token as decode rows, longer ones as prompts are."""
    rows, start = [], 0
    for length in chunks:
        part = tokens[start : start + length]
        if length == 1:
            rows.append(run.step(decode=[(0, part[0])]))
        else:
            rows.append(run.step(chunk=part, subchunk_rows=subchunk_rows))
        start += length
    return np.concatenate(rows)
