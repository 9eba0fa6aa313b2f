"""Real processes under Ray that are killed, closed and started again. One cluster for all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copytree

import pytest
from tiny import tiny_tokens

from shadowlane import LLM, SamplingParams, plan_model
from shadowlane.actors.cluster import SESSION_PREFIX, ClusterError, join_cluster
from shadowlane.actors.engine import EngineError
from shadowlane.actors.machine import usable_cores
from shadowlane.actors.ray_host import ENGINE_THREADS
from shadowlane.ops.errors import ModelError
from shadowlane.planner.placement import InfeasiblePlan

pytestmark = [
    pytest.mark.ray,
    # of Ray's and grpc's own making
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = tiny_tokens(41)
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
LANES = min(2, len(usable_cores()))
PATIENCE_S = 30.0
DRIVER = """
import json, sys
from shadowlane import LLM
llm = LLM(sys.argv[1], ram=int(sys.argv[2]), ctx_size=512)
print(json.dumps(llm._call("process_ids")), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster that this process and its children use."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        joined = join_cluster(None)
        address = ray.get_runtime_context().gcs_address
        patch.setenv("RAY_ADDRESS", address)
        try:
            yield address
        finally:
            joined.leave()


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", hidden_size=256, intermediate_size=1024, max_position_embeddings=512)


@pytest.fixture(scope="module")
def budget(model: Path) -> int:
    """The least budget that a plan fits, to a quarter of a MiB: weights stream under it."""
    ram = 1 << 20
    while True:
        try:
            plan_model(model, ram=ram, ctx_size=512, cpu_workers=LANES)
            return ram
        except InfeasiblePlan:
            ram += 1 << 18


@pytest.fixture(scope="module")
def llm(cluster: str, model: Path, budget: int) -> Iterator[LLM]:
    with LLM(model, ram=budget, ctx_size=512, cpu_workers=LANES) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[int, ...]:
    return llm.generate(PROMPT, PARAMS)[0].token_ids


def wait_until(is_true: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    ended = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < ended, "it took too long"
        time.sleep(0.02)


def are_gone(process_ids: dict[str, int]) -> bool:
    return not any(os.path.exists(f"/proc/{each}") for each in process_ids.values())


@pytest.mark.parametrize("victim", [*(f"cpu:{number}" for number in range(LANES)), "disk:0"])
def test_a_killed_lane(llm: LLM, expected: tuple[int, ...], victim: str) -> None:
    before = llm._call("process_ids")
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    os.kill(before[victim], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError) as told:
        list(stream)
    assert time.monotonic() - began < 2.0
    assert str(told.value) == f"{victim}: its process died"
    assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
    after = llm._call("process_ids")
    assert {name for name in after if after[name] != before[name]} == {victim}


@pytest.mark.parametrize("victim", ["cpu:0", "disk:0"])
def test_a_killed_lane_of_a_mixture(
    cluster: str, tiny_model: Callable[..., Path], victim: str
) -> None:
    """Experts that are in RAM stay there; what was on its way is read again."""
    mixture = tiny_model("qwen3-moe-norm", num_experts=32)
    plan = plan_model(mixture, ctx_size=512)
    missing = plan["expert_slots"] - 8
    slot = plan["bytes"]["experts"] // plan["expert_slots"]
    ram = plan["bytes"]["total"] - missing * slot
    with LLM(mixture, ram=ram, ctx_size=512) as loaded:
        assert loaded.plan["expert_slots"] < plan["expert_slots"] // 2
        expected = loaded.generate(PROMPT, PARAMS)[0].token_ids
        before = loaded._call("process_ids")
        stream = loaded.stream(PROMPT, LONG)
        next(stream)
        os.kill(before[victim], signal.SIGKILL)
        with pytest.raises(EngineError, match=f"{victim}: its process died"):
            list(stream)
        assert loaded.generate(PROMPT, PARAMS)[0].token_ids == expected
        assert loaded.stats()["experts"]["hit_rate"] is not None


def test_a_killed_planner(llm: LLM, expected: tuple[int, ...]) -> None:
    before = llm._call("process_ids")["planner"]
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        return bool(llm._call("process_ids").get("planner", before) != before)

    wait_until(is_back)


def test_a_closed_stream_frees_its_slot(llm: LLM, expected: tuple[int, ...]) -> None:
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    stream.close()
    assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
    with pytest.raises(ValueError, match="room in the context"):
        llm.generate(list(PROMPT) * 20, PARAMS)


def test_figures_of_a_closed_stream_come_at_once(llm: LLM) -> None:
    for _ in range(3):  # the step that runs ends sometimes before the question, mostly after it
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        stream.close()
        figures = llm.stats()
        assert figures["finish_reason"] == "cancelled"
        assert 0 < figures["completion_tokens"] < 400
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    with pytest.raises(ValueError, match="still running"):  # it was not closed
        llm.stats()
    stream.close()


def test_a_stream_can_be_closed_while_all_listeners_are_taken(
    llm: LLM, expected: tuple[int, ...]
) -> None:
    """The first stream runs, the others wait for its slot and hold every thread that listens."""
    streams = [llm.stream(PROMPT, LONG)]
    streams += [llm.stream(PROMPT, PARAMS) for _ in range(1, ENGINE_THREADS)]
    next(streams[0])
    threads = [threading.Thread(target=next, args=(each, None)) for each in streams[1:]]
    for thread in threads:
        thread.start()
    streams[0].close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    for stream in streams[1:]:
        stream.close()
    assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected


def test_a_request_that_is_cancelled_before_it_is_heard_does_not_begin(llm: LLM) -> None:
    """As when Ctrl-C is pressed while every thread that listens is taken."""
    engine = llm._engine
    llm._call("cancel", "early")
    chunks = engine.stream_chunks.options(num_returns="streaming").remote("early", PROMPT, LONG)
    assert list(chunks) == []


def test_a_model_that_changes_and_starts_that_fail(
    cluster: str, model: Path, budget: int, tmp_path: Path
) -> None:
    path = Path(copytree(model, tmp_path / "model"))
    with LLM(path, ram=budget, ctx_size=512) as changing:
        changing.generate(PROMPT, PARAMS)
        os.utime(path / "model.safetensors", ns=(1, 1))
        for _ in range(2):
            with pytest.raises(EngineError, match="must not change while it is used") as told:
                changing.generate(PROMPT, LONG)
            assert "\n" not in str(told.value)
    with pytest.raises(InfeasiblePlan):
        LLM(path, ram=1 << 16, ctx_size=512)
    (path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        LLM(path, ram=budget, ctx_size=512)


def test_loading_and_unloading_leaves_nothing(cluster: str, model: Path, budget: int) -> None:
    descriptors = []
    for _ in range(3):
        with LLM(model, ram=budget, ctx_size=512) as loaded:
            used = loaded._call("process_ids")
            loaded.generate(PROMPT, PARAMS)
        wait_until(lambda used=used: are_gone(used))  # type: ignore[misc]
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[0] + 2


def test_a_killed_engine_takes_all_along(cluster: str, model: Path, budget: int) -> None:
    loaded = LLM(model, ram=budget, ctx_size=512)
    used = loaded._call("process_ids")
    stream = loaded.stream(PROMPT, LONG)
    next(stream)
    os.kill(used["engine"], signal.SIGKILL)
    with pytest.raises(ClusterError, match="the engine's process died"):
        list(stream)
    wait_until(lambda: are_gone(used))
    loaded.close()


def test_a_killed_driver_leaves_nothing(cluster: str, model: Path, budget: int) -> None:
    arguments = [sys.executable, "-c", DRIVER, str(model), str(budget)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        used = json.loads(driver.stdout.readline())
        driver.kill()
    wait_until(lambda: are_gone(used))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay_s", [0.2, 1.5])
def test_a_signal_while_ray_starts_leaves_nothing(
    model: Path, delay_s: float, number: signal.Signals
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        environment = {**os.environ, "RAY_ADDRESS": "local", "TMPDIR": place}
        code = "from shadowlane.cli import main; main()"
        driver = subprocess.Popen(
            [sys.executable, "-c", code, "bench", str(model), "-pp", "8", "-tg", "8"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert driver.stderr is not None
        while "starting Ray" not in driver.stderr.readline():
            assert driver.poll() is None
        time.sleep(delay_s)  # into the middle of what takes Ray some seconds
        driver.send_signal(number)
        driver.stderr.read()
        assert driver.wait(PATIENCE_S) == 128 + number
        wait_until(lambda: not processes_of(place))
        assert os.listdir(place) == []


def test_a_signal_does_not_wait_for_ray_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes many seconds on a busy machine. What runs of it by then is ended."""
    from shadowlane.actors import cluster as clusters

    seen: list[int] = []

    def start(**_: object) -> None:
        (directory,) = made
        late = [sys.executable, "-c", "import time; time.sleep(600)", str(directory)]
        seen.append(subprocess.Popen(late).pid)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal came at once")

    make, made = clusters._make_session_directory, []

    def make_session() -> clusters.Cluster:
        session = make()
        made.append(session.directory)
        return session

    monkeypatch.setattr("shadowlane.actors.cluster.is_joined", lambda: False)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(clusters, "_make_session_directory", make_session)
    monkeypatch.setattr(clusters, "_set_environment", lambda environment: None)
    with pytest.raises(KeyboardInterrupt):
        join_cluster(None)
    (late,) = seen
    assert os.waitpid(late, 0)[1] == signal.SIGKILL
    assert not made[0].exists()


GONE = """
import os, signal
from pathlib import Path
from shadowlane.actors import cluster as clusters

cluster = clusters.join_cluster(None)
print(cluster.directory, flush=True)
for process in Path("/proc").glob("[0-9]*"):
    if int(process.name) != os.getpid() and clusters._mentions(process, cluster.directory):
        try:
            os.kill(int(process.name), signal.SIGKILL)
        except ProcessLookupError:
            pass  # it went with another
cluster.leave()
"""


def test_nothing_is_left_where_rays_daemons_died_first() -> None:
    """As of a SIGTERM to the whole group; Ray may then end the process that cleans up."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", GONE], env=environment, capture_output=True, text=True, timeout=120
    )
    session = Path(ended.stdout.split()[0])
    assert session.name.startswith(SESSION_PREFIX)
    assert not session.exists()


def processes_of(place: str) -> list[str]:
    """Processes that were started with a directory for their temporary files."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and place.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found
