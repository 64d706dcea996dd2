"""`chiar generate`, and the options of all commands that write. Heavy imports happen inside the command."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")]
Gate = Annotated[str, typer.Option(metavar="prefill|refuse", help="A gate that sees later tokens: freeze it, or stop.")]
Fast = Annotated[bool | None, typer.Option("--fast/--no-fast", help="Decode by a fixed step. Default: on a GPU.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")]

SHADES = "░▒▓█"


def note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sample at this temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest of this share.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    routes: Annotated[bool, typer.Option("--routes", help="Show how light or dark each token was routed.")] = False,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text, shown as it is produced. Greedy (the likeliest token) unless a sampling option is given."""
    from dataclasses import replace

    from rich.console import Console
    from rich.text import Text

    from chiar.colours import route_colour
    from chiar.errors import require
    from chiar.generation.writer import Characters, Row, Sampling, Writer, darkness, open_writer, room_behind
    from chiar.visible import visible

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    opened, codec, _ = open_writer(model, gate, fast, tokenizer, device, note)
    ids, config = codec.encode(prompt), opened.config
    require(ids, "the prompt is empty: give it at least a word to continue.")
    require(config.routed_layers or not routes, f"{model} has no routed layers: leave --routes out.")
    room = room_behind(config, len(ids), max_new_tokens)
    require(room >= 1, f"the prompt takes all {config.max_position_embeddings} learned positions: shorten it.")
    if room < max_new_tokens:
        note(f"the model has {config.max_position_embeddings} learned positions: {room} tokens fit behind the prompt.")
    console, characters, writer = Console(highlight=False, soft_wrap=True), Characters(codec), Writer(opened, routes)
    dark: list[float] = []

    def marked(text: str, share: float) -> Text:
        """On a background between yellow and blue, or behind a shade where there is no colour."""
        if console.color_system is None or console.no_color:
            return Text(SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)] + text)
        return Text(text, f"{'black' if share < 0.5 else 'white'} on {route_colour(share)}")

    def show(count: int, text: str) -> None:
        if shown := visible(text):
            console.print(marked(shown, sum(dark[:count]) / count) if routes else Text(shown), end="")
            console.file.flush()
        del dark[:count]

    if routes:
        steps = [marked(f" {share:.0%} ", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        console.print(Text.assemble("light ", *steps, " dark: share of the routed layers that chose attention"))
    row, read = Row(codec, replace(sampling, max_new_tokens=room), opened.device), writer.read_prompt(ids)
    dark += darkness(writer.trace) if writer.trace else []
    writer.begin(read, [row])  # where it fails, no half a line is left before the sentence
    for token in ids:
        show(*characters.add(token))
    for written in writer.follow(row):
        dark += darkness(writer.trace) if writer.trace else []
        show(*characters.add(written.id))
    show(*characters.end())
    console.print()
    if len(ids) + len(row.tokens) > (trained := config.max_position_embeddings):
        note(f"the text is longer than the {trained} tokens the model was trained on: beyond them it guesses.")
