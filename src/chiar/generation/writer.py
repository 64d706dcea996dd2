"""The generation loop of `chiar generate`, `serve` and `explore`, and of samples in training."""

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
from chiar.data.tokens import Characters, TextCodec
from chiar.errors import InputError, require, unknown_name
from chiar.model.cache import ChiarCache
from chiar.model.inputs import ChiarModelOutput
from chiar.model.load import choose_device, load_model, resolve_model
from chiar.model.modeling import ChiarForCausalLM
from chiar.model.speculation import SplitModel
from chiar.model.trace import RoutingTrace

GATES = ("prefill", "refuse")
GREEDY_BELOW = 1e-5  # logits divided by a lower temperature would overflow
NOT_FINITE = "the model's logits are not finite: its weights are damaged, or too large for this precision."
SCORE_CHUNK = 256  # prompt tokens scored at a time


@dataclass(frozen=True)
class Sampling:
    """Greedy if temperature, top_k and top_p are None, or the temperature is nearly 0. `logprobs`: how many of the most
    likely tokens to return with each token's own log-probability."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = 0
    stops: tuple[str, ...] = ()
    logprobs: int | None = None

    def warpers(self) -> logits.LogitsProcessorList | None:
        """In the order of transformers' `generate`, so that samples agree with it; None if greedy."""
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
    """A token and its log-probability under the model, before temperature and top-p; None for a text's first token."""

    id: int
    logprob: float | None = None
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A piece of a row's output. `finish` marks the last one and says why the text ends: "stop" or "length"."""

    text: str
    tokens: list[TokenScore]
    finish: str | None = None


class Row:
    """One text being generated. `send` receives it in pieces of whole characters, up to a stop sequence. Sampling uses
    the row's own generator, independently of other rows. A row is also over when its `owner` is."""

    def __init__(
        self, codec: TextCodec, sampling: Sampling, device: Any = "cpu", send: Callable | None = None, owner: Any = None
    ) -> None:
        self.sampling, self.warpers, self.send, self.owner = sampling, sampling.warpers(), send, owner
        self.characters, self.generator = Characters(codec), torch.Generator(device)
        self.generator.seed() if sampling.seed is None else self.generator.manual_seed(sampling.seed)
        self.tokens: list[TokenScore] = []
        self.finished: str | None = None
        # Text sent, text held back in case a stop sequence begins, tokens sent, and tokens cached (the next position).
        self.text, self.held, self.sent, self.stored = "", "", 0, 0

    @property
    def is_over(self) -> bool:
        return self.finished is not None or (self.owner is not None and self.owner.is_over)

    def choose(self, logits_V: Tensor, best: int | None) -> TokenScore:
        """Greedy or sampled. `best` is the most likely token, None if its logit is not finite."""
        if best is None:
            raise InputError(NOT_FINITE)
        token = best if self.warpers is None else self.draw(self.probabilities(logits_V))
        return self.scored(token, logits_V)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """The distribution the next token is drawn from."""
        if self.warpers is None:
            return (torch.arange(len(logits_V), device=logits_V.device) == logits_V.argmax()).float()
        return self.warpers(None, logits_V[None].float()).softmax(-1)[0]

    def draw(self, p_V: Tensor) -> int:
        return int(torch.multinomial(p_V, 1, generator=self.generator))

    def bernoulli(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator, device=self.generator.device)) < probability

    def scored(self, token: int, logits_V: Tensor) -> TokenScore:
        count = self.sampling.logprobs
        return TokenScore(token) if count is None else score(logits_V[None], [token], count)[0]

    def verify(self, draft: int, q_V: Tensor, p_V: Tensor) -> int:
        """The draft, sampled from q, or a replacement; the result is distributed as p (arXiv 2211.17192)."""
        ratio, residual_V = acceptance(draft, q_V, p_V)
        return draft if ratio >= 1 or (ratio > 0 and self.bernoulli(ratio)) else self.draw(residual_V)

    def take(self, token: TokenScore, eos_ids: set[int]) -> None:
        self.tokens.append(token)
        self.held += self.characters.add(token.id)[1]
        if self.truncate() or token.id in eos_ids:
            self.finish("stop")
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish("length")
        else:  # hold back the longest suffix that may begin a stop sequence
            prefixes = (stop[:size] for stop in self.sampling.stops for size in range(len(stop)))
            if safe := len(self.held) - max(map(len, filter(self.held.endswith, prefixes)), default=0):
                self.release(safe)

    def finish(self, why: str) -> None:
        self.held += self.characters.end()[1]
        self.finished = "stop" if self.truncate() else why
        self.release(len(self.held))

    def truncate(self) -> bool:
        """Drop the first stop sequence and all text after it. Returns whether there was one."""
        starts = [start for start in map(self.held.find, self.sampling.stops) if start >= 0]
        self.held = self.held[: min(starts, default=len(self.held))]
        return bool(starts)

    def release(self, characters: int) -> None:
        piece = Piece(self.held[:characters], self.tokens[self.sent :], self.finished)
        self.text, self.held, self.sent = self.text + piece.text, self.held[characters:], len(self.tokens)
        if self.send is not None:
            self.send(piece)


def acceptance(draft: int, q_V: Tensor, p_V: Tensor) -> tuple[float, Tensor]:
    """p / q, as a draft is accepted with probability min(1, p / q), and the distribution of its replacement if not."""
    residual_V = (p_V - q_V).clamp_min(0)
    return float(p_V[draft] / q_V[draft]), residual_V / residual_V.sum()


class Writer:
    """Generates rows in a batch, which they join after their prompt. Prompts are read one by one, so that rows do not
    influence each other: the paper's gate is a mean over all rows read together. `traced`: `trace` holds the routes of
    the last pass. `around`: makes a context for each pass. `max_drafts`: draft tokens per pass of `follow`."""

    def __init__(
        self,
        model: ChiarForCausalLM,
        traced: bool = False,
        around: Callable[[], Any] = nullcontext,
        max_drafts: int = 0,
    ) -> None:
        self.model, self.traced, self.around, self.max_drafts = model, traced, around, max_drafts
        self.split: SplitModel | None = None
        self.drafted = self.kept = self.passes = 0  # drafts, those accepted, and passes that verify them
        eos = model.config.eos_token_id
        self.eos_ids: set[int] = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.rows: list[Row] = []
        self.cache: ChiarCache | None = None
        self.trace: RoutingTrace | None = None

    def fail(self, owners: list[Any], error: Exception) -> None:
        """Called when rows of these owners fail. A subclass that can go on with other rows does not raise."""
        raise error

    @torch.no_grad()
    def read_prompt(self, ids: list[int]) -> ChiarModelOutput:
        cache, ids_1T = ChiarCache(len(self.model.model.layers)), torch.tensor([ids], device=self.model.device)
        with self.around():
            output = self.model.model(ids_1T, past_key_values=cache, output_routes=True, output_routing=self.traced)
        self.trace = output.routing
        return output

    @torch.no_grad()
    def begin(self, output: ChiarModelOutput, rows: list[Row]) -> None:
        """Choose the first token of rows that continue the prompt of `output`, and add them to the batch."""
        cache, states_1TD = output.past_key_values, output.last_hidden_state
        assert cache is not None and states_1TD is not None
        for row in rows:
            row.stored = states_1TD.shape[1]
        self.choose(rows, self.model.lm_head(states_1TD[0, -1]).expand(len(rows), -1))
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        self.drop_finished()
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache, len(self.rows), len(rows))
        self.rows += rows

    def step(self) -> None:
        """Generate one more token of every row. Finished rows stay in the batch until they are half of it."""
        if 2 * sum(row.is_over for row in self.rows) >= len(self.rows):
            self.drop_finished()
        if self.rows:
            self.choose(self.rows, self.read())

    @torch.no_grad()
    def read(self) -> Tensor:
        """Run the model on the last token of each row. Returns the logits of the next."""
        assert self.cache is not None
        ids_B1 = torch.tensor([[row.tokens[-1].id] for row in self.rows], device=self.model.device)
        positions_B1 = torch.tensor([[row.stored] for row in self.rows], device=self.model.device)
        self.cache.seen = max(row.stored for row in self.rows)
        inputs = {"past_key_values": self.cache, "position_ids": positions_B1, "output_routing": self.traced}
        with self.around():
            output = self.model(ids_B1, **inputs)
        self.trace = output.routing
        for row in self.rows:
            row.stored += not row.is_over  # a finished row may have no next position
        return output.logits[:, -1]

    def choose(self, rows: list[Row], logits_BV: Tensor) -> None:
        """Choose each row's next token; if that fails, the row fails alone. Makes a single transfer from the device."""
        logits_BV = logits_BV.float()
        best_B = logits_BV.argmax(-1)  # NaN counts as the maximum
        finite_B = logits_BV.gather(1, best_B[:, None])[:, 0].isfinite()
        for row, logits_V, best, ok in zip(rows, logits_BV, *torch.stack([best_B, finite_B]).tolist(), strict=True):
            try:
                if not row.is_over:
                    row.take(row.choose(logits_V, best if ok else None), self.eos_ids)
            except Exception as error:
                self.fail([row.owner], error)

    def drop_finished(self) -> None:
        """Remove finished rows from the batch. If that fails half-way, the cache is unusable and all rows fail."""
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
        """Drop all rows and the cache. Returns the owners of the rows."""
        rows, self.rows, self.cache = self.rows, [], None
        return [row.owner for row in rows]

    def follow(self, row: Row) -> Iterator[TokenScore]:
        """Yields the tokens of the only row, up to an end-of-sequence token. If traced, `trace` has their routes."""
        count = 0
        while count < len(row.tokens) and row.tokens[count].id not in self.eos_ids:
            logits_BV = self.read() if self.traced else None
            yield row.tokens[count]
            count += 1
            if self.max_drafts and not row.is_over:
                if count == len(row.tokens):
                    self.speculate(row)
            elif not row.is_over:
                self.choose([row], self.read() if logits_BV is None else logits_BV)

    def speculate(self, row: Row) -> None:
        """Add at least one token: the early head drafts while it is sure, and one pass of the rest verifies."""
        if self.split is None or self.split.cache is not self.cache:
            assert self.cache is not None
            self.split = SplitModel(self.model, self.cache, row.stored, self.max_drafts)
        split, drafts = self.split, list[tuple[int, Tensor]]()
        limit = min(self.max_drafts, row.sampling.max_new_tokens - len(row.tokens) - 1)
        with self.around():
            halves = [split.read_early(row.tokens[-1].id, 0)]
            while halves[-1].drafts and len(drafts) < limit:
                q_V = row.probabilities(halves[-1].early_V)
                token = row.draw(q_V) if row.warpers else int(q_V.argmax())
                drafts.append((token, q_V))
                if token in self.eos_ids:  # the text would end here
                    break
                halves.append(split.read_early(token, len(halves)))
            logits_TV = split.read_rest(halves).float()
        require(bool(logits_TV.isfinite().all()), NOT_FINITE)
        before = len(row.tokens)
        for logits_V, (token, q_V) in zip(logits_TV, drafts, strict=False):
            verified = row.verify(token, q_V, row.probabilities(logits_V))
            row.take(row.scored(verified, logits_V), self.eos_ids)
            if verified != token or row.is_over:
                break
        else:
            row.take(row.choose(logits_TV[-1], int(logits_TV[-1].argmax())), self.eos_ids)
        taken = len(row.tokens) - before
        split.keep(halves, taken)
        row.stored = split.at
        self.drafted, self.kept, self.passes = self.drafted + len(drafts), self.kept + taken - 1, self.passes + 1


def score(logits_TV: Tensor, tokens: list[int], count: int) -> list[TokenScore]:
    """Each token with its log-probability and those of the `count` most likely tokens."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    own = logprobs_TV.gather(1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])[:, 0].tolist()
    require(all(map(math.isfinite, own)), NOT_FINITE)
    values, ids = (x.tolist() for x in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
    return [TokenScore(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in zip(tokens, own, ids, values, strict=True)]


@torch.no_grad()
def score_prompt(model: ChiarForCausalLM, ids: list[int], output: ChiarModelOutput, count: int = 0) -> list[TokenScore]:
    assert output.last_hidden_state is not None
    scores, states_TD = [TokenScore(ids[0])], output.last_hidden_state[0]
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        targets = ids[start + 1 : start + 1 + SCORE_CHUNK]
        scores += score(model.lm_head(states_TD[start : start + len(targets)]), targets, count)
    return scores


def darkness(trace: RoutingTrace) -> list[float]:
    """Each token's weight of attention, at most 1, averaged over the routed layers (over all if none routes)."""
    layers = [trace.layers[index] for index in trace.routed_layers or range(len(trace.layers))]
    dark = [[float(name == "attention") for name in layer.operators] for layer in layers]
    weights_BTK = [layer.weights_BTK.float().clamp(max=1.0) for layer in layers]
    return torch.stack([w @ w.new_tensor(d) for w, d in zip(weights_BTK, dark, strict=True)]).mean(0)[0].tolist()


def shades(trace: RoutingTrace) -> list[float]:
    """How dark to show each token: by its score if that is a predictive entropy, else by its routes."""
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None or layer.entropy_name == "spectral entropy":
        return darkness(trace)
    tau = layer.thresholds[0] if layer.thresholds else None
    return [uncertainty(score, tau) for score in layer.entropy_BT[0].tolist()]


def open_writer(
    name: str, gate: str, fast: bool | None, tokenizer: Path | None, device: str, note: Callable, seed: int = 0
) -> tuple[ChiarForCausalLM, TextCodec, Path | None]:
    """Loads a model for generation, its tokenizer and its folder, if any. `note` receives notes for the user. `fast`:
    use the fast decoder (chiar.model.decoding); None: on a GPU."""
    if gate not in GATES:
        raise unknown_name("gate", gate, GATES)
    folder, run = resolve_model(name)
    model, model_folder = load_model(folder, seed)
    model.to(choose_device(device))
    config = model.config
    if model.device.type == "cuda" if fast is None else fast:
        model.enable_fast_decoding()
    if run is not None:
        note("this is a training run: its best model is used.")
    elif model_folder is None:
        note(f"this is a preset with random weights (seed {seed}): its output is meaningless.")
    if config.meta_router and config.gate_pool != "causal":
        config.gate_generation = gate
        model.model.check_gate_can_generate()
        note(f"the gate pools over the {config.gate_pool}, later tokens included: g keeps its value of the prompt.")
    return model, TextCodec.open(config, model_folder, tokenizer), model_folder


def room_after(config: ChiarConfig, prompt_length: int, wanted: int) -> int:
    """How many of the wanted tokens fit after a prompt: learned positions are limited."""
    return min(wanted, config.max_position_embeddings - prompt_length) if config.positions == "learned" else wanted


def write_text(model: ChiarForCausalLM, codec: TextCodec, prompt: str, sampling: Sampling) -> str:
    """Continue a prompt, also during training: dropout is off, and a gate that sees later tokens is frozen."""
    training, gate, ids = model.training, model.config.gate_generation, codec.encode(prompt)
    room = room_after(model.config, len(ids), sampling.max_new_tokens)
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
