"""A model to look at: loaded once, with its tokenizer, its white-noise null, and what a reader should know of it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.explore.steering import ways_to_steer, why_not
from chiar.kernels.noise_sample import Null, make_null
from chiar.model.load import count_parameters, load_model, resolve_model
from chiar.visible import visible

NULL_SAMPLES = 8192


@dataclass
class LoadedModel:
    name: str
    model: Any
    codec: TextCodec
    notes: list[str]

    @classmethod
    def open(cls, name: str, tokenizer: Path | None = None, seed: int = 0) -> "LoadedModel":
        """A training run (its best model), a model folder, or a preset with random weights."""
        folder, run = resolve_model(name)
        model, found = load_model(folder, seed)
        config, notes = model.config, []
        if run is not None:
            notes.append("The best model of a training run.")
        if found is None:
            notes.append(f"Random weights (seed {seed}): the routes show the mechanism, not a skill.")
        if config.meta_router and config.gate_pool != "causal":
            config.gate_generation = "prefill"
            notes.append(
                f"Its gate pools over the {config.gate_pool}, later tokens included; while it continues a text the "
                "gate stays as the text set it."
            )
        if found is not None:
            notes.append(f"Trained on {config.max_position_embeddings:,} tokens in a row: beyond that it guesses.")
        if config.routing == "soft":
            notes.append("Soft routing: both paths run for every token and are blended; the darker one is marked.")
        if config.target_fraction is not None:
            notes.append("Its thresholds were found in training, to hold a share; moving them here changes no file.")
        return cls(visible(Path(name).as_posix(), keep=""), model, TextCodec.open(config, found, tokenizer), notes)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def most_tokens(self) -> int | None:
        """None: RoPE goes on."""
        return self.config.max_position_embeddings if self.config.positions == "learned" else None

    @cached_property
    def null(self) -> Null:
        """What H of noise looks like for this model."""
        config = self.config
        return make_null(config.hidden_size, NULL_SAMPLES, 0, config.entropy_eps, config.entropy_dc_weight)

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the page says of it before any text is routed."""
        config = self.config
        return {
            "name": self.name,
            "parameters": count_parameters(config),
            "width": config.hidden_size,
            "kinds": list(config.layer_types),
            "router": describe_router(config),
            "notes": self.notes,
            "steer": ways_to_steer(config),
            "unsteerable": why_not(config),
        }


def describe_router(config: Any) -> str:
    """How a token's path is chosen, in a few words."""
    if not config.routed_layers:
        return "no routing"
    how = {
        "entropy": "routed by spectral entropy, H\u00a0>\u00a0τ",
        "learned": f"routed by a learned router ({config.routing})",
        "random": f"routed by a random hash of the {config.random_key}",
        "static": "routed by layer, whatever the token",
    }
    return how.get(config.router, f"routed by {config.router}")


def open_models(names: list[str], tokenizer: Path | None = None, seed: int = 0) -> list[LoadedModel]:
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]} is named twice: two different models are compared.")
    models = [LoadedModel.open(name, tokenizer, seed) for name in names]
    for loaded in models:
        _ = loaded.null, loaded.about  # before anybody waits for them
    return models
