"""`pack` and `perplexity`: what is written, what is printed, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import tokenizers
from tiny import write_tiny_model
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from typer.testing import Result

from shadowlane.ops.files import open_model
from shadowlane.packing import packed_dir, packed_model, write_packed
from shadowlane.quality import logit_rows_for, measure_perplexity

from .conftest import FakeEngine

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


class Reader:
    """Stands in for an LLM: token ids are letters, each as likely as `chance` says."""

    def __init__(self, chance: float, bos: tuple[int, ...] = ()) -> None:
        self.chance = chance
        self.bos = bos
        self.windows: list[tuple[list[int], int]] = []

    def encode(self, text: str) -> list[int]:
        return [*self.bos, *map(ord, text)]

    def log_probabilities(self, token_ids: Sequence[int], first: int = 0) -> np.ndarray:
        self.windows.append((list(token_ids), first))
        return np.full(len(token_ids) - 1 - first, math.log(self.chance), np.float32)


def test_perplexity_scores_the_second_half_of_each_window() -> None:
    reader = Reader(0.25, bos=(1,))
    found = measure_perplexity(reader, "abcdefghijklmnopqrs", window=8)  # type: ignore[arg-type]
    assert found.perplexity == pytest.approx(4, rel=1e-6)
    assert found.uncertainty == pytest.approx(0, abs=1e-6)
    # 20 tokens are two windows; the first token of each is the one that begins a text
    assert (found.tokens, found.windows, found.scored_tokens) == (20, 2, 2 * 3)
    assert [(part[0], len(part), first) for part, first in reader.windows] == [(1, 8, 4), (1, 8, 4)]
    assert reader.windows[1][0][1:] == [ord(letter) for letter in "ijklmno"]


def test_without_a_token_before_the_text_windows_are_as_they_stand() -> None:
    reader = Reader(0.5)
    measure_perplexity(reader, "abcdefgh", window=4)  # type: ignore[arg-type]
    assert [part for part, _ in reader.windows] == [[97, 98, 99, 100], [101, 102, 103, 104]]


def test_a_text_of_less_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 512 tokens, one window; got 3"):
        measure_perplexity(Reader(0.5), "abc")  # type: ignore[arg-type]


def write_letters(folder: Path) -> None:
    """A tokenizer of a token for each letter."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = Split("", "isolated")
    (folder / "tokenizer.json").write_text(backend.to_str())


def test_pack_writes_a_file_that_opens(
    shadowlane_command: Command, tiny: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in tiny.iterdir())
    out = tmp_path / "out.gguf"
    result = shadowlane_command("pack", tiny, "--weights", "q4_0", "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert f"{out}: " in result.stderr
    assert "note: the model has no tokenizer" in result.stderr
    assert open_model(out).tensors["model.layers.0.mlp.up_proj.weight"].layout == "q4_0"
    assert sorted(path.name for path in tiny.iterdir()) == before


def test_pack_refuses_in_one_line(fails: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    assert "a file to write is needed: -o" in fails("pack", tiny)
    (tmp_path / "there.gguf").write_text("kept")
    assert "--out must not exist yet" in fails("pack", tiny, "-o", tmp_path / "there.gguf")
    assert (tmp_path / "there.gguf").read_text() == "kept"
    assert "--out must end in .gguf" in fails("pack", tiny, "-o", tmp_path / "out.bin")
    assert "--out must not lie in the model's own" in fails("pack", tiny, "-o", tiny / "out.gguf")
    nowhere = tmp_path / "nowhere" / "out.gguf"
    assert "cannot be written: No such file" in fails("pack", tiny, "-o", nowhere)
    write_packed(tiny, "q8_0", tmp_path / "done.gguf", lambda stage, done: None)
    again = fails("pack", tmp_path / "done.gguf", "-o", tmp_path / "more.gguf")
    assert "this is GGUF already" in again
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    out = tmp_path / "out.gguf"
    assert "must be a text in UTF-8" in fails(
        "pack", tiny, "-o", out, "--text", tmp_path / "bad.txt"
    )
    (tmp_path / "good.txt").write_text("some letters")
    text = ("--text", tmp_path / "good.txt")
    assert "needs a model with a tokenizer" in fails("pack", tiny, "-o", out, *text)
    copytree(tiny, tmp_path / "letters")
    write_letters(tmp_path / "letters")
    said = fails("pack", tmp_path / "letters", "-o", out, *text)
    assert "the text must have at least 512 tokens, one window; got 12" in said
    assert not out.exists()


def test_perplexity_refuses_in_one_line(
    fails: Callable[..., str], engine: FakeEngine, tiny: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some letters")
    said = fails("perplexity", tiny, "-f", text)
    assert f"perplexity needs a model with a tokenizer; {tiny} has none" in said
    copytree(tiny, tmp_path / "letters")
    write_letters(tmp_path / "letters")
    said = fails("perplexity", tmp_path / "letters", "-f", text, "--ctx-size", 16)
    assert "the text must have at least 16 tokens, one window; got 12" in said
    assert engine.arguments == {}
    assert "a text is needed: -f" in fails("perplexity", tiny)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "must hold some text" in fails("perplexity", tiny, "-f", empty)
    assert "--ctx-size must be at least 4 for perplexity; got 3" in fails(
        "perplexity", tiny, "-f", empty, "--ctx-size", 3
    )


def test_perplexity_prints_a_line_or_an_object(
    shadowlane_command: Command,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = write_tiny_model(tmp_path / "model", "llama2")
    write_letters(tiny)
    reader = Reader(0.125)
    monkeypatch.setattr(FakeEngine, "encode", reader.encode, raising=False)
    monkeypatch.setattr(FakeEngine, "log_probabilities", reader.log_probabilities, raising=False)
    text = tmp_path / "text.txt"
    text.write_text("some letters, forty in all as it happens")
    result = shadowlane_command("perplexity", tiny, "-f", text, "--ctx-size", 16)
    assert result.stdout.startswith("perplexity 8.0000 +- 0.0000 (14 of 40 tokens scored, 2 w")
    assert engine.arguments["ctx_size"] == 16
    assert engine.arguments["logit_rows"] == logit_rows_for(tiny, 16) == 16
    result = shadowlane_command("perplexity", tiny, "-f", text, "--ctx-size", 16, "--json")
    assert json.loads(result.stdout)["scored_tokens"] == 14


def test_the_packed_copy_is_made_once_and_again_when_the_tokenizer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHADOWLANE_CACHE", str(tmp_path / "cache"))
    model = write_tiny_model(tmp_path / "model", "llama2")
    stages: list[str] = []

    def tell(stage: str, fraction: float | None) -> None:
        stages.append(stage)

    path, note = packed_model(model, "q4_1", tell)
    assert path.parent == packed_dir()
    assert note.startswith(f"weights are q4_1, from {path} (")
    assert set(stages) == {f"packing model as q4_1, once, into {path}"}
    written = path.stat().st_mtime_ns
    assert packed_model(model, "q4_1", tell) == (path, note)
    assert path.stat().st_mtime_ns == written
    assert packed_model(model, "q8_0", tell)[0] != path
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert packed_model(model, "q4_1", tell)[0] != path
