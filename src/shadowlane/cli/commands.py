"""The commands, put together; `main` in the package's own file comes here."""

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
from shadowlane.cli import simulate as simulate_command
from shadowlane.cli import timeline as timeline_command
from shadowlane.cli.errors import OneLineErrors
from shadowlane.cli.naming import Command

app = typer.Typer(
    name="shadowlane",
    cls=OneLineErrors,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog='Start with: [cyan]shadowlane run -p "Why is the sky blue?"[/cyan]',
)

for module, name, function in (
    (run_command, "run", run_command.run),
    (chat_command, "chat", chat_command.chat),
    (plan_command, "plan", plan_command.plan),
    (profile_command, "profile", profile_command.profile),
    (bench_command, "bench", bench_command.bench),
    (pack_command, "pack", pack_command.pack),
    (perplexity_command, "perplexity", perplexity_command.perplexity),
    (fetch_command, "fetch", fetch_command.fetch),
    (list_command, "list", list_command.list_models),
    (show_command, "show", show_command.show),
    (simulate_command, "simulate", simulate_command.simulate),
    (timeline_command, "timeline", timeline_command.timeline),
    (ps_command, "ps", ps_command.ps),
):
    app.command(name, cls=Command, epilog=module.EPILOG)(function)


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


def start() -> None:
    """Run the command that the process was called with, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a "?", not the end of the answer.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
