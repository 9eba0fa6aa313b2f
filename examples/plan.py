"""What a budget would do to a model, for several budgets, without loading anything.

.venv/bin/python examples/plan.py smollm2
"""

import sys

from shadowlane.llm import plan_model
from shadowlane.models import resolve_model
from shadowlane.sizes import format_size


def main(name: str) -> None:
    path = resolve_model(name)
    for ram in ("48MiB", "64MiB", "96MiB", "128MiB", "256MiB"):
        try:
            plan = plan_model(path, ram=ram)
        except ValueError as error:  # nothing fits: the error names what is short
            print(f"{ram:>8}: {error}")
            continue
        tiers = ", ".join(f"{tier} {format_size(size)}" for tier, size in plan["tiers"].items())
        print(f"{ram:>8}: {tiers}; {plan['predicted']['decode_tok_per_s']:.1f} tok/s predicted")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
