"""One core taken by another process while two CPU workers decode: adaptive against static.

    python benchmarks/disturbed.py --model DIR --rounds 3

Every configuration runs as its own process, in turns, with the same disturbance: after a quiet
start a busy loop is pinned to one core. The best *static* configuration for the disturbed machine
is measured in the same round, and the adaptive one is held against it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compare import PEERS, last_json_line
from machine import hardware_line, run_limited, versions
from measure import Spread, as_json, markdown_table, ratio_per_round, spread

# Arguments of LLM for each configuration. The disturbed core is the last one, so one worker alone
# sits on a quiet core. Splits are the shares of rows of cpu:0 and cpu:1.
ADAPTIVE = "adaptive"
CONFIGURATIONS: dict[str, dict[str, object]] = {
    ADAPTIVE: {"cpu_workers": 2, "cpu_threads": 2},
    "one worker": {"cpu_workers": 1, "cpu_threads": 1, "replan": False},
    "two, even, spinning": {"cpu_workers": 2, "cpu_threads": 2, "replan": False,
                            "shares": [0.5, 0.5], "spin_us": 50},
    "two, even, sleeping": {"cpu_workers": 2, "cpu_threads": 2, "replan": False,
                            "shares": [0.5, 0.5], "spin_us": 0},
    "two, 2:1, sleeping": {"cpu_workers": 2, "cpu_threads": 2, "replan": False,
                           "shares": [2 / 3, 1 / 3], "spin_us": 0},
    "two, 3:1, sleeping": {"cpu_workers": 2, "cpu_threads": 2, "replan": False,
                           "shares": [0.75, 0.25], "spin_us": 0},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phases:
    """Decode speed before the disturbance and after the engine had its time to settle."""

    quiet_tok_per_s: float
    disturbed_tok_per_s: float


def phases(
    times: Sequence[float], disturbed_at: float, settle_s: float, settle_steps: int
) -> Phases:
    """Speeds from the times at which tokens came.

    Settling ends after `settle_s` seconds or `settle_steps` steps, whichever is later; what
    comes after that counts.
    """
    quiet = [time for time in times if time < disturbed_at]
    later = [time for time in times if time >= disturbed_at]
    counted = [
        time
        for number, time in enumerate(later)
        if number >= settle_steps and time >= disturbed_at + settle_s
    ]
    if len(quiet) < 2 or len(counted) < 2:
        raise ValueError(
            f"both phases must hold two tokens; got {len(quiet)} and {len(counted)} of {len(times)}"
        )
    return Phases(
        (len(quiet) - 1) / (quiet[-1] - quiet[0]),
        (len(counted) - 1) / (counted[-1] - counted[0]),
    )


def time_to_settle(
    times: Sequence[float], disturbed_at: float, wanted_tok_per_s: float, window: int = 5
) -> tuple[int, float] | None:
    """Steps and seconds after the disturbance until `window` steps in a row ran at the wanted
    speed; None if that never happened. The steps of the window itself are not counted."""
    later = [time for time in times if time >= disturbed_at]
    for first in range(len(later) - window):
        if window / (later[first + window] - later[first]) >= wanted_tok_per_s:
            return first, later[first] - disturbed_at
    return None


def measure_once(name: str, given: argparse.Namespace, vocab: int) -> dict | str:
    """The child's result, or why there is none."""
    options = [f"--set={key}={json.dumps(value)}" for key, value in CONFIGURATIONS[name].items()]
    done, _, _ = run_limited(
        [sys.executable, str(PEERS / "disturbed_run.py"), f"--model={given.model}",
         f"--vocab={vocab}", f"--new-tokens={given.new_tokens}", f"--core={given.core}",
         f"--quiet-tokens={given.quiet_tokens}", "--prompt-tokens=16", *options],
        None,
        given.timeout,
    )  # fmt: skip
    result = last_json_line(done.stdout) if done.returncode == 0 else None
    if result is None:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--quiet-tokens", type=int, default=100, help="before the disturbance")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)),
                        help="core that the busy loop takes")  # fmt: skip
    parser.add_argument("--settle-s", type=float, default=1.0)
    parser.add_argument("--settle-steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    vocab = json.loads((given.model / "config.json").read_text())["vocab_size"]
    runs: dict[str, list[dict | str]] = {name: [] for name in CONFIGURATIONS}
    for number in range(given.rounds):
        for name in CONFIGURATIONS:
            runs[name].append(measure_once(name, given, vocab))
            print(f"round {number + 1}/{given.rounds} {name}: done", file=sys.stderr)
    try:
        report(given, runs)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def report(given: argparse.Namespace, runs: dict[str, list[dict | str]]) -> None:
    speeds: dict[str, list[Phases | None]] = {
        name: [
            None
            if isinstance(run, str)
            else phases(run["times"], run["disturbed_at"], given.settle_s, given.settle_steps)
            for run in column
        ]
        for name, column in runs.items()
    }
    disturbed = {
        name: [phase.disturbed_tok_per_s if phase else None for phase in column]
        for name, column in speeds.items()
    }
    static = [column for name, column in disturbed.items() if name != ADAPTIVE]
    best = [max((v for v in values if v is not None), default=None)
            for values in zip(*static, strict=True)]  # fmt: skip
    ratio = spread(ratio_per_round(disturbed[ADAPTIVE], best))
    settling = [
        None if isinstance(run, str) or wanted is None
        else time_to_settle(run["times"], run["disturbed_at"], 0.9 * wanted)
        for run, wanted in zip(runs[ADAPTIVE], best, strict=True)
    ]  # fmt: skip
    if given.output == "json":
        print(as_json({"hardware": hardware_line(given.model), "speeds": speeds, "ratio": ratio,
                       "settling": settling, "runs": runs}))  # fmt: skip
        return

    def shown(values: Spread | None) -> str:
        return values.text(1) if values else "-"

    rows = []
    for name, column in speeds.items():
        reasons = sorted({run for run in runs[name] if isinstance(run, str)})
        rows.append(
            (
                name + (f" (failed: {'; '.join(reasons)})" if reasons else ""),
                shown(spread(phase.quiet_tok_per_s if phase else None for phase in column)),
                shown(spread(phase.disturbed_tok_per_s if phase else None for phase in column)),
            )
        )
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'ray', 'torch', 'numba')}\n")
    print(markdown_table(("configuration", "quiet tok/s", "disturbed tok/s"), rows))
    print(f"\nadaptive / best static, per round: {ratio.text() if ratio else '-'}")
    for number, settled in enumerate(settling):
        said = f"{settled[0]} steps, {settled[1]:.2f} s" if settled else "not reached"
        print(f"round {number + 1}: 90 % of the best static after {said}")


if __name__ == "__main__":
    main()
