"""What a command line says about the engine, as arguments of `LLM`, and about sampling."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowlane.arguments import named_pins
from shadowlane.card_budget import check_card_budget
from shadowlane.cli.notes import say
from shadowlane.engine_arguments import EngineArguments
from shadowlane.models import KNOWN
from shadowlane.sizes import parse_size

if TYPE_CHECKING:
    from shadowlane import LLM, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line says about the engine, checked as far as it can be without a model.

    Errors name arguments as Python does; `naming.py` puts flags in their place.
    """

    given: Mapping[str, Any]  # by the names of LLM's arguments

    def __post_init__(self) -> None:
        from shadowlane.actors.machine import assign_cores

        gpu_memory = self.given.get("gpu_memory")
        if self.given.get("hardware") is None and gpu_memory is not None:
            check_card_budget(gpu_memory)
        named_pins(self.given.get("pins", ()))
        assign_cores(self.given.get("cpu_threads"), self.given.get("cpu_workers", 1))

    @classmethod
    def of(cls, values: Mapping[str, Any], **more: Any) -> EngineOptions:
        """Those of a command's `values` that an engine knows, and `more`.

        Its parameters have the names of LLM's arguments, but for switches that say no.
        """
        names = {*(field.name for field in fields(EngineArguments)), "weights"}
        given = {name: value for name, value in values.items() if name in names} | more
        for name in ("pins", "disturb"):  # lists, or nothing
            given[name] = tuple(given.get(name) or ())
        if given.get("ram") is not None:
            given["ram"] = parse_size(given["ram"], "ram")
        if "no_prefetch" in values:
            given["prefetch"] = not values["no_prefetch"]
        return cls(given)

    @property
    def is_emulated(self) -> bool:
        return self.given.get("hardware") is not None

    @property
    def is_by_hand(self) -> bool:
        """Whether a layout was asked for, which stays."""
        layers = self.given.get("gpu_layers"), self.given.get("n_cpu_moe")
        is_moe = bool(self.given.get("cpu_moe"))
        return is_moe or layers != (None, None) or self.given.get("strategy") not in (None, "auto")

    def open(self, path: Path, progress: Callable[[str, float | None], None], **more: Any) -> LLM:
        """Starts the engine on the model at `path`. Raises ModelError, ValueError, OSError."""
        from shadowlane.llm import LLM

        return LLM(path, **self.given, **more, progress=progress)


def refuse_shape(model: str, when: str) -> None:
    """Raise ValueError for a model of which nothing but its shape is known, where it shall run."""
    if model in KNOWN or "/" in model or Path(model).exists():
        return  # at once: shapes come with YAML, which few need to wait for
    from shadowlane.shapes import known_shapes

    if model in known_shapes():
        raise ValueError(
            f"MODEL must be one that is here {when}; {model} is known by its shape alone, for "
            "plan --hardware and bench --compare"
        )


def sampling_params(max_tokens: int, stop: list[str] | None, **given: Any) -> SamplingParams:
    """Sampling parameters with the library's default for whatever was not given."""
    from shadowlane import SamplingParams

    chosen = {name: value for name, value in given.items() if value is not None}
    stop = stop or os.environ.get("SHADOWLANE_STOP", "").splitlines()
    if stop:
        chosen["stop"] = stop
    params = SamplingParams(max_tokens=max_tokens, **chosen)
    idle = [
        "--" + name.replace("_", "-")
        for name in ("top_k", "top_p", "min_p", "seed")
        if name in chosen
    ]
    if params.is_greedy and idle:
        verb = "has" if len(idle) == 1 else "have"
        say(f"note: {', '.join(idle)} {verb} no effect at temperature 0; add --temp 0.8, say")
    return params
