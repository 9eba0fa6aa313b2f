"""`shadowlane fetch`: have a model on this machine, so that later commands need no network."""

from __future__ import annotations

from typing import Annotated

import typer

from shadowlane.cli import options
from shadowlane.cli.stages import Stages
from shadowlane.models import resolve_model

EPILOG = options.epilog(
    "shadowlane fetch smollm2",
    "shadowlane fetch org/name",
    "HF_HUB_CACHE=/big/disk shadowlane fetch org/name",
)


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="smollm2, or a Hugging Face id such as org/name.",
        ),
    ],
) -> None:
    """Download a model once and print where it is. Only safetensors or GGUF weights, no code."""
    with Stages() as stages:
        path = resolve_model(name, stages)
    print(path)
