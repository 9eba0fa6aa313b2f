"""Compiled code is loaded before steps need it, and by one process at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shadowlane.ops import warm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warm, "compiled_code_directory", lambda: tmp_path / "code")
    return tmp_path / "code"


class Kernel:
    """Stands for a compiled function; notes what it was compiled for."""

    def __init__(self) -> None:
        self.signatures: list[tuple] = []

    def compile(self, signature: tuple) -> None:
        self.signatures.append(signature)


def test_it_is_warm_once_all_parts_are_complete(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    for part in ("counter", "decode", "prefill"):
        monkeypatch.setattr(warm, f"{part}_kernels", lambda: ((kernel, (warm.I64,)),))
    assert not warm.is_warm()
    warm.warm_decode()
    assert not warm.is_warm()
    warm.warm_prefill()
    assert warm.is_warm()
    assert not warm.is_warm(["a layout nobody has loaded"])
    assert kernel.signatures == [(warm.I64,)] * 3


def test_a_second_process_waits_while_the_first_compiles(cache: Path) -> None:
    cache.mkdir()
    started, passed = threading.Event(), threading.Event()

    def second() -> None:
        started.set()
        with warm._compiling_alone("decode"):
            passed.set()

    with (cache / "decode.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        started.wait()
        assert not passed.wait(0.2)
    assert passed.wait(30)
    thread.join()


def test_nobody_waits_for_what_is_complete(cache: Path) -> None:
    with warm._compiling_alone("decode"):
        pass
    with (cache / "decode.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with warm._compiling_alone("decode"):
            pass


def test_what_fails_is_not_marked_complete(cache: Path) -> None:
    with pytest.raises(RuntimeError), warm._compiling_alone("decode"):
        raise RuntimeError("the compiler fell over")
    assert not (cache / "decode.complete").exists()


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(warm, "compiled_code_directory", lambda: tmp_path / "file" / "code")
    with warm._compiling_alone("decode"):
        pass
    assert not warm.is_warm()


STEPS = """
import sys
from pathlib import Path
from inprocess import running
from shadowlane.ops import warm

def signatures():
    parts = (warm.counter_kernels, warm.decode_kernels, warm.prefill_kernels)
    return {(f.__name__, each) for part in parts for f, _ in part() for each in f.signatures}

warm.warm_decode()
warm.warm_prefill()
before = signatures()
with running(Path(sys.argv[1])) as run:
    run.generate(list(range(1, 21)), 4)
    run.generate([1, 2, 3], 4)
    run.logits(list(range(1, 21)))
for name, signature in sorted(signatures() - before, key=str):
    print(name, signature)
"""


def test_steps_compile_nothing_after_warming(tiny_model: Callable[..., Path]) -> None:
    """A prompt long enough for torch, a short one, and tokens, in a process that ran no other."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "actors")])
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(tiny_model("qwen3"))],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "compiled by steps, missing in ops/warm.py"
