"""A command line with a fake engine behind it: same API, no Ray, answers known in advance."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import shadowlane
from shadowlane.ops.sampling import SamplingParams
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.placement import Request
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog

PLAN = {
    "plan_id": "3f2a",
    "replans": 1,
    "predicted_decode_tok_per_s": 21.5,
    "tiers": {"ram": 48 << 20, "disk": 45 << 20},
    "read_nbytes_per_token": 44 << 20,
}


@dataclass
class FakeChunk:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class FakeCompletion:
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int


@dataclass
class FakeEngine:
    """Class-like: calling it is `LLM(...)`. Keeps what it was asked for and what was closed."""

    pieces: tuple[str, ...] = ("The", " sky", " is", " blue.")
    interrupt_after: int | None = None  # pieces before a Ctrl-C arrives
    start_error: Exception | None = None
    stream_error: Exception | None = None
    has_chat_template: bool = True
    vocab_size: int = 50
    notes: tuple[str, ...] = ()
    decisions: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, Any, SamplingParams]] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0

    def __call__(
        self, model: Path, progress: Callable[..., None] = lambda *_: None, **arguments: Any
    ) -> FakeEngine:
        if self.start_error is not None:
            progress("starting Ray", None)
            raise self.start_error
        self.arguments = {"model": model, **arguments}
        progress("starting Ray", None)
        progress("loading weights", 0.5)
        progress("loading weights", 1.0)
        return self

    @property
    def plan(self) -> dict[str, Any]:
        return {"notes": list(self.notes)}

    def __enter__(self) -> FakeEngine:
        self.num_open += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.num_open -= 1

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[FakeChunk]:
        self.requests.append(("stream", prompt, params))
        return self._chunks(params)

    def stream_chat(self, messages: Any, params: SamplingParams) -> Iterator[FakeChunk]:
        self.requests.append(("chat", [dict(message) for message in messages], params))
        return self._chunks(params)

    def generate(self, prompts: Any, params: SamplingParams) -> list[FakeCompletion]:
        self.requests += [("generate", prompt, params) for prompt in prompts]
        return [FakeCompletion("".join(self.pieces), [100, 101], "stop", 5) for _ in prompts]

    def chat(self, messages: Any, params: SamplingParams) -> FakeCompletion:
        return self.generate([messages], params)[0]

    def _chunks(self, params: SamplingParams) -> Iterator[FakeChunk]:
        if self.stream_error is not None:
            raise self.stream_error
        is_finished = False
        try:
            for index, piece in enumerate(self.pieces[: params.max_tokens]):
                if index == self.interrupt_after:
                    self.interrupt_after = None
                    raise KeyboardInterrupt
                yield FakeChunk(piece, [100 + index])
            is_finished = True
        finally:
            self.num_cancelled += not is_finished

    def stats(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 5,
            "completion_tokens": len(self.pieces),
            "finish_reason": "stop",
            "ttft_s": 0.25,
            "prefill_tok_per_s": 120.0 + len(self.requests),
            "decode_tok_per_s": 20.0 + len(self.requests),
            "load_s": 1.5,
            "plan": PLAN,
            "lanes": {
                "cpu:0": {"busy_s": 2.0, "busy_pct": 62.0, "nbytes": 1 << 30},
                "disk:0": {"busy_s": 3.0, "busy_pct": 93.0, "nbytes": 2 << 30},
            },
            "bottleneck": "disk:0",
            "emulated": False,
            "predicted_step_s": 0.046,
            "measured_step_s": 0.05,
            "notes": list(self.notes),
            "decisions": list(self.decisions),
        }


def a_real_plan() -> dict[str, Any]:
    """What the planner says about a small model of which a third fits."""
    catalog = llama_catalog(layers=6)
    weights = sum(block.held_nbytes for block in catalog.blocks)
    request = Request(ram=weights // 2, context=64)
    cost = CostModel(None)
    return plan_report(catalog, place(catalog, request, cost, placement_id=1), cost)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """The fake engine, in the place of `shadowlane.llm`, with caches below `tmp_path`."""
    fake = FakeEngine()
    module = ModuleType("shadowlane.llm")
    module.LLM = fake  # type: ignore[attr-defined]

    def plan_model(model: Path, **arguments: Any) -> dict[str, Any]:
        if fake.start_error is not None:
            raise fake.start_error
        fake.arguments = {"model": model, **arguments}
        return a_real_plan()

    def profile_model(
        model: Path, refresh: bool, progress: Callable[..., None], **options: Any
    ) -> dict[str, Any]:
        fake.arguments = {"model": model, **options}
        progress("measuring disk", 0.1)
        return {"model": str(model), "refreshed": refresh, "disk": {"read_bytes_per_s": 1.7e9}}

    module.plan_model = plan_model  # type: ignore[attr-defined]
    module.profile_model = profile_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shadowlane.llm", module)
    monkeypatch.setitem(vars(shadowlane), "SamplingParams", SamplingParams)
    monkeypatch.setitem(vars(shadowlane), "LLM", fake)
    monkeypatch.setenv("SHADOWLANE_CACHE", str(tmp_path / "cache"))
    # as many cores as any of the tests asks for
    monkeypatch.setattr("shadowlane.actors.machine.usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("shadowlane.actors.machine.quota_cores", lambda: None)
    return fake


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that passes for a model as far as names and headers go."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def shadowlane_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command line in this process; standard input is a pipe."""
    for name in ("SHADOWLANE_DEBUG", "SHADOWLANE_STOP", "SHADOWLANE_RAM", "SHADOWLANE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    from shadowlane.cli import app

    def invoke(*arguments: object, input: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(each) for each in arguments], input=input)

    return invoke


@pytest.fixture
def fails(shadowlane_command: Callable[..., Result]) -> Callable[..., str]:
    """Runs a command that must end with exit code 2 and one `error:` line, which it returns."""

    def invoke(*arguments: object, input: str | None = None) -> str:
        result = shadowlane_command(*arguments, input=input)
        assert result.exit_code == 2, (result.exit_code, result.output)
        assert result.stdout == ""
        lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        return lines[0]

    return invoke
