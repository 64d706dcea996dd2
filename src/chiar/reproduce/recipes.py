"""The paper's tables as data: which models each has, how they were trained, and what the paper reports."""

from dataclasses import dataclass, field
from typing import Any

PAPER_BATCH, PAPER_LENGTH = 128, 256
MIXED_SETTINGS = {"mixing": "added", "added_share": 0.25}


@dataclass(frozen=True)
class Row:
    """One model of a table. Rows with the entropy router get the τ measured on the trained baseline."""

    name: str
    title: str
    """As the paper calls it."""
    preset: str
    paper_validation: float
    """The paper's perplexities on WikiText-103."""
    paper_test: float
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration fields changed in the preset."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Training settings of this row alone; mixing='added' reads every corpus, other rows the first one."""
    beside: str | None = None
    """Another row whose gap to this one the paper names."""

    @property
    def mixed(self) -> bool:
        return self.settings.get("mixing") == "added"

    def of_size(self, size: str) -> str:
        """The preset of this row's family at another size."""
        return f"{self.preset.split('-')[0]}-{size}"


@dataclass(frozen=True)
class Recipe:
    """A table and its training. The first row is the baseline: gaps refer to it and τ is measured on it."""

    name: str
    title: str
    size: str
    epochs: int
    steps: int
    """The paper's, of 128 × 256 tokens."""
    warmup: int
    micro_batch: int
    """Rows of a forward pass, over which the paper's gate pools."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """The paper's budget of one row."""
        return self.steps * PAPER_BATCH * PAPER_LENGTH

    @property
    def mixed(self) -> bool:
        return any(row.mixed for row in self.rows)


# Five epochs are 18,062 steps in the paper; it gives no steps for the ten at 16M.
STEPS_OF_FIVE_EPOCHS = 18_062
BASELINE_400M = Row("baseline", "Baseline (Full Attn + RoPE)", "baseline-400m", 23.73, 23.58)
THRESHOLD_400M = Row("threshold", "CHIAR DCT+Attn", "v3-400m", 27.75, 27.51)

ABLATION = Recipe(
    name="ablation-16m",
    title="Table 1: ablations at 16M parameters",
    size="16m",
    epochs=10,
    steps=2 * STEPS_OF_FIVE_EPOCHS,
    warmup=500,
    micro_batch=32,
    rows=(
        Row("baseline", "Baseline (Full Attn + RoPE)", "baseline-16m", 45.78, 44.63),
        Row("soft", "CHIAR Soft routing", "v3-16m", 46.75, 45.62, {"routing": "soft"}),
        Row("hard", "CHIAR Hard routing (STE)", "v3-16m", 46.86, 45.67, {"routing": "hard"}),
        Row("threshold", "CHIAR Threshold", "v3-16m", 49.62, 48.34),
        Row("threshold-reg", "CHIAR Threshold + Reg.", "v3-16m", 49.70, 48.45, {"collapse_regulariser": 0.01}),
    ),
    notes=(
        "The regulariser has no gradient under threshold routing: with the same seed its row can differ from "
        "threshold's by rounding only.",
    ),
)
SCALING = Recipe(
    name="scaling-400m",
    title="Table 2: 400M parameters",
    size="400m",
    epochs=5,
    steps=STEPS_OF_FIVE_EPOCHS,
    warmup=1000,
    micro_batch=8,
    rows=(BASELINE_400M, THRESHOLD_400M),
)
MIXED = Recipe(
    name="mixed",
    title="Table 2 with its mixed row: 400M parameters",
    size="400m",
    epochs=5,
    steps=STEPS_OF_FIVE_EPOCHS,
    warmup=1000,
    micro_batch=8,
    rows=(
        BASELINE_400M,
        THRESHOLD_400M,
        Row("mixed", "CHIAR Mixed Training", "v3-400m", 28.81, 28.56, settings=MIXED_SETTINGS, beside="threshold"),
    ),
    notes=(
        "Tokens are those of the language corpus; the mixed row reads as many of them, and what is added comes on top.",
        "The paper adds WikiText-2, IMDB and ListOps; classification goes through the whole model here.",
    ),
)
RECIPES = {recipe.name: recipe for recipe in (ABLATION, SCALING, MIXED)}
