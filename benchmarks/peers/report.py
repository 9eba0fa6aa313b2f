"""What every peer shares: its arguments, the prompt, the clock's marks, and the one JSON line.

Timing is the same for all. *Prefill* runs from the call until the first new token is known;
*decode* from there until the last: new_tokens - 1 steps. The monotonic clock, inside the process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Marks:
    """When generation began and when each new token became known (monotonic seconds)."""

    began: float = field(default_factory=time.monotonic)
    tokens: list[float] = field(default_factory=list)

    def token(self) -> None:
        self.tokens.append(time.monotonic())

    def rates(self, num_prompt: int) -> dict[str, float | None]:
        first, last, steps = self.tokens[0], self.tokens[-1], len(self.tokens) - 1
        return {
            "prefill_tok_per_s": num_prompt / (first - self.began),
            "decode_tok_per_s": steps / (last - first) if steps else None,
            "wall_s": last - self.began,
        }


def arguments(description: str, **extra: Callable[[argparse.ArgumentParser], None]):  # type: ignore[no-untyped-def]
    """The options all peers have; `extra` adds a peer's own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="model directory (GGUF file for llama.cpp)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", help="memory for weights, where the engine can be told")
    parser.add_argument("--warmup", type=int, default=4, metavar="TOKENS",
                        help="of an untimed answer to another prompt, before")  # fmt: skip
    parser.add_argument("--vocab", type=int, default=512, help="prompt ids are drawn below this")
    for add in extra.values():
        add(parser)
    given = parser.parse_args()
    for name in ("prompt_tokens", "new_tokens", "threads", "vocab"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {getattr(given, name)}")
    return given


def prompt_ids(count: int, vocab: int, seed: int = 20240) -> list[int]:
    """The same `count` token ids for every engine; ids 0-2 are left out as they may be special.

    Warm-ups pass another seed: an engine that keeps its cache between requests would otherwise
    find the measured prompt there, and its prefill would be free.
    """
    source = random.Random(seed)
    return [source.randrange(3, vocab) for _ in range(count)]


def peak_rss_bytes() -> int:
    """Most memory this process had resident, mapped file pages included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def tree_pss_bytes() -> int:
    """Memory of this process and all its children now; shared pages are counted once in the sum.

    For an engine of many processes that share their arenas, sums of resident sizes would count the
    arenas once per process.
    """
    import psutil

    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile
        total += sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
    return 1024 * total


def report(
    engine: str,
    version: str,
    settings: dict[str, object],
    marks: Marks,
    num_prompt: int,
    load_s: float,
    token_ids: list[int],
    **more: object,
) -> None:
    """Print the result as one JSON line, the last line of standard output."""
    result: dict[str, object] = {
        "engine": engine,
        "version": version,
        "settings": settings,
        "prompt_tokens": num_prompt,
        "new_tokens": len(token_ids),
        **marks.rates(num_prompt),
        "load_s": load_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "token_ids": token_ids,
    }
    result.update(more)
    print(json.dumps(result))
    sys.stdout.flush()
