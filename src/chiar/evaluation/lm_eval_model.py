"""A CHIAR-Former as a model of lm-evaluation-harness. Needs lm_eval."""

import sys
from collections import defaultdict
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.evaluation.continuations import Pair, continue_texts, fit, score_continuations
from chiar.generation.stream import Sampling

# What a task may ask of generated text; anything else would change it unseen.
SUPPORTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
DEFAULT_TOKENS = 256
"""lm_eval's."""


class ChiarLM(TemplateLM):
    """`length` is what the model reads at once; longer contexts lose their beginning (`cut` counts them), and
    `short` counts texts that have less room than their task allows them."""

    def __init__(
        self, model: Any, codec: TextCodec, length: int, batch_size: int = 16, precision: str = "fp32"
    ) -> None:
        super().__init__()
        self.model, self.codec, self.length = model, codec, length
        self.batch_size, self.precision = batch_size, precision
        self.cut = self.short = 0
        self.asked = False
        """Whether any task got as far as asking the model."""
        self._device = model.device
        ends = model.config.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        if end is None:
            raise InputError("the model has no end of text, which lm-evaluation-harness puts before every document.")
        self.end = end

    @property
    def eot_token_id(self) -> int:
        return self.end

    @property
    def tokenizer_name(self) -> str:
        return "bytes" if self.codec.source is None else str(self.codec.source)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.codec.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        self.asked = True
        pairs = [self.fitted(Pair(context, continuation)) for _, context, continuation in requests]
        with tqdm(total=len(pairs), desc="scoring", disable=disable_tqdm or None) as bar:
            scored = score_continuations(
                self.model, pairs, batch_size=self.batch_size, precision=self.precision, advance=bar.update
            )
        return [(one.nats, one.greedy) for one in scored]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Each document by itself, every token once, with as much before it as the model reads at once."""
        pairs, documents = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.length, context_len=1):
                context, continuation = make_disjoint_window(window)
                pairs.append(((None, None), context, continuation))
                documents.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
        for number, (nats, _) in zip(documents, scores, strict=True):
            totals[number] += nats
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Those that ask for the same are batched."""
        self.asked = True
        alike = defaultdict(list)
        for number, request in enumerate(requests):
            alike[repr(sorted(request.args[1].items()))].append(number)
        written: dict[int, str] = {}
        with tqdm(total=len(requests), desc="writing", disable=disable_tqdm or None) as bar:
            for numbers in alike.values():
                texts = self.continue_alike([requests[n].args[0] for n in numbers], requests[numbers[0]].args[1])
                written |= dict(zip(numbers, texts, strict=True))
                bar.update(len(numbers))
        return [written[number] for number in range(len(requests))]

    def continue_alike(self, contexts: list[str], asked: dict[str, Any]) -> list[str]:
        unknown = set(asked) - SUPPORTED
        if unknown:
            raise InputError(f"a task asks for {sorted(unknown)[0]!r} of generated text, which is not supported.")
        if self.length < 2:
            raise InputError("a task writes text, and a --length of 1 leaves no room behind a prompt: raise it.")
        until = asked.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        sampling = Sampling()
        if asked.get("do_sample"):
            sampling = Sampling(
                temperature=asked.get("temperature", 1.0), top_k=asked.get("top_k"), top_p=asked.get("top_p")
            )
        prompts = [self.tok_encode(context) or [self.end] for context in contexts]
        together = defaultdict(list)
        for number, prompt in enumerate(prompts):
            together[self.room(prompt, int(asked.get("max_gen_toks", DEFAULT_TOKENS)))].append(number)
        written: dict[int, str] = {}
        for new, numbers in together.items():
            fitted = [prompts[n][-(self.length - new) :] for n in numbers]
            settings = sampling.configuration(self.model, new)
            texts = continue_texts(self.model, self.codec, fitted, stops, settings, self.batch_size)
            written |= dict(zip(numbers, texts, strict=True))
        return [written[number] for number in range(len(contexts))]

    def room(self, prompt: list[int], wanted: int) -> int:
        """How many tokens may be written behind a prompt: what it leaves, but a quarter of the length at least, for
        which it loses its beginning."""
        new = min(wanted, max(self.length - len(prompt), self.length // 4, 1))
        self.cut += len(prompt) > self.length - new
        self.short += new < wanted
        return new

    def fitted(self, pair: Pair) -> Pair:
        short = fit(pair, self.length)
        self.cut += len(short.context) < len(pair.context)
        return short
