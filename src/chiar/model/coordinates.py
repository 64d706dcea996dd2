"""Rotating a model's residual stream: the same function, with the basis in the weights instead of in every layer. Under
pre-norm RMSNorm the rotated stream x' = C x has the same root mean square. So matrices that read the stream become
W diag(γ) Cᵀ, with the norm's γ folded in, matrices that write to it C W, and embeddings E Cᵀ. The basis becomes the
identity: H is then a row reduction and the filter an element-wise product."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError, require, unknown_name
from chiar.files import check_new, new_folder
from chiar.kernels.transform import make_transform
from chiar.layers.attention import CausalAttention
from chiar.layers.block import Block
from chiar.layers.context import Maybe
from chiar.layers.rbf import RBFMixing
from chiar.layers.routers import LearnedRouter
from chiar.layers.spectral import SpectralFilter
from chiar.layers.temporal import TemporalFilter
from chiar.model.heads import as_classifier, read_heads, save_heads
from chiar.model.load import MODEL_FILE, copy_tokenizer, load_config, open_weights, resolve_model
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification

Model = TypeVar("Model", ChiarForCausalLM, ChiarForSequenceClassification)
Rotation = Callable[[Tensor], Tensor]
"""Maps rows in the old coordinates to rows in the new ones."""


def to_spectral_coordinates(model: Model) -> Model:
    """A copy of the model with basis="identity": logits, H and routes agree up to rounding. In training they do so only
    without dropout, which would drop other coordinates."""
    config = model.config
    require(config.basis != "identity", "basis is 'identity': the model is in spectral coordinates already.")
    transform = make_transform(config.basis, config.hidden_size, config.router_seed, torch.float64)
    return rotated(model, transform.forward, "identity", config.router_seed)


def to_feature_coordinates(model: Model, basis: str = "dct", seed: int = 0) -> Model:
    """The reverse: a copy of a model with basis="identity" that transforms in every layer."""
    config = model.config
    if config.basis != "identity":
        raise InputError(f"basis is {config.basis!r}: only a model with basis='identity' is in spectral coordinates.")
    if basis not in ("dct", "random"):
        raise unknown_name("basis", basis, ("dct", "random"))
    transform = make_transform(basis, config.hidden_size, seed, torch.float64)
    return rotated(model, transform.inverse, basis, seed)


def convert_folder(name: str, out: Path, coordinates: str, overwrite: bool = False) -> ChiarConfig:
    """Write a model folder in other coordinates, with its tokenizer and the classifier heads beside it."""
    if coordinates not in ("spectral", "features"):
        raise unknown_name("coordinates", coordinates, ("spectral", "features"))
    check_new(out, overwrite, MODEL_FILE)
    source = Path(resolve_model(name)[0])
    language = load_config(str(source)).architectures == ["ChiarForCausalLM"]
    require(source.is_dir(), f"{name} is a preset with random weights: give the folder of a model.")
    model = open_weights(ChiarForCausalLM if language else ChiarForSequenceClassification, str(source))
    convert: Callable[[Any], Any] = to_spectral_coordinates if coordinates == "spectral" else to_feature_coordinates
    converted, heads = convert(model), {}
    for corpus, head in read_heads(source).items():
        heads[corpus] = convert(as_classifier(model.model, head, [str(i) for i in range(head.out_features)])).score
    with new_folder(out, overwrite, MODEL_FILE) as aside:
        converted.save_pretrained(aside)
        save_heads(aside, heads)
        copy_tokenizer(source, aside)
    return converted.config


def check_can_rotate(model: Model) -> None:
    """Raise InputError if no rotation of the weights gives the same function."""
    config, layers = model.config, [layer for layer in model.model.layers if isinstance(layer, Block)]
    operators = [operator for layer in layers for operator in layer.operators.values()]
    routers = [layer.router for layer in layers if layer.router is not None]
    own = not all(type(operator) in (SpectralFilter, CausalAttention, RBFMixing) for operator in operators)
    own |= config.router_kind.reads_state and not all(isinstance(router, LearnedRouter) for router in routers)
    along_time = any(isinstance(module, TemporalFilter) for module in model.modules())
    filters = [
        layer.norms[n] for layer in layers for n in layer.norms if isinstance(layer.operators[n], SpectralFilter)
    ]
    reasons = {
        "it is post-norm: γ multiplies the residual stream itself": config.norm_position != "pre",
        "LayerNorm subtracts the mean over features, a direction that a rotation turns": config.norm != "rmsnorm",
        "its temporal filters treat each feature by itself, and a rotation mixes features": along_time,
        "an operator of your own, or a router of your own that reads states, cannot be rotated": own,
        "a filter's norm has a γ that differs between features, so C diag(γ) Cᵀ is not diagonal: train with "
        "filter_gamma=False, or with basis='identity' from the start": not all(map(has_one_gamma, filters)),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise InputError(f"the model has no spectral coordinates: {reason}.")


def rotated(model: Model, rotate: Rotation, basis: str, seed: int) -> Model:
    check_can_rotate(model)
    config = deepcopy(model.config)
    config.basis, config.router_seed = basis, seed
    # The final γ is folded into the output matrix but not into the embedding, so the two cannot stay tied.
    folds = not has_one_gamma(model.model.norm)
    if isinstance(model, ChiarForCausalLM) and folds:
        config.tie_word_embeddings = False
    new = type(model)(config).to(device=model.device, dtype=model.dtype).train(model.training)
    new.load_state_dict(model.state_dict())
    new.generation_config = deepcopy(getattr(model, "generation_config", None))
    decoder = new.model
    with torch.no_grad():
        for table in (decoder.embed_tokens, decoder.embed_positions, decoder.meta_router and decoder.meta_router.gate):
            if table is not None:
                rotate_reader(table.weight, rotate)
        for layer in decoder.layers:
            rotate_layer(layer, rotate)
        gamma = take_gamma(decoder.norm) if folds else None
        if isinstance(new, ChiarForSequenceClassification):
            rotate_reader(new.score.weight, rotate, gamma)
        elif not config.tie_word_embeddings:
            rotate_reader(new.lm_head.weight, rotate, gamma)
    return new


def rotate_layer(layer: Block, rotate: Rotation) -> None:
    gammas = {name: take_gamma(norm) for name, norm in layer.norms.items()}
    for name, operator in layer.operators.items():
        if isinstance(operator, SpectralFilter):
            operator.weight.mul_(gammas[name].to(operator.weight))  # constant, so it commutes with the rotation
        else:
            assert isinstance(operator, CausalAttention | RBFMixing)
            reader = operator.qkv.weight if isinstance(operator, CausalAttention) else operator.omega_Dm.T
            rotate_reader(reader, rotate, gammas[name])
            rotate_writer(operator.out, rotate)
    if isinstance(layer.router, LearnedRouter):
        gamma_D = gammas["attention"]  # it reads [x; H], with x as attention reads it
        rotate_reader(layer.router.score.weight[:, : len(gamma_D)], rotate, gamma_D)
    rotate_reader(layer.ffn.up.weight, rotate, take_gamma(layer.ffn_norm))
    rotate_writer(layer.ffn.down, rotate)


def take_gamma(norm: nn.Module) -> Tensor:
    """A norm's γ (1 if it has none), which is set to 1 in the norm."""
    assert isinstance(norm, nn.RMSNorm)
    if norm.weight is None:
        return torch.ones(norm.normalized_shape)
    gamma_D = norm.weight.detach().clone()
    norm.weight.fill_(1.0)
    return gamma_D


def rotate_reader(weight_OD: Tensor, rotate: Rotation, gamma_D: Maybe = None) -> None:
    """W becomes W diag(γ) Cᵀ: each row is rotated, on the CPU because not every device has float64."""
    rows_OD = weight_OD.detach().cpu().double()
    weight_OD.copy_(rotate(rows_OD if gamma_D is None else rows_OD * gamma_D.cpu().double()))


def rotate_writer(linear: nn.Linear, rotate: Rotation) -> None:
    """W becomes C W and b becomes C b: each column is rotated."""
    rotate_reader(linear.weight.T, rotate)
    rotate_reader(linear.bias, rotate)


def has_one_gamma(norm: nn.Module) -> bool:
    assert isinstance(norm, nn.RMSNorm | nn.LayerNorm)
    return norm.weight is None or bool((norm.weight == norm.weight[0]).all())
