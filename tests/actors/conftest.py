"""Tiny models for the tests of lanes and engine, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import write_tiny_model


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
