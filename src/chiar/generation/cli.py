"""`chiar generate`, and the options of all commands that write. Heavy imports happen inside the command."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")]
Gate = Annotated[str, typer.Option(metavar="prefill|refuse", help="A gate that sees later tokens: freeze it, or stop.")]
Fast = Annotated[bool | None, typer.Option("--fast/--no-fast", help="Decode by a fixed step. [default: on a GPU]")]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")]

SHADES = "░▒▓█"


def note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sample at it. [default: greedy]")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens. [default: all]")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest of this share.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    routes: Annotated[bool, typer.Option("--routes", help="Show how light or dark each token was routed.")] = False,
    speculate: Annotated[int, typer.Option(min=0, max=64, help="Tokens an early head may draft, of a dark stack.")] = 0,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text, shown as it is produced. Greedy (the likeliest token) unless a sampling option is given. With
    --speculate greedy texts are the same; drawn ones (temperature above 0) differ from those without it at the same
    seed, though they are as probable."""
    from dataclasses import replace

    from rich.console import Console
    from rich.text import Text

    from chiar.colours import entropy_colours, layer_numbers, route_colour
    from chiar.console import has_colour
    from chiar.errors import require
    from chiar.generation.writer import Characters, Row, Sampling, Writer, darkness, open_writer, room_behind, shades
    from chiar.model.speculation import check_can_draft
    from chiar.visible import visible

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    opened, codec, _ = open_writer(model, gate, fast, tokenizer, device, note)
    ids, config = codec.encode(prompt), opened.config
    require(ids, "the prompt is empty: give it at least a word to continue.")
    require(config.routed_layers or not routes, f"{model} has no routed layers: leave --routes out.")
    require(not (routes and speculate), "routes are those of whole passes: leave out --routes or --speculate.")
    if speculate:
        check_can_draft(config)
    room = room_behind(config, len(ids), max_new_tokens)
    require(room >= 1, f"the prompt takes all {config.max_position_embeddings} learned positions: shorten it.")
    if room < max_new_tokens:
        note(f"the model has {config.max_position_embeddings} learned positions: {room} tokens fit behind the prompt.")
    console, characters, coloured = Console(highlight=False, soft_wrap=True), Characters(codec), has_colour()
    writer = Writer(opened, routes, speculates=speculate)
    seen: list[tuple[float, float]] = []  # of each token how dark it is shown, and was routed
    stacks = " and ".join(map(layer_numbers, config.stacks.values()))

    def marked(text: str, share: float, dark: bool = False) -> Text:
        """On a background between yellow and blue, or behind a shade where there is no colour."""
        if not coloured:
            return Text(SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)] + text)
        line = "bold underline " if dark and stacks else ""
        by_route = route_colour(share), "black" if share < 0.5 else "white"
        back, letter = entropy_colours(share) if stacks else by_route
        return Text(text, f"{line}{letter} on {back}")

    def note_routes() -> None:
        if writer.trace:
            seen.extend(zip(shades(writer.trace), darkness(writer.trace), strict=True))

    def show(count: int, text: str) -> None:
        if shown := visible(text):
            share, dark = (sum(part) / count for part in zip(*seen[:count], strict=True)) if routes else (0.0, 0.0)
            console.print(marked(shown, share, dark >= 0.5) if routes else Text(shown), end="")
            console.file.flush()
        del seen[:count]

    row, read = Row(codec, replace(sampling, max_new_tokens=room), opened.device), writer.read_prompt(ids)
    note_routes()
    if writer.trace:
        layer = writer.trace.coloured_by
        by_entropy = layer is not None and layer.entropy_name != "spectral entropy"
        steps = [marked("  " if by_entropy else f" {share:.0%} ", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        meaning = "share of the routed layers that chose attention"
        if by_entropy and layer is not None:
            meaning = layer.entropy_name + (", τ half-way" if layer.thresholds else " from 0 to 1")
        passed = f"; underlined: passed layers {stacks}" if stacks and coloured else ""
        console.print(Text.assemble("light ", *steps, f" dark: {meaning}{passed}"))
    writer.begin(read, [row])  # where it fails, no half a line is left before the sentence
    for token in ids:
        show(*characters.add(token))
    for written in writer.follow(row):
        note_routes()
        show(*characters.add(written.id))
    show(*characters.end())
    console.print()
    if writer.passes:
        note(f"{writer.kept} of {writer.drafted} drafted tokens stayed, in {writer.passes} passes of the whole model.")
    if len(ids) + len(row.tokens) > (trained := config.max_position_embeddings):
        note(f"the text is longer than the {trained} tokens the model was trained on: beyond them it guesses.")
