"""ChiarConfig: one validated field for every architectural choice of the paper and of this implementation."""

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
    """Number of token ids. Training a preset sets it to that of the corpus."""
    hidden_size: int = 256
    """Width D of the residual stream."""
    num_hidden_layers: int | None = None
    """Number of layers N. Default: the length of `layer_types` if that is given, else 4."""
    num_attention_heads: int = 4
    """Number of attention heads, a divisor of `hidden_size`."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network. Default: 4·D."""
    layer_types: list[str] | None = None
    """Type of each layer: spectral, temporal, routed, dark or attention. Default: the paper's spectral,
    routed × (N−2), attention. Consecutive dark layers form one stack, which processes dark tokens only."""

    operators: list[str] | None = None
    """Operators of routed layers in order of rising entropy: spectral or temporal, optionally rbf, then attention.
    With dark stacks: carry, attention, where the carry passes a stack's last change on to light tokens."""
    router: str | None = None
    """Router that chooses each token's operator. For routed layers: entropy, learned, random or static. For dark
    stacks: rise, predictive, forecast, learned, boundary, spectral, space, stride or random."""
    routing: str | None = None
    """How the router decides: hard or soft (the learned router), threshold (all others)."""
    thresholds: float | list | None = None
    """Threshold τ: one number, or one for each routed layer (pairs [τ_low, τ_high] with three operators). Default: the
    mean entropy of white noise of this width, or its 33rd and 67th percentiles. Change those of a built model with
    `set_thresholds`."""
    hard_estimator: str = "both"
    """Gradient of hard routing: both (the paper's straight-through estimator) or selected (chosen operator only)."""
    target_fraction: float | list[float] | None = None
    """Target fraction f of dark tokens, one for all layers or stacks or one for each. In training the threshold follows
    the (1 − f)-quantile of the scores (H, or the learned router's logit difference); in evaluation it is fixed."""
    router_scale: str = "one"
    """Factor on the chosen operator's output: one (p / stopgrad(p), for the gradient only) or probability (2·p where
    attention was chosen, 1 elsewhere)."""
    random_key: str = "token"
    """What the random router hashes: token (its id), position, or both."""
    random_fraction: float = 0.5
    """Fraction of tokens the random router sends to attention."""
    router_seed: int = 0
    """Seed of the random router's hash and of the random basis."""
    static_operators: list[str] | None = None
    """The static router's operator for each routed layer. Default: attention in every second one, from the first."""
    collapse_regulariser: float = 0.0
    """λ of the loss −λ·(entropy of mean operator use), averaged over routed layers. No gradient under threshold."""
    keys: str = "all"
    """Keys of an operator in routed layers: all tokens, or routed (only tokens sent to it)."""
    light_ffn: bool = True
    """Whether light tokens pass through the feed-forward network and its norm in routed layers."""

    window: int | None = None
    """Sliding window of attention layers in tokens, including the token itself. Default: none. Not for dark layers."""
    inner_size: int | None = None
    """Width of dark layers, whose heads keep their size. Default: D."""
    carry: str = "linear"
    """What light tokens get from a dark stack: linear (a linear map of its last change), smoothed (a running mean of
    its changes, weighted by the router's probabilities) or none."""
    early_weight: float = 0.2
    """Weight of the next-token loss of the early head before each dark stack, the source of predictive entropy."""

    execution: str = "dense"
    """How routed layers and dark stacks run: dense (every operator on every token, then select: the definition), sparse
    (only what was chosen) or auto (sparse where possible). The results are the same."""

    spectral_form: str = "sublayer"
    """Light path of post-norm layers: sublayer (the released code) or equation (the paper's Eq. 3)."""
    norm: str = "layernorm"
    """Kind of norm: layernorm or rmsnorm."""
    norm_position: str = "post"
    """Where norms are: post (after each residual addition, as in the paper) or pre (before each sublayer)."""
    embedding_norm: bool = False
    """Whether embeddings are divided by their root mean square, so that the residual stream starts at scale 1."""
    filter_init: float = 1.0
    """Initial value of the weights of light filters: 1 in the paper; under pre-norm a filter at 0 adds nothing."""
    filter_gamma: bool = True
    """Whether a filter's own norm has a scale γ under pre-norm; without it, spectral coordinates stay exact."""
    basis: str = "dct"
    """Basis of the entropy and the filter: dct, or the controls identity and random (orthogonal)."""
    entropy_eps: float = 0.0
    """ε of the entropy: 0 is exact and scale-free; the released code has 1e-8."""
    entropy_dc_weight: float = 1.0
    """Weight of the first coefficient's energy in H: 2 reproduces the released code's unnormalised DCT."""
    temporal_window: int = 16
    """Window W of the temporal filter in tokens, including the token itself."""
    temporal_coefficients: int = 4
    """Number K of DCT coefficients along the window that define a temporal filter's taps in each channel."""
    temporal_everywhere: bool = False
    """Whether every layer begins with one more sublayer, a temporal filter for every token, initialised to 0."""
    positions: str = "rope"
    """Position encoding: rope or learned."""
    max_position_embeddings: int = 256
    """Number of learned positions; with RoPE the length trained on, which may be exceeded."""

    meta_router: bool | None = None
    """Whether layer 1 has a learned gate. Default: only if it is spectral or temporal and positions are rope (v3)."""
    gate_pool: str = "batch"
    """Mean embedding the gate reads: over the batch (the paper), over the sequence, or causal (running mean)."""
    gate_init: str = "biased"
    """Initial gate: biased (weights 0, bias 2; the paper) or neutral (weights N(0, 0.02), bias 0; released code)."""
    gate_skip_below: float | None = None
    """Hard gate: at inference layer 1 is skipped where g is below this bound. Default: never."""
    gate_generation: str = "refuse"
    """Generation with a gate that reads later tokens: refuse, or prefill (freeze g after the prompt)."""

    dropout: float = 0.1
    """Dropout on embeddings, attention probabilities, and the hidden layer and output of the feed-forward network."""
    classifier_pool: str = "last"
    """State the sequence classifier reads: last (of the last real token) or mean (over real tokens)."""
    tie_word_embeddings: bool = True
    """Whether embedding and output projection share one matrix."""
    bos_token_id: int | None = None
    """Id of the token before a text. Training a preset sets it to the end of text of the corpus."""
    eos_token_id: int | list[int] | None = None
    """Id or ids of the token that ends a text. Training a preset sets it like `bos_token_id`."""
    pad_token_id: int | None = None
    """Id of the token that pads the rows of a batch."""

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
        if self.stacks and self.router == "stride":  # every k-th token: f is 1/k; f above ½ is left to be refused
            exact = [1 / round(1 / f) if 0 < f <= 0.5 else f for f in self.layer_fractions() or ()]
            self.target_fraction = exact if isinstance(self.target_fraction, list) else exact[0]
        if kind is not None and kind.decides_by_layer and self.static_operators is None:
            count = self.layer_types.count("routed")
            self.static_operators = ["attention" if i % 2 == 0 else self.operators[0] for i in range(count)]

    @property
    def routed_layers(self) -> list[int]:
        """Indices of layers that route tokens: routed layers, and the first layer of each dark stack."""
        kinds, stacks = self.layer_types or [], self.stacks
        return [i for i, kind in enumerate(kinds) if kind == "routed" or i in stacks]

    @property
    def stacks(self) -> dict[int, range]:
        """Layers of each dark stack, keyed by the first."""
        kinds, first = self.layer_types or [], 0
        found: dict[int, range] = {}  # torch.compile cannot trace dict[int, range]()
        if "dark" not in kinds:
            return found
        for i, kind in enumerate(kinds):
            if kind == "dark":
                first = first if i and kinds[i - 1] == "dark" else i
                found[first] = range(first, i + 1)
        return found

    @property
    def can_run_sparse(self) -> bool:
        """Whether a token needs only one operator. Soft routing blends all, and the paper's straight-through estimator
        gets its gradient from all."""
        selected = self.routing == "hard" and (self.hard_estimator == "selected" or bool(self.stacks))
        return self.routing == "threshold" or selected

    @property
    def router_kind(self) -> registry.RouterKind:
        assert self.router is not None
        return registry.ROUTERS[self.router]

    @property
    def follows_quantile(self) -> bool:
        """Whether thresholds follow a quantile of the scores in training (layers/routers.py)."""
        return self.target_fraction is not None and bool(self.routed_layers) and self.router_kind.can_follow

    def layer_fractions(self) -> list[float] | None:
        """target_fraction as a list, one per entry of `routed_layers`."""
        if self.target_fraction is None or isinstance(self.target_fraction, list | tuple):
            return self.target_fraction
        return [self.target_fraction] * len(self.routed_layers)

    def of_layer(self, layer: int) -> "ChiarConfig":
        """The configuration to build one layer from: dark layers may have another width."""
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
        """The thresholds in force: a tuple per routed layer, one value per boundary between two operators. Before
        calibration: the mean of white noise, or its 33rd and 67th percentiles (normal to first order)."""
        boundaries, layers = len(self.operators or []) - 1, len(self.routed_layers)
        if self.thresholds is None:
            mean, deviation = white_noise_entropy(self.hidden_size)
            return [(mean,) if boundaries == 1 else (mean - 0.44 * deviation, mean + 0.44 * deviation)] * layers
        if isinstance(self.thresholds, int | float):
            return [(self.thresholds,) * boundaries] * layers
        return [tuple(t) if isinstance(t, list | tuple) else (t,) for t in self.thresholds]

    def validate(self) -> None:
        """Raise InputError with the value received and those allowed. transformers calls this to save, we to build.
        It replaces transformers' own validators, one of which would reject our layer types."""
        config_checks.check(self)

    def to_diff_dict(self) -> dict[str, Any]:
        """The fields a file stores. transformers has its own `layer_types` and would reject ours when it reads the file
        without knowing the model class, for example to load a tokenizer. So files have another name for it."""
        fields = super().to_diff_dict()
        return {SAVED_LAYER_TYPES if name == "layer_types" else name: value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        fields = {"layer_types" if name == SAVED_LAYER_TYPES else name: value for name, value in config_dict.items()}
        return super().from_dict(fields, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As in transformers, and write the shim to which the `auto_map` of the saved file points."""
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / f"{SHIM_MODULE}.py").write_text(SHIM, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Exports always carry our shim instead of a copy of the source."""
