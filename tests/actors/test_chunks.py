"""Chunks of a prompt of any length: the same bits, and weights are read once for each chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    cancelling,
    collect,
    cut,
    plan,
    running,
    small_blocks,
    smallest_ram,
)
from mixture_files import write_mixture_gguf
from tiny import tiny_tokens

from shadowlane.actors import engine as engines
from shadowlane.actors.blueprint import Options
from shadowlane.actors.disk_lane import EXPERT_NBYTES, ModelFile
from shadowlane.actors.measure import measure_groups

OPTIONS = Options(context=256, prefill_chunk=25, logit_rows=200, dtype="float32")
PROMPT = tiny_tokens(190)  # seven sub-chunks of 25 rows, and 15
COUNTS = (1, 2, 4, 8)
MANY = "qwen3-moe"


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(4096):
        yield


def smallest(model: Path, options: Options, cores: Sequence[Sequence[int]], count: int) -> int:
    """The least budget for chunks of so many sub-chunks."""
    catalog = cut(model, options, cores).catalog
    more = catalog.with_subchunks(count).scratch_nbytes - catalog.scratch_nbytes
    return smallest_ram(cut(model, options, cores)) + more


def sweep_nbytes(run: InProcess) -> int:
    """Bytes of what streams, once."""
    blocks = run.engine.blueprint.catalog.blocks
    return sum(blocks[index].nbytes for index in run.engine.placement.sweep)


def answer(run: InProcess) -> tuple[np.ndarray, list[int]]:
    return run.logits(PROMPT), run.generate(PROMPT, 12)


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_THREADS, TWO_LANES])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama-biases", "float32"), ("llama-biases", "bfloat16"), ("qwen3-window", "float32")],
)
def test_a_streamed_model_gives_the_same_bits(
    tiny_model: Callable[..., Path], family: str, dtype: Any, cores: Sequence[Sequence[int]]
) -> None:
    # rows of no whole cache lines: where a sub-chunk begins must not matter either
    model = tiny_model(family, hidden_size=96, intermediate_size=200)
    options = replace(OPTIONS, dtype=dtype)
    with running(model, options=options, cores=ONE_THREAD) as run:
        assert run.engine.placement.subchunks == 1
        logits, tokens = answer(run)
    for count in COUNTS:
        ram = smallest(model, options, cores, count)
        with running(model, options=options, cores=cores, ram=ram, subchunks=count) as run:
            assert run.engine.placement.sweep
            assert run.engine.placement.subchunks == count
            ours = answer(run)
            assert np.array_equal(ours[0], logits)
            assert ours[1] == tokens


def test_a_streamed_model_is_read_once_for_each_chunk(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama-biases")
    expected = []
    for count in COUNTS:
        ram = smallest(model, OPTIONS, TWO_THREADS, count)
        with running(model, options=OPTIONS, ram=ram, subchunks=count, prefetch=False) as run:
            once = sweep_nbytes(run)
            run.generate(PROMPT, 1)
            assert run.sweep_nbytes == once * -(-len(PROMPT) // (25 * count))
            expected.append(run.sweep_nbytes // once)
    assert expected == [8, 4, 2, 1]


def test_a_short_rest_is_read_for_on_its_own(tiny_model: Callable[..., Path]) -> None:
    """It goes through other kernels, and so has to, whatever the chunk."""
    model = tiny_model("llama-biases")
    prompt = tiny_tokens(78)  # three sub-chunks, and three rows
    found = []
    for count in (1, 4):
        ram = smallest(model, OPTIONS, TWO_THREADS, count)
        with running(model, options=OPTIONS, ram=ram, subchunks=count, prefetch=False) as run:
            found.append(run.generate(prompt, 1))
            found.append(run.sweep_nbytes // sweep_nbytes(run))
    assert found[0] == found[2]
    assert (found[1], found[3]) == (4, 2)


# -- mixtures


def mixture(tiny_model: Callable[..., Path], tmp_path: Path, kind: str | None) -> Path:
    model = tiny_model(MANY, hidden_size=128)
    if kind is None:
        return model
    layout = gguf.GGMLQuantizationType[kind]
    return write_mixture_gguf(model, tmp_path / "model.gguf", kind=layout)


def with_slots(model: Path, options: Options, slots: int, count: int) -> int:
    """RAM under which a plan with chunks of `count` sub-chunks has so many slots for experts."""
    catalog = cut(model, options, TWO_THREADS).catalog
    assert catalog.experts is not None
    whole = plan(cut(model, options, TWO_THREADS), AMPLE, TWO_THREADS)
    gathered = sum(
        block.held_nbytes for block in catalog.blocks if catalog.group(block.group).kind == "embed"
    )
    more = catalog.with_subchunks(count).scratch_nbytes - catalog.scratch_nbytes
    missing = catalog.experts.total - slots
    return whole.total_nbytes + more - gathered - missing * catalog.experts.slot_nbytes


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_a_mixture_gives_the_same_bits_and_reads_each_expert_once(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str | None
) -> None:
    """Of a sub-chunk some experts have many rows and some few, which go through other kernels."""
    model = mixture(tiny_model, tmp_path, kind)
    options = replace(OPTIONS, prefill_chunk=48)
    experts = cut(model, options, TWO_THREADS).catalog.experts
    assert experts is not None
    with running(model, options=options, cores=ONE_THREAD) as run:
        logits, tokens = answer(run)
    slots = experts.top_k + 2
    for count in (1, 2, 4):
        ram = with_slots(model, options, slots, count)
        with running(model, options=options, ram=ram, subchunks=count, prefetch=False) as run:
            assert run.engine.placement.expert_slots == slots
            first = run.generate(PROMPT, 1)
            steps = -(-len(PROMPT) // (48 * count))
            statistics = run.engine.gauges.disk_statistics()
            reads = int(statistics[EXPERT_NBYTES]) / experts.nbytes
            # what was in RAM before is not read again; what is there is not dropped meanwhile
            assert steps * (experts.total - slots) <= reads <= 1.05 * steps * experts.total
            ours = answer(run)
            assert np.array_equal(ours[0], logits)
            assert ours[1] == tokens
            assert first == tokens[:1]


@pytest.mark.parametrize("family", ["llama-biases", MANY])
def test_decode_rows_beside_a_long_chunk(tiny_model: Callable[..., Path], family: str) -> None:
    """Neither of two requests that share steps sees that in its tokens."""
    model = tiny_model(family)
    options = replace(OPTIONS, max_batch=2, context=288)
    prompts = [tiny_tokens(20), tiny_tokens(193)[3:]]
    lengths = [60, 8]
    with running(model, options=options, cores=ONE_THREAD) as run:
        alone = [run.generate(*each) for each in zip(prompts, lengths, strict=True)]
    for count in (2, 4):
        if family == MANY:
            experts = cut(model, options, TWO_THREADS).catalog.experts
            assert experts is not None
            ram = with_slots(model, options, experts.top_k + 2, count)
        else:
            ram = smallest(model, options, TWO_THREADS, count)
        with running(model, options=options, ram=ram, subchunks=count) as run:
            assert run.engine.placement.beside_subchunks == count
            one = run.submit(prompts[0], lengths[0])
            while not one.outputs.qsize():  # it decodes
                pass
            other = run.submit(prompts[1], lengths[1])
            assert [collect(one), collect(other)] == alone


def test_frequencies_that_depend_on_the_length_of_a_text_keep_chunks_short(
    tiny_model: Callable[..., Path],
) -> None:
    model, options = tiny_model("llama-dynamic"), replace(OPTIONS, context=96)
    assert not cut(model, options, ONE_THREAD).catalog.chunk_scratch
    with (
        pytest.raises(ValueError, match="subchunks must be one of 1 here; got 2"),
        running(model, options=options, subchunks=2),
    ):
        pass


# -- a request that nobody wants any more


@pytest.mark.parametrize("family", ["llama-biases", MANY])
def test_a_chunk_that_is_cancelled_is_not_computed_to_its_end(
    tiny_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest is retired undone, and what comes next is as if it had never been."""
    # Steps long enough to be left: of streamed blocks by a slow disk, below; of experts by size.
    model = tiny_model(family, **({"moe_intermediate_size": 2048} if family == MANY else {}))
    if family == MANY:
        experts = cut(model, OPTIONS, TWO_THREADS).catalog.experts
        assert experts is not None
        ram = with_slots(model, OPTIONS, experts.top_k + 2, 8)
    else:
        ram = smallest(model, OPTIONS, TWO_THREADS, 8)
    monkeypatch.setattr(engines, "CHECK_NS", 1)
    with running(model, options=OPTIONS, ram=ram, subchunks=8) as run:
        expected = run.generate(PROMPT, 12)
        read_block = ModelFile.read_block

        def read_slowly(*arguments: Any) -> None:
            threading.Event().wait(0.005)
            read_block(*arguments)

        @contextmanager
        def slow_disk() -> Iterator[None]:
            with monkeypatch.context() as slow:
                slow.setattr(ModelFile, "read_block", read_slowly)
                yield

        for _ in cancelling(run, PROMPT, 12, slow_disk):
            assert run.generate(PROMPT, 12, reuses_cache=True) == expected
            assert run.generate(tiny_tokens(30), 2)
        assert run.engine.error is None


def test_a_second_sub_chunk_is_measured_beside_the_first(tiny_model: Callable[..., Path]) -> None:
    """What is done once for both is told from what is not; where there is room for two."""
    model = tiny_model("llama2")

    def measured(ram: int) -> set[int]:
        figures = measure_groups((0,), model, OPTIONS, ram)["groups"]
        return {figure.rows for figure in figures if figure.phase == "prefill"}

    assert measured(AMPLE) == {25, 50}
    assert measured(smallest(model, OPTIONS, ONE_THREAD, 1)) == {25}
