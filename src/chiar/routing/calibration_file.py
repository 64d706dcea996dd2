"""A calibration on disk, and the thresholds another model takes from it."""

import json
from pathlib import Path
from typing import Any

from chiar.config import ChiarConfig
from chiar.errors import InputError, first_line
from chiar.files import check_file
from chiar.routing.calibration import Calibration

FORMAT = "chiar-calibration/1"
# One model's thresholds mean something in another only if H is the same function of the same kind of vector.
MUST_AGREE = ("hidden_size", "vocab_size", "basis", "basis_seed", "entropy_eps", "entropy_dc_weight")


def to_json(found: Calibration, config: ChiarConfig) -> str:
    measured = {name: getattr(config, name) for name in MUST_AGREE}
    return json.dumps({"format": FORMAT, "measured": measured, **found.to_dict()}, indent=2)


def check_comparable(measured: dict[str, Any], target: ChiarConfig) -> None:
    for field in MUST_AGREE:
        ours, theirs = measured.get(field), getattr(target, field)
        if ours != theirs:
            raise InputError(f"the two models differ in {field} ({ours!r}, {theirs!r}), so thresholds do not carry.")
    if target.router != "entropy":
        raise InputError(f"the model has router={target.router!r}, which has no thresholds.")


def read_thresholds(path: Path, target: ChiarConfig) -> list:
    """Thresholds for `target` as its configuration stores them: one τ everywhere, or those measured layer by layer."""
    check_file(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise InputError(f"{path} is not a calibration: it does not say format {FORMAT!r}.")
        layers = [[float(value) for value in layer["thresholds"]] for layer in stored["layers"]]
        rule, measured = stored["rule"], stored["measured"]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a readable calibration: {first_line(error)}") from error
    check_comparable(measured, target)
    routed = len(target.routed_layers)
    if not routed:
        raise InputError("the model has no routed layers, so thresholds have no effect: leave --thresholds out.")
    if rule == "embeddings":
        layers = layers[:1] * routed
    if len(layers) != routed:
        raise InputError(f"{path} has thresholds for {len(layers)} routed layers, the model has {routed}.")
    return [values[0] if len(values) == 1 else values for values in layers]
