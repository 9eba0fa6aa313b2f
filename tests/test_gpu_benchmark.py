"""`benchmarks/gpu.py`, every section of it, on a card that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recording_driver
from recording_driver import RecordingDriver

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
KERNELS = ["--kernels", "recording_kernels:RecordingKernels"]
SMALL = [*KERNELS, "--size", "4MiB", "--repeats", "4"]


SECTIONS = (
    "device",
    "pinning",
    "contexts",
    "sharing",
    "rates",
    "overlap",
    "crossings",
    "under weights",
    "behind kernels",
    "queue depth",
    "stream aliasing",
    "matvecs",
)


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(out: Path, *arguments: str) -> list[dict]:
    from gpu import main

    assert main([*SMALL, "--out", str(out), *arguments]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_section_measures_something(tmp_path: Path) -> None:
    driver = ("--driver", "recording_driver:RecordingDriver")
    rows = run(tmp_path / "card.jsonl", *driver, "--only", ",".join(SECTIONS))
    names = [each["name"] for each in rows]
    assert len(set(names)) == len(names)
    assert names[:2] == ["machine", "device"]
    for part in (
        "pin 1 GiB",
        "context of a second process without torch",
        "sharing: write",
        "h2d 1024 KiB",
        "d2h 1024 KiB",
        "h2d and d2h at once",
        "graph beside copies of a thread",
        "graph beside copies of a process",
        "crossing",
        "16 KiB both ways, copy engine",
        "16 KiB both ways, zero-copy kernel",
        "event, recorded",
        "host function",
        "zero-copy kernel, beside chunks of 1 MiB",
        "another process, this one 5 ms kernels",
        "queue depth",
        "streams without false dependences",
        "matvec bf16 4096 x 4096",
        "matvec int8 4096 x 4096",
    ):
        found = [each for each in rows if part in each["name"]]
        assert found, part
        for each in found:
            assert each["median"] is not None, each
            assert each["p99"] is not None
            assert each["unit"]
    failed = {each["name"] for each in rows if "error" in each}
    assert all("int4" in each or "with torch" in each for each in failed), failed
    (shared,) = (each for each in rows if each["name"] == "sharing: write")
    assert shared["is_same"] is True
    (depth,) = (each for each in rows if each["name"] == "queue depth")
    assert (depth["median"], depth["is_bounded"]) == (1024, True)


def named(monkeypatch: pytest.MonkeyPatch, make: object) -> list[str]:
    """The arguments that choose a driver which only this test has."""
    monkeypatch.setattr(recording_driver, "Special", make, raising=False)
    return ["--driver", "recording_driver:Special"]


def test_without_memory_operations_events_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = named(monkeypatch, lambda: RecordingDriver(has_memops=False))
    rows = run(tmp_path / "card.jsonl", *driver, "--only", "crossings,queue depth,stream aliasing")
    (crossing,) = (each for each in rows if each["name"] == "crossing")
    assert crossing["counters"] == "events"
    assert [each["name"] for each in rows if "skipped" in each] == [
        "queue depth",
        "streams without false dependences",
    ]
    assert not [each for each in rows if "error" in each]


def test_less_is_measured_where_less_can_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = named(monkeypatch, lambda: RecordingDriver(pin_limit=4 << 20))
    rows = run(tmp_path / "card.jsonl", *driver, "--only", "device,rates")
    assert rows[1]["pinned_nbytes"] == (1 << 20) + (2 << 20)
    assert "cudaErrorMemoryAllocation" in rows[1]["pin_error"]
    assert not [each for each in rows if "error" in each]


class Forgetful(RecordingDriver):
    """Loses every counter write after the probe's."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        if any(name == "write_value" for name, _ in self.calls):
            return
        super().write_value(stream, address, value)


def test_a_section_that_hangs_is_ended_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_rig

    monkeypatch.setattr(gpu_rig.Rig.limit, "__defaults__", (0.2,))
    driver = named(monkeypatch, Forgetful)
    rows = run(tmp_path / "card.jsonl", *driver, "--only", "crossings,matvecs")
    (hung,) = (each for each in rows if each["name"] == "crossings")
    assert hung["error"].startswith("TimeoutError: ")
    assert any(each["name"].startswith("matvec") and each["median"] for each in rows)


class Broken(RecordingDriver):
    """Fails at the first copy, and then at everything that asks for a stream, as cards do."""

    def copy(self, *given: object) -> None:
        self.failures["copy"] = "cudaErrorIllegalAddress"
        self._fail("copy")

    def is_stream_idle(self, stream: int) -> bool:
        self._fail("copy")
        return super().is_stream_idle(stream)


def test_a_card_that_fails_is_a_line_per_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = named(monkeypatch, Broken)
    rows = run(tmp_path / "card.jsonl", *driver, "--only", "rates,overlap")
    assert [each["name"] for each in rows] == ["machine", "rates", "overlap"]
    for each in rows[1:]:
        assert each["error"] == "CudaError: copy: cudaErrorIllegalAddress"


def test_no_time_is_a_line(tmp_path: Path) -> None:
    driver = ("--driver", "recording_driver:RecordingDriver")
    rows = run(tmp_path / "card.jsonl", *driver, "--minutes", "0")
    assert all("skipped" in each for each in rows[1:])


def test_no_card_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu import main

    assert main(named(monkeypatch, lambda: RecordingDriver(num_devices=0))) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "error: no measurement without a CUDA card: cudaGetDeviceCount: no CUDA card\n"
    )


@pytest.mark.parametrize("wrong", [["--only", "rates,all"], ["--repeats", "0"], ["--rounds", "0"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    from gpu import main

    with pytest.raises(SystemExit) as raised:
        main(wrong)
    assert raised.value.code == 2


PEER = """
import json, pathlib, sys
name = pathlib.Path(__file__).stem
with open(pathlib.Path(__file__).with_name("runs"), "a") as runs:
    print(name, *[each for each in sys.argv if "gpu" in each], file=runs)
turn = len(pathlib.Path(__file__).with_name("runs").read_text().splitlines())
if name == "llamacpp_run" and "--gpu-layers=3" in sys.argv:
    sys.exit("error: no room on the card")
rate = {"shadowlane_run": 100.0, "accelerate_run": 10.0, "llamacpp_run": 50.0}[name] + turn
print("a word before")
print(json.dumps({"decode_tok_per_s": rate, "prefill_tok_per_s": 2 * rate, "version": "1",
                  "settings": {}}))
"""


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Peers that note when they are run, instead of those that need a card."""
    import gpu_models

    folder = tmp_path / "peers"
    folder.mkdir()
    for name in ("shadowlane_run", "accelerate_run", "llamacpp_run"):
        (folder / f"{name}.py").write_text(PEER)
    monkeypatch.setattr(gpu_models, "PEERS", folder)
    monkeypatch.setattr(gpu_models, "num_layers", lambda path: 4)
    monkeypatch.setattr(gpu_models, "why_not", lambda engine, course: None)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 512}')
    (folder / "model.safetensors").write_bytes(bytes(4000))
    return folder


RECORDING = ("--driver", "recording_driver:RecordingDriver", "--only", "models")


def test_models_are_run_in_turns_at_three_budgets(tmp_path: Path, peers: Path, model: Path) -> None:
    given = ("--model", str(model), "--gguf", str(model / "x.gguf"), "--rounds", "2")
    rows = run(tmp_path / "card.jsonl", *RECORDING, *given)
    one_round = [
        line
        for percent in (25, 50, 75)
        for line in (
            f"shadowlane_run --set=gpu_memory={40 * percent}",
            f"accelerate_run --gpu={40 * percent}",
            f"llamacpp_run --gpu-layers={percent // 25}",
        )
    ]
    assert (peers / "runs").read_text().splitlines() == 2 * one_round
    found = {each["name"]: each for each in rows}
    decode = found["accelerate with 25 % of the weights' bytes: decode"]
    assert (decode["median"], decode["p99"], decode["most"]) == (16.5, 12.0, 21.0)
    assert (decode["unit"], decode["rounds"]) == ("tok/s", 2)
    ratios = [101.0 / 12.0, 110.0 / 21.0]
    assert decode["ratio_of_first"] == pytest.approx([sum(ratios) / 2, ratios[1], ratios[0]])
    failed = found["llama.cpp with 75 % of the weights' bytes"]
    assert failed["error"] == "exit 1: error: no room on the card"
    assert "llama.cpp with 75 % of the weights' bytes: decode" not in found
    assert "llama.cpp with 50 % of the weights' bytes: prefill" in found


def test_what_is_not_installed_is_a_line(
    tmp_path: Path, peers: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_models

    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(gpu_models, "PEERS", peers)
    monkeypatch.setattr(gpu_models, "has_package", lambda python, package: False)
    rows = run(tmp_path / "card.jsonl", *RECORDING, "--model", str(model), "--rounds", "1")
    found = {each["name"]: each for each in rows}
    assert found["model with accelerate"]["skipped"] == "accelerate is not installed"
    assert "needs --gguf" in found["model with llama.cpp"]["skipped"]
    assert (peers / "runs").read_text().count("shadowlane_run") == 3


def test_models_end_when_the_time_is_over(peers: Path, model: Path) -> None:
    import time

    import gpu_models

    course = gpu_models.Course(model, model / "x.gguf", "python", rounds=3)
    (line,) = gpu_models.models(course, time.monotonic() + gpu_models.LEAST_S / 2)
    assert line.extras["skipped"] == "no time is left for all rounds"
    assert not (peers / "runs").exists()


def test_a_model_that_is_not_there_is_a_line(tmp_path: Path) -> None:
    rows = run(tmp_path / "card.jsonl", *RECORDING, "--model", str(tmp_path / "none"))
    assert rows[-1]["name"] == "models"
    assert rows[-1]["error"].startswith("ModelError: no such model")
