"""The command line. Nothing here imports ray, torch or numba before a command needs the engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shadowlane.cli import bench as bench_command
from shadowlane.cli import chat as chat_command
from shadowlane.cli import fetch as fetch_command
from shadowlane.cli import listing as list_command
from shadowlane.cli import pack as pack_command
from shadowlane.cli import perplexity as perplexity_command
from shadowlane.cli import plan as plan_command
from shadowlane.cli import profile as profile_command
from shadowlane.cli import ps as ps_command
from shadowlane.cli import run as run_command
from shadowlane.cli import show as show_command
from shadowlane.cli import timeline as timeline_command
from shadowlane.cli.errors import OneLineErrors

app = typer.Typer(
    name="shadowlane",
    cls=OneLineErrors,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog='Start with: [cyan]shadowlane run -p "Why is the sky blue?"[/cyan]',
)

app.command(epilog=run_command.EPILOG)(run_command.run)
app.command(epilog=chat_command.EPILOG)(chat_command.chat)
app.command(epilog=plan_command.EPILOG)(plan_command.plan)
app.command(epilog=profile_command.EPILOG)(profile_command.profile)
app.command(epilog=bench_command.EPILOG)(bench_command.bench)
app.command(epilog=pack_command.EPILOG)(pack_command.pack)
app.command(epilog=perplexity_command.EPILOG)(perplexity_command.perplexity)
app.command(epilog=fetch_command.EPILOG)(fetch_command.fetch)
app.command("list", epilog=list_command.EPILOG)(list_command.list_models)
app.command(epilog=show_command.EPILOG)(show_command.show)
app.command(epilog=timeline_command.EPILOG)(timeline_command.timeline)
app.command(epilog=ps_command.EPILOG)(ps_command.ps)


@app.callback(invoke_without_command=True)
def shadowlane(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run language models that do not fit: weights on disk and in RAM, one plan over all lanes."""
    if version:
        from importlib.metadata import version as installed_version

        print(f"shadowlane {installed_version('shadowlane')}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


def main() -> None:
    """Entry point of the `shadowlane` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a "?", not the end of the answer.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
