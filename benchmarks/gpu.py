"""The first hour with a card: everything that is only known by trying, in under eight minutes.

    python benchmarks/gpu.py --out card.jsonl

One JSON line per measurement: {name, median, p99, unit, ...}. A section that fails or hangs leaves
a line that says so, and the next one begins: a watchdog advances all counters after 3 s. Exit code
2 and one line where there is no card.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# before the driver is loaded: no false dependences, no module loaded behind a wait
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import gpu_copies
import gpu_crossings
import gpu_kernels
import gpu_models
from gpu_rig import Rig, Row, Section, note
from machine import hardware_line, versions

from shadowlane.actors.cuda.driver import CudaError
from shadowlane.models import resolve_model
from shadowlane.sizes import parse_size

SECTIONS: list[tuple[str, Section]] = [
    ("device", gpu_copies.device),
    ("pinning", gpu_copies.pinning),
    ("contexts", gpu_copies.contexts),
    ("sharing", gpu_copies.sharing),
    ("rates", gpu_copies.rates),
    ("overlap", gpu_copies.overlap),
    ("crossings", gpu_crossings.crossings),
    ("under weights", gpu_crossings.under_weights),
    ("behind kernels", gpu_crossings.behind_kernels),
    ("queue depth", gpu_crossings.queue_depth),
    ("stream aliasing", gpu_crossings.stream_aliasing),
    ("matvecs", gpu_kernels.matvecs),
]
MODELS = "models"  # the last section; it needs the card for itself


def run_section(rig: Rig, name: str, section: Section, until: float, out: TextIO) -> None:
    """Print a section's rows as they come, and what ended it early."""

    def tell(line: Row) -> None:
        print(line.json(), file=out, flush=True)

    if time.monotonic() >= until:
        tell(note(name, skipped="no time is left"))
        return
    try:
        for line in section(rig):
            tell(line)
            if time.monotonic() >= until:
                tell(note(name, skipped="no time is left for the rest"))
                return
    except Exception as error:  # whatever it is, the next section may still work
        tell(note(name, error=" ".join(f"{type(error).__name__}: {error}".split())))
    finally:
        with suppress(CudaError):  # a card that has failed fails at everything; the lines say so
            rig.streams.abandon(5.0)


def run_models(given: argparse.Namespace, until: float, out: TextIO) -> None:
    """The last section: other processes on the card, whose memory is theirs."""

    def tell(line: Row) -> None:
        print(line.json(), file=out, flush=True)

    if time.monotonic() >= until:
        tell(note(MODELS, skipped="no time is left"))
        return
    try:
        model = resolve_model(given.model)
        gguf = model if model.suffix == ".gguf" else given.gguf
        course = gpu_models.Course(model, gguf, given.peer_python, given.rounds)
        for line in gpu_models.models(course, until):
            tell(line)
    except Exception as error:  # what was measured before stands
        tell(note(MODELS, error=" ".join(f"{type(error).__name__}: {error}".split())))


def close(rig: Rig) -> None:
    with suppress(CudaError):
        rig.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the lines here as well as to the terminal")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after so long")
    parser.add_argument("--card", type=int, default=0, help="number of the card")
    parser.add_argument("--size", default="1GiB", help="weights to copy, in RAM and on the card")
    parser.add_argument("--repeats", type=int, default=200, help="round trips of each kind")
    parser.add_argument("--model", default="smollm2", help="of the last section: a name or a path")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--peer-python", default=sys.executable, help="with accelerate, llama.cpp")
    parser.add_argument("--rounds", type=int, default=3, help="of the last section")
    parser.add_argument("--only", help="comma-separated sections; default: all")
    for option, default in (
        ("--driver", "shadowlane.actors.cuda.driver:CudaDriver"),
        ("--kernels", "gpu_kernels:TorchKernels"),
    ):
        parser.add_argument(option, default=default, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    known = [*(name for name, _ in SECTIONS), MODELS]
    wanted = given.only.split(",") if given.only else known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"sections must be among {', '.join(known)}; got {unknown[0]}")
    if given.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {given.repeats}")
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {given.rounds}")

    until = time.monotonic() + 60 * given.minutes
    try:
        nbytes = parse_size(given.size)
        rig = Rig(given.driver, given.kernels, given.card, nbytes, given.repeats)
    except (CudaError, ImportError, IndexError, ValueError) as error:
        print(f"error: no measurement without a CUDA card: {error}", file=sys.stderr)
        return 2
    gc.disable()  # a collection may unload a module, and wait for the card
    out = Tee(given.out) if given.out else sys.stdout
    try:
        head = note(
            "machine", hardware=hardware_line(), versions=versions("torch", "cuda-bindings")
        )
        print(head.json(), file=out, flush=True)
        for name, section in SECTIONS:
            if name in wanted:
                run_section(rig, name, section, until, out)
        close(rig)
        if MODELS in wanted:
            run_models(given, until, out)
    finally:
        close(rig)
        gc.enable()
        if isinstance(out, Tee):
            out.close()
    return 0


class Tee:
    """A file that is also shown."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, text: str) -> int:
        sys.stdout.write(text)
        return self._file.write(text)

    def flush(self) -> None:
        sys.stdout.flush()
        self._file.flush()

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    sys.exit(main())
