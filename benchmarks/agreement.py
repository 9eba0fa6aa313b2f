"""Whether the same file gives the same text here and in llama.cpp.

    python benchmarks/agreement.py --model FILE.gguf --peer-python PEERS/bin/python

llama.cpp answers a set of prompts greedily. Here the same tokens are gone through, and at each step
this engine's likeliest token is compared. Where the two differ, the line says by how much this
engine prefers its own, beside how far the two engines' logits are apart anyway: both quantise
activations, in blocks of different sizes and orders of addition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from compare import PEERS
from measure import as_json, markdown_table

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, for the first time,",
    "Q: What is the largest planet in the solar system?\nA:",
)


def likeliest_there(given: argparse.Namespace) -> list[dict]:
    done = subprocess.run(
        [given.peer_python, str(PEERS / "llamacpp_greedy.py"), f"--model={given.model}",
         f"--new-tokens={given.new_tokens}"],
        input=json.dumps(PROMPTS), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"error: llama.cpp must answer; {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_answer(answer: dict, logits: np.ndarray) -> dict:
    """logits float32 [steps, vocab]: this engine's, with llama.cpp's tokens before each."""
    theirs, differences, preferred = answer["token_ids"], [], []
    for row, candidates, token in zip(logits, answer["candidates"], theirs, strict=True):
        ids = [each for each, _ in candidates]
        apart = row[ids] - np.array([logit for _, logit in candidates], np.float32)
        differences.append(float(np.abs(apart - apart.mean()).max()))
        preferred.append(float(row.max() - row[token]))
    agreed = [each == 0 for each in preferred]
    first = agreed.index(False) if False in agreed else len(agreed)
    return {
        "steps": len(theirs),
        "agreed": sum(agreed),
        "first_difference": first,
        "largest_preference": max(preferred),
        "logits_apart": float(np.median(differences)),
        "unexplained": sum(
            gap > 2 * apart for gap, apart in zip(preferred, differences, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file with a tokenizer")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    answers = likeliest_there(given)
    from shadowlane import LLM

    rows = []
    with LLM(given.model) as llm:
        for text, answer in zip(PROMPTS, answers, strict=True):
            ids = answer["prompt_ids"] + answer["token_ids"][:-1]
            logits = llm.logits(ids)[len(answer["prompt_ids"]) - 1 :]
            rows.append({"prompt": text, **compare_answer(answer, logits)})
    if given.output == "json":
        print(as_json({"rows": rows}))
        return
    print(
        markdown_table(
            ("prompt", "same likeliest token", "first difference at", "largest preference",
             "logits apart", "unexplained"),
            [
                (json.dumps(row["prompt"])[1:-1], f"{row['agreed']}/{row['steps']}",
                 str(row["first_difference"]) if row["agreed"] < row["steps"] else "-",
                 f"{row['largest_preference']:.3f}", f"{row['logits_apart']:.3f}",
                 str(row["unexplained"]))
                for row in rows
            ],
        )
    )  # fmt: skip
    if any(row["unexplained"] for row in rows):
        raise SystemExit("error: a token differs by more than the engines' logits are apart")


if __name__ == "__main__":
    main()
