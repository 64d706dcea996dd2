"""The `chiar` command. Each subcommand is in its package and does slow imports inside its function."""

from typing import Annotated

import typer

from chiar import __version__
from chiar.console import guarded
from chiar.data.cli import data_app
from chiar.evaluation.cli import evaluate
from chiar.explore.cli import explore
from chiar.generation.cli import generate
from chiar.model.cli import convert, models
from chiar.plots.cli import plot
from chiar.registry import add_plugins
from chiar.routing.cli import calibrate, flops, trace
from chiar.serving.cli import serve
from chiar.studies.cli import study_app
from chiar.training.cli import finetune, train

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="CHIAR-Former: language models that route each token to a spectral filter (light) or to attention (dark).",
)

app.add_typer(data_app, name="data")
app.add_typer(study_app, name="study")
app.command("eval")(evaluate)
for command in (train, finetune, generate, serve, explore, plot, models, flops, calibrate, trace, convert):
    app.command()(command)


def show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"chiar {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py|MODULE", help="Import custom routers and operators first (docs/extending.md)."),
    ] = None,
) -> None:
    add_plugins(plugin or [])


def main() -> None:
    guarded(app)
