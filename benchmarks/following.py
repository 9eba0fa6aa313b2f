"""How often routers find their experts on cards: fixed sets, and sets that follow the choices.

    python benchmarks/following.py                          choices that shift once, made up
    python benchmarks/following.py --routing TRACE.csv.gz   one half known, the other met

No speeds, and nothing runs: the planner's own `Following` on a trace, told every 16 tokens as by an
engine. What it proposes is taken up where it would have hit `--worth` more of the choices; moves
are counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from measure import markdown_table

from shadowlane.planner.catalog import Experts
from shadowlane.planner.following import Following, Layers
from shadowlane.planner.heat import heat_of, remembered
from shadowlane.planner.routing import Trace, synthesize
from shadowlane.planner.routing_files import read_trace

EVERY = 16  # tokens, as in `actors/shadow_link.py`
PARTS = (0.1, 0.2, 0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routing", type=Path, help="a recorded trace")
    parser.add_argument("--worth", type=float, default=0.02, help="of the choices")
    given = parser.parse_args()
    if given.routing is None:
        known, met = (synthesize(num_tokens=512, num_layers=12, seed=seed) for seed in (0, 1))
    else:
        known, met = read_trace(given.routing).halves()
    rows = [compared(known, met, part, given.worth) for part in PARTS]
    header = ("part on cards", "fixed", "following", "its last half", "best fixed set", "moved")
    print(f"{met.num_tokens} tokens after {known.num_tokens} that were known\n")
    print(markdown_table(header, rows))


def compared(known: Trace, met: Trace, part: float, worth: float) -> list[str]:
    count = round(part * met.num_experts)
    fixed, best = (hottest(trace, count) for trace in (known, met))
    following = Following(experts_of(known), [fixed])
    now, hits, moved = fixed, [], 0
    for first in range(0, met.num_tokens, EVERY):
        lately = heat_of(met.part(first, min(met.num_tokens, first + EVERY)))
        hits.append([*(hit(lately.counts, each) for each in (fixed, now, best)), 1.0])
        following.note(lately.visits, lately.counts)
        proposal = following.proposal()
        if proposal is not None and proposal.hits - proposal.hits_now > worth:
            moved += proposal.num_moved
            (now,) = proposal.cards
            following.held([now])
    fixed_hits, following_hits, best_hits, _ = np.mean(hits, axis=0)
    late = np.mean(hits[len(hits) // 2 :], axis=0)[1]
    held = count * met.num_layers
    return [
        f"{part:.0%}",
        f"{fixed_hits:.1%}",
        f"{following_hits:.1%}",
        f"{late:.1%}",
        f"{best_hits:.1%}",
        f"{moved} of {held}",
    ]


def experts_of(known: Trace) -> Experts:
    ranks = tuple(hottest(known, known.num_experts))
    shape = (known.num_layers, known.num_experts, known.top_k)
    return Experts(*shape, 1, 1, 1, hits=remembered(heat_of(known)), ranks=ranks)


def hottest(trace: Trace, count: int) -> Layers:
    """Of each layer, by falling use."""
    order = np.argsort(-heat_of(trace).counts, axis=1, kind="stable")[:, :count]
    return tuple(tuple(map(int, row)) for row in order)


def hit(counts: np.ndarray, held: Layers) -> float:
    """Part of the choices that are on the card."""
    return sum(counts[layer, list(each)].sum() for layer, each in enumerate(held)) / counts.sum()


if __name__ == "__main__":
    main()
