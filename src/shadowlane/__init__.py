"""Shadowlane: language models that do not fit, on one PC.

from shadowlane import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
