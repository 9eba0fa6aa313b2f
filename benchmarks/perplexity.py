"""Perplexity of the same file on the same text, here and in llama.cpp.

    python benchmarks/perplexity.py --model FILE.gguf --text FILE --peer-python PEERS/bin/python

Both read the same windows of the same token ids, and the same tokens are scored, as `shadowlane
perplexity` and llama.cpp's tool do it. So the difference is one of arithmetic alone, and is known
much better than either figure: its error comes from the differences token by token. Here packed
weights meet activations in two ways, and both are measured: expanded, as `shadowlane perplexity`
and long prompts have it, and with activations rounded to bytes, as in decode.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from compare import PEERS
from machine import hardware_line, versions
from measure import as_json, markdown_table

from shadowlane.ops.table import MAX_DECODE_ROWS
from shadowlane.quality import check_window, cut_windows, logit_rows_for, perplexity_of


def scores_there(given: argparse.Namespace, text: str, windows: list[list[int]]) -> dict:
    done = subprocess.run(
        [given.peer_python, str(PEERS / "llamacpp_scores.py"), f"--model={given.model}",
         f"--threads={given.threads}"],
        input=json.dumps({"text": text, "windows": windows, "first": given.window // 2}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise SystemExit(f"error: llama.cpp must answer; {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Our perplexity over theirs, less 1, and the standard error of that."""
    apart = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    mean = math.fsum(apart) / len(apart)
    variance = math.fsum((each - mean) ** 2 for each in apart) / max(1, len(apart) - 1)
    return math.expm1(mean), math.exp(mean) * math.sqrt(variance / len(apart))


def scores_here(
    given: argparse.Namespace, logit_rows: int, text: str
) -> tuple[list[int], list[list[int]], list[float]]:
    """The text's token ids, its windows, and how unlikely each scored token is."""
    from shadowlane import LLM

    with LLM(given.model, ctx_size=given.window, dtype=given.dtype, logit_rows=logit_rows) as llm:
        tokens = llm.encode(text)
        windows = cut_windows(tokens, llm.encode("")[:1], given.window)
        scores = [
            float(-score)
            for window in windows
            for score in llm.log_probabilities(window, given.window // 2)
        ]
    return tokens, windows, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a text in UTF-8")
    parser.add_argument("--window", type=int, default=512, help="tokens read at a time")
    parser.add_argument(
        "--dtype", help="compute type of prompts here; default: the engine's choice"
    )
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    check_window(given.window)
    text = given.text.read_text()
    ways = {
        "Shadowlane, as prompts": logit_rows_for(given.model, given.window),
        "Shadowlane, as decode": MAX_DECODE_ROWS,
    }
    ours: dict[str, list[float]] = {}
    for way, logit_rows in ways.items():
        tokens, windows, ours[way] = scores_here(given, logit_rows, text)
    answer = scores_there(given, text, windows)
    theirs = [score for scores in answer["scores"] for score in scores]
    shape = (len(tokens), len(windows), given.window)
    rows = [
        {
            "engine": engine,
            "perplexity": perplexity_of(scores, *shape),
            "difference": difference(scores, theirs),
            "largest_difference_of_a_token": max(
                abs(mine - other) for mine, other in zip(scores, theirs, strict=True)
            ),
        }
        for engine, scores in (*ours.items(), ("llama.cpp", theirs))
    ]
    result = {
        "hardware": hardware_line(given.model),
        "versions": f"{versions('torch', 'ray')}, {answer['version']}",
        "model": given.model.name,
        "text": str(given.text),
        "same_token_ids": tokens == answer["token_ids"],
        "rows": rows,
    }
    if given.output == "json":
        print(as_json(result))
        return
    print(f"{result['hardware']}; {result['versions']}\n")
    print(
        f"{given.model.name} on {given.text}: {len(theirs)} of {len(tokens)} tokens scored, "
        f"{len(windows)} windows of {given.window}; llama.cpp's tokenizer gives "
        f"{'the same' if result['same_token_ids'] else 'OTHER'} token ids\n"
    )
    print(
        markdown_table(
            ("engine", "perplexity", "relative to llama.cpp"),
            [
                (
                    row["engine"],
                    f"{row['perplexity'].perplexity:.4f} ± {row['perplexity'].uncertainty:.4f}",
                    "{:+.3f} % ± {:.3f}".format(*(100 * each for each in row["difference"])),
                )
                for row in rows
            ],
        )
    )


if __name__ == "__main__":
    main()
