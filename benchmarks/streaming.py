"""A model that does not fit: decode with 0, 25, 50, 75 % of the weights resident, against fio.

    python benchmarks/streaming.py --model DIR --rounds 3

The budget for each share is searched with the planner, which reads no weights. Each round lets fio
read the same files (direct, same request size and depth) just before the engine runs; the ratio is
the disk lane's bytes per second during decode over fio's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from bandwidth import best_disk_bytes_per_s
from checkpoint import decode_nbytes, vocab_size, weight_files
from compare import PEERS, last_json_line
from machine import (
    disk_bytes_read,
    drop_page_cache,
    hardware_line,
    run_limited,
    versions,
)
from measure import as_json, find_budget, markdown_table, ratio_per_round, spread

from shadowlane.sizes import parse_size

STEP_NBYTES = 4 << 20  # how finely budgets are searched


@dataclass(frozen=True, slots=True)
class Reading:
    """One run at one budget."""

    decode_tok_per_s: float
    predicted_tok_per_s: float | None
    disk_nbytes_per_token: int  # by the plan
    disk_bytes_per_s: float  # while decoding
    fio_bytes_per_s: float  # just before
    witness_nbytes: int | None  # what the kernel saw read over the whole process, load included
    token_ids: tuple[int, ...]


def planned(model: Path, ram: int, threads: int, context: int) -> dict | None:
    """The plan for a budget; None where nothing fits."""
    from shadowlane.llm import plan_model

    try:
        return plan_model(model, ram=ram, cpu_threads=threads, dtype="bfloat16", ctx_size=context)
    except ValueError:
        return None


def budgets_for(
    model: Path, shares: list[float], threads: int, context: int
) -> dict[float, tuple[int, dict]]:
    """For each share of resident weights: the smallest budget that reaches it, and its plan."""
    total = decode_nbytes(model)
    high = 2 * total + (4 << 30)

    def resident_share(ram: int) -> float | None:
        plan = planned(model, ram, threads, context)
        return None if plan is None else 1 - plan["tiers"]["disk"] / total

    found = {}
    for share in shares:
        ram = find_budget(resident_share, share, 0, high, STEP_NBYTES)
        plan = planned(model, ram, threads, context)
        assert plan is not None
        found[share] = (ram, plan)
    return found


def measure_once(given: argparse.Namespace, ram: int, plan: dict, vocab: int) -> Reading:
    if given.cold:
        drop_page_cache()
    fio = best_disk_bytes_per_s(
        weight_files(given.model), parse_size(given.block), given.depth, given.fio_seconds
    )["best"]
    before = disk_bytes_read(given.model)
    done, _, _ = run_limited(
        [sys.executable, str(PEERS / "shadowlane_run.py"), f"--model={given.model}",
         f"--ram={ram}B", f"--threads={given.threads}", f"--vocab={vocab}",
         f"--prompt-tokens={given.prompt_tokens}", f"--new-tokens={given.new_tokens}",
         f"--set=ctx_size={context_of(given)}"],
        None,
        given.timeout,
    )  # fmt: skip
    after = disk_bytes_read(given.model)
    result = last_json_line(done.stdout)
    if done.returncode != 0 or result is None:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise ValueError(f"the engine must finish with {ram} bytes; {said[-1]}")
    rate = result["decode_tok_per_s"]
    return Reading(
        decode_tok_per_s=rate,
        predicted_tok_per_s=(result.get("plan") or {}).get("predicted_decode_tok_per_s"),
        disk_nbytes_per_token=plan["tiers"]["disk"],
        disk_bytes_per_s=plan["tiers"]["disk"] * rate,
        fio_bytes_per_s=fio,
        witness_nbytes=None if before is None or after is None else after - before,
        token_ids=tuple(result["token_ids"]),
    )


def context_of(given: argparse.Namespace) -> int:
    """As much context as the run needs and no more: KV must not differ between the budgets."""
    return given.prompt_tokens + given.new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="bfloat16 directory or GGUF file")
    parser.add_argument("--shares", default="0,25,50,75", help="percent of weights resident")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", default="4MiB", help="fio's request size: the engine's")
    parser.add_argument("--depth", type=int, default=4, help="fio's depth: the engine's")
    parser.add_argument("--fio-seconds", type=float, default=6.0)
    parser.add_argument("--cold", action="store_true", help="drop the page cache first (root)")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio must be installed; it is not on the path")
    try:
        shares = [float(text) / 100 for text in given.shares.split(",")]
        vocab = vocab_size(given.model)
        budgets = budgets_for(given.model, shares, given.threads, context_of(given))
        readings: dict[float, list[Reading]] = {share: [] for share in shares}
        for number in range(given.rounds):
            for share in shares:
                ram, plan = budgets[share]
                reading = measure_once(given, ram, plan, vocab)
                readings[share].append(reading)
                print(f"round {number + 1} {share:.0%}: {reading.decode_tok_per_s:.2f} tok/s, "
                      f"{reading.disk_bytes_per_s / 1e9:.2f} of "
                      f"{reading.fio_bytes_per_s / 1e9:.2f} GB/s", file=sys.stderr)  # fmt: skip
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    report(given, budgets, readings)


def report(
    given: argparse.Namespace,
    budgets: dict[float, tuple[int, dict]],
    readings: dict[float, list[Reading]],
) -> None:
    if given.output == "json":
        print(as_json({
            "hardware": hardware_line(given.model),
            "budgets": {f"{share:.0%}": ram for share, (ram, _) in budgets.items()},
            "plans": {f"{share:.0%}": plan for share, (_, plan) in budgets.items()},
            "readings": {f"{share:.0%}": column for share, column in readings.items()},
        }))  # fmt: skip
        return
    rows = []
    for share, column in readings.items():
        rate = spread(reading.decode_tok_per_s for reading in column)
        predicted = spread(reading.predicted_tok_per_s for reading in column)
        ours = [reading.disk_bytes_per_s for reading in column]
        theirs = [reading.fio_bytes_per_s for reading in column]
        ratio = spread(ratio_per_round(ours, theirs))
        disk, fio = spread(ours), spread(theirs)
        if rate is None or ratio is None or disk is None or fio is None:
            continue  # no rounds
        rows.append(
            (
                f"{share:.0%}",
                f"{budgets[share][0] / (1 << 20):.0f}",
                f"{column[0].disk_nbytes_per_token / 1e9:.2f}",
                rate.text(),
                predicted.text() if predicted else "-",
                f"{disk.median / 1e9:.2f}",
                f"{fio.median / 1e9:.2f}",
                ratio.text(),
            )
        )
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'ray', 'torch', 'numba')}\n")
    print(
        markdown_table(
            ("resident", "budget MiB", "GB read per token", "tok/s", "predicted", "disk GB/s",
             "fio GB/s", "disk / fio"),
            rows,
        )
    )  # fmt: skip
    distinct = {reading.token_ids for column in readings.values() for reading in column}
    print(f"\nsame tokens at every budget: {'yes' if len(distinct) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
