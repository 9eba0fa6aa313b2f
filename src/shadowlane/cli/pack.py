"""`shadowlane pack`: a model's weights packed to 8 or 4 bits, once, into a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shadowlane.arguments import PACK_NAMES
from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions
from shadowlane.cli.notes import say_notes
from shadowlane.cli.perplexity import of_model, read_text
from shadowlane.cli.stages import Stages
from shadowlane.models import resolve_model
from shadowlane.sizes import format_size

if TYPE_CHECKING:
    from shadowlane.ops.pack import PackLayout

EPILOG = options.epilog(
    "shadowlane pack ./my-model --weights q4_0 -o my-model-q4_0.gguf",
    "shadowlane pack org/name --weights q8_0 -o name.gguf --text sample.txt",
    "shadowlane run ./my-model-q4_0.gguf -p hello",
)


def pack(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            envvar="SHADOWLANE_MODEL",
            show_envvar=False,
            help="A directory of safetensors, or a Hugging Face id such as org/name.",
        ),
    ],
    weights: Annotated[
        str,
        options.option(
            "--weights",
            **options.choice(*PACK_NAMES),
            help="q8_0: 8.5 bits per weight, hardly any loss; q4_1: 5 bits; q4_0: 4.5 bits.",
        ),
    ] = "q8_0",
    out: Annotated[
        Path | None,
        options.option("--out", "-o", metavar="FILE.gguf", help="The file to write."),
    ] = None,
    text: Annotated[
        Path | None,
        options.option(
            "--text",
            metavar="FILE",
            help="Also measure the perplexity of this text before and after.",
        ),
    ] = None,
) -> None:
    """Pack the weights of a safetensors model into a GGUF file, to run or stream from.

    Matrices get the format of --weights, embedding and output q8_0, vectors
    stay float32; config, tokenizer and chat template go into the file. The
    file appears when it is complete; nothing is written beside the model.
    """
    if out is None:
        raise ValueError("a file to write is needed: -o FILE.gguf")
    if out.suffix.lower() != ".gguf":
        raise ValueError(f"out must end in .gguf; got {out}")
    if out.exists():
        raise ValueError(f"out must not exist yet; got {out}")
    sample = None if text is None else read_text(text)
    with Stages() as stages:
        from shadowlane.packing import write_packed
        from shadowlane.quality import WINDOW_TOKENS, check_text

        path = resolve_model(model, stages)
        if sample is not None:
            check_text(path, sample, WINDOW_TOKENS)
        made = write_packed(path, cast("PackLayout", weights), out, stages)
    say_notes(made.notes)
    print(
        f"{made.path}: {format_size(made.nbytes)} of {weights}, from "
        f"{format_size(made.source_nbytes)} of weights",
        file=sys.stderr,
    )
    if sample is not None:
        engine = EngineOptions.of({}, ctx_size=WINDOW_TOKENS)
        for name, measured in (("before", path), ("after ", made.path)):
            with Stages() as stages:
                found = of_model(measured, sample, WINDOW_TOKENS, engine, stages)
            print(f"{name} {found}", flush=True)
