"""Typed values of a model's configuration, each refusal in one line: key, rule, value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shadowlane.ops.errors import ModelError

_REQUIRED = object()


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if value is _REQUIRED:
        raise ModelError(f"{key} is missing from the config")
    return value


def read_integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} must be an integer; got {value!r}")
    return value


def read_positive_int(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    value = read_integer(config, key, default)
    if value <= 0:
        raise ModelError(f"{key} must be positive; got {value}")
    return value


def read_positive_number(config: Mapping[str, Any], key: str) -> float:
    value = _value(config, key, _REQUIRED)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"{key} must be a positive number; got {value!r}")
    return float(value)


def read_optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else read_positive_number(config, key)


def read_boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false; got {value!r}")
    return value
