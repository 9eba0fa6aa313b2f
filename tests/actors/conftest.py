"""Tiny models for the tests of lanes and engine, written once per session."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from card_mixtures import FAMILIES, PROMPT, Mixture
from cards import OPTIONS
from inprocess import ONE_THREAD, running, small_blocks
from mixture_files import model_of_family
from tiny import write_tiny_model

ENDING_S = 20.0  # that a thread which is over may take to let go


def mapped_arenas() -> int:
    with open("/proc/self/maps", errors="replace") as ranges:
        return sum("/memfd:shadowlane" in each for each in ranges)


@pytest.fixture(autouse=True)
def _no_arena_stays_mapped(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has mapped goes with it.

    An error that somebody keeps holds all that it came through, itself too: only the collector of
    cycles ends that. Without errors nothing is left, and nothing is collected here.
    """
    before, failed = mapped_arenas(), request.session.testsfailed
    yield
    request.node.funcargs.clear()  # what other fixtures made, which is over
    if mapped_arenas() > before:
        until = time.monotonic() + ENDING_S
        gc.collect()
        while mapped_arenas() > before and time.monotonic() < until:
            time.sleep(0.01)
        is_shown = request.session.testsfailed > failed  # a failure that is shown keeps its frames
        assert is_shown or mapped_arenas() <= before, "somebody keeps an arena"


@pytest.fixture(scope="module")
def blocks_of_a_page() -> Iterator[None]:
    """Models are cut into blocks of 4 KiB, so that tiny ones have many."""
    with small_blocks(4096):
        yield


@pytest.fixture(scope="module")
def biased_llama(tiny_model: Callable[..., Path]) -> Path:
    """Of a width that divides into no whole blocks."""
    return tiny_model("llama-biases", hidden_size=96, intermediate_size=200, head_dim=24)


@pytest.fixture(scope="module")
def model(biased_llama: Path) -> Path:
    """Of the files that name no other."""
    return biased_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("qwen3", hidden_size=128)` -> its directory, the same one each time."""
    written: dict[tuple, Path] = {}

    def write(family: str, **options: object) -> Path:
        key = (family, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in written:
            written[key] = write_tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return written[key]

    return write


@pytest.fixture(params=FAMILIES)
def mixture(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path: Path
) -> Mixture:
    path = model_of_family(tiny_model, tmp_path, request.param)
    with running(path, options=OPTIONS, cores=ONE_THREAD) as engine:
        said = engine.generate(PROMPT, 8), engine.logits(PROMPT)
    return Mixture(path, request.param == "published", *said)
