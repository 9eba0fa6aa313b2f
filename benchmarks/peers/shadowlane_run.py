"""Shadowlane itself, through its public Python interface, timed from outside like the others."""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata

from report import Marks, arguments, prompt_ids, report, tree_pss_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, help="CPU lanes (default: the engine's)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON",
                        help="any other argument of LLM, its value as JSON")  # fmt: skip


def main() -> None:
    given = arguments(__doc__, own=add_options)
    from shadowlane import LLM, SamplingParams

    options: dict[str, object] = {"cpu_threads": given.threads, "dtype": "bfloat16"}
    if given.ram:
        options["ram"] = given.ram
    if given.workers:
        options["cpu_workers"] = given.workers
    for setting in given.set:
        name, _, value = setting.partition("=")
        options[name] = json.loads(value)

    ids = prompt_ids(given.prompt_tokens, given.vocab)
    began = time.monotonic()
    with LLM(given.model, **options) as llm:
        load_s = time.monotonic() - began
        if given.warmup:
            other = prompt_ids(given.prompt_tokens, given.vocab, seed=1)
            llm.generate(
                [other], SamplingParams(max_tokens=given.warmup, ignore_eos=True, temperature=0.0)
            )
        params = SamplingParams(max_tokens=given.new_tokens, ignore_eos=True, temperature=0.0)
        began = time.monotonic()
        tokens = llm.generate([ids], params)[0].token_ids
        wall_s = time.monotonic() - began
        stats = llm.stats()
        memory = tree_pss_bytes()

    # The engine's clock says how the wall time divides; the wall time says whether to believe it.
    prefill_s = len(ids) / stats["prefill_tok_per_s"]
    decode_s = (len(tokens) - 1) / stats["decode_tok_per_s"] if len(tokens) > 1 else 0.0
    report(
        "shadowlane",
        metadata.version("shadowlane"),
        options,
        Marks(began=0.0, tokens=[prefill_s, prefill_s + decode_s]),
        len(ids),
        load_s,
        list(tokens),
        prefill_tok_per_s=stats["prefill_tok_per_s"],
        decode_tok_per_s=stats["decode_tok_per_s"],
        wall_s=wall_s,
        unaccounted_s=wall_s - prefill_s - decode_s,
        peak_rss_bytes=memory,
        lanes=stats.get("lanes"),
        plan=stats.get("plan"),
        experts=stats.get("experts"),
    )


if __name__ == "__main__":
    main()
