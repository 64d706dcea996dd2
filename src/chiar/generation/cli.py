"""`chiar generate`, and options shared by commands that load a model to generate. Slow imports are inside."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")]
Gate = Annotated[str, typer.Option(metavar="prefill|refuse", help="If a gate sees later tokens: freeze it, or stop.")]
Fast = Annotated[bool | None, typer.Option("--fast/--no-fast", help="Use the fast decoder. [default: on a GPU]")]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device; auto uses a GPU if there is one.")]

SHADES = "░▒▓█"


def note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature. [default: greedy]")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the top k tokens. [default: all]")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling: probability to keep.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed for sampling.")] = 0,
    routes: Annotated[bool, typer.Option("--routes", help="Show how light or dark each token was routed.")] = False,
    speculate: Annotated[int, typer.Option(min=0, max=64, help="Maximum tokens a dark stack's early head drafts.")] = 0,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text, printed as it is generated. Decoding is greedy unless a sampling option is given. With
    --speculate greedy output stays the same; samples (temperature above 0) differ from those without it at the same
    seed, but follow the same distribution."""
    from dataclasses import replace

    from rich.console import Console
    from rich.text import Text

    from chiar.colours import entropy_colours, layer_numbers, route_colour
    from chiar.console import has_colour
    from chiar.data.tokens import Characters
    from chiar.errors import require
    from chiar.generation.writer import Row, Sampling, Writer, darkness, open_writer, room_after, shades
    from chiar.model.speculation import check_can_draft
    from chiar.visible import visible

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    opened, codec, _ = open_writer(model, gate, fast, tokenizer, device, note)
    ids, config = codec.encode(prompt), opened.config
    require(ids, "the prompt is empty: give at least a word to continue.")
    require(config.routed_layers or not routes, f"{model} has no routed layers: leave --routes out.")
    require(not (routes and speculate), "routes cannot be shown while drafting: leave out --routes or --speculate.")
    if speculate:
        check_can_draft(config)
    room = room_after(config, len(ids), max_new_tokens)
    require(room >= 1, f"the prompt takes all {config.max_position_embeddings} learned positions: shorten it.")
    if room < max_new_tokens:
        note(f"the model has {config.max_position_embeddings} learned positions: {room} tokens fit after the prompt.")
    console, characters, coloured = Console(highlight=False, soft_wrap=True), Characters(codec), has_colour()
    writer = Writer(opened, routes, max_drafts=speculate)
    pending: list[tuple[float, float]] = []  # shade and darkness of tokens that are not printed yet
    stacks = " and ".join(map(layer_numbers, config.stacks.values()))

    def marked(text: str, share: float, dark: bool = False) -> Text:
        """Text on a background from yellow to blue, or without colour after a shade."""
        if not coloured:
            return Text(SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)] + text)
        emphasis = "bold underline " if dark and stacks else ""
        by_route = route_colour(share), "black" if share < 0.5 else "white"
        back, letter = entropy_colours(share) if stacks else by_route
        return Text(text, f"{emphasis}{letter} on {back}")

    def note_routes() -> None:
        if writer.trace:
            pending.extend(zip(shades(writer.trace), darkness(writer.trace), strict=True))

    def show(count: int, text: str) -> None:
        if shown := visible(text):
            share, dark = (sum(part) / count for part in zip(*pending[:count], strict=True)) if routes else (0.0, 0.0)
            console.print(marked(shown, share, dark >= 0.5) if routes else Text(shown), end="")
            console.file.flush()
        del pending[:count]

    row, output = Row(codec, replace(sampling, max_new_tokens=room), opened.device), writer.read_prompt(ids)
    note_routes()
    if writer.trace:
        layer = writer.trace.coloured_by
        by_entropy = layer is not None and layer.entropy_name != "spectral entropy"
        shares = (0.0, 0.25, 0.5, 0.75, 1.0) if coloured else (0.0, 0.25, 0.5, 0.75)  # each with a shade of its own
        steps = [marked("  " if by_entropy else f" {share:.0%} ", share) for share in shares]
        meaning = "share of the routed layers that chose attention"
        if by_entropy and layer is not None:
            meaning = layer.entropy_name + (", τ half-way" if layer.thresholds else " from 0 to 1")
        passed = f"; underlined: passed layers {stacks}" if stacks and coloured else ""
        console.print(Text.assemble("light ", *steps, f" dark: {meaning}{passed}"))
    writer.begin(output, [row])  # before any text is printed, in case it fails
    for token in ids:
        show(*characters.add(token))
    for written in writer.follow(row):
        note_routes()
        show(*characters.add(written.id))
    show(*characters.end())
    console.print()
    if writer.passes:
        accepted = f"{writer.kept} of {writer.drafted} drafted tokens were accepted"
        none = "nothing was drafted, as the early head was never certain enough"
        note(f"{accepted if writer.drafted else none}, in {writer.passes} passes of the model.")
    if len(ids) + len(row.tokens) > (trained := config.max_position_embeddings):
        note(f"the text is longer than the {trained} tokens of training: predictions beyond them are unreliable.")
