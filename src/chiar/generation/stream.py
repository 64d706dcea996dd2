"""A prompt continued through transformers' own generate, streamed to the terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from chiar.data.tokens import TextCodec
from chiar.errors import InputError, unknown_name
from chiar.generation.routes import RouteReader, legend, marked
from chiar.model.load import choose_device, load_model, resolve_model
from chiar.visible import visible

GATES = ("prefill", "refuse")
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: logits divided by it would leave the numbers there are."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_WAITING = 16
"""Tokens held back for one character. It has four bytes at most; the rest are tokens that show nothing."""


@dataclass(frozen=True)
class Sampling:
    """Greedy while temperature, top_k and top_p are None, and at a temperature of 0 or nearly so."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def configuration(self, model: Any, room: int) -> GenerationConfig:
        """What transformers is told. Its own default would keep the 50 likeliest tokens only."""
        chosen: dict[str, Any] = {"max_new_tokens": room, "do_sample": False}
        greedy = self.temperature is not None and self.temperature < GREEDY_BELOW
        if not greedy and (self.temperature, self.top_k, self.top_p) != (None, None, None):
            if self.top_p == 0:
                raise InputError("--top-p must be above 0: no token would be left to sample.")
            chosen |= {"do_sample": True, "temperature": 1.0 if self.temperature is None else self.temperature}
            chosen |= {"top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        config = model.config
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        chosen |= {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "pad_token_id": end}
        return GenerationConfig(**chosen)


class TokenStreamer(BaseStreamer):
    """Hands on text as soon as its bytes are whole (a token may be a part of a character), with its mean darkness."""

    def __init__(self, codec: TextCodec, reader: RouteReader | None, write: Callable[[str, float], None]) -> None:
        self.codec, self.reader, self.write = codec, reader, write
        self.waiting: list[int] = []
        self.darkness: list[float] = []

    def put(self, value: Tensor) -> None:
        """First all of the prompt, then token by token."""
        tokens = value.flatten().tolist()
        for token, dark in zip(tokens, self.reader.read(tokens) if self.reader else [0.0] * len(tokens), strict=True):
            self.waiting.append(token)
            self.darkness.append(dark)
            self.release(self.count_settled())

    def count_settled(self) -> int:
        """How many of the tokens that wait have their text, whatever follows: a character lacks a byte of its up to
        four, so it began in the last three tokens, at a place where the text falls into two."""
        waiting, decode = self.waiting, self.codec.decode
        text = decode(waiting)
        if not text.endswith(BROKEN) or len(waiting) > MOST_WAITING:
            return len(waiting)
        for start in range(len(waiting) - 1, max(0, len(waiting) - 4), -1):
            last = decode(waiting[start:])
            if last and decode(waiting[:start]) + last == text:
                return start
        return 0

    def release(self, count: int) -> None:
        if count:
            self.write(self.codec.decode(self.waiting[:count]), sum(self.darkness[:count]) / count)
            self.waiting, self.darkness = self.waiting[count:], self.darkness[count:]

    def end(self) -> None:
        self.release(len(self.waiting))


def open_writer(
    name: str, gate: str, fast: bool | None, device: str, note: Callable[[str], None]
) -> tuple[Any, Path | None]:
    """A model that is to write, where it runs, and the folder it came from; `note` is told what it is."""
    if gate not in GATES:
        raise unknown_name("gate", gate, GATES)
    folder, run = resolve_model(name)
    model, found = load_model(folder)
    model.to(choose_device(device))
    if model.device.type == "cuda" if fast is None else fast:
        model.enable_fast_decoding()
    if run is not None:
        note(f"{run} is a training run: its best model writes.")
    elif found is None:
        note(f"{name} is a preset with random weights: what it writes means nothing.")
    return model, found


def stream_text(
    name: str,
    prompt: str,
    sampling: Sampling,
    *,
    routes: bool = False,
    gate: str = "prefill",
    fast: bool | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Prompt and continuation on standard output; `note` is told what a reader should know. `fast`: decode through the
    fixed step (chiar.model.decoding), None where there is a GPU."""
    model, found = open_writer(name, gate, fast, device, note)
    config = model.config
    codec = TextCodec.open(config, found, tokenizer)
    ids = torch.tensor([codec.encode(prompt)], device=model.device, dtype=torch.int64)
    if not ids.numel():
        raise InputError("the prompt is empty: give it at least a word to continue.")
    if config.meta_router and config.gate_pool != "causal":
        config.gate_generation = gate
        if gate == "prefill":
            note(f"the gate pools over the {config.gate_pool}, later tokens included: it stays as the prompt set it.")
    if routes and not config.routed_layers:
        raise InputError(f"{name} has no routed layers: leave --routes out.")
    settings = sampling.configuration(model, room_for(config, ids.shape[1], sampling.max_new_tokens, note))
    console = Console(highlight=False, soft_wrap=True)
    reader = RouteReader(model) if routes else None
    if reader is not None:
        console.print(legend(console))

    def write(text: str, dark: float) -> None:
        shown = visible(text)
        if shown:
            console.print(Text(shown) if reader is None else marked(shown, dark, console), end="")
            console.file.flush()

    torch.manual_seed(sampling.seed)
    streamer = TokenStreamer(codec, reader, write)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer)
    console.print()


def room_for(config: Any, prompt: int, wanted: int, note: Callable[[str], None]) -> int:
    """How many tokens may be added: learned positions end."""
    left = config.max_position_embeddings - prompt
    if config.positions != "learned" or wanted <= left:
        return wanted
    if left < 1:
        raise InputError(f"the prompt takes all {config.max_position_embeddings} learned positions: shorten it.")
    note(f"the model has {config.max_position_embeddings} learned positions: {left} tokens fit behind the prompt.")
    return left
