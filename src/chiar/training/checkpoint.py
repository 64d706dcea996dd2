"""A format of our own, since torch's distributed one pickles its index and has no hashes to tell what is damaged:
a folder with `state.json` (plain values), a `tensors-R.safetensors` for each process that holds a part (split by rows,
so any number of processes can read it) and `manifest.json` (the SHA-256 of all), written aside and renamed."""

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
from chiar.files import aside_of
from chiar.training.distributed import Processes, local_rows

MANIFEST, STATE = "manifest.json", "state.json"
GONE = {f"model.language.model.router_state.{name}" for name in ("spread_L", "progress")}  # in older checkpoints


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


class Found(NamedTuple):
    """A checkpoint that passed its check, and what was said about newer ones that did not."""

    folder: Path
    state: dict[str, Any]
    complaints: list[str]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def steps(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], processes: Processes) -> None:
    """Write the checkpoint of one step. Each process writes the rows it holds; what all hold, the main one writes."""
    aside, hashes, what = folder.parent / f".{folder.name}.partial", {}, f"the checkpoint {folder.name}"
    mine = {name: local_rows(t) for name, t in tensors.items() if processes.main or isinstance(t, DTensor)}
    try:
        with agreed(processes, what):
            if mine:
                aside.mkdir(parents=True, exist_ok=True)
                file = aside / f"tensors-{processes.rank}.safetensors"
                starts = json.dumps({name: start for name, (start, _) in mine.items() if start})
                save_file({n: rows.cpu().contiguous() for n, (_, rows) in mine.items()}, file, {"starts": starts})
                hashes[file.name] = synced_hash(file)
        for other in processes.all(hashes):
            hashes |= other
        with agreed(processes, what):
            if processes.main:
                (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
                hashes[STATE] = synced_hash(aside / STATE)
                (aside / MANIFEST).write_text(json.dumps({"files": hashes}, indent=1), encoding="utf-8")
                synced_hash(aside / MANIFEST)
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(aside, folder)
                os.fsync(handle := os.open(folder.parent, os.O_RDONLY))
                os.close(handle)
    except TrainingStopped:
        if processes.main:
            shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def agreed(processes: Processes, what: str) -> Iterator[None]:
    """A block that writes; failing in one process it fails in all: none waits for another that has given up."""
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


def find(folder: Path) -> Found | None:
    """The newest checkpoint whose files all have their hash; None if there never was one."""
    complaints: list[str] = []
    for path in steps(folder):
        try:
            hashes = read_manifest(path)
            wrong = [name for name, expected in hashes.items() if synced_hash(path / Path(name).name) != expected]
            if STATE in hashes and len(hashes) > 1 and not wrong:
                return Found(path, json.loads((path / STATE).read_text(encoding="utf-8")), complaints)
            why = f"{wrong[0]} does not have its hash" if wrong else "its manifest is damaged"
        except FileNotFoundError as error:
            why = f"{Path(error.filename).name} is missing"
        except OSError as error:  # an older one would do, but training again what is there is not for us to choose
            raise InputError(f"the checkpoint {path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError):
            why = "its manifest is damaged"
        complaints.append(f"{path.name} is not used: {why}.")
    require(not complaints, f"no checkpoint in {folder} is usable: {' '.join(complaints)}")
    return None


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place, each with the rows this process holds."""
    places, found = {name: local_rows(tensor) for name, tensor in tensors.items()}, set[str]()
    missing = {name: len(rows) if rows.ndim else 1 for name, (_, rows) in places.items()}
    changed = (
        f"{folder} was damaged while it was read: repeat the command, which then takes the newest whole checkpoint"
    )
    for file_name in read_manifest(folder).keys() - {STATE}:
        opened = folder / Path(file_name).name
        # Read, not mapped into memory: a mapped file that shrinks ends the process.
        with (
            errors_as(changed, SafetensorError, OSError),
            safe_open(opened, framework="pt", backend="pread") as file,
            torch.no_grad(),
        ):
            starts = json.loads((file.metadata() or {}).get("starts", "{}"))
            found |= (names := set(file.keys()))
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
    odd = ", ".join(sorted((found - GONE) ^ tensors.keys())[:3])
    require(not odd, f"the checkpoint and the model do not hold the same tensors: {odd} …")
    for name, tensor in tensors.items():
        require(not missing[name], f"the checkpoint does not hold all of {name} {list(tensor.shape)}.")


def retain(folder: Path, keep: int, best: dict[str, float] | None) -> None:
    """Remove all but the newest `keep` checkpoints and that of the best step."""
    for path in steps(folder)[keep:]:
        if best is None or path.name != step_name(int(best["step"])):
            shutil.rmtree(path, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, at once."""
    aside_of(link).unlink(missing_ok=True)
    aside_of(link).symlink_to(os.path.relpath(target, link.parent))
    os.replace(aside_of(link), link)
