"""Steps of lanes as spans in Ray's own timeline, seen from a real cluster while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shadowlane import LLM, SamplingParams, plan_model
from shadowlane.actors import ray_host
from shadowlane.actors.cluster import SESSION_PREFIX, _session_parent
from shadowlane.planner.placement import InfeasiblePlan

ROUNDS = 60  # requests after which a span must have come; Ray posts them about once a second

pytestmark = [
    pytest.mark.ray,
    # of Ray's and grpc's own making
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", hidden_size=256, intermediate_size=1024)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """On a cluster of its own with a dashboard, with too little RAM for all weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        with LLM(model, ram=streaming_budget(model), ctx_size=64, dashboard=True) as opened:
            yield opened


def streaming_budget(model: Path) -> int:
    """The least budget that a plan fits, to a quarter of a MiB: weights stream under it."""
    budget = 1 << 20
    while True:
        try:
            plan_model(model, ram=budget, ctx_size=64)
            return budget
        except InfeasiblePlan:
            budget += 1 << 18


def fetch(llm: LLM, path: str) -> Any:
    assert llm.dashboard is not None
    url, token = llm.dashboard
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def rows_of(events: list[dict[str, Any]], prefix: str) -> dict[Any, list[dict[str, Any]]]:
    """Spans whose name begins so, by the row (process) that they are shown in."""
    rows: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith(prefix):
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return rows


def timeline_with(llm: LLM, *prefixes: str) -> list[dict[str, Any]]:
    """The dashboard's timeline, asked for between requests until it shows such spans."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    for _ in range(ROUNDS):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        events = fetch(llm, f"/api/v0/tasks/timeline?download=1&job_id={job}")
        if all(rows_of(events, prefix) for prefix in prefixes):
            return events
    raise AssertionError(f"no spans {prefixes} after {ROUNDS} requests")


def test_the_dashboard_shows_steps_and_sweeps_while_they_run(llm: LLM) -> None:
    events = timeline_with(llm, "step ", "sweep ")
    (steps,) = rows_of(events, "step ").values()  # one compute lane: one row
    (sweeps,) = rows_of(events, "sweep ").values()
    assert llm.stats()["plan"]["tiers"]["disk"] > 0
    assert {each["tid"] for each in steps} != {each["tid"] for each in sweeps}
    numbers = sorted(int(each["name"].split()[1]) for each in steps)
    assert len(set(numbers)) == len(numbers), "a step has one span"
    for earlier, later in pairwise(sorted(steps, key=lambda each: each["ts"])):
        assert later["ts"] >= earlier["ts"] + earlier["dur"] - 1, "steps do not overlap"
    assert {each["name"].split()[2] for each in steps} <= {"decode", "prefill"}


def test_the_dashboard_asks_for_the_token(llm: LLM) -> None:
    assert llm.dashboard is not None
    url, token = llm.dashboard
    assert token
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/api/v0/tasks/timeline?download=1", timeout=30)
    assert refused.value.code == 401
    refused.value.close()


def test_ray_timeline_shows_the_same_spans(llm: LLM) -> None:
    import ray

    timeline_with(llm, "step ", "sweep ")
    names = [event["name"] for event in ray.timeline()]
    assert any(name.startswith("step ") for name in names)
    assert any(name.startswith("sweep ") for name in names)


def test_two_models_on_one_cluster(llm: LLM, model: Path) -> None:
    """Nothing has a name that two engines could both want."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = llm.generate([5, 6, 7], params)
    with LLM(model, ram="64MiB", ctx_size=64) as second:
        together = [llm.generate([5, 6, 7], params), second.generate([5, 6, 7], params)]
    assert [each[0].token_ids for each in together] == [expected[0].token_ids] * 2
    assert llm.generate([5, 6, 7], params)[0].token_ids == expected[0].token_ids


def test_without_ray_s_private_functions_there_are_no_spans_and_no_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Worker:
        """What Ray's worker may look like one day."""

    monkeypatch.setattr(ray_host.ray._private.worker, "global_worker", Worker())
    with ray_host.ray_span("step 1 decode"):
        pass
    monkeypatch.delattr(ray_host.ray._private, "worker")
    with ray_host.ray_span("step 2 decode"):
        pass


def test_our_own_cluster_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """In a process of its own: the one of this test is connected already."""

    script = (
        "import sys; from shadowlane import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], ram='64MiB', ctx_size=64) as llm:\n"
        "    import ray; print(ray._private.worker._global_node._session_dir)\n"
        "    print(len(llm.generate([1, 2], SamplingParams(max_tokens=4))[0].token_ids))\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    session, count = done.stdout.split()
    assert int(count) >= 1
    assert Path(session).parent.parent == _session_parent()
    assert Path(session).parent.name.startswith(SESSION_PREFIX)
    assert not Path(session).parent.exists()
    commands = []
    for process in Path("/proc").iterdir():
        try:
            commands.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    assert not [command for command in commands if session in command]
