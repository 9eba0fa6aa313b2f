"""The operators of a card on a card: kernels, families, and steps replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from card_choices import Chosen, by_processors, by_torch, by_triton, rows_of
from card_layouts import sane_rows
from card_model import CHUNKS, CardRun, assert_close, load_model, logits
from mixture_files import write_mixture_gguf
from plain_forward import PlainForward, load_experts, load_weights
from tiny import FAMILIES, MIXTURES, reference_logits, tiny_tokens

from shadowlane.ops.card.buffers import StepRows
from shadowlane.ops.card.packed_torch import expand
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.rope import inv_freq

CASES = {**FAMILIES, **MIXTURES}
TOLERANCE_OF = {"float32": 2e-4, "bfloat16": 0.25, "float16": 0.03}
TOKENS = tiny_tokens(sum(CHUNKS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_inputs", [1, 3, 8, 11])
def test_products_of_packed_rows(layout: str, num_inputs: int) -> None:
    triton_kernels = pytest.importorskip("shadowlane.ops.card.kernels_triton")
    num_rows, cols = 67, 2048
    skew = LAYOUTS[layout].block_nbytes if LAYOUTS[layout].block_elements == 1 else 3
    packed = sane_rows(layout, num_rows, cols)
    memory = torch.zeros(packed.size + skew, dtype=torch.uint8, device="cuda")
    memory[skew:] = torch.from_numpy(packed).reshape(-1)
    rows = memory[skew:].view(num_rows, -1)
    weights = expand_rows(layout, packed.reshape(-1), num_rows, cols)
    assert np.array_equal(expand(layout, rows, cols).cpu().numpy(), weights)
    inputs = np.random.default_rng(1).standard_normal((num_inputs, cols)).astype(np.float32)
    out = torch.empty((num_inputs, num_rows), device="cuda")
    triton_kernels.multiply(layout, rows, torch.from_numpy(inputs).cuda(), out)
    found = out.cpu().numpy()
    expected = inputs @ weights.astype(np.float64).T
    scale = np.abs(inputs) @ np.abs(weights).astype(np.float64).T
    assert (np.abs(found - expected) <= 1e-6 * scale).all()


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(4, 2), (60, 4), (128, 8)])
@pytest.mark.parametrize("choose", [by_torch, by_triton])
def test_a_choice_has_the_bits_of_a_processors(
    choose: Callable[..., Chosen], count: int, top_k: int, normalises: bool
) -> None:
    logits = rows_of(count)
    expected = by_processors(logits, top_k, normalises)
    for found, of_processors in zip(
        choose(logits, top_k, normalises, "cuda"), expected, strict=True
    ):
        assert found.astype(of_processors.dtype).tobytes() == of_processors.tobytes()


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_every_family(tiny_model: Callable[..., Path], family: str, cards: int) -> None:
    """Two sets of operators on one card, with half of each group, exchange their parts."""
    path, dtype = tiny_model(family), CASES[family].get("dtype", "float32")
    exact = reference_logits(path, TOKENS, CHUNKS, dtype="float32")
    off = np.abs(logits(CardRun(load_model(path, "cuda"), dtype, cards), TOKENS) - exact)
    # in half precision a row may go to another expert where two are nearly as good
    worst = np.quantile(off.max(axis=1), 1.0 if dtype == "float32" else 0.9)
    assert worst <= TOLERANCE_OF[dtype]


@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "Q4_0"), ("qwen2-moe", "F32"), ("gpt-oss", "MXFP4")]
)
def test_experts_in_place(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, kind: str
) -> None:
    path = tmp_path / "mixture.gguf"
    write_mixture_gguf(tiny_model(family), path, kind=gguf.GGMLQuantizationType[kind])
    model = load_model(path, "cuda")
    run = CardRun(model, "float32", 2, in_place_experts=True)
    files, cfg = model.files, model.config
    forward = PlainForward(cfg, load_weights(files), load_experts(cfg, files))
    start, rows = 0, []
    for length in CHUNKS:
        rows.append(forward(TOKENS[start : start + length]))
        start += length
    assert_close(logits(run, TOKENS), np.concatenate(rows), 5e-4)


@pytest.mark.parametrize("family", ["llama2", "qwen3-window", "llama-bfloat16"])
def test_a_step_replayed_from_a_graph(tiny_model: Callable[..., Path], family: str) -> None:
    """One graph of all groups serves every next token: only what it reads changes."""
    path, dtype = tiny_model(family), CASES[family].get("dtype", "float32")
    model = load_model(path, "cuda")
    run = CardRun(model, dtype)
    card, tokens = run.cards[0], tiny_tokens(20)
    run.step(chunk=tokens[:9])
    rows = StepRows(1, num_logits=1)

    def enter(token: int) -> None:
        position = run.lengths[0]
        run.lengths[0] += 1
        frequencies = {0: inv_freq(model.config.rope, run.lengths[0])}
        card.inputs.write([token], [position], [0], [0], frequencies=frequencies)
        card.buffers.gather[:1] = model.gather[[token]].to("cuda")

    def compute() -> None:
        card.begin(rows)
        for group in model.groups:
            run._run(group, rows)

    enter(tokens[9])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()  # kernels are compiled and libraries loaded before a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    found = []
    run.lengths[0] = 9
    for token in tokens[9:]:
        enter(token)
        graph.replay()
        found.append(card.buffers.logits[:1].cpu().numpy())
    expected = reference_logits(path, tokens, [9] + [1] * 11, dtype="float32")[9:]
    assert_close(np.concatenate(found), expected, TOLERANCE_OF[dtype])
