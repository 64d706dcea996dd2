"""Models by folder or preset name, for the command line."""

import json
from pathlib import Path
from typing import Any

from chiar import presets
from chiar.config import ChiarConfig
from chiar.errors import InputError, first_line, unknown_name


def resolve_model(name: str) -> tuple[str, str | None]:
    """The folder to load, and the training run it belongs to if one was named."""
    best = Path(name) / "best"
    if (best / "config.json").is_file():
        return str(best), name
    if (Path(name) / "metrics.jsonl").is_file() and not (Path(name) / "config.json").is_file():
        raise InputError(f"{name} is a training run without a best model yet: let it reach its first evaluation.")
    return name, None


def load_config(name: str) -> ChiarConfig:
    """A preset's configuration or a folder's."""
    path = Path(name) / "config.json"
    if path.is_file():
        try:
            kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged: {first_line(error)}") from error
        if kind != ChiarConfig.model_type:
            raise InputError(f"{name} holds a {kind!r} model, not a CHIAR-Former.")
        return ChiarConfig.from_pretrained(name)
    if Path(name).exists():
        raise InputError(f"{name} is not a model folder: it has no config.json.")
    if "/" in name:
        raise InputError(f"there is no folder {name}.")
    if name not in presets.NAMES:
        raise unknown_name("preset or folder", name, presets.NAMES)
    return presets.get(name)


def load_model(name: str, seed: int = 0) -> tuple[Any, Path | None]:
    """A language model and its folder; a preset gives random weights and no folder."""
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging

    from chiar.modeling import ChiarForCausalLM

    logging.disable_progress_bar()
    config = load_config(name)
    if Path(name).is_dir():
        try:
            model, info = ChiarForCausalLM.from_pretrained(name, output_loading_info=True)
        except (SafetensorError, RuntimeError) as error:
            raise InputError(f"the weights in {name} cannot be loaded: {first_line(error)}") from error
        if info["missing_keys"]:
            raise InputError(f"{name} has no weights for {', '.join(sorted(info['missing_keys']))}: it is incomplete.")
        return model.eval(), Path(name)
    torch.manual_seed(seed)
    return ChiarForCausalLM(config).eval(), None


def count_parameters(config: ChiarConfig) -> int:
    """Trainable parameters, tied ones once; the model is laid out on the meta device and holds no memory."""
    import torch

    from chiar.modeling import ChiarForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ChiarForCausalLM(config).parameters())
