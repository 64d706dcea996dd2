"""Checkpoints: whole or not at all, and damage is noticed."""

import os
from unittest.mock import Mock

import pytest
import torch

from chiar.training import checkpoint
from chiar.training.distributed import Processes
from helpers import refused

ALONE = Processes(0, 1, torch.device("cpu"))


def tensors(value=1.0):
    return {"model.a": torch.full((3, 2), value), "optimizer.a.step": torch.tensor(value)}


def save(folder, step, value=1.0):
    checkpoint.save(folder / checkpoint.step_name(step), tensors(value), {"step": step}, ALONE)


TENSORS, MANIFEST, STATE = "tensors-0.safetensors", checkpoint.MANIFEST, checkpoint.STATE
DAMAGES = {
    "flipped byte": (TENSORS, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "truncated": (TENSORS, lambda content: content[:-4]),
    "missing": (TENSORS, None),
    "no manifest": (MANIFEST, None),
    "broken manifest": (MANIFEST, lambda content: b"{"),
    "state": (STATE, lambda content: b'{"step": 3}'),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(name, damage, tmp_path):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    file = tmp_path / checkpoint.step_name(2) / name
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    found = checkpoint.find(tmp_path)
    (warning,) = found.warnings
    assert found.state == {"step": 1} and warning.startswith("step-00000002 is not used")
    into = tensors(0.0)
    checkpoint.load(found.folder, into)
    assert all(torch.equal(into[name], value) for name, value in tensors(1.0).items())
    (tmp_path / checkpoint.step_name(1) / TENSORS).unlink()
    refused("is usable", checkpoint.find, tmp_path)


def test_a_checkpoint_that_shrinks_while_it_is_read_is_a_sentence(tmp_path, monkeypatch):
    """Were it mapped into memory, this would end the process by a bus error."""
    save(tmp_path, 1)
    open_file = checkpoint.safe_open

    def shrinking(path, **options):
        opened = open_file(path, **options)
        os.truncate(path, 0)
        return opened

    monkeypatch.setattr(checkpoint, "safe_open", shrinking)
    refused("was damaged while it was read: repeat the command", checkpoint.load, tmp_path / "step-00000001", tensors())


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "synced_hash", Mock(side_effect=PermissionError(13, "Permission denied")))
    refused("step-00000001 cannot be read: Permission denied", checkpoint.find, tmp_path)


def test_tensors_of_another_model_are_refused_and_the_newest_and_the_best_kept(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    first, gone = tmp_path / checkpoint.step_name(1), sorted(checkpoint.GONE)[0]
    for shape in ((4, 2), (3, 1)):
        refused(r"not hold all of model\.a", checkpoint.load, first, {**tensors(), "model.a": torch.zeros(shape)})
    for other in ({"model.b": torch.zeros(1)}, {**tensors(), gone: torch.zeros(())}):
        refused("same tensors", checkpoint.load, first, other)
    checkpoint.retain(tmp_path, keep=2, best={"step": 3})
    assert [path.name[-1] for path in checkpoint.steps(tmp_path)] == ["6", "5", "3"]
