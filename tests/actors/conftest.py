"""Tiny models for the tests of lanes and engine, written once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inprocess import small_blocks
from tiny import write_tiny_model


@pytest.fixture(scope="module")
def blocks_of_a_page() -> Iterator[None]:
    """Models are cut into blocks of 4 KiB, so that tiny ones have many."""
    with small_blocks(4096):
        yield


@pytest.fixture(scope="module")
def biased_llama(tiny_model: Callable[..., Path]) -> Path:
    """Of a width that divides into no whole blocks."""
    return tiny_model("llama-biases", hidden_size=96, intermediate_size=200, head_dim=24)


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
