"""Checkpoints of the author's released code as folders `from_pretrained` opens. Nothing inside a file is ever executed:
torch's restricted unpickler admits tensors and plain containers only, and their size is checked first."""

import pickle
import re
import warnings
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from pickletools import genops, markobject
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors.torch import save_file
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.config_checks import CHOICES
from chiar.errors import InputError, first_line, require, unknown_name
from chiar.files import check_file, check_new, new_folder
from chiar.model.load import MODEL_FILE
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification

# The published 400M threshold; the files do not carry one.
PUBLISHED_TAU = {1024: 0.8954}
# The released DCT is twice the orthonormal one and its inverse ∘ forward is 2x: the filter absorbs the factor. At DC
# it is larger by a further √2, so that bin's energy counts double in H; ε is added in both places of the entropy.
FILTER_SCALE, ENTROPY_EPS, ENTROPY_DC_WEIGHT = 2.0, 1e-8, 2.0
# Most values of a file (one per reference) and levels of nesting; most names that a message lists.
MOST_VALUES, DEEPEST, LISTED = 1_000_000, 50, 8
GROWS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # add to a container instead of making one
ROPE_BUFFER = re.compile(r"(layers\.\d+\.attn|attns\.\d+)\.rope\.(inv_freq|cos_cache|sin_cache)")
AUTHORS_NAMES = {
    r"^model\.": "", r"^embed_tokens": "token_emb", r"^meta_router\.gate": "meta_router.gate_proj",
    r"^score": "classifier", r"operators\.spectral\.weight": "dct_mix.w", r"norms\.spectral": "dct_mix.norm",
    r"operators\.attention\.qkv": "attn.qkv", r"operators\.attention\.out": "attn.out_proj",
    r"norms\.attention": "attn.norm", r"router\.score": "router.gate_proj", r"ffn\.up": "ffn.0", r"ffn\.down": "ffn.3",
}  # fmt: skip
"""Substitutions from our tensor names to the author's, applied in order."""
BASELINE_NAMES = {r"layers\.(\d+)\.(attn|ffn|ffn_norm)\.": r"\2s.\1."}
"""The author's dense model keeps each kind of part in a list of its own."""


@dataclass
class Imported:
    config: ChiarConfig
    tensors: dict[str, Tensor]
    heads: dict[str, Tensor]  # of mixed training
    notes: list[str]  # assumptions made


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Tensors of a `.pt` file ({step, model, val_ppl, cfg} or a bare state dict), and the routing mode in its cfg."""
    check_file(path)
    try:
        with ZipFile(path) as archive:
            for record in archive.infolist():  # every one, whichever torch reads
                require(record.compress_type == ZIP_STORED, f"{path} is compressed, as torch.save never writes it.")
                if record.filename.lower().endswith("data.pkl"):
                    with archive.open(record) as stream:
                        check_size(stream, path)
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except (pickle.UnpicklingError, BadZipFile) as error:
        forbidden = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
        what = f"it asks for {forbidden[1]}" if forbidden else "it is not a zip of torch.save, or it is damaged"
        raise InputError(f"{path} is not a file of tensors and plain values, so it was not opened: {what}.") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a readable checkpoint (truncated or damaged): {first_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, expected a dictionary with the model's tensors.")
    tensors, stored = content.get("model", content), content.get("cfg")
    require(isinstance(tensors, dict) and tensors, "the checkpoint has no tensors under 'model'.")
    room = 2 * path.stat().st_size  # a tied matrix may have two names; many views of one tensor would take forever
    for name, value in tensors.items():
        # Messages print names of the file only if they are short.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}", name):
            allowed = "up to 200 letters, digits, '_', '.' or '-'"
            raise InputError(f"a tensor in {path} has an invalid name, a {type(name).__name__}: expected {allowed}.")
        if not isinstance(value, Tensor):
            raise InputError(f"the checkpoint's entry {name!r} is a {type(value).__name__}, expected a tensor.")
        # Only ordinary dense tensors: a stride of 0 can claim terabytes, a sparse tensor anything.
        ordinary = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
        if not ordinary or not value.dtype.is_floating_point:
            raise InputError(f"tensor {name} ({value.dtype}) is not an ordinary dense tensor of floating point.")
        if value.numel() == 0 or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise InputError(f"tensor {name} of shape {(*value.shape,)} is empty or larger than what the file stores.")
        room -= value.numel() * value.element_size()
        require(room >= 0, f"the tensors up to {name} are together larger than what the file stores.")
        require(bool(value.isfinite().all()), f"tensor {name} holds values that are not finite.")
    mode = stored.get("routing_mode") if isinstance(stored, dict) else None
    if not isinstance(mode, str | None) or len(mode or "") > 100:
        raise InputError(f"routing_mode in the checkpoint's cfg is a {type(mode).__name__}, expected one word.")
    return dict(tensors), mode


def check_size(stream: IO[bytes], path: Path) -> None:
    """Raise InputError if a pickle is too large or too deep, before anything is built. Shared values count once per
    reference, as often as they would be hashed or printed: 28 lists, each of twice the last one, are 2²⁸ values."""
    parts: list[list[int]] = []  # of each value, by number
    stack: list[Any] = []  # numbers of values; None is a mark
    memo: dict[Any, Any] = {}
    too_large = InputError(f"{path} was not opened: it holds more than {MOST_VALUES:,} values, or {DEEPEST} levels.")
    for count, (code, argument, _) in enumerate(genops(stream)):
        if count > MOST_VALUES:
            raise too_large
        before, taken = code.stack_before, list[Any]()
        if markobject in before:
            while (top := stack.pop()) is not None:
                taken.append(top)
            before = before[: before.index(markobject)]
        taken += [stack.pop() for _ in before]
        if code.name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif code.name.endswith("GET"):
            stack.append(memo[argument])
        elif code.name == "MARK":
            stack.append(None)
        elif code.stack_after:
            if code.name in GROWS:
                stack.append(taken.pop())
            else:
                stack.append(len(parts))
                parts.append([])
            parts[stack[-1]] += taken

    measured: dict[int, tuple[int, int]] = {}

    def measure(value: int, level: int) -> tuple[int, int]:
        """The size and depth of a value. One that contains itself is too deep."""
        if value not in measured:
            if level > DEEPEST:
                raise too_large
            within = [measure(part, level + 1) for part in parts[value]]
            measured[value] = 1 + sum(size for size, _ in within), 1 + max((depth for _, depth in within), default=0)
            if measured[value][0] > MOST_VALUES or measured[value][1] > DEEPEST:
                raise too_large
        return measured[value]

    for value in range(len(parts)):
        measure(value, 1)


def convert(
    tensors: dict[str, Tensor], stored: str | None, tau: float | None = None, routing: str | None = None,
    classifier_pool: str = "last",
) -> Imported:  # fmt: skip
    """Rename the author's tensors to ours, deriving the sizes from their shapes."""
    for option, given in (("routing", routing), ("classifier_pool", classifier_pool)):
        if given is not None and given not in CHOICES[option]:
            raise unknown_name(option, given, CHOICES[option])
    notes: list[str] = []
    tensors = {name.removeprefix("backbone."): value for name, value in tensors.items()}
    heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith("_cls_head_")}
    vocabulary, width = shape_of(tensors, "token_emb.weight", 2)
    layer_types, (head_size, length) = find_layer_types(tensors), find_rope(tensors)
    require(width % head_size == 0, f"the head size {head_size} in rope.inv_freq does not divide the width {width}.")
    fields: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": width, "num_attention_heads": width // head_size}
    fields |= {"layer_types": layer_types, "max_position_embeddings": length, "gate_init": "neutral"}
    fields["gate_generation"] = "prefill"
    fields |= {"entropy_eps": ENTROPY_EPS, "entropy_dc_weight": ENTROPY_DC_WEIGHT}
    fields["meta_router"] = "meta_router.gate_proj.weight" in tensors
    if "routed" in layer_types:
        has_router = any(".router.gate_proj." in name for name in tensors)
        fields["routing"] = find_routing(has_router, stored, routing)
        if has_router and tau is not None:
            notes.append(f"{fields['routing']} routing has no threshold: --tau is not used.")
        elif not has_router:
            fields["thresholds"] = PUBLISHED_TAU.get(width) if tau is None else tau
            if fields["thresholds"] is None:
                raise InputError(f"the file carries no threshold and none is published for width {width}: pass --tau.")
            if tau is None:
                notes.append(f"the file carries no threshold; using the published τ = {fields['thresholds']} (--tau).")
    elif tau is not None or routing is not None:
        notes.append("the file has no routed layers: --tau and --routing are not used.")
    if "classifier.weight" in tensors:
        fields |= {"num_labels": shape_of(tensors, "classifier.weight", 2)[0], "classifier_pool": classifier_pool}
        notes.append(f"the file does not say how the classifier pools tokens; using {classifier_pool!r} (--pool).")
    elif heads:
        notes.append(
            f"{len(heads)} tensors of mixed-training heads are kept apart: {', '.join(sorted(heads)[:LISTED])}."
        )
    config = ChiarConfig(**fields)
    return Imported(config, rename(tensors, config), heads, notes)


def find_layer_types(tensors: dict[str, Tensor]) -> list[str]:
    """The type of each layer. `rename` reports tensors that a layer lacks."""
    part = "attns" if any(name.startswith("attns.") for name in tensors) else "layers"
    numbers = {int(number) for name in tensors for number in re.findall(rf"^{part}\.([0-9]{{1,9}})\.", name)}
    require(numbers, "no layers found: the tensors are named neither layers.N.* nor attns.N.*.")
    if missing := set(range(len(numbers))) - numbers:
        raise InputError(f"the file is incomplete: it has {part}.{max(numbers)}.* but no {part}.{min(missing)}.*.")
    if part == "attns":
        return ["attention"] * len(numbers)
    held = [(f"layers.{i}.dct_mix.w" in tensors, f"layers.{i}.attn.qkv.weight" in tensors) for i in sorted(numbers)]
    return [("routed" if dark else "spectral") if light else "attention" for light, dark in held]


def find_rope(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Head size and trained length, from the rotary buffers."""
    names = sorted(name for name in tensors if name.endswith("rope.inv_freq"))
    require(names, "missing tensor: no *.rope.inv_freq, from which the number of heads follows.")
    head_size = 2 * shape_of(tensors, names[0], 1)[0]
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    for name in names:
        value = tensors[name].float()
        if value.shape != frequencies.shape or not torch.allclose(value, frequencies, rtol=1e-4):
            raise InputError(f"{name} is not RoPE with base 10000 for heads of {head_size}.")
    cache = names[0].replace("inv_freq", "cos_cache")
    return head_size, shape_of(tensors, cache, 2)[0] if cache in tensors else 256


def find_routing(has_router: bool, stored: str | None, given: str | None) -> str:
    if given is not None and stored not in (None, given):
        raise InputError(f"the file says {stored!r}: leave --routing out, it is for files that do not say.")
    routing = given or stored or (None if has_router else "threshold")
    if routing is None:
        raise InputError("the file has router weights but does not say soft or hard: pass --routing soft or hard.")
    if routing not in CHOICES["routing"]:
        raise unknown_name("routing", routing, CHOICES["routing"])
    if has_router != (routing != "threshold"):
        held = "has" if has_router else "has no"
        raise InputError(f"the file {held} router weights (layers.N.router.gate_proj), which contradicts {routing!r}.")
    return routing


def rename(tensors: dict[str, Tensor], config: ChiarConfig) -> dict[str, Tensor]:
    """Our names and values; every tensor must be there, with the right shape, and none may be left over."""
    rules = AUTHORS_NAMES | (BASELINE_NAMES if set(config.layer_types or ()) == {"attention"} else {})
    expected = empty_model(config, "classifier.weight" in tensors).state_dict()
    expected.pop("lm_head.weight", None)
    theirs = {ours: reduce(lambda name, rule: re.sub(rule[0], rule[1], name), rules.items(), ours) for ours in expected}
    used = {*theirs.values(), "lm_head.weight", *filter(ROPE_BUFFER.fullmatch, tensors)}
    wrong = []
    for ours, name in theirs.items():
        found, shape = tuple(tensors[name].shape) if name in tensors else None, tuple(expected[ours].shape)
        if found != shape:
            wrong.append(f"{name} has shape {found}, expected {shape}" if found is not None else f"missing {name}")
    tied = tensors.get("lm_head.weight")
    if tied is not None and not wrong and not torch.equal(tied, tensors["token_emb.weight"]):
        wrong.append("lm_head.weight differs from token_emb.weight, to which it should be tied")
    wrong += [f"unexpected {name}" for name in sorted(set(tensors) - used)]
    more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
    require(not wrong, f"the tensors do not fit: {'; '.join(wrong[:LISTED])}{more}.")
    renamed = {ours: tensors[name].float().contiguous() for ours, name in theirs.items()}
    return {ours: FILTER_SCALE * value if "operators.spectral" in ours else value for ours, value in renamed.items()}


def shape_of(tensors: dict[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    if name not in tensors or tensors[name].ndim != dimensions:
        found = f"{name} has shape {tuple(tensors[name].shape)}" if name in tensors else f"missing {name}"
        raise InputError(f"the tensors do not fit: {found}, expected {dimensions} dimensions.")
    return tuple(tensors[name].shape)


def empty_model(config: ChiarConfig, classifier: bool) -> Any:
    """A model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return (ChiarForSequenceClassification if classifier else ChiarForCausalLM)(config)


def import_checkpoint(path: Path, out: Path, *options: Any, overwrite: bool = False, **named: Any) -> Imported:
    """Convert the file, with `convert`'s options, and write a complete model folder to `out`, which must be new."""
    check_new(out, overwrite, MODEL_FILE)
    imported = convert(*read_checkpoint(path), *options, **named)
    model = empty_model(imported.config, "score.weight" in imported.tensors).to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(imported.tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    with new_folder(out, overwrite, MODEL_FILE) as folder:
        model.save_pretrained(folder)
        if imported.heads:
            save_file(imported.heads, folder / "mixed_heads.safetensors")
    return imported
