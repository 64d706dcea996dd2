"""The one loop that writes text: for `chiar generate`, `serve` and `explore`, and samples in training."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as logits

from chiar.colours import uncertainty
from chiar.config import ChiarConfig
from chiar.data.tokens import TextCodec
from chiar.errors import InputError, require, unknown_name
from chiar.model.cache import ChiarCache
from chiar.model.inputs import ChiarModelOutput
from chiar.model.load import choose_device, load_model, resolve_model
from chiar.model.modeling import ChiarForCausalLM
from chiar.model.speculation import SplitModel
from chiar.model.trace import RoutingTrace

GATES = ("prefill", "refuse")
GREEDY_BELOW = 1e-5  # logits divided by such a temperature would leave the numbers there are
NOT_FINITE = "the model's logits are not finite: its weights are damaged, or too large for this precision."
BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens held back for one character (of four bytes and what shows nothing), and tokens of a prompt scored together.
MOST_WAITING, SCORED = 16, 256


@dataclass(frozen=True)
class Sampling:
    """Greedy while temperature, top_k and top_p are None, and at a temperature of nearly 0. `logprobs`: how many
    likeliest tokens to tell beside each token's own log-probability."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = 0
    stops: tuple[str, ...] = ()
    logprobs: int | None = None

    def warpers(self) -> logits.LogitsProcessorList | None:
        """In the order of transformers' generate, whose draws these are; None: greedy."""
        require(self.top_p != 0, "top-p must be above 0: no token would be left to sample.")
        nearly_zero = self.temperature is not None and self.temperature < GREEDY_BELOW
        if nearly_zero or (self.temperature, self.top_k, self.top_p) == (None, None, None):
            return None
        temperature, top_p = self.temperature and float(self.temperature), None if self.top_p == 1 else self.top_p
        values = {logits.TemperatureLogitsWarper: temperature, logits.TopKLogitsWarper: self.top_k}
        kinds: dict[Any, Any] = {**values, logits.TopPLogitsWarper: top_p}
        return logits.LogitsProcessorList(kind(value) for kind, value in kinds.items() if value is not None)


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability under the model, before temperature and top-p; None for a text's first."""

    id: int
    logprob: float | None = None
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """What a row has to add; `finish` says that it is the last piece, and why: "stop" or "length"."""

    text: str
    tokens: list[TokenScore]
    finish: str | None = None


@dataclass
class Characters:
    """Hands on text as soon as its bytes are whole: a token may be a part of a character."""

    codec: TextCodec
    waiting: list[int] = field(default_factory=list)

    def add(self, token: int) -> tuple[int, str]:
        """How many of the waiting tokens now have their text, and the text. A character lacks a byte of its up to four,
        so it began in the last three tokens, at a place where the text falls into two."""
        self.waiting.append(token)
        waiting, decode, text = self.waiting, self.codec.decode, self.codec.decode(self.waiting)
        if not text.endswith(BROKEN) or len(waiting) > MOST_WAITING:
            return self.end()
        for start in range(len(waiting) - 1, max(0, len(waiting) - 4), -1):
            last = decode(waiting[start:])
            if last and decode(waiting[:start]) + last == text:
                self.waiting = waiting[start:]
                return start, decode(waiting[:start])
        return 0, ""

    def end(self) -> tuple[int, str]:
        waiting, self.waiting = self.waiting, []
        return len(waiting), self.codec.decode(waiting)


class Row:
    """One text being written. `send` gets it in pieces: whole characters, and nothing from a stop text on. Its own
    generator draws, so neighbours change nothing. It is also over when its `owner` is."""

    def __init__(
        self, codec: TextCodec, sampling: Sampling, device: Any = "cpu", send: Callable | None = None, owner: Any = None
    ) -> None:
        self.sampling, self.warpers, self.send, self.owner = sampling, sampling.warpers(), send, owner
        self.characters, self.generator = Characters(codec), torch.Generator(device)
        self.generator.seed() if sampling.seed is None else self.generator.manual_seed(sampling.seed)
        self.tokens: list[TokenScore] = []
        self.finished: str | None = None
        # Sent, perhaps the beginning of a stop text, tokens sent, and tokens in the cache (the position of the next).
        self.text, self.held, self.sent, self.stored = "", "", 0, 0

    @property
    def is_over(self) -> bool:
        return self.finished is not None or (self.owner is not None and self.owner.is_over)

    def choose(self, logits_V: Tensor, token: int | None) -> TokenScore:
        """`token` is the likeliest."""
        if token is None:
            raise InputError(NOT_FINITE)
        if self.warpers is not None:
            token = self.draw(self.probabilities(logits_V))
        return self.scored(token, logits_V)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """What the next token is drawn from."""
        if self.warpers is None:
            return (torch.arange(len(logits_V), device=logits_V.device) == logits_V.argmax()).float()
        return self.warpers(None, logits_V[None].float()).softmax(-1)[0]

    def draw(self, p_V: Tensor) -> int:
        return int(torch.multinomial(p_V, 1, generator=self.generator))

    def happens(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator, device=self.generator.device)) < probability

    def scored(self, token: int, logits_V: Tensor) -> TokenScore:
        count = self.sampling.logprobs
        return TokenScore(token) if count is None else score(logits_V[None], [token], count)[0]

    def confirm(self, drafted: int, q_V: Tensor, p_V: Tensor) -> int:
        """A token drawn from q, or another one: in all, drawn from p (speculative sampling, arXiv 2211.17192)."""
        kept, other_V = confirmed(drafted, q_V, p_V)
        return drafted if kept >= 1 or (kept > 0 and self.happens(kept)) else self.draw(other_V)

    def take(self, token: TokenScore, ends: set[int]) -> None:
        self.tokens.append(token)
        self.held += self.characters.add(token.id)[1]
        if self.cut() or token.id in ends:
            self.finish("stop")
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish("length")
        else:  # but for the longest end that a stop text begins with
            starts = (stop[:size] for stop in self.sampling.stops for size in range(len(stop)))
            if safe := len(self.held) - max(map(len, filter(self.held.endswith, starts)), default=0):
                self.release(safe)

    def finish(self, why: str) -> None:
        self.held += self.characters.end()[1]
        self.finished = "stop" if self.cut() else why
        self.release(len(self.held))

    def cut(self) -> bool:
        """Drop a stop text and all behind it; whether there was one."""
        found = [at for at in map(self.held.find, self.sampling.stops) if at >= 0]
        self.held = self.held[: min(found, default=len(self.held))]
        return bool(found)

    def release(self, characters: int) -> None:
        piece = Piece(self.held[:characters], self.tokens[self.sent :], self.finished)
        self.text, self.held, self.sent = self.text + piece.text, self.held[characters:], len(self.tokens)
        if self.send is not None:
            self.send(piece)


def confirmed(drafted: int, q_V: Tensor, p_V: Tensor) -> tuple[float, Tensor]:
    """How probably a token drawn from q stays, min(1, p / q), and what is drawn from where it does not."""
    missing_V = (p_V - q_V).clamp_min(0)
    return float(p_V[drafted] / q_V[drafted]), missing_V / missing_V.sum()


class Writer:
    """Prompts are read one by one, so that neighbours change nothing: the paper's gate is a mean over all rows read
    together. Rows join behind their prompt. `traced`: after each pass `trace` has its routes; `around` each pass.
    `speculates`: a row that is followed may be up to so many drafted tokens ahead of what the whole model has read."""

    def __init__(
        self,
        model: ChiarForCausalLM,
        traced: bool = False,
        around: Callable[[], Any] = nullcontext,
        speculates: int = 0,
    ) -> None:
        self.model, self.traced, self.around, self.speculates = model, traced, around, speculates
        self.split: SplitModel | None = None
        self.drafted = self.kept = self.passes = 0  # tokens of the early head, those that stayed, and second halves
        ends = model.config.eos_token_id
        self.ends: set[int] = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.rows: list[Row] = []
        self.cache: ChiarCache | None = None
        self.trace: RoutingTrace | None = None

    def fail(self, owners: list[Any], error: Exception) -> None:
        """Their rows failed; a writer whose other rows go on does not raise."""
        raise error

    @torch.no_grad()
    def read_prompt(self, ids: list[int]) -> ChiarModelOutput:
        cache, ids_1T = ChiarCache(len(self.model.model.layers)), torch.tensor([ids], device=self.model.device)
        with self.around():
            read = self.model.model(ids_1T, past_key_values=cache, output_routes=True, output_routing=self.traced)
        self.trace = read.routing
        return read

    @torch.no_grad()
    def begin(self, read: ChiarModelOutput, rows: list[Row]) -> None:
        """Write the first token of rows that continue a prompt; they join the others."""
        cache, states_1TD = read.past_key_values, read.last_hidden_state
        assert cache is not None and states_1TD is not None
        for row in rows:
            row.stored = states_1TD.shape[1]
        self.choose(rows, self.model.lm_head(states_1TD[0, -1]).expand(len(rows), -1))
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        self.drop()
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache, len(self.rows), len(rows))
        self.rows += rows

    def step(self) -> None:
        """One more token for every row. A row that is over is carried along until half of them are."""
        if 2 * sum(row.is_over for row in self.rows) >= len(self.rows):
            self.drop()
        if self.rows:
            self.choose(self.rows, self.read())

    @torch.no_grad()
    def read(self) -> Tensor:
        """Read the token each row wrote last; the logits of the next."""
        assert self.cache is not None
        ids_B1 = torch.tensor([[row.tokens[-1].id] for row in self.rows], device=self.model.device)
        positions_B1 = torch.tensor([[row.stored] for row in self.rows], device=self.model.device)
        self.cache.seen = max(row.stored for row in self.rows)
        passed = {"past_key_values": self.cache, "position_ids": positions_B1, "output_routing": self.traced}
        with self.around():
            output = self.model(ids_B1, **passed)
        self.trace = output.routing
        for row in self.rows:
            row.stored += not row.is_over  # positions may end where the row did
        return output.logits[:, -1]

    def choose(self, rows: list[Row], logits_BV: Tensor) -> None:
        """The next token of each row; where there is none, the row fails alone. One look: each waits for a device."""
        logits_BV = logits_BV.float()
        best_B = logits_BV.argmax(-1)  # NaN counts as the largest
        finite_B = logits_BV.gather(1, best_B[:, None])[:, 0].isfinite()
        for row, logits_V, best, ok in zip(rows, logits_BV, *torch.stack([best_B, finite_B]).tolist(), strict=True):
            try:
                if not row.is_over:
                    row.take(row.choose(logits_V, best if ok else None), self.ends)
            except Exception as error:
                self.fail([row.owner], error)

    def drop(self) -> None:
        """Let go of the rows that are over. Where that fails half-way the cache is of no use to any of its rows."""
        kept = [number for number, row in enumerate(self.rows) if not row.is_over]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in kept]
        try:
            if self.cache is not None and kept:
                self.cache.batch_select_indices(torch.tensor(kept, device=self.model.device))
            self.cache = self.cache if kept else None
        except Exception as error:
            self.fail(self.clear(), error)

    def clear(self) -> list[Any]:
        """Forget everything; the owners of the rows that were being written."""
        rows, self.rows, self.cache = self.rows, [], None
        return [row.owner for row in rows]

    def follow(self, row: Row) -> Iterator[TokenScore]:
        """The tokens of the one row that was begun, without an end of text; traced once `trace` has their route."""
        at = 0
        while at < len(row.tokens) and row.tokens[at].id not in self.ends:
            logits_BV = self.read() if self.traced else None
            yield row.tokens[at]
            at += 1
            if self.speculates and not row.is_over:
                if at == len(row.tokens):
                    self.speculate(row)
            elif not row.is_over:
                self.choose([row], self.read() if logits_BV is None else logits_BV)

    def speculate(self, row: Row) -> None:
        """At least one more token: the early head drafts what it is sure of, and one pass of the rest confirms."""
        if self.split is None or self.split.cache is not self.cache:
            assert self.cache is not None
            self.split = SplitModel(self.model, self.cache, row.stored, self.speculates)
        split, drafts = self.split, list[tuple[int, Tensor]]()
        most = min(self.speculates, row.sampling.max_new_tokens - len(row.tokens) - 1)
        with self.around():
            halves = [split.read_early(row.tokens[-1].id, 0)]
            while halves[-1].drafts and len(drafts) < most:
                q_V = row.probabilities(halves[-1].early_V)
                token = row.draw(q_V) if row.warpers else int(q_V.argmax())
                drafts.append((token, q_V))
                if token in self.ends:  # nothing stands behind it
                    break
                halves.append(split.read_early(token, len(halves)))
            logits_TV = split.read_rest(halves).float()
        require(bool(logits_TV.isfinite().all()), NOT_FINITE)
        before = len(row.tokens)
        for logits_V, (token, q_V) in zip(logits_TV, drafts, strict=False):
            stays = row.confirm(token, q_V, row.probabilities(logits_V))
            row.take(row.scored(stays, logits_V), self.ends)
            if stays != token or row.is_over:
                break
        else:
            row.take(row.choose(logits_TV[-1], int(logits_TV[-1].argmax())), self.ends)
        taken = len(row.tokens) - before
        split.keep(halves, taken)
        row.stored = split.at
        self.drafted, self.kept, self.passes = self.drafted + len(drafts), self.kept + taken - 1, self.passes + 1


def score(logits_TV: Tensor, tokens: list[int], count: int) -> list[TokenScore]:
    """Each token with its log-probability and those of the `count` likeliest."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    own = logprobs_TV.gather(1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])[:, 0].tolist()
    require(all(map(math.isfinite, own)), NOT_FINITE)
    values, ids = (x.tolist() for x in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
    return [TokenScore(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in zip(tokens, own, ids, values, strict=True)]


@torch.no_grad()
def score_prompt(model: ChiarForCausalLM, ids: list[int], read: ChiarModelOutput, count: int = 0) -> list[TokenScore]:
    assert read.last_hidden_state is not None
    scores, states_TD = [TokenScore(ids[0])], read.last_hidden_state[0]
    for start in range(0, len(ids) - 1, SCORED):
        targets = ids[start + 1 : start + 1 + SCORED]
        scores += score(model.lm_head(states_TD[start : start + len(targets)]), targets, count)
    return scores


def darkness(trace: RoutingTrace) -> list[float]:
    """For each token attention's weight, a mean over the routed layers (all, where none routes); scales count as 1."""
    layers = [trace.layers[index] for index in trace.routed_layers or range(len(trace.layers))]
    dark = [[float(name == "attention") for name in layer.operators] for layer in layers]
    weights_BTK = [layer.weights_BTK.float().clamp(max=1.0) for layer in layers]
    return torch.stack([w @ w.new_tensor(d) for w, d in zip(weights_BTK, dark, strict=True)]).mean(0)[0].tolist()


def shades(trace: RoutingTrace) -> list[float]:
    """How dark to show each token: by its score where that is of a prediction; else by route."""
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None or layer.entropy_name == "spectral entropy":
        return darkness(trace)
    cut = layer.thresholds[0] if layer.thresholds else None
    return [uncertainty(score, cut) for score in layer.entropy_BT[0].tolist()]


def open_writer(
    name: str, gate: str, fast: bool | None, tokenizer: Path | None, device: str, note: Callable, seed: int = 0
) -> tuple[ChiarForCausalLM, TextCodec, Path | None]:
    """A model that is to write, its tokenizer and its folder, if any; `note` is told what a reader should know.
    `fast`: decode by the fixed step (chiar.model.decoding); None: where there is a GPU."""
    if gate not in GATES:
        raise unknown_name("gate", gate, GATES)
    folder, run = resolve_model(name)
    model, found = load_model(folder, seed)
    model.to(choose_device(device))
    config = model.config
    if model.device.type == "cuda" if fast is None else fast:
        model.enable_fast_decoding()
    if run is not None:
        note("this is a training run: its best model writes.")
    elif found is None:
        note(f"this is a preset with random weights (seed {seed}): what it writes means nothing.")
    if config.meta_router and config.gate_pool != "causal":
        config.gate_generation = gate
        model.model.check_gate_can_generate()
        note(f"the gate pools over the {config.gate_pool}, later tokens included: it stays as the prompt set it.")
    return model, TextCodec.open(config, found, tokenizer), found


def room_behind(config: ChiarConfig, prompt: int, wanted: int) -> int:
    """How many of the tokens wanted may be added: learned positions end."""
    return min(wanted, config.max_position_embeddings - prompt) if config.positions == "learned" else wanted


def write_text(model: ChiarForCausalLM, codec: TextCodec, prompt: str, sampling: Sampling) -> str:
    """What the model, perhaps in training, writes behind a prompt: without dropout, a gate's future view frozen."""
    training, gate, ids = model.training, model.config.gate_generation, codec.encode(prompt)
    room = room_behind(model.config, len(ids), sampling.max_new_tokens)
    writer, row = Writer(model), Row(codec, replace(sampling, max_new_tokens=room), model.device)
    model.eval()
    model.config.gate_generation = "prefill"
    try:
        if room > 0:
            writer.begin(writer.read_prompt(ids), [row])
        for _ in writer.follow(row):
            pass
    finally:
        model.train(training)
        model.config.gate_generation = gate
    return row.text
