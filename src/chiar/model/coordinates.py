"""Rotating a model's residual stream: the same function, with the basis in the weights instead of in every layer.

With pre-norm RMSNorm nothing between the matrices that write to the residual stream and those that read from it
notices a rotation: x' = C x has the same root mean square. Readers become W diag(γ) Cᵀ with the norm's γ folded in,
writers C W, embeddings E Cᵀ, and the basis becomes the identity: H is then a row reduction and the filter an
element-wise product.
"""

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from chiar import registry
from chiar.analysis.calibration_report import TOKENIZER_FILES
from chiar.config import ChiarConfig
from chiar.errors import InputError, unknown_name
from chiar.files import check_new, new_folder
from chiar.kernels.transform import make_transform
from chiar.layers.attention import CausalAttention
from chiar.layers.block import LIGHT, Block, FeedForward
from chiar.layers.rbf import RBFMixing
from chiar.layers.routers import LearnedRouter
from chiar.layers.spectral import SpectralFilter
from chiar.model.decoder import ChiarModel
from chiar.model.heads import as_classifier, read_heads, save_heads
from chiar.model.load import architecture, load_config, open_weights, resolve_model
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification

Model = TypeVar("Model", ChiarForCausalLM, ChiarForSequenceClassification)
Turn = Callable[[Tensor], Tensor]
"""Rows in the old coordinates to rows in the new ones."""


def to_spectral_coordinates(model: Model) -> Model:
    """The same model with basis="identity": logits, H and routes agree to rounding. The given one stays as it is.

    Dropout of embeddings and of the FFN's output falls on other coordinates, so only inference, and training without
    dropout, are the same.
    """
    config = model.config
    if config.basis == "identity":
        raise InputError("basis is 'identity': the model is in spectral coordinates already.")
    transform = make_transform(config.basis, config.hidden_size, config.basis_seed, torch.float64)
    return turned(model, transform.forward, "identity", config.basis_seed)


def to_feature_coordinates(model: Model, basis: str = "dct", seed: int = 0) -> Model:
    """The reverse: a model with basis="identity" as one that transforms in every layer."""
    config = model.config
    if config.basis != "identity":
        raise InputError(f"basis is {config.basis!r}: only a model with basis='identity' is in spectral coordinates.")
    if basis not in ("dct", "random"):
        raise unknown_name("basis", basis, ("dct", "random"))
    transform = make_transform(basis, config.hidden_size, seed, torch.float64)
    return turned(model, transform.inverse, basis, seed)


def fold_filters(model: nn.Module) -> None:
    """Before inference with a DCT or random basis: each filter as the matrix Cᵀ diag(w) C, for half its products.

    Forgotten as soon as the model is trained, moved or loaded into.
    """
    for decoder in model.modules():
        if isinstance(decoder, ChiarModel):
            for module in decoder.modules():
                if isinstance(module, SpectralFilter):
                    module.fold(decoder.basis.transform())


def convert_folder(name: str, out: Path, coordinates: str) -> Any:
    """Write a model folder in other coordinates, its tokenizer and further classifiers with it; returns the model."""
    conversions: dict[str, Callable[[Any], Any]]
    conversions = {"spectral": to_spectral_coordinates, "features": to_feature_coordinates}
    if coordinates not in conversions:
        raise unknown_name("coordinates", coordinates, tuple(conversions))
    convert = conversions[coordinates]
    check_new(out)
    source = Path(resolve_model(name)[0])
    load_config(str(source))
    if not source.is_dir():
        raise InputError(f"{name} is a preset with random weights: give the folder of a model.")
    kind = ChiarForCausalLM if architecture(str(source)) == "ChiarForCausalLM" else ChiarForSequenceClassification
    model = open_weights(kind, str(source))
    converted = convert(model)
    heads = {
        corpus: convert(as_classifier(model.model, head, [str(i) for i in range(head.out_features)])).score
        for corpus, head in read_heads(source).items()
    }
    with new_folder(out) as aside:
        converted.save_pretrained(aside)
        if heads:
            save_heads(aside, heads)
        for file in TOKENIZER_FILES:
            if (source / file).is_file():
                shutil.copy(source / file, aside / file)
    return converted


def check_can_turn(model: nn.Module) -> None:
    """Raise InputError where no rotation of the weights gives the same function."""
    config: ChiarConfig = model.config  # type: ignore[assignment]
    if config.norm_position != "pre":
        raise InputError(
            "only a pre-norm model has spectral coordinates: a post-norm layer multiplies the residual stream itself "
            "by γ, one feature at a time, which no rotation passes."
        )
    if config.norm != "rmsnorm":
        raise InputError(
            "only a model with norm='rmsnorm' has spectral coordinates: LayerNorm subtracts the mean over features, "
            "a direction that a rotation turns away."
        )
    if any(layer.looks_back for layer in model.model.layers):  # type: ignore[union-attr]
        raise InputError(
            "a model with temporal filters or the temporal signal has no spectral coordinates: they work on one "
            "feature or direction at a time, which no rotation passes."
        )
    own = not registry.built_in(config.router_kind) and config.router_kind.reads_state
    if own or any(not registry.built_in(registry.OPERATORS[name]) for name in config.operators or []):
        raise InputError(
            "a model with an operator of your own, or a router of your own that reads states, has no spectral "
            "coordinates: nobody knows how to rotate its weights."
        )
    for number, layer in enumerate(model.model.layers, 1):  # type: ignore[union-attr,arg-type]
        gamma_D = layer.norms[LIGHT].weight if LIGHT in layer.norms else None
        if gamma_D is not None and not is_constant(gamma_D):
            raise InputError(
                f"the filter's norm in layer {number} has a γ that differs between features, so C diag(γ) Cᵀ is not "
                "diagonal and the filter no element-wise product: train with filter_gamma=False, or with "
                "basis='identity' from the start."
            )


def turned(model: Model, turn: Turn, basis: str, seed: int) -> Model:
    check_can_turn(model)
    config = deepcopy(model.config)
    config.basis, config.basis_seed = basis, seed
    # A final γ is folded into what reads it; the embedding does not, so a tied output matrix becomes one of its own.
    folds = not is_constant(model.model.norm.weight)  # type: ignore[arg-type]
    if isinstance(model, ChiarForCausalLM) and folds:
        config.tie_word_embeddings = False
    new = type(model)(config).to(device=model.device, dtype=model.dtype).train(model.training)
    new.load_state_dict(model.state_dict())
    new.generation_config = deepcopy(getattr(model, "generation_config", None))
    with torch.no_grad():
        turn_decoder(new.model, turn)
        gamma = take_gamma(new.model.norm) if folds else None
        if isinstance(new, ChiarForSequenceClassification):
            turn_reader(new.score.weight, turn, gamma)
        elif not config.tie_word_embeddings:
            turn_reader(new.lm_head.weight, turn, gamma)
    return new


def turn_decoder(decoder: ChiarModel, turn: Turn) -> None:
    turn_reader(decoder.embed_tokens.weight, turn)
    if decoder.embed_positions is not None:
        turn_reader(decoder.embed_positions.weight, turn)
    if decoder.meta_router is not None:
        turn_reader(decoder.meta_router.gate.weight, turn)
    for layer in decoder.layers:
        assert isinstance(layer, Block)
        turn_layer(layer, turn)


def turn_layer(layer: Block, turn: Turn) -> None:
    gammas = {name: take_gamma(norm) for name, norm in layer.norms.items()}
    for name, operator in layer.operators.items():
        if isinstance(operator, CausalAttention):
            turn_reader(operator.qkv.weight, turn, gammas[name])
            turn_writer(operator.out, turn)
        elif isinstance(operator, RBFMixing):
            turn_reader(operator.omega_Dm.T, turn, gammas[name])
            turn_writer(operator.out, turn)
        elif isinstance(operator, SpectralFilter):
            operator.weight.mul_(gammas[name].to(operator.weight))  # constant, so it passes the rotation
    if isinstance(layer.router, LearnedRouter):
        # It reads [x; H], with x as attention reads it.
        first = layer.router.score
        turn_reader(first.weight[:, : len(gammas["attention"])], turn, gammas["attention"])
    assert isinstance(layer.ffn, FeedForward)
    gamma_D = take_gamma(layer.ffn_norm)
    for ffn in (layer.ffn,):
        if ffn is not None:
            turn_reader(ffn.up.weight, turn, gamma_D)
            turn_writer(ffn.down, turn)


def take_gamma(norm: nn.Module) -> Tensor:
    """A norm's γ, which becomes 1; a norm may have none."""
    assert isinstance(norm, nn.RMSNorm)
    if norm.weight is None:
        return torch.ones(norm.normalized_shape)
    gamma_D = norm.weight.detach().clone()
    norm.weight.fill_(1.0)
    return gamma_D


def turn_reader(weight_OD: Tensor, turn: Turn, gamma_D: Tensor | None = None) -> None:
    """W becomes W diag(γ) Cᵀ: each row is turned."""
    rows_OD = exact(weight_OD)
    weight_OD.copy_(turn(rows_OD if gamma_D is None else rows_OD * exact(gamma_D)))


def turn_writer(linear: nn.Linear, turn: Turn) -> None:
    """W becomes C W and b becomes C b: each column is turned."""
    linear.weight.copy_(turn(exact(linear.weight).T).T)
    linear.bias.copy_(turn(exact(linear.bias)))


def exact(tensor: Tensor) -> Tensor:
    """In float64, on the CPU: not every device has it."""
    return tensor.detach().cpu().double()


def is_constant(gamma_D: Tensor) -> bool:
    return bool((gamma_D == gamma_D[0]).all())
