"""Models by folder or preset name. Model classes are slow to import, so they are imported only where one is opened."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from chiar import presets
from chiar.config import SHIM_MODULE, ChiarConfig
from chiar.errors import InputError, errors_as, require, unknown_name
from chiar.files import write_atomic

MODEL_FILE = f"{SHIM_MODULE}.py"  # in every model folder we write, and in no other
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", SETTINGS, "vocab.json", "merges.txt", "special_tokens_map.json")


def copy_tokenizer(source: Path | None, target: Path) -> None:
    """Copy the tokenizer files that the target lacks. Without a padding token, the end of text pads on the left."""
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).is_file() and not (target / name).exists():
            shutil.copy(source / name, target / name)
    if (path := target / SETTINGS).is_file():
        with errors_as(f"{path} is damaged", ValueError, AttributeError):
            settings = json.loads(path.read_text(encoding="utf-8"))
            if settings.get("pad_token") is None and settings.get("eos_token") is not None:
                settings |= {"pad_token": settings["eos_token"], "padding_side": "left"}
                write_atomic(path, json.dumps(settings, indent=2) + "\n")


def choose_device(name: str) -> torch.device:
    if name not in (known := ("auto", "cpu", "cuda")):
        raise unknown_name("device", name, known)
    require(name != "cuda" or torch.cuda.is_available(), "there is no CUDA device here: use --device cpu.")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def resolve_model(name: str) -> tuple[str, str | None]:
    """The folder to load, and the training run it belongs to if one was named."""
    best = Path(name) / "best"
    if (best / "config.json").is_file():
        return str(best), name
    if (Path(name) / "metrics.jsonl").is_file() and not (Path(name) / "config.json").is_file():
        raise InputError(f"{name} is a training run without a best model yet: let it reach its first evaluation.")
    return name, None


def load_config(name: str) -> ChiarConfig:
    """The configuration of a preset, a model folder or a run."""
    name = resolve_model(name)[0]
    path = Path(name) / "config.json"
    if path.is_file():
        with errors_as(f"{path} is damaged", ValueError, AttributeError):
            kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        require(kind == ChiarConfig.model_type, f"{name} holds a {kind!r} model, not a CHIAR-Former.")
        return ChiarConfig.from_pretrained(name)
    if Path(name).exists() or "/" in name:
        raise InputError(f"there is no folder {name} with a config.json: name a preset, a run or a model folder.")
    if name not in presets.NAMES:
        raise unknown_name("preset or folder", name, presets.NAMES)
    return presets.get(name)


def load_model(name: str, seed: int = 0) -> tuple[Any, Path | None]:
    """A language model and its folder: of a run its best model, of a preset random weights and no folder."""
    from chiar.model.modeling import ChiarForCausalLM

    name = resolve_model(name)[0]
    config = load_config(name)
    if Path(name).is_dir():
        if config.architectures == ["ChiarForSequenceClassification"]:
            raise InputError(f"{name} is a classifier, not a language model: chiar eval measures it on labelled text.")
        return open_weights(ChiarForCausalLM, name).eval(), Path(name)
    torch.manual_seed(seed)
    return ChiarForCausalLM(config).eval(), None


def open_weights(kind: Any, folder: str, **options: Any) -> Any:
    """A model of class `kind` with the weights of a folder. All must be present and finite, and none left over but a
    classifier's head. Files are not memory-mapped: truncating a mapped file would kill the process, even much later."""
    logging.disable_progress_bar()
    options |= {"output_loading_info": True, "disable_mmap": True, "ignore_mismatched_sizes": True}
    verbosity, unfit = logging.get_verbosity(), f"the weights in {folder} cannot be loaded"
    logging.set_verbosity_error()  # instead of its table of mismatches: see the messages below
    try:
        damaged = f"the weights in {folder} are damaged, restore them or take another model"
        with errors_as(unfit, RuntimeError, OSError), errors_as(damaged, SafetensorError):
            model, info = kind.from_pretrained(folder, **options)
    finally:
        logging.set_verbosity(verbosity)
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise InputError(f"{unfit}: {name} is {tuple(stored)}, and the configuration wants {tuple(wanted)}.")
    if info["missing_keys"]:
        raise InputError(f"{folder} has no weights for {', '.join(sorted(info['missing_keys']))}: it is incomplete.")
    if left := sorted(name for name in info["unexpected_keys"] if not name.startswith("score.")):
        unplaced = f"this configuration has no place for {left[0]}, which {folder} holds"
        raise InputError(f"{unplaced}: keep the folder's own configuration.")
    for name, values in model.state_dict().items():
        if not bool(values.isfinite().all()):
            what = f"{name} in {folder} holds values that are not finite"
            raise InputError(f"{what}: its training diverged or the file is damaged. Take an earlier model.")
    return model


def count_parameters(config: ChiarConfig) -> int:
    """Trainable parameters, tied ones once, of a model on the meta device, which takes no memory."""
    from chiar.model.modeling import ChiarForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ChiarForCausalLM(config).parameters())
