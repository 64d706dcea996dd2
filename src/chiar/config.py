"""ChiarConfig: every architectural choice of the paper, and of our reading of it, is one validated field."""

from copy import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from chiar import config_checks, registry
from chiar.config_checks import LIGHT_LAYERS
from chiar.errors import refuse_misspelt, require
from chiar.kernels.white_noise import white_noise_entropy

AUTO_CLASSES = {
    "AutoConfig": "ChiarConfig",
    "AutoModel": "ChiarModel",
    "AutoModelForCausalLM": "ChiarForCausalLM",
    "AutoModelForSequenceClassification": "ChiarForSequenceClassification",
}
SAVED_LAYER_TYPES = "chiar_layer_types"
SHIM_MODULE = "chiar_shim"
SHIM = f"""# Lets transformers' Auto classes find the chiar package, which must be installed.
from chiar.config import ChiarConfig
from chiar.modeling import {", ".join(name for name in AUTO_CLASSES.values() if name != "ChiarConfig")}
"""


class ChiarConfig(PreTrainedConfig):
    """A CHIAR-Former. The defaults are the paper's v3 at 16M parameters; `chiar.presets` names the others."""

    model_type = "chiar"

    vocab_size: int = 50257
    """Number of token ids; a preset takes its corpus' own."""
    hidden_size: int = 256
    """Width D of the residual stream."""
    num_hidden_layers: int | None = None
    """Number of layers N; taken from `layer_types` when that is given, else 4."""
    num_attention_heads: int = 4
    """Heads of attention; they divide the width."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4·D when not given."""
    layer_types: list[str] | None = None
    """spectral, temporal, routed, dark or attention for each layer; when not given the paper's spectral,
    routed × (N−2), attention. Consecutive dark layers are one inner stack, which only dark tokens pass."""

    operators: list[str] | None = None
    """Operators of routed layers in order of rising entropy: spectral or temporal, (rbf,) attention. Around a dark
    stack carry, attention: light tokens get what the stack said last."""
    router: str | None = None
    """What chooses a token's operator: entropy, learned, random or static in routed layers; before a dark stack
    rise, predictive, forecast, learned, boundary, spectral, space, stride or random."""
    routing: str | None = None
    """threshold (entropy, random and static routers), hard or soft (the learned router)."""
    thresholds: float | list | None = None
    """τ: one number for all routed layers or one per routed layer (pairs [τ_low, τ_high] with three operators).
    Until calibration: what white noise of this width would give. A built model changes them with `set_thresholds`."""
    hard_estimator: str = "both"
    """Gradient of hard routing: both (the paper's straight-through) or selected (only the chosen operator runs)."""
    target_fraction: float | list[float] | None = None
    """f that a layer or a dark stack holds, one for all or one each: in training its threshold follows the
    (1 − f)-quantile of the scores (H, or the learned router's logit difference); in evaluation it stays."""
    router_scale: str = "one"
    """What the chosen change is multiplied by: one (p / stopgrad(p), for the gradient only), or probability (2·p where
    attention was chosen, 1 elsewhere)."""
    random_key: str = "token"
    """The random router hashes the token id, the position, or both."""
    random_fraction: float = 0.5
    """Fraction of tokens the random router sends to attention."""
    router_seed: int = 0
    """Seed of the random router's hash and of the random basis."""
    static_operators: list[str] | None = None
    """The static router's operator for each routed layer; every other layer attention when not given."""
    collapse_regulariser: float = 0.0
    """λ of the loss −λ·(entropy of mean operator use), averaged over routed layers. No gradient under threshold."""
    keys: str = "all"
    """all: every token is a key. routed: only tokens sent to an operator are keys in it."""
    light_ffn: bool = True
    """False: in routed layers light tokens skip the feed-forward network and its norm."""

    window: int | None = None
    """How many tokens attention layers look at, themselves among them; all when not given. Dark layers see all."""
    inner_size: int | None = None
    """Width of dark layers; D when not given. Heads keep their size."""
    carry: str = "linear"
    """What light tokens get of a dark stack: linear (a map of what it last changed), smoothed (a running mean,
    weighted by the router's probabilities) or none."""
    early_weight: float = 0.2
    """Weight of the next-token loss of a head before each dark stack; predictive entropy is that head's."""

    execution: str = "dense"
    """How routed layers and dark stacks run: dense computes everything for every token and selects, the definition;
    sparse computes only what was chosen; auto is sparse wherever that is possible. The numbers are the same."""

    spectral_form: str = "sublayer"
    """Light path of post-norm layers: sublayer (the released code) or equation (the paper's Eq. 3)."""
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    norm_position: str = "post"
    """post (the paper) or pre: after what a layer adds, or before what it reads."""
    embedding_norm: bool = False
    """Embedded tokens are divided by their root mean square, so that the residual stream begins at scale 1."""
    filter_init: float = 1.0
    """What the weights of light filters begin at: 1 as in the paper, or 0, which adds nothing under pre-norm."""
    filter_gamma: bool = True
    """False: under pre-norm the filter's own norm has no γ, so that spectral coordinates are exact after training."""
    basis: str = "dct"
    """Basis of the entropy and the filter: dct, or the controls identity and random (orthogonal)."""
    entropy_eps: float = 0.0
    """ε of the entropy; 0 is exact and scale-free, 1e-8 is the released code's."""
    entropy_dc_weight: float = 1.0
    """Weight of the first coefficient's energy in H; 2 for the released code's unnormalised DCT."""
    temporal_window: int = 16
    """W: how many tokens the temporal filter looks at, the token itself among them."""
    temporal_coefficients: int = 4
    """K: DCT coefficients along the window that give a temporal filter's taps in each channel."""
    temporal_everywhere: bool = False
    """A temporal filter as one more sublayer at the beginning of every layer, for every token; it starts at 0."""
    positions: str = "rope"
    """rope or learned."""
    max_position_embeddings: int = 256
    """Number of learned positions, or the trained length under RoPE (which may be exceeded)."""

    meta_router: bool | None = None
    """A learned gate on layer 1; on by default exactly when that is spectral or temporal and positions RoPE (v3)."""
    gate_pool: str = "batch"
    """Mean embedding the gate sees: over the batch (the paper), over the sequence, or causal (running mean)."""
    gate_init: str = "biased"
    """biased: weights 0 and bias 2 (the text); neutral: weights N(0, 0.02), bias 0 (the released code)."""
    gate_skip_below: float | None = None
    """Hard gate: at inference, a g below this bound skips layer 1."""
    gate_generation: str = "refuse"
    """Generation with a gate that sees the future: refuse, or freeze g at the prefill."""

    dropout: float = 0.1
    """On embeddings, attention probabilities, feed-forward hidden and output."""
    classifier_pool: str = "last"
    """Token state the sequence classifier reads: the last real token, or the mean over real tokens."""
    tie_word_embeddings: bool = True
    """One matrix for embeddings and output."""
    bos_token_id: int | None = None
    """Token before a text; a preset takes its corpus' end of text."""
    eos_token_id: int | list[int] | None = None
    """Token that ends a text, or several; as above."""
    pad_token_id: int | None = None
    """Token that fills up rows of a batch."""

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs = config_checks.without_removed(kwargs)
        refuse_misspelt("configuration field", kwargs, ChiarConfig.__annotations__)
        config_checks.check_types(self)
        self._fill_in_defaults()
        layer_types = self.layer_types
        super().__post_init__(**kwargs)
        # transformers renames "attention" to its own "full_attention" in a field of this name.
        self.layer_types = layer_types
        self.auto_map = {auto: f"{SHIM_MODULE}.{name}" for auto, name in AUTO_CLASSES.items()}
        self.validate()

    def _fill_in_defaults(self) -> None:
        if self.layer_types is None:
            layers = 4 if self.num_hidden_layers is None else self.num_hidden_layers
            require(layers >= 3, f"num_hidden_layers={layers} is too few for spectral, routed, attention.")
            self.layer_types = ["spectral", *["routed"] * (layers - 2), "attention"]
        self.layer_types = list(self.layer_types)
        if self.num_hidden_layers is None:
            self.num_hidden_layers = len(self.layer_types)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.operators is None:
            self.operators = ["carry" if "dark" in self.layer_types else "spectral", "attention"]
        self.operators = list(self.operators)
        if self.router is None:
            self.router = "learned" if self.routing in ("hard", "soft") else "rise" if self.stacks else "entropy"
        kind = registry.ROUTERS.get(self.router)
        if self.routing is None:
            self.routing = "threshold" if kind is None else kind.routings[0]
        if self.meta_router is None:
            self.meta_router = self.positions == "rope" and self.layer_types[:1] in ([kind] for kind in LIGHT_LAYERS)
        if self.stacks and self.target_fraction is None and not (kind and kind.fraction):
            self.target_fraction = 0.2
        if self.stacks and self.router == "stride":  # every k-th token is 1/k of them; others are refused as given
            exact = [1 / round(1 / f) if 0 < f <= 0.5 else f for f in self.layer_fractions() or ()]
            self.target_fraction = exact if isinstance(self.target_fraction, list) else exact[0]
        if kind is not None and kind.decides_by_layer and self.static_operators is None:
            count = self.layer_types.count("routed")
            self.static_operators = ["attention" if i % 2 == 0 else self.operators[0] for i in range(count)]

    @property
    def routed_layers(self) -> list[int]:
        """Where tokens are routed: the indices of routed layers, and of the first layer of each dark stack."""
        kinds, stacks = self.layer_types or [], self.stacks
        return [i for i, kind in enumerate(kinds) if kind == "routed" or i in stacks]

    @property
    def stacks(self) -> dict[int, range]:
        """The dark layers of each stack, by its first."""
        kinds, first = self.layer_types or [], 0
        found: dict[int, range] = {}  # a compiler cannot call dict[int, range]
        if "dark" not in kinds:
            return found
        for i, kind in enumerate(kinds):
            if kind == "dark":
                first = first if i and kinds[i - 1] == "dark" else i
                found[first] = range(first, i + 1)
        return found

    @property
    def can_run_sparse(self) -> bool:
        """Whether a token needs one operator only. Soft routing blends all, and the paper's straight-through estimator
        takes its gradient from all."""
        selected = self.routing == "hard" and (self.hard_estimator == "selected" or bool(self.stacks))
        return self.routing == "threshold" or selected

    @property
    def router_kind(self) -> registry.RouterKind:
        assert self.router is not None
        return registry.ROUTERS[self.router]

    @property
    def follows_quantile(self) -> bool:
        """Whether thresholds follow the scores in training (layers/routers.py)."""
        return self.target_fraction is not None and bool(self.routed_layers) and self.router_kind.can_follow

    def layer_fractions(self) -> list[float] | None:
        """target_fraction, one for each routed layer."""
        if self.target_fraction is None or isinstance(self.target_fraction, list | tuple):
            return self.target_fraction
        return [self.target_fraction] * len(self.routed_layers)

    def of_layer(self, layer: int) -> "ChiarConfig":
        """As one layer sees it: dark ones may be wider."""
        if self.inner_size is None or (self.layer_types or [])[layer] != "dark":
            return self
        inner = copy(self)
        inner.hidden_size, inner.num_attention_heads = self.inner_size, self.inner_size // self.head_size
        inner.intermediate_size = (self.intermediate_size or 0) * self.inner_size // self.hidden_size
        return inner

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def layer_thresholds(self) -> list[tuple[float, ...]]:
        """The thresholds in force, one tuple per routed layer: one value a boundary between two operators. Before
        calibration: the white-noise mean, or its 33rd and 67th percentiles (normal to first order)."""
        boundaries, layers = len(self.operators or []) - 1, len(self.routed_layers)
        if self.thresholds is None:
            mean, deviation = white_noise_entropy(self.hidden_size)
            return [(mean,) if boundaries == 1 else (mean - 0.44 * deviation, mean + 0.44 * deviation)] * layers
        if isinstance(self.thresholds, int | float):
            return [(self.thresholds,) * boundaries] * layers
        return [tuple(t) if isinstance(t, list | tuple) else (t,) for t in self.thresholds]

    def validate(self) -> None:
        """Raise InputError with the value received and what is allowed. transformers calls this when saving, we when a
        model is built. It replaces transformers' own validators, one of which would reject our layer types."""
        config_checks.check(self)

    def to_diff_dict(self) -> dict[str, Any]:
        """What a saved file holds. transformers has a field `layer_types` of its own and reads files without knowing
        whose they are, for a tokenizer alone too: it would reject ours, so there it has another name."""
        told = super().to_diff_dict()
        return {SAVED_LAYER_TYPES if name == "layer_types" else name: value for name, value in told.items()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        told = {"layer_types" if name == SAVED_LAYER_TYPES else name: value for name, value in config_dict.items()}
        return super().from_dict(told, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As in transformers, plus the shim the `auto_map` of the saved file points to."""
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / f"{SHIM_MODULE}.py").write_text(SHIM, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Exports always carry our shim instead of a copy of the source."""
