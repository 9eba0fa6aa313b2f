"""Which models on which machines a benchmark is asked for: arguments that several of them have."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = (
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-70b",
    "qwen2.5-32b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
)


def pairs_parser(description: str | None) -> argparse.ArgumentParser:
    """Of `--models` (by default `MODELS`), `--machines` (all examples) and `--output`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument(
        "--machines",
        nargs="+",
        type=Path,
        default=sorted((ROOT / "examples" / "hardware").glob("*.yaml")),
        metavar="FILE",
    )
    parser.add_argument("--output", choices=("md", "json"), default="md")
    return parser
