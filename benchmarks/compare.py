"""Shadowlane and its peers on the same model, in turns, optionally within one memory limit.

    python benchmarks/compare.py --model DIR --gguf FILE --peer-python PEERS/bin/python \\
        --engines shadowlane,transformers,llamacpp-mmap --rounds 5
    python benchmarks/compare.py ... --memory-limit 4GiB --ram 2.4GiB --accelerate-ram 3GiB --cold

Each measurement is a process of its own; a round runs every engine once (A B C, A B C, ...), and
ratios are taken within the round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import vocab_size
from machine import drop_page_cache, hardware_line, run_limited, versions
from measure import Spread, as_json, markdown_table, ratio_per_round, spread

from shadowlane.sizes import parse_size

PEERS = Path(__file__).resolve().parent / "peers"
ENGINES = (
    "shadowlane",
    "transformers",
    "transformers-static",
    "accelerate",
    "llamacpp-mmap",
    "llamacpp-ram",
    "airllm",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One process: its result line, or why there is none."""

    engine: str
    result: dict | None
    failure: str | None
    group_peak_nbytes: int | None  # of the memory group; page cache included


@dataclass(frozen=True, slots=True)
class Row:
    """One engine over all rounds; ratios are those of the first engine to this one."""

    engine: str
    version: str
    prefill_tok_per_s: Spread | None
    decode_tok_per_s: Spread | None
    prefill_ratio: Spread | None
    decode_ratio: Spread | None
    load_s: Spread | None
    memory_nbytes: Spread | None
    group_peak_nbytes: Spread | None
    same_tokens: str  # length of the common prefix with the first engine's tokens
    failures: tuple[str, ...]


def command_of(engine: str, given: argparse.Namespace, vocab: int) -> list[str]:
    """The command line that measures one engine once."""
    peer = given.peer_python
    script, python, model, extra = {
        "shadowlane": ("shadowlane_run.py", sys.executable, given.model, []),
        "transformers": ("transformers_run.py", peer, given.model, []),
        "transformers-static": ("transformers_run.py", peer, given.model, ["--cache", "static"]),
        "accelerate": ("accelerate_run.py", peer, given.model, ["--ram", given.accelerate_ram]),
        "llamacpp-mmap": ("llamacpp_run.py", peer, given.gguf, []),
        "llamacpp-ram": ("llamacpp_run.py", peer, given.gguf, ["--no-mmap"]),
        "airllm": ("airllm_run.py", given.airllm_python or peer, given.model,
                   ["--split-folder", given.airllm_folder]),
    }[engine]  # fmt: skip
    if model is None or None in extra:
        raise ValueError(f"{engine} needs --gguf, --accelerate-ram or --airllm-folder; see --help")
    if engine == "shadowlane":
        extra = (["--ram", given.ram] if given.ram else []) + given.shadowlane_options
    return [
        python,
        str(PEERS / script),
        "--model",
        str(model),
        f"--prompt-tokens={given.prompt_tokens}",
        f"--new-tokens={given.new_tokens}",
        f"--threads={given.threads}",
        f"--vocab={vocab}",
        f"--warmup={given.warmup}",
        *extra,
    ]


def last_json_line(text: str) -> dict | None:
    """The result line of a peer; engines may print before it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                return None
    return None


def measure_once(engine: str, command: list[str], given: argparse.Namespace) -> Outcome:
    if given.cold:
        drop_page_cache()
    limit = parse_size(given.memory_limit) if given.memory_limit else None
    done, peak, was_killed = run_limited(command, limit, given.timeout)
    result = last_json_line(done.stdout) if done.returncode == 0 else None
    failure = None
    if result is None:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        failure = "memory limit" if was_killed else f"exit {done.returncode}: {(said or [''])[-1]}"
    return Outcome(engine, result, failure, peak)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for length, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return length
    return min(len(left), len(right))


def summarise(engines: Sequence[str], rounds: Sequence[Sequence[Outcome]]) -> list[Row]:
    """One row per engine; the first engine is what the others are compared with."""
    columns = list(zip(*rounds, strict=True))

    def values(column: Sequence[Outcome], key: str) -> list[float | None]:
        return [outcome.result.get(key) if outcome.result else None for outcome in column]

    first = columns[0]
    reference = next((o.result["token_ids"] for o in first if o.result), None)
    rows = []
    for engine, column in zip(engines, columns, strict=True):
        result = next((o.result for o in column if o.result), None)
        same = "-"
        if result is not None and reference is not None:
            length = common_prefix(reference, result["token_ids"])
            same = f"{length}/{len(reference)}"
        rows.append(
            Row(
                engine=engine,
                version=result["version"] if result else "-",
                prefill_tok_per_s=spread(values(column, "prefill_tok_per_s")),
                decode_tok_per_s=spread(values(column, "decode_tok_per_s")),
                prefill_ratio=spread(
                    ratio_per_round(
                        values(first, "prefill_tok_per_s"), values(column, "prefill_tok_per_s")
                    )
                ),
                decode_ratio=spread(
                    ratio_per_round(
                        values(first, "decode_tok_per_s"), values(column, "decode_tok_per_s")
                    )
                ),
                load_s=spread(values(column, "load_s")),
                memory_nbytes=spread(values(column, "peak_rss_bytes")),
                group_peak_nbytes=spread(o.group_peak_nbytes for o in column if o.result),
                same_tokens=same,
                failures=tuple(sorted({o.failure for o in column if o.failure})),
            )
        )
    return rows


def as_markdown(rows: Sequence[Row]) -> str:
    def shown(value: Spread | None, digits: int = 2, scale: float = 1.0) -> str:
        if value is None:
            return "-"
        scaled = Spread(value.median / scale, value.low / scale, value.high / scale, value.count)
        return scaled.text(digits)

    first = rows[0].engine
    table = markdown_table(
        ("engine", "prefill tok/s", "decode tok/s", f"{first} / it, prefill",
         f"{first} / it, decode", "load s", "memory GB", "same tokens"),
        [
            (
                row.engine + (f" (failed: {'; '.join(row.failures)})" if row.failures else ""),
                shown(row.prefill_tok_per_s, 1),
                shown(row.decode_tok_per_s),
                shown(row.prefill_ratio),
                shown(row.decode_ratio),
                shown(row.load_s, 1),
                shown(row.memory_nbytes, 2, 1e9),
                row.same_tokens,
            )
            for row in rows
        ],
    )  # fmt: skip
    engines = "; ".join(f"{row.engine}: {row.version}" for row in rows)
    return f"{table}\n\n{engines}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from these words (none: the command line); other benchmarks reuse them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True,
                        help="Hugging Face directory, or a GGUF file")  # fmt: skip
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--engines", default="shadowlane,transformers", help=", ".join(ENGINES))
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of the peers")
    parser.add_argument("--airllm-python", help="interpreter of AirLLM, if another one")
    parser.add_argument("--airllm-folder", help="where AirLLM may keep its per-layer copy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", help="Shadowlane's budget (default: the engine's own choice)")
    parser.add_argument("--accelerate-ram", help="what accelerate may keep on the CPU")
    parser.add_argument("--shadowlane-options", type=shlex.split, default=[],
                        help="more options of peers/shadowlane_run.py, in one string")  # fmt: skip
    parser.add_argument("--memory-limit", help="of the whole process tree; implies --cold (root)")
    parser.add_argument(
        "--cold", action="store_true", help="drop the page cache before each (root)"
    )
    parser.add_argument("--warmup", type=int, default=4, metavar="TOKENS",
                        help="of an untimed answer to another prompt, before")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per process")
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args(words)
    given.cold = given.cold or given.memory_limit is not None
    unknown = [name for name in given.engines.split(",") if name not in ENGINES]
    if unknown:
        parser.error(f"engines must be among {', '.join(ENGINES)}; got {', '.join(unknown)}")
    if given.rounds < 1:
        parser.error(f"rounds must be positive; got {given.rounds}")
    return given


def main() -> None:
    given = parse()
    engines = given.engines.split(",")
    vocab = vocab_size(given.model)
    rounds: list[list[Outcome]] = []
    try:
        commands = {engine: command_of(engine, given, vocab) for engine in engines}
        for number in range(given.rounds):
            rounds.append([])
            for engine in engines:
                outcome = measure_once(engine, commands[engine], given)
                rate = outcome.result and outcome.result["decode_tok_per_s"]
                said = outcome.failure or (f"{rate:.2f} tok/s" if rate else "done")
                print(f"round {number + 1}/{given.rounds} {engine}: {said}", file=sys.stderr)
                rounds[-1].append(outcome)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    rows = summarise(engines, rounds)
    hardware = hardware_line(given.model)
    if given.output == "json":
        print(as_json({
            "hardware": hardware,
            "versions": versions("shadowlane", "ray", "torch", "transformers", "numba", "numpy"),
            "command": shlex.join(sys.argv),
            "rows": rows,
            "rounds": rounds,
        }))  # fmt: skip
        return
    print(f"{hardware}  \n{versions('shadowlane', 'ray', 'torch', 'numba', 'numpy')}  ")
    print(f"`{shlex.join(sys.argv)}`  ")
    print(
        f"{given.prompt_tokens} prompt + {given.new_tokens} new tokens, "
        f"{given.rounds} rounds in turns, median (least-greatest)\n"
    )
    print(as_markdown(rows))


if __name__ == "__main__":
    main()
