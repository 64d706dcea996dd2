"""Classifiers made of a decoder and a head. A run whose first corpus has labels exports a
ChiarForSequenceClassification; other heads are saved beside the model in `heads.safetensors`, named by corpus."""

from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

from chiar.errors import InputError, errors_as, require
from chiar.model.decoder import ChiarModel
from chiar.model.load import copy_tokenizer, load_config, open_weights
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification

HEADS = "heads.safetensors"


class Classified(Protocol):
    """The attributes of a prepared corpus that are read here."""

    name: str
    folder: Path
    labels: list[str]


def as_classifier(decoder: ChiarModel, head: nn.Linear, labels: list[str]) -> ChiarForSequenceClassification:
    """A classifier of this decoder and head, not of copies. Its configuration is a copy, with the class names."""
    config = deepcopy(decoder.config)
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    with torch.device("meta"):  # without memory: both parts are replaced
        classifier = ChiarForSequenceClassification(config)
    classifier.model, classifier.score = decoder, head
    return classifier


def export_model(model: Any, corpus: Classified, target: Path) -> None:
    """Save a TaskModel as a folder for `from_pretrained` and `pipeline`: a classifier if its first corpus has labels,
    else the language model. It gets a padding token, and may generate under a gate that sees later tokens."""
    heads = dict(model.heads.items())
    if corpus.labels:
        exported: Any = as_classifier(model.language.model, heads.pop(corpus.name), corpus.labels)
    else:
        exported = copy(model.language)  # shallow, with configurations of its own: those of the run stay unchanged
    exported.config, end = deepcopy(exported.config), exported.config.eos_token_id
    exported.config.gate_generation = "prefill"
    if exported.config.pad_token_id is None:
        exported.config.pad_token_id = end[0] if isinstance(end, list) else end
    if not corpus.labels:
        exported.generation_config = GenerationConfig.from_model_config(exported.config)
    exported.save_pretrained(target)
    save_heads(target, heads)
    copy_tokenizer(corpus.folder / "tokenizer", target)


def save_heads(folder: Path, heads: dict[str, nn.Linear]) -> None:
    named = {f"{name}.{part}": value for name, head in heads.items() for part, value in head.state_dict().items()}
    if named:
        save_file({name: value.detach().cpu().contiguous() for name, value in named.items()}, folder / HEADS)


def read_heads(folder: Path) -> dict[str, nn.Linear]:
    """The heads saved beside a model, by the name of their corpus."""
    path, heads = folder / HEADS, {}
    with errors_as(f"{path} cannot be loaded", SafetensorError, KeyError, ValueError, RuntimeError):
        stored = load_file(path, backend="pread") if path.is_file() else {}
        for name in sorted({key.rpartition(".")[0] for key in stored}):
            classes, width = stored[f"{name}.weight"].shape
            heads[name] = nn.Linear(width, classes)
            heads[name].load_state_dict({part: stored[f"{name}.{part}"] for part in ("weight", "bias")})
    return heads


def open_classifier(name: str, corpus: Classified) -> ChiarForSequenceClassification:
    """A folder's classifier for a corpus: the head of that name, or else the folder's own classifier."""
    heads, own = read_heads(Path(name)), Path(name).is_dir() and load_config(name).architectures != ["ChiarForCausalLM"]
    kind = ChiarForSequenceClassification if own else ChiarForCausalLM
    if corpus.name in heads:
        head, classes = heads[corpus.name], len(corpus.labels)
        if head.out_features != classes:
            other = f"{name} was trained on another {corpus.name}: {head.out_features} classes"
            raise InputError(f"{other}, {corpus.folder} has {classes}.")
        return as_classifier(open_weights(kind, name).model, head, corpus.labels)
    if own:
        return open_weights(kind, name)
    require(not heads, f"{name} has no head for {corpus.name}, only for {', '.join(heads)}.")
    raise InputError(f"{name} is a language model without a classifier: chiar finetune makes one.")
