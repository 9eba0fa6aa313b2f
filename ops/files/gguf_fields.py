"""Metadata of a GGUF file with the types of its values checked, each refusal in one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shadowlane.ops.errors import ModelError


class GgufFields:
    """Metadata by key, with its type checked; keys of the architecture go without its name."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = ""

    def refuse(self, key: str, rule: str, value: object) -> ModelError:
        return ModelError(f"{self.path}: {key} must be {rule}; got {value!r:.60}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a text", value)
        return value

    def of_architecture(self, key: str) -> Any:
        """The field `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; one that stands once for each layer must be the same for all."""
        value = self.of_architecture(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None:
            value = default
        if type(value) is not int or not 0 < value < 2**40:
            raise self.refuse(f"{self.architecture}.{key}", "a positive whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.of_architecture(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(f"{self.architecture}.{key}", "a positive number", value)
        return float(value)

    def token_id(self, key: str) -> int | None:
        value = self.metadata.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.refuse(key, "a token id", value)
        # 2^32 - 1 is how some writers say that there is none
        return None if value == 0xFFFFFFFF else value
