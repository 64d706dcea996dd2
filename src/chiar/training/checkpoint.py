"""Checkpoints, in a format of our own: torch's distributed one pickles its index and has no hashes to detect damage.

A checkpoint is a folder with `state.json` (plain values), a `tensors-R.safetensors` of each rank R that holds tensors
(sharded by rows, readable by any number of processes) and `manifest.json` (the SHA-256 of all other files). It is
written under a temporary name and renamed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from chiar.errors import InputError, errors_as, require
from chiar.files import temporary_path
from chiar.training.distributed import Processes, local_rows

MANIFEST, STATE = "manifest.json", "state.json"
GONE = {f"model.language.model.router_state.{name}" for name in ("spread_L", "progress")}  # of older runs


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message says why and what is kept."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint that passed its check, and warnings about newer ones that did not."""

    folder: Path
    state: dict[str, Any]
    warnings: list[str]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], processes: Processes) -> None:
    """Write the checkpoint of one step: each process its rows of sharded tensors, the main one also the others."""
    partial, hashes, what = folder.parent / f".{folder.name}.partial", {}, f"the checkpoint {folder.name}"
    mine = {name: local_rows(t) for name, t in tensors.items() if processes.main or isinstance(t, DTensor)}
    try:
        with collective_write(processes, what):
            if mine:
                partial.mkdir(parents=True, exist_ok=True)
                file = partial / f"tensors-{processes.rank}.safetensors"
                starts = json.dumps({name: start for name, (start, _) in mine.items() if start})
                save_file({n: rows.cpu().contiguous() for n, (_, rows) in mine.items()}, file, {"starts": starts})
                hashes[file.name] = synced_hash(file)
        for other in processes.all(hashes):
            hashes |= other
        with collective_write(processes, what):
            if processes.main:
                (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
                hashes[STATE] = synced_hash(partial / STATE)
                (partial / MANIFEST).write_text(json.dumps({"files": hashes}, indent=1), encoding="utf-8")
                synced_hash(partial / MANIFEST)
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)
                os.fsync(handle := os.open(folder.parent, os.O_RDONLY))
                os.close(handle)
    except TrainingStopped:
        if processes.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def collective_write(processes: Processes, what: str) -> Iterator[None]:
    """A block that writes files. If it fails in one process it fails in all, so that none waits for one that failed."""
    failure: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        failure = error
    if reasons := [reason for reason in processes.all(str(failure) if failure else None) if reason]:
        raise TrainingStopped(f"{what} could not be written ({reasons[0]}): earlier ones are kept.") from failure


def synced_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])


def find(folder: Path) -> FoundCheckpoint | None:
    """The newest checkpoint whose files all match their hashes; None if there are no checkpoints."""
    warnings: list[str] = []
    for path in steps(folder):
        try:
            hashes = read_manifest(path)
            wrong = [name for name, expected in hashes.items() if synced_hash(path / Path(name).name) != expected]
            if STATE in hashes and len(hashes) > 1 and not wrong:
                return FoundCheckpoint(path, json.loads((path / STATE).read_text(encoding="utf-8")), warnings)
            why = f"{wrong[0]} does not match its hash" if wrong else "its manifest is damaged"
        except FileNotFoundError as error:
            why = f"{Path(error.filename).name} is missing"
        except OSError as error:  # perhaps not damaged: whether to repeat its steps is the user's choice
            raise InputError(f"the checkpoint {path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError):
            why = "its manifest is damaged"
        warnings.append(f"{path.name} is not used: {why}.")
    require(not warnings, f"no checkpoint in {folder} is usable: {' '.join(warnings)}")
    return None


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read `tensors` in place; of sharded ones, the rows this process holds."""
    places, stored_names = {name: local_rows(tensor) for name, tensor in tensors.items()}, set[str]()
    missing = {name: len(rows) if rows.ndim else 1 for name, (_, rows) in places.items()}
    damaged = (
        f"{folder} was damaged while it was read: repeat the command, which then takes the newest whole checkpoint"
    )
    for file_name in read_manifest(folder).keys() - {STATE}:
        path = folder / Path(file_name).name
        # pread instead of mmap: if a mapped file shrinks, the system kills the process.
        with (
            errors_as(damaged, SafetensorError, OSError),
            safe_open(path, framework="pt", backend="pread") as file,
            torch.no_grad(),
        ):
            starts = json.loads((file.metadata() or {}).get("starts", "{}"))
            stored_names |= (names := set(file.keys()))
            for name in names & tensors.keys():
                (first, rows), start, stored = places[name], starts.get(name, 0), file.get_slice(name)
                if rows.ndim == 0:
                    rows.copy_(stored[...])
                    missing[name] = 0
                    continue
                begin, end = max(first, start), min(first + len(rows), start + stored.get_shape()[0])
                if begin < end and stored.get_shape()[1:] == list(rows.shape[1:]):
                    rows[begin - first : end - first].copy_(stored[begin - start : end - start])
                    missing[name] -= end - begin
    differing = ", ".join(sorted((stored_names - GONE) ^ tensors.keys())[:3])
    require(not differing, f"the checkpoint and the model do not hold the same tensors: {differing} …")
    for name, tensor in tensors.items():
        require(not missing[name], f"the checkpoint does not hold all of {name} {list(tensor.shape)}.")


def retain(folder: Path, keep: int, best: dict[str, float] | None) -> None:
    """Remove all but the newest `keep` checkpoints and that of the best step."""
    for path in steps(folder)[keep:]:
        if best is None or path.name != step_name(int(best["step"])):
            shutil.rmtree(path, ignore_errors=True)


def replace_link(link: Path, target: Path) -> None:
    """Atomically make `link` a relative symbolic link to `target`."""
    temporary_path(link).unlink(missing_ok=True)
    temporary_path(link).symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary_path(link), link)
