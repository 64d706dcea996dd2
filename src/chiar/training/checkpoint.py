"""Checkpoints: written aside, hashed, switched by a rename.

A checkpoint is a folder with `state.safetensors` (weights, optimiser, average), `state.json` (plain values) and
`manifest.json` (the SHA-256 of both, written last). Nothing is pickled. A process killed at any moment leaves the
previous checkpoints as they were and at most a hidden partial folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from chiar.errors import InputError
from chiar.training.distributed import Processes

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "state.safetensors"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def steps(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def partials(folder: Path) -> Iterator[Path]:
    """What a killed process left half-written."""
    return folder.glob(".step-*.partial")


def state_tensors(model: Any, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything a run has learned: weights, saved buffers, the optimiser's state of every parameter, the average."""
    parameters = dict(model.named_parameters())  # tied ones once
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    saved = {name: value for name, value in model.state_dict().items() if name in parameters or name not in all_names}
    tensors = {f"model.{name}": value for name, value in saved.items()}
    for name, parameter in parameters.items():
        for key, value in sorted(optimizer.state[parameter].items()):
            tensors[f"optimizer.{name}.{key}"] = value
    tensors.update({f"average.{name}": value for name, value in average.items()})
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], processes: Processes) -> None:
    """Write the checkpoint of one step. Processes hold the same state, so the main one writes it."""
    if processes.main:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside / TENSORS)
            write_synced(aside / STATE, json.dumps(state, indent=1))
            hashes = {name: file_hash(aside / name) for name in (TENSORS, STATE)}
            write_synced(aside / MANIFEST, json.dumps({"files": hashes}, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(aside, folder)
            sync(folder.parent)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    processes.barrier()


def write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem(folder: Path) -> str | None:
    """None if every file is there with its hash, else what is wrong."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        hashes = {TENSORS: files[TENSORS], STATE: files[STATE]}
    except (OSError, ValueError, KeyError, TypeError):
        return "its manifest is missing or damaged"
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_hash(folder / name) != expected:
            return f"{name} does not have its hash"
    return None


@dataclass
class Found:
    """A checkpoint that passed its check, and what was said about newer ones that did not."""

    folder: Path
    state: dict[str, Any]
    complaints: list[str]


def find(folder: Path) -> Found | None:
    """The newest sound checkpoint; None if there never was one."""
    complaints: list[str] = []
    for path in steps(folder):
        wrong = problem(path)
        if wrong is None:
            return Found(path, json.loads((path / STATE).read_text(encoding="utf-8")), complaints)
        complaints.append(f"{path.name} is not used: {wrong}.")
    if complaints:
        raise InputError(f"no checkpoint in {folder} is usable: {' '.join(complaints)}")
    return None


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place."""
    with safe_open(folder / TENSORS, framework="pt") as file, torch.no_grad():
        stored = set(file.keys())
        if stored != set(tensors):
            odd = sorted(stored ^ set(tensors))
            raise InputError(f"the checkpoint and the model do not hold the same tensors: {', '.join(odd[:3])} …")
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))


def retain(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best."""
    for path in steps(folder)[keep:]:
        if best is None or path.name != step_name(best):
            shutil.rmtree(path, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, at once."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(target, link.parent))
    os.replace(aside, link)
