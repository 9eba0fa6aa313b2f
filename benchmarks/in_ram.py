"""Models that fit: decode and prefill against peers, and against the memory's own bandwidth.

    python benchmarks/in_ram.py --model DIR [--gguf FILE] --peer-python PEERS/bin/python

Each round measures the memory bandwidth, then every engine: a long prompt for prefill, then decode
at batch 1. Before that, each answers another prompt of the same length. "of DRAM" is the share of
that round's bandwidth which the decoded tokens' weights took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import compare
from checkpoint import decode_nbytes, vocab_size
from machine import benchmark_environment, hardware_line, versions
from measure import as_json, markdown_table, spread

LARGEST_NBYTES = 4 << 30  # more would only take longer
BANDWIDTH = Path(__file__).resolve().parent / "bandwidth.py"


def measure_dram(nbytes: int) -> float:
    """Bytes per second of reading so many bytes again and again, in a process of its own.

    As many as the model has: of a small one, a server's cache holds a good part, for the engine as
    for this measurement.
    """
    done = subprocess.run(
        [sys.executable, str(BANDWIDTH), "--dram", f"--size={nbytes}B"],
        capture_output=True,
        text=True,
        env=benchmark_environment(),
        check=True,
    )
    return float(json.loads(done.stdout)["dram_bytes_per_s"]["best"])


def share_of_dram(
    rates: Sequence[float | None], dram: Sequence[float], nbytes_per_token: int
) -> list[float | None]:
    """Weights read per second over what the memory gave in the same round."""
    return [
        rate * nbytes_per_token / bandwidth if rate else None
        for rate, bandwidth in zip(rates, dram, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Every other option of compare.py (--peer-python, --gguf, --threads, ...) is taken.",
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--engines", default="shadowlane,transformers,transformers-static")
    own, others = parser.parse_known_args()
    given = compare.parse(
        [f"--model={own.model}", f"--rounds={own.rounds}", f"--prompt-tokens={own.prompt_tokens}",
         f"--new-tokens={own.new_tokens}", f"--engines={own.engines}",
         f"--warmup={own.new_tokens}", *others]
    )  # fmt: skip
    engines = given.engines.split(",")
    vocab = vocab_size(given.model)
    dram: list[float] = []
    rounds: list[list[compare.Outcome]] = []
    try:
        nbytes = decode_nbytes(given.model)
        commands = {engine: compare.command_of(engine, given, vocab) for engine in engines}
        for number in range(given.rounds):
            dram.append(measure_dram(min(nbytes, LARGEST_NBYTES)))
            print(f"round {number + 1}: DRAM {dram[-1] / 1e9:.1f} GB/s", file=sys.stderr)
            rounds.append([compare.measure_once(name, commands[name], given) for name in engines])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    rows = compare.summarise(engines, rounds)
    shares = {}
    for engine, column in zip(engines, zip(*rounds, strict=True), strict=True):
        rates = [o.result["decode_tok_per_s"] if o.result else None for o in column]
        shares[engine] = spread(share_of_dram(rates, dram, nbytes))
    bandwidth = spread(dram)
    if given.output == "json":
        print(as_json({
            "hardware": hardware_line(given.model),
            "nbytes_per_token": nbytes,
            "dram_bytes_per_s": bandwidth,
            "share_of_dram": shares,
            "rows": rows,
            "rounds": rounds,
        }))  # fmt: skip
        return
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'ray', 'torch', 'numba')}\n")
    print(compare.as_markdown(rows))
    assert bandwidth is not None
    print(f"\n{nbytes / 1e9:.3f} GB of weights per token; DRAM "
          f"{bandwidth.median / 1e9:.1f} GB/s ({bandwidth.low / 1e9:.1f}-"
          f"{bandwidth.high / 1e9:.1f})\n")  # fmt: skip
    print(
        markdown_table(
            ("engine", "decode, of DRAM bandwidth"),
            [(name, share.text() if share else "-") for name, share in shares.items()],
        )
    )


if __name__ == "__main__":
    main()
