"""All groups of every family through the operators of a card: transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from card_layouts import interpret_few_programs, needs_interpreter
from card_model import CHUNKS, CardModel, CardRun, assert_close, load_model, logits
from mixture_files import write_mixture_gguf
from plain_forward import PlainForward, load_experts, load_weights
from tiny import FAMILIES, MIXTURES, reference_logits, tiny_tokens

from shadowlane.ops.card import attention
from shadowlane.ops.card.buffers import CardGeometry, StepRows
from shadowlane.ops.card.operators import CardOperators
from shadowlane.ops.card.products import CardBlock, join_blocks
from shadowlane.ops.files import open_model
from shadowlane.ops.pack_model import pack_model

CASES = {**FAMILIES, **MIXTURES}
FLOAT32 = [name for name, options in CASES.items() if "dtype" not in options]
SHORT = [name for name, options in CASES.items() if "dtype" in options]
# The interpreter takes its time: one layer, few words, few tokens.
SMALL = {"num_hidden_layers": 1, "vocab_size": 64}
FEW = [3, 1, 1]
# of logits that are about 4 at most: weights are the same, activations round before each product
TOLERANCE_OF = {"bfloat16": 0.25, "float16": 0.03}
TOKENS = tiny_tokens(sum(CHUNKS))
SMALL_TOKENS = tiny_tokens(sum(FEW), SMALL["vocab_size"])


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_few_programs(monkeypatch)


def plain_logits(model: CardModel, tokens: list[int], chunks: list[int]) -> np.ndarray:
    """By the plain forward pass, from the weights as they are in the files."""
    files, cfg = model.files, model.config
    forward, start, rows = PlainForward(cfg, load_weights(files), load_experts(cfg, files)), 0, []
    for length in chunks:
        rows.append(forward(tokens[start : start + length]))
        start += length
    return np.concatenate(rows)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", FLOAT32)
def test_prefill_and_decode_equal_those_of_transformers(
    tiny_model: Callable[..., Path], family: str, cards: int
) -> None:
    """One card has whole groups; two have half of the units, KV heads and experts each."""
    path = tiny_model(family)
    run = CardRun(load_model(path), "float32", cards, uses_triton=False)
    assert_close(logits(run, TOKENS), reference_logits(path, TOKENS, CHUNKS))


@pytest.mark.parametrize("family", SHORT)
def test_half_precision_stays_near_the_exact_result(
    tiny_model: Callable[..., Path], family: str
) -> None:
    path, dtype = tiny_model(family), CASES[family]["dtype"]
    exact = reference_logits(path, TOKENS, CHUNKS, dtype="float32")
    theirs = reference_logits(path, TOKENS, CHUNKS)
    ours = logits(CardRun(load_model(path), dtype, 2, uses_triton=False), TOKENS)
    # a row may go to another expert where two are nearly as good, as transformers' rows do
    off = np.abs(ours - exact).max(axis=1)
    assert np.quantile(off, 0.9) <= TOLERANCE_OF[dtype]
    # nearer to the exact result than transformers, which rounds after every operator
    assert np.abs(ours - exact).mean() < np.abs(theirs - exact).mean()


@needs_interpreter
@pytest.mark.parametrize("family", ["mistral-window", "mistral-head-dim", "gpt-oss"])
def test_attention_in_triton_gives_the_same(tiny_model: Callable[..., Path], family: str) -> None:
    path = tiny_model(family)
    run = CardRun(load_model(path), "float32", 2, uses_triton=True)
    assert_close(logits(run, TOKENS), reference_logits(path, TOKENS, CHUNKS))


@pytest.mark.parametrize("uses_triton", [False, pytest.param(True, marks=needs_interpreter)])
@pytest.mark.parametrize("family", ["llama2", "qwen2-tied", "llama-biases"])
def test_packed_weights_of_a_gguf(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, uses_triton: bool
) -> None:
    """Rotary pairs are neighbours in some of these; embeddings and the head are packed too."""
    path = tmp_path / "packed.gguf"
    size, tokens, chunks = (SMALL, SMALL_TOKENS, FEW) if uses_triton else ({}, TOKENS, CHUNKS)
    source = open_model(tiny_model(family, hidden_size=96, **size))
    pack_model(source, "q8_0", path, tmp_path, lambda done: None)
    model = load_model(path)
    run = CardRun(model, "float32", 2, uses_triton=uses_triton)
    assert_close(logits(run, tokens, chunks), plain_logits(model, tokens, chunks), 2e-4)


@pytest.mark.parametrize(
    ("family", "kind", "in_place"),
    [
        ("mixtral", "Q4_0", False),
        ("qwen2-moe", "Q8_0", False),
        ("gpt-oss", "MXFP4", False),
        pytest.param("mixtral", "Q4_0", True, marks=needs_interpreter),
        pytest.param("qwen2-moe", "F32", True, marks=needs_interpreter),
        pytest.param("olmoe", "F32", True, marks=needs_interpreter),
        pytest.param("gpt-oss", "MXFP4", True, marks=needs_interpreter),
    ],
)
def test_packed_experts_of_a_gguf(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, kind: str, in_place: bool
) -> None:
    """Each of two cards has every other expert; in place: found by a table on the device."""
    path = tmp_path / "mixture.gguf"
    size, tokens, chunks = (SMALL, SMALL_TOKENS, FEW) if in_place else ({}, TOKENS, CHUNKS)
    source = tiny_model(family, **size)
    write_mixture_gguf(source, path, kind=gguf.GGMLQuantizationType[kind])
    model = load_model(path)
    run = CardRun(model, "float32", 2, uses_triton=in_place, in_place_experts=in_place)
    assert_close(logits(run, tokens, chunks), plain_logits(model, tokens, chunks), 2e-4)


@pytest.mark.parametrize(
    ("family", "uses_triton"),
    [
        ("llama2", False),
        ("mistral-window", False),
        ("llama-dynamic", False),
        ("qwen2-moe", False),
        pytest.param("mistral-window", True, marks=needs_interpreter),
    ],
)
def test_several_sequences_in_one_step(
    tiny_model: Callable[..., Path], family: str, uses_triton: bool
) -> None:
    """Three texts of unlike lengths decode together, beside a chunk of one of them at first."""
    path = tiny_model(family)
    run = CardRun(load_model(path), "float32", 1, uses_triton=uses_triton)
    texts = [tiny_tokens(60)[first : first + 30] for first in (0, 7, 30)]
    found: list[list[np.ndarray]] = [[], [], []]
    found[0].append(run.step(chunk=texts[0][:17]))
    both = run.step(decode=[(0, texts[0][17])], chunk=texts[1][:9], chunk_sequence=1)
    found[0].append(both[:1])
    found[1].append(both[1:])
    found[2].append(run.step(chunk=texts[2][:2], chunk_sequence=2))
    passes = [[17, 1], [9], [2]]
    for _ in range(2 if uses_triton else 6):
        order = [2, 0, 1]
        tokens = [(number, texts[number][run.lengths[number]]) for number in order]
        rows = run.step(decode=tokens)
        for number, row in zip(order, rows, strict=True):
            found[number].append(row[None])
            passes[number].append(1)
    for text, ours, chunks in zip(texts, found, passes, strict=True):
        expected = reference_logits(path, text[: sum(chunks)], chunks)
        assert_close(np.concatenate(ours), expected)


@pytest.mark.parametrize("uses_triton", [False, pytest.param(True, marks=needs_interpreter)])
def test_decode_rows_of_one_sequence(tiny_model: Callable[..., Path], uses_triton: bool) -> None:
    """The last rows of a prompt: each sees the ones before it in the same step."""
    path = tiny_model("mistral-window")
    run = CardRun(load_model(path), "float32", 1, uses_triton=uses_triton)
    tokens = tiny_tokens(24)
    rows = [run.step(chunk=tokens[:16]), run.step(decode=[(0, token) for token in tokens[16:]])]
    assert_close(np.concatenate(rows), reference_logits(path, tokens, [16, 8]))


def test_a_chunk_in_sub_chunks_gives_the_same(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen2-moe-window")
    run = CardRun(load_model(path), "float32", 1, uses_triton=False)
    assert_close(logits(run, TOKENS, subchunk_rows=6), reference_logits(path, TOKENS, CHUNKS))


@pytest.mark.parametrize("family", ["mistral-window", "gpt-oss"])
def test_a_chunk_is_attended_in_parts(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where a mask is needed, rows share one a few at a time."""
    monkeypatch.setattr(attention, "QUERY_ROWS", 8)
    path = tiny_model(family)
    run = CardRun(load_model(path), "float32", 1, uses_triton=False)
    assert_close(logits(run, TOKENS), reference_logits(path, TOKENS, CHUNKS))


def test_the_likeliest_tokens_are_chosen_where_the_logits_are(
    tiny_model: Callable[..., Path],
) -> None:
    run = CardRun(load_model(tiny_model("llama2")), "float32", 1, uses_triton=False)
    rows = run.step(chunk=TOKENS[:12])
    tokens, largest = run.cards[0].likeliest(StepRows(0, 12, 12))
    assert tokens.tolist() == rows.argmax(axis=1).tolist()
    assert largest.tolist() == rows.max(axis=1).tolist()


def test_a_step_with_too_many_rows_is_refused(tiny_model: Callable[..., Path]) -> None:
    card = CardRun(load_model(tiny_model("llama2")), "float32", 1, uses_triton=False).cards[0]
    with pytest.raises(ValueError, match="a step has room for 40 tokens; got 41"):
        card.inputs.write([0] * 41, [], [])


@pytest.mark.parametrize("family", ["llama-head-dim", "gpt-oss"])
def test_keys_and_values_in_8_bits(tiny_model: Callable[..., Path], family: str) -> None:
    path = tiny_model(family, head_dim=32)
    exact = reference_logits(path, TOKENS, CHUNKS)
    run = CardRun(load_model(path), "float32", 1, uses_triton=False, kv_layout="q8_0")
    error = np.abs(logits(run, TOKENS) - exact).mean()
    assert 1e-4 < error < 0.05  # logits are about 0.8 on average
    page = run.cards[0].cache.page(0, 3, 1, 1)
    assert page.numel() == 8 * 34


def test_a_page_lies_as_in_the_arena(tiny_model: Callable[..., Path]) -> None:
    """The keys of a token are one row of head_dim numbers, in the order of the sequence's pages."""
    run = CardRun(load_model(tiny_model("llama2")), "float32", 2, uses_triton=False)
    run.step(chunk=TOKENS[:12])
    second = run.cards[1]  # holds the second of two KV heads
    number = int(second.inputs.pages[0, 1])
    page = second.cache.page(2, number, 0, 1).view(torch.float32).view(8, -1)
    assert page[:4].abs().min() > 0
    assert not page[4:].any()
    with pytest.raises(ValueError, match="KV heads 0 to 1 of layer 2 are not on this card"):
        second.cache.heads(2, 0, 1)


def test_rows_that_pad_a_step_change_nothing(tiny_model: Callable[..., Path]) -> None:
    """They belong to a sequence of their own, whose page is the spare one."""
    path = tiny_model("llama2")
    found = []
    for padding in ([], [2, 2]):
        run = CardRun(load_model(path), "float32", 1, uses_triton=False)
        run.cards[0].inputs.write([], [], [], pages={2: [run.cards[0].cache.spare]})
        run.step(chunk=TOKENS[:9])
        run.lengths[2] = 0
        rows = run.step(decode=[(0, TOKENS[9]), *((sequence, 0) for sequence in padding)])
        found.append(rows[:1])
    assert_close(*found, 1e-5)


def test_blocks_that_lie_together_are_one() -> None:
    memory = torch.arange(34 * 12, dtype=torch.uint8)

    def block(first: int, rows: int, output_row: int, part: int = 0) -> CardBlock:
        return CardBlock("q8_0", memory[34 * first : 34 * (first + rows)], rows, output_row, part)

    # the second follows the first, the third has a gap before it, the last is of another part
    blocks = [block(2, 4, 2), block(0, 2, 0), block(7, 1, 6), block(8, 4, 7, part=1)]
    joined = join_blocks(blocks)
    assert [(each.output_row, each.num_rows, each.part) for each in joined] == [
        (0, 6, 0),
        (6, 1, 0),
        (7, 4, 1),
    ]
    assert torch.equal(joined[0].data, memory[: 34 * 6])
    assert joined[0].data.data_ptr() == memory.data_ptr()


def test_sizes_are_named_when_they_are_wrong() -> None:
    with pytest.raises(ValueError, match="decode_rows must be at least 1; got 0"):
        CardGeometry(0, 8, 1, 1, 1, 1)


def test_experts_are_not_a_group_like_others(tiny_model: Callable[..., Path]) -> None:
    model = load_model(tiny_model("mixtral"))
    card = CardOperators(
        model.config, model.groups, model.constants, CardGeometry(1, 0, 1, 1, 1, 1),
        dtype="float32", device="cpu", embedding_layout="f32", uses_triton=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"0.experts: experts are computed one by one"):
        card.compute("0.experts", 0, 1, [], StepRows(1))
