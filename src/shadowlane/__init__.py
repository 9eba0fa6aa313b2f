"""Shadowlane: language models that do not fit, on one PC.

from shadowlane import LLM, SamplingParams
"""

from __future__ import annotations

# Type checkers take the name for `typing`'s, which the command line shall not wait for.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shadowlane.llm import LLM, Completion, plan_model, profile_model
    from shadowlane.ops.sampling import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "plan_model", "profile_model"]

# Loaded when asked for: the command line must answer --help without paying for numpy.
_HOMES = {
    "LLM": "shadowlane.llm",
    "Completion": "shadowlane.llm",
    "plan_model": "shadowlane.llm",
    "profile_model": "shadowlane.llm",
    "SamplingParams": "shadowlane.ops.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
