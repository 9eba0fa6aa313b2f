"""What the Python interface refuses, before anything is fetched or started."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadowlane.engine_arguments import EngineArguments, make_spec
from shadowlane.llm import LLM, plan_model, profile_model
from shadowlane.prompts import as_ids, as_messages, as_prompt, as_prompts, checked_params
from shadowlane.quality import check_window

LAPTOP = Path(__file__).parents[2] / "examples" / "hardware" / "rtx-3060-laptop-6gb.yaml"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("nothing may be fetched or started")

    monkeypatch.setattr("shadowlane.llm.resolve_model", refuse)
    monkeypatch.setattr("shadowlane.actors.cluster.join_cluster", refuse)
    monkeypatch.setattr("shadowlane.actors.machine.usable_cores", lambda: [0, 1])
    monkeypatch.setattr("shadowlane.actors.machine.quota_cores", lambda: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progress": 5}, "progress must be a function of a stage and a fraction, or None; got 5"),
        ({"shares": 5}, "shares must be one number of at least 0 for the one lane .*; got 5"),
        ({"shares": [1, 2]}, r"for the one lane \(cpu_workers\), and not all 0; got \[1, 2\]"),
        ({"shares": [5], "cpu_workers": 2}, r"for each of 2 lanes .*; got \[5\]"),
        ({"shares": [1, -1], "cpu_workers": 2}, r"at least 0 for each of 2 .*; got \[1, -1\]"),
        ({"shares": [0]}, r"and not all 0; got \[0\]"),
        ({"shares": [float("nan")]}, r"shares must be .*; got \[nan\]"),
        ({"shares": ["1"]}, r"shares must be .*; got \['1'\]"),
        ({"shares": "1"}, "shares must be .*; got '1'"),
        ({"ram": 1.5}, "ram must be a size such as .*; got 1.5"),
        ({"ram": True}, "ram must be a size such as .*; got True"),
        ({"cpu_threads": "2"}, "cpu_threads must be a whole number; got '2'"),
        ({"cpu_threads": True}, "cpu_threads must be a whole number; got True"),
        ({"cpu_threads": 0}, "cpu_threads must be at least 1; got 0"),
        ({"cpu_workers": None}, "cpu_workers must be a whole number; got None"),
        ({"cpu_workers": 3}, "cpu_workers must not be more than the 2 threads they share; got 3"),
        ({"ctx_size": -4}, "ctx_size must be at least 1; got -4"),
        ({"ctx_size": 64.0}, "ctx_size must be a whole number; got 64.0"),
        ({"max_batch": 99}, "max_batch must be between 1 and 8; got 99"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1; got 0"),
        ({"subchunks": 0}, "subchunks must be at least 1; got 0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1; got 0"),
        ({"micro_batches": 2}, "micro_batches needs cards, which work one behind another; got 2"),
        ({"logit_rows": 0}, "logit_rows must be at least 1; got 0"),
        ({"spin_us": -1}, "spin_us must be between 0 and 1000000000; got -1"),
        ({"spin_us": 0.5}, "spin_us must be a whole number; got 0.5"),
        ({"dtype": "int3"}, "dtype must be one of float32, bfloat16, float16; got 'int3'"),
        ({"dtype": float}, "dtype must be one of .*; got <class 'float'>"),
        ({"kv": "q4_0"}, "kv must be q8_0; got 'q4_0'"),
        ({"weights": 4}, "weights must be one of q8_0, q4_0, q4_1; got 4"),
        ({"prefetch": "no"}, "prefetch must be True or False; got 'no'"),
        ({"direct_io": 1}, "direct_io must be True or False; got 1"),
        ({"expand": "spare"}, "expand must be True or False; got 'spare'"),
        ({"replan": None}, "replan must be True or False; got None"),
        ({"dashboard": "yes"}, "dashboard must be True or False; got 'yes'"),
        ({"model": None}, "model must be a known name, .*; got None"),
        ({"model": ""}, "model must be a known name, .*; got ''"),
        ({"hardware": 5}, "hardware must be the path of a file; got 5"),
        ({"hardware": ""}, "hardware must be the path of a file; got ''"),
        ({"hardware": LAPTOP, "disturb": "3:cpu=1"}, "disturb must be a list of texts"),
        ({"hardware": LAPTOP, "disturb": 5}, "disturb must be a list of texts .*; got 5"),
        ({"hardware": LAPTOP, "slowed": "2"}, "slowed must be a number; got '2'"),
        ({"hardware": LAPTOP, "slowed": float("nan")}, "slowed must be from 1 to 1000000; got nan"),
        ({"hardware": LAPTOP, "fixed_costs": None}, "fixed_costs must be a number; got None"),
        ({"hardware": LAPTOP, "emulate_seed": 1.5}, "emulate_seed must be a whole number; got 1.5"),
        ({"hardware": LAPTOP, "cpu_moe": "yes"}, "cpu_moe must be True or False; got 'yes'"),
        ({"hardware": LAPTOP, "strategy": ""}, "strategy must be one of auto, .*; got ''"),
        ({"hardware": LAPTOP, "gpu_memory": ["1GiB"]}, "gpu_memory must be a size such as"),
        ({"ram": "1\n" * 99}, r"ram must be a size such as 6GiB, 512MiB or 1.5GB; got '1\\n1"),
    ],
)
def test_constructor_arguments(options: dict[str, Any], message: str) -> None:
    arguments = {"model": "smollm2", **options}
    with pytest.raises(ValueError, match=message) as told:
        LLM(**arguments)
    assert "\n" not in str(told.value)
    if not {"dashboard"} & options.keys():
        for function in (plan_model, profile_model):
            with pytest.raises(ValueError, match=re.escape(str(told.value))):
                function(**arguments)


class Odd:
    """What no argument can be."""


@pytest.mark.parametrize("hardware", [None, LAPTOP])
@pytest.mark.parametrize("name", [field.name for field in fields(EngineArguments)])
def test_no_argument_meets_a_type_that_it_does_not_know(name: str, hardware: Path | None) -> None:
    for value in (Odd(), {"a": 1}, b"x"):
        given = {"hardware": hardware, name: value}
        with suppress(ValueError):  # in one line, and nothing else
            make_spec(Path("x"), **given)
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        make_spec(Path("x"), **{"hardware": hardware, name: Odd()})


@pytest.mark.parametrize("name", ["trace_routing", "replay_routing"])
def test_files_of_routing_are_paths(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be the path of a file; got 5"):
        LLM("smollm2", **{name: 5})


def test_what_is_done_is_told_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and libraries take seconds to read, in which nobody shall wait for nothing."""
    for call in (LLM, plan_model, profile_model):
        told: list[str] = []

        def resolve(name: object, tell: object, told: list[str] = told) -> None:
            raise ValueError(f"after {told}")

        monkeypatch.setattr("shadowlane.llm.resolve_model", resolve)
        with pytest.raises(ValueError, match=r"after \['reading the model'\]"):
            call("smollm2", progress=lambda stage, fraction, told=told: told.append(stage))


def test_whole_numbers_may_be_those_of_numpy() -> None:
    spec = make_spec(Path("x"), cpu_threads=np.int64(2), ram=np.int32(9), ctx_size=np.int16(64))
    assert (type(spec.options.context), type(spec.settings.ram)) == (int, int)
    assert sum(map(len, spec.settings.cores)) == 2
    assert make_spec(Path("x"), shares=np.array([3.0])).settings.shares == (3.0,)


@pytest.mark.parametrize(
    ("options", "expand"),
    [
        ({}, "never"),  # all that is free was not given to us to be used up
        ({"ram": "6GiB"}, "spare"),
        ({"expand": True}, "always"),
        ({"ram": "6GiB", "expand": True}, "always"),
        ({"expand": False}, "never"),
        ({"ram": "6GiB", "expand": False}, "never"),
    ],
)
def test_copies_are_made_unasked_in_a_named_budget_alone(
    options: dict[str, Any], expand: str
) -> None:
    assert make_spec(Path("x"), **options).settings.expand == expand


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: as_prompts(5), "a prompt must be a text or a list of ids; got 5"),
        (lambda: as_prompt(5), "a prompt must be a text or a list of ids; got 5"),
        (lambda: as_prompts(b"hi"), "a prompt must be a text or a list of ids; got b'hi'"),
        (lambda: as_prompts({"a": 1}), "a prompt must be a text or a list of ids; got {'a': 1}"),
        (lambda: as_prompts(np.array(5)), "a prompt must be a text or a list of ids; got array"),
        (lambda: as_prompts(["a", None]), "a prompt must be a text or a list of ids; got None"),
        (lambda: as_prompts([[1.5]]), r"token ids must be whole numbers; got \[1.5\]"),
        (lambda: as_prompts([3, "a"]), r"token ids must be whole numbers; got \[3, 'a'\]"),
        (lambda: as_ids("x"), "token ids must be whole numbers; got 'x'"),
        (lambda: checked_params({"max_tokens": 3}), "params must be SamplingParams; got {'max_to"),
        (lambda: check_window(3), "window must be at least 4 for perplexity; got 3"),
    ],
)
def test_requests(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_prompts_may_be_arrays() -> None:
    ids = np.array([3, 4], np.int32)
    assert as_prompts(ids) == [[3, 4]]
    assert as_prompts([ids, "text"]) == [[3, 4], "text"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be dicts with role and content, in a list; got 'hi'"),
        (5, "messages must be dicts with role and content, in a list; got 5"),
        ([], "messages must hold at least one; got none"),
        ([USER, "hi"], r"messages\[1\] must be a dict with role and content; got 'hi'"),
        ([{"content": "hi"}], r"messages\[0\] must have a role; got content"),
        ([USER, {"role": "user"}], r"messages\[1\] must have a content; got role"),
        ([{}], r"messages\[0\] must have a role; got no keys"),
        ([{"role": 5, "content": "hi"}], r"messages\[0\] must have a text as role; got 5"),
        ([{"role": "", "content": "hi"}], r"messages\[0\] must have a text as role; got ''"),
        ([USER, USER, {"role": "user", "content": None}], r"messages\[2\] .* as content; got None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\] must have a text as"),
    ],
)
def test_messages_of_the_wrong_form(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        as_messages(messages)


def test_roles_are_for_the_template_to_know() -> None:
    calls = [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "12:00", "name": "now"},
    ]
    assert as_messages(tuple(messages)) == messages
    assert as_messages(USER) == [USER]
