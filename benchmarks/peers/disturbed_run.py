"""One configuration of Shadowlane, token by token, with a busy loop on one core from the middle."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from report import arguments, prompt_ids


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--core", type=int, required=True, help="core that the busy loop takes")
    parser.add_argument("--quiet-tokens", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")


def start_busy_loop(core: int) -> subprocess.Popen[bytes]:
    """Another process that never sleeps, pinned to `core`, at normal priority."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code])


def main() -> None:
    given = arguments(__doc__, own=add_options)
    if given.core not in os.sched_getaffinity(0):
        raise SystemExit(f"error: core must be one this process may use; got {given.core}")
    from shadowlane import LLM, SamplingParams

    options: dict[str, object] = {"dtype": "bfloat16"}
    for setting in given.set:
        name, _, value = setting.partition("=")
        options[name] = json.loads(value)
    ids = prompt_ids(given.prompt_tokens, given.vocab)
    other = prompt_ids(given.prompt_tokens, given.vocab, seed=1)
    params = SamplingParams(max_tokens=given.new_tokens, ignore_eos=True, temperature=0.0)
    times: list[float] = []
    token_ids: list[int] = []
    busy = disturbed_at = None
    with LLM(given.model, **options) as llm:
        llm.generate([other], SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0))
        try:
            for chunk in llm.stream(ids, params):
                now = time.monotonic()
                times.extend([now] * len(chunk.token_ids))
                token_ids.extend(chunk.token_ids)
                if busy is None and len(times) >= given.quiet_tokens:
                    busy = start_busy_loop(given.core)
                    disturbed_at = time.monotonic()
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()
        stats = llm.stats()
    if disturbed_at is None:
        raise SystemExit("error: new-tokens must exceed quiet-tokens")
    print(
        json.dumps(
            {
                "engine": "shadowlane",
                "settings": options,
                "times": times,
                "disturbed_at": disturbed_at,
                "token_ids": token_ids,
                "plan": stats.get("plan"),
                "lanes": stats.get("lanes"),
            }
        )
    )


if __name__ == "__main__":
    main()
