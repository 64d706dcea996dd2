"""The commands `models` and `convert`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from chiar.console import Overwrite, show
from chiar.errors import InputError, require


def models() -> None:
    """List the presets with their exact trainable parameter counts."""
    from rich.table import Table

    from chiar import presets
    from chiar.config_checks import LIGHT_LAYERS
    from chiar.model.load import count_parameters

    columns = ("layers: light + routed + dark + attention", "beside attention")
    table = Table("preset", "parameters", "D", "heads", *columns, "router", "positions", "gate", box=None)
    for name in presets.NAMES:
        config = presets.get(name)
        kinds, sizes = config.layer_types or [], (config.hidden_size, config.num_attention_heads)
        counts = sum(map(kinds.count, LIGHT_LAYERS)), *map(kinds.count, ("routed", "dark", "attention"))
        layers, routes = "+".join(map(str, counts)), bool(config.routed_layers)
        chosen = ("+".join((config.operators or [])[:-1]), f"{config.router}") if routes else ("–", "–")
        gate = config.gate_pool if config.meta_router else "–"
        table.add_row(name, f"{count_parameters(config):,}", *map(str, sizes), layers, *chosen, config.positions, gate)
    show(table)


def convert(
    source: Annotated[str, Argument(metavar="SOURCE", help="A model folder, or a .pt file of the author's code.")],
    out: Annotated[Path, Option(metavar="FOLDER", help="New model folder.")],
    coordinates: Annotated[str | None, Option(help="Model folder: spectral or features. [default: spectral]")] = None,
    tau: Annotated[float | None, Option(help=".pt file: its threshold τ. [default: the published one]")] = None,
    routing: Annotated[str | None, Option(help=".pt file: soft or hard. [default: as stored in the file]")] = None,
    pool: Annotated[str | None, Option(help=".pt file of a classifier: last or mean. [default: last]")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Import a checkpoint of the author's code, or fold a basis. No code in a checkpoint is executed. In spectral
    coordinates the DCT is folded into the weights of a pre-norm RMSNorm model, which then gives the same outputs
    without any transform."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if source.endswith(".pt") or Path(source).is_file():
        from chiar.model.author_checkpoint import import_checkpoint

        if coordinates is not None:
            raise InputError("--coordinates is for a model folder: import the file first, then convert the folder.")
        imported = import_checkpoint(Path(source), out, tau, routing, pool or "last", overwrite=overwrite)
        for note in imported.notes:
            typer.echo(f"note: {note}")
        config = imported.config
        what = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.vocab_size} tokens"
    else:
        from chiar.model.coordinates import convert_folder

        for name, value in (("--tau", tau), ("--routing", routing), ("--pool", pool)):
            require(value is None, f"{name} is for a .pt file of the author's code: leave it out with a model folder.")
        config = convert_folder(source, out, coordinates or "spectral", overwrite)
        tied = "tied to the embedding" if config.tie_word_embeddings else "a matrix of its own"
        what = f"basis {config.basis}, output projection {tied}"
    typer.echo(f"wrote {out}: {what}")
