"""Whether a model reads text at all, from the names and headers of its files: in milliseconds.

The engine loads the tokenizer beside the weights; that there is none is known before it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shadowlane.ops.errors import ModelError

#: Any of these makes a tokenizer, see `ops/tokenizer.py`.
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
GGUF_WITHOUT = ("no_vocab", "none")
GGUF_WHOLE = "tokenizer.huggingface.json"


def check_reads_text(model: Path, what: str) -> None:
    """Raise ModelError where `what`, a command, gets a text and the model has no tokenizer."""
    if not has_tokenizer(model):
        raise ModelError(f"{what} needs a model with a tokenizer; {model} has none")


def check_chats(model: Path, what: str) -> None:
    """Raise ModelError where `what` needs a chat template and the model has none."""
    check_reads_text(model, what)
    if not has_chat_template(model):
        raise ModelError(f"{what} needs a model with a chat template; {model} has none")


def has_tokenizer(model: Path) -> bool:
    if model.is_dir():
        return any((model / name).exists() for name in TOKENIZER_NAMES)
    metadata = _gguf_metadata(model)
    return GGUF_WHOLE in metadata or metadata.get("tokenizer.ggml.model") not in GGUF_WITHOUT


def has_chat_template(model: Path) -> bool:
    """Whether there may be one: a file that cannot be read is the engine's to explain."""
    if not model.is_dir():
        return _gguf_metadata(model).get("tokenizer.chat_template") is not None
    if (model / "chat_template.jinja").exists():
        return True
    path = model / "tokenizer_config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("chat_template") is not None
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True


def _gguf_metadata(model: Path) -> dict[str, Any]:
    from shadowlane.ops.files import open_model

    return open_model(model).gguf_metadata or {}
