"""Random small models in float64: however a text is computed, outputs and gradients are the same.

A failure names its seed: `trial(SEED)` draws the same model and text again."""

import random
from contextlib import contextmanager

import pytest
import torch

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.layers import dark, sparse
from helpers import STACK_ROUTERS, fed_logits, feed, gradients, random_model

VOCABULARY = 13
# Sums run in another order: 2e-14 is the most seen in 200 trials. RBF mixing and the gate are computed in fp32: 5e-7.
ROUNDING, FP32_ROUNDING = 1e-9, 2e-5
EDGE = 1e-6  # a score nearer to its threshold, or a probability to the next, may fall on either side of it
OPERATORS = [["spectral", "attention"], ["temporal", "attention"], ["spectral", "rbf", "attention"]]
OPERATORS += [["temporal", "rbf", "attention"]]
LAYERS = ["routed", "routed", "routed", "spectral", "temporal", "attention"]
CHOICES = {
    "operators": OPERATORS,
    "router": ["entropy", "entropy", "learned", "learned", "random", "static"],
    "routing": [None, None, "soft"],
    "hard_estimator": ["selected", "selected", "both"],
    "router_scale": ["one", "one", "probability"],
    "random_key": ["token", "position"],
    "target_fraction": [None, None, 0.3],
    "collapse_regulariser": [0.0, 0.1],
    "keys": ["all", "routed"],
    "light_ffn": [True, False],
    "spectral_form": ["sublayer", "sublayer", "equation"],
    "norm": ["layernorm", "rmsnorm"],
    "norm_position": ["pre", "post"],
    "embedding_norm": [False, True],
    "filter_gamma": [True, True, False],
    "basis": ["dct", "identity", "random"],
    "entropy_eps": [0.0, 1e-8],
    "entropy_dc_weight": [1.0, 2.0, 0.0],
    "temporal_window": [2, 5, 8],
    "temporal_coefficients": [1, 2],
    "temporal_everywhere": [False, False, True],
    "positions": ["rope", "learned"],
    "gate_pool": ["batch", "sequence", "causal", "causal"],
    "gate_skip_below": [None, 0.5],
    "tie_word_embeddings": [True, False],
}
STACK_LAYERS = ["dark", "dark", "dark", "spectral", "temporal", "attention"]
# Of models with dark stacks, in the place of some of those above.
STACK_CHOICES = {
    "operators": [None],
    "router": STACK_ROUTERS,
    "routing": [None],
    "router_scale": ["one"],
    "target_fraction": [None, 0.3, 0.6],
    "norm_position": ["pre"],
    "spectral_form": ["sublayer"],
    "window": [None, None, 1, 2, 5],
    "inner_size": [None, None, 8, 24],
    "carry": ["linear", "linear", "smoothed", "none"],
    "early_weight": [0.2, 0.0],
}


def draw(r: random.Random) -> ChiarConfig:
    """Any configuration that there may be; in every third a dark stack."""
    choices, kinds = (CHOICES | STACK_CHOICES, STACK_LAYERS) if r.random() < 1 / 3 else (CHOICES, LAYERS)
    while True:
        heads, fields = r.choice([1, 2, 3]), {name: r.choice(values) for name, values in choices.items()}
        layers = [r.choice(kinds) for _ in range(r.randint(1, 4))]
        sizes = {"vocab_size": VOCABULARY, "num_attention_heads": heads, "hidden_size": heads * r.choice([2, 4, 8])}
        try:
            return ChiarConfig(layer_types=layers, dropout=0.0, max_position_embeddings=32, **sizes, **fields)
        except InputError:
            continue


@contextmanager
def form(name):
    """Packed rows as on a CPU, for long texts too, or with room behind the last, as on a GPU; new memory is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "room":
            patch.setattr(sparse, "host_sees_routes", lambda device: False)
        if name == "long":
            patch.setattr(sparse, "LONG", 1)
            patch.setattr(dark, "has_flash", lambda x: True)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


class Trial:
    """A model and a text, computed in one way and another."""

    def __init__(self, seed: int) -> None:
        self.r = r = random.Random(seed)
        self.config = draw(r)
        self.model = random_model(self.config, seed)
        self.rows, self.tokens, self.form = r.randint(1, 3), r.randint(1, 12), r.choice(["exact", "long", "room"])
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = self.drawn(VOCABULARY, self.tokens)
        self.routes = self.draw_routes()
        fp32 = "rbf" in self.config.operators or self.config.meta_router
        self.rounding = FP32_ROUNDING if fp32 else ROUNDING

    def drawn(self, below: int, tokens: int) -> torch.Tensor:
        return torch.randint(below, (self.rows, tokens), generator=self.generator)

    def draw_routes(self) -> dict[int, torch.Tensor]:
        """Random ones in some trials; the model's own where one of them lies on an edge, which rounding may turn."""
        if self.config.routing == "soft" or not self.config.routed_layers:
            return {}
        if self.r.random() < 0.3:
            count = len(self.config.operators)
            return {layer: self.drawn(count, self.tokens) for layer in self.config.routed_layers}
        with torch.no_grad():
            trace = self.model(self.ids, output_routing=True).routing
        routed = [trace.layers[i] for i in trace.routed_layers]
        return {} if all(margin(layer) > EDGE for layer in routed) else {x.index: x.choice_BT for x in routed}

    def routes_of_ties(self) -> dict[int, torch.Tensor]:
        """In training a stack cuts at a quantile: its routes where two scores there are as good as equal, since
        rounding tells them apart otherwise among padding."""
        if not (self.config.stacks and self.config.follows_quantile):
            return {}
        state = self.model.model.router_state
        before = {name: value.clone() for name, value in state.state_dict().items()}
        with torch.no_grad():
            routes = self.model.train().model(self.ids, output_routes=True).routes
        state.load_state_dict(before)
        scores = [route.score_BT.flatten().sort().values for route in routes]
        places = [len(s) - int(f * len(s)) for f, s in zip(self.config.layer_fractions(), scores, strict=True)]
        if all(place == len(s) or s[place] - s[place - 1] > EDGE for place, s in zip(places, scores, strict=True)):
            return {}
        return dict(zip(self.config.routed_layers, (route.choice_BT for route in routes), strict=True))

    def run(self, execution="dense", mask=None, pieces=None, training=False, routes=None):
        """Logits of real tokens, and the gradients of a sum of them."""
        model, ids = self.model.train(training), self.ids
        routes = self.routes if routes is None else routes
        if mask is not None:
            real = mask.bool()
            ids, routes = spread(ids, real), {layer: spread(choice, real) for layer, choice in routes.items()}
        state = model.model.router_state
        before = None if state is None else {name: value.clone() for name, value in state.state_dict().items()}
        model.zero_grad()
        model.config.execution = execution
        if pieces is None:
            outputs = [model(ids, mask, forced_routes=routes)]
        else:
            outputs, _ = feed(model, ids, pieces, mask, routes, gradients=True)
        logits = torch.cat([output.logits for output in outputs], 1)
        logits = logits.flatten(0, 1) if mask is None else logits[real]
        loss = (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)).sum()
        if training and outputs[0].routing_loss is not None:
            loss = loss + outputs[0].routing_loss
        loss.backward()
        zero = torch.zeros(())  # the gradient of what no token was sent to
        model.config.execution = "dense"
        if state is not None:
            state.load_state_dict(before)
        return {"logits": logits.detach(), **dict.fromkeys(dict(model.named_parameters()), zero), **gradients(model)}

    def padding(self) -> torch.Tensor:
        """A mask in which each row's real tokens stand among three that are not."""
        mask = torch.zeros(self.rows, self.tokens + 3, dtype=torch.long)
        for row in mask:
            row[self.r.sample(range(len(row)), self.tokens)] = 1
        return mask

    def pieces(self, length: int) -> list[int]:
        sizes = []
        while sum(sizes) < length:
            sizes.append(min(self.r.choice([1, 1, 2, 5]), length - sum(sizes)))
        return sizes

    def compare(self) -> None:
        """In training or evaluation; cached always in evaluation."""
        config, mask, training = self.config, self.padding(), self.r.random() < 0.5
        if training and not self.routes:
            self.routes = self.routes_of_ties()
        expected = self.run(training=training)
        self.same("padded", expected, self.run(mask=mask, training=training))
        if config.can_run_sparse and config.routed_layers:
            with form(self.form):
                self.same("sparse", expected, self.run("sparse", self.r.choice([None, mask]), training=training))
        if config.meta_router and config.gate_pool != "causal":
            return
        expected = self.run() if training else expected
        pieces, real = self.pieces(self.tokens + 3), mask.bool()
        if config.keys == "routed" and config.routing == "hard" and config.hard_estimator == "both":
            expected = {"logits": expected["logits"]}  # such a cache has no gradient of what was not chosen
        self.same("cached", expected, self.run(mask=mask, pieces=pieces))
        self.model.eval().enable_fast_decoding()
        routes = {layer: spread(choice, real) for layer, choice in self.routes.items()}
        logits, _ = fed_logits(self.model, spread(self.ids, real), pieces, mask, routes)
        self.same("in fixed steps", {"logits": expected["logits"]}, {"logits": logits[real]})

    def same(self, how: str, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
        for name, value in expected.items():
            error = (found[name] - value).abs().max() / value.abs().max().clamp_min(1)
            assert error <= self.rounding, f"{how}: {name} differs by {error:.1e}"


def margin(layer) -> float:
    """How far the closest decision of a routed layer is from going the other way."""
    scores = [(layer.entropy_BT - cut).abs() for cut in layer.thresholds or []]
    if layer.probabilities_BTK is not None:
        first, second = layer.probabilities_BTK.topk(2).values.unbind(-1)
        scores.append(first - second)
    return min((float(score.min()) for score in scores), default=1.0)


def spread(values, real):
    """Values of real tokens at their places among padding."""
    found = torch.zeros(real.shape, dtype=values.dtype)
    found[real] = values.flatten()
    return found


def trial(seed: int) -> None:
    made = Trial(seed)
    try:
        made.compare()
    except Exception as error:
        about = f"{made.rows} × {made.tokens} tokens, {made.form}, {made.config.to_diff_dict()}"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{about}") from error


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_some(start):
    for seed in range(start, start + 20):
        trial(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(200, 4200, 200))
def test_many(start):
    for seed in range(start, start + 200):
        trial(seed)
