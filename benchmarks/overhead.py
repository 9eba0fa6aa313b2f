"""What the engine itself costs: per instruction, per step, and per hop between two actors.

    python benchmarks/overhead.py --model DIR

Instruction: the real walk over operators that do nothing. Step: the share of a lane's time in which
no operator ran, on the real model. Hop: a counter in shared memory between two Ray actors, spinning
and sleeping, on an idle machine and while both cores compute.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import PEERS, last_json_line
from machine import hardware_line, run_limited, versions
from measure import as_json, markdown_table, percentile, spread

WORK_NS = 50_000  # computed between two hops: about one operator of a small model
SPIN_NS = 50_000  # how long a wait spins before it sleeps
FOLDER = str(Path(__file__).resolve().parent)


class Hopper:
    """An actor at one end of the counters; it opens the driver's memory by its /proc path."""

    def __init__(self, path: str, core: int, folder: str) -> None:
        sys.path.insert(0, folder)
        import hops
        import numpy as np

        os.sched_setaffinity(0, {core})  # of this thread, which also runs the methods
        with open(path, "r+b", buffering=0) as file:
            self._area = mmap.mmap(file.fileno(), hops.HOPS_NBYTES)
        self._words = np.frombuffer(self._area, np.uint8)
        self._hops = hops

    def compile(self) -> None:
        """Make both loops ready, so that no hop waits for a compiler."""
        import numpy as np

        base = self._words.ctypes.data
        self._hops.serve_hops(base, 0, 0, 0)
        self._hops.time_hops(base, 0, 0, 0, np.zeros(1, np.int64))

    def serve(self, count: int, spin_ns: int, work_ns: int) -> int:
        return self._hops.serve_hops(self._words.ctypes.data, count, spin_ns, work_ns)

    def time(self, count: int, spin_ns: int, work_ns: int) -> Any:
        import numpy as np

        taken = np.zeros(count, np.int64)
        failed = self._hops.time_hops(self._words.ctypes.data, count, spin_ns, work_ns, taken)
        if failed:
            raise RuntimeError(f"every hop must return; number {failed} did not")
        return taken


def measure_hops(cores: Sequence[int], count: int) -> dict[str, dict[str, float]]:
    """Microseconds of one hop (half a round trip): median and 99th percentile of each case.

    Back to back is the least a hop can take. In an engine both ends compute in between, so that the
    caches and the scheduler have other things to do; and another process may want the cores.
    """
    import hops
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")
    handle = os.memfd_create("hops")
    os.ftruncate(handle, hops.HOPS_NBYTES)
    path = f"/proc/{os.getpid()}/fd/{handle}"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    result = {}
    try:
        actor = ray.remote(num_cpus=0)(Hopper)
        near, far = (actor.remote(path, core, FOLDER) for core in cores[:2])
        ray.get([near.compile.remote(), far.compile.remote()])
        for case, work_ns, is_loaded in (
            ("back to back", 0, False),
            ("both cores compute", WORK_NS, False),
            ("both cores compute, another process on each", WORK_NS, True),
        ):
            busy = [start_busy_loop(core) for core in cores[:2]] if is_loaded else []
            try:
                for waiting, spin_ns in (("spin", SPIN_NS), ("sleep", 0)):
                    os.pwrite(handle, bytes(hops.HOPS_NBYTES), 0)
                    served = far.serve.remote(count, spin_ns, work_ns)
                    taken = ray.get(near.time.remote(count, spin_ns, work_ns))
                    ray.get(served)
                    half_us = (taken[count // 10 :] / 2000).tolist()
                    result[f"{waiting}, {case}"] = {
                        "median_us": percentile(half_us, 50),
                        "p99_us": percentile(half_us, 99),
                    }
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    finally:
        ray.shutdown()
        os.close(handle)
    return result


def start_busy_loop(core: int) -> subprocess.Popen[bytes]:
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code])


def measure_steps(given: argparse.Namespace) -> list[dict]:
    """Runs of the real model, decoding: how busy its compute lanes were."""
    results = []
    for _ in range(given.rounds):
        done, _, _ = run_limited(
            [sys.executable, str(PEERS / "shadowlane_run.py"), f"--model={given.model}",
             "--prompt-tokens=1", f"--new-tokens={given.new_tokens}",
             f"--threads={given.threads}", f"--warmup={given.new_tokens}"],
            None,
            given.timeout,
        )  # fmt: skip
        result = last_json_line(done.stdout)
        if done.returncode != 0 or result is None:
            said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            raise ValueError(f"the engine must finish; {said[-1]}")
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="also measure steps of this model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", type=int, default=152, help="per step (30 layers)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hops", type=int, default=20000)
    parser.add_argument("--skip-hops", action="store_true", help="start no Ray")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    import hops

    cores = sorted(os.sched_getaffinity(0))
    per_instruction = {
        workers: spread(
            1e6 * seconds
            for seconds in hops.time_empty_steps(given.instructions, given.steps, workers)
        )
        for workers in (1, given.threads)
    }
    hop_times = {}
    if not given.skip_hops:
        if len(cores) < 2:
            raise SystemExit(f"error: hops need two cores; got {len(cores)}")
        hop_times = measure_hops(cores, given.hops)
    idle: dict[str, object] = {}
    if given.model:
        try:
            steps = measure_steps(given)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        for lane in (name for name in steps[0]["lanes"] if name.startswith("cpu:")):
            idle[lane] = spread(100 - result["lanes"][lane]["busy_pct"] for result in steps)

    if given.output == "json":
        print(as_json({"hardware": hardware_line(given.model), "hops": hop_times,
                       "instruction_us": per_instruction, "idle_pct": idle}))  # fmt: skip
        return
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'ray', 'numba')}\n")
    rows = [
        (f"instruction, {workers} worker{'s' if workers > 1 else ''}", value.text(), "us")
        for workers, value in per_instruction.items()
        if value is not None
    ]
    rows += [
        (f"hop, {name}", f"{times['median_us']:.1f} (p99 {times['p99_us']:.1f})", "us")
        for name, times in hop_times.items()
    ]
    rows += [(f"no operator running, {lane}", value.text(), "% of decode")  # type: ignore[attr-defined]
             for lane, value in idle.items() if value is not None]  # fmt: skip
    print(markdown_table(("what", "median (least-greatest)", "unit"), rows))


if __name__ == "__main__":
    main()
