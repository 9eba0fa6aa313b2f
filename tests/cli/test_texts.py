"""What is known of a model's tokenizer from names and headers, against the tokenizer itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tiny import write_tiny_model
from tokenizers.models import WordLevel

from shadowlane.ops import tokenizer
from shadowlane.ops.files import open_model
from shadowlane.packing import write_packed
from shadowlane.texts import GGUF_WHOLE, GGUF_WITHOUT, has_chat_template, has_tokenizer

CHAT = "{{ messages[0].content }}"


def _files(name: str) -> dict[str, str]:
    whole = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()
    config = json.dumps({"chat_template": CHAT})
    return {
        "nothing": {},
        "tokenizer": {"tokenizer.json": whole},
        "template beside it": {"tokenizer.json": whole, "chat_template.jinja": CHAT},
        "template in the config": {"tokenizer.json": whole, "tokenizer_config.json": config},
        "template alone": {"chat_template.jinja": CHAT},
        "config without": {"tokenizer.json": whole, "tokenizer_config.json": "{}"},
    }[name]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    "files",
    ["nothing", "tokenizer", "template beside it", "template in the config", "template alone",
     "config without"],
)  # fmt: skip
def test_names_and_headers_say_what_the_tokenizer_does(
    tmp_path: Path, kind: str, files: str
) -> None:
    model = write_tiny_model(tmp_path / "model", "llama2")
    for name, text in _files(files).items():
        (model / name).write_text(text)
    if kind == "gguf":
        out = tmp_path / "model.gguf"
        model = write_packed(model, "q8_0", out, lambda stage, done: None).path
    loaded = tokenizer.load_tokenizer(open_model(model), tmp_path / "cache")
    assert has_tokenizer(model) == (loaded is not None)
    if loaded is not None:
        assert has_chat_template(model) == loaded.has_chat_template


def test_the_names_are_those_of_the_tokenizer() -> None:
    assert GGUF_WHOLE == tokenizer.HUGGING_FACE_FIELD
    assert tokenizer.NO_VOCABULARY in GGUF_WITHOUT
