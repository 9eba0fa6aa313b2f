"""Chunks of a prompt of any length: the same bits, and weights are read once for each chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    PATIENCE_S,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    collect,
    cut,
    plan,
    running,
    small_blocks,
    smallest_ram,
)
from mixture_files import write_mixture_gguf
from tiny import tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.disk_lane import EXPERT_NBYTES
from shadowlane.ops.routes import SLOT_MASK

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
