"""Which models on which machines a benchmark is asked for: arguments that several of them have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pairs_parser(description: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """Of `--models` (by default `models`), `--machines` (all examples) and `--output`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME")
    parser.add_argument(
        "--machines",
        nargs="+",
        type=Path,
        default=sorted((ROOT / "examples" / "hardware").glob("*.yaml")),
        metavar="FILE",
    )
    parser.add_argument("--output", choices=("md", "json"), default="md")
    return parser
