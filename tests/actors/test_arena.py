"""What an arena tells those who look at it from outside."""

from __future__ import annotations

import os

import pytest

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE
from shadowlane.cli.ps import engine_processes
from shadowlane.models import KNOWN


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/models/my own.gguf", "/models/my own.gguf"),
        ("/hub/models--org--name/snapshots/0a1b", "org/name"),
        (str(KNOWN["smollm2"].path), "smollm2"),
        ("/" + "d/" * 200 + "end.gguf", "d/end.gguf"),
        ("/models/\udcff", "/models/"),
        ("", ""),
    ],
)
def test_an_arena_names_its_model(path: str, shown: str) -> None:
    arena = Arena.create(3 * PAGE, path)
    (this,) = (each for each in engine_processes() if each.pid == os.getpid())
    assert this.arena_nbytes == 3 * PAGE
    if path.endswith("/end.gguf"):
        assert this.model.startswith("...")
        assert this.model.endswith(shown)
    else:
        assert this.model.rstrip("\N{REPLACEMENT CHARACTER}") == shown
    arena.close()
