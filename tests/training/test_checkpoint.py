"""Checkpoints: whole or not at all, and damage is noticed."""

import json

import pytest
import torch
from runs import full_disk

from chiar.errors import InputError
from chiar.training import checkpoint
from chiar.training.distributed import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


def tensors(value=1.0):
    return {"model.a": torch.full((3, 2), value), "optimizer.a.step": torch.tensor(value)}


def save(folder, step, value=1.0):
    checkpoint.save(folder / checkpoint.step_name(step), tensors(value), {"step": step}, ALONE)


def test_round_trip(tmp_path):
    assert checkpoint.find(tmp_path) is None
    save(tmp_path, 5, 7.0)
    found = checkpoint.find(tmp_path)
    into = tensors(0.0)
    checkpoint.load(found.folder, into)
    assert found.state == {"step": 5}
    assert all(torch.equal(into[name], value) for name, value in tensors(7.0).items())


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "missing", "no manifest", "broken manifest", "state"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(damage, tmp_path):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    newest = tmp_path / checkpoint.step_name(2)
    file = newest / "tensors-0.safetensors"
    content = file.read_bytes()
    damages = {
        "flipped byte": lambda: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "truncated": lambda: file.write_bytes(content[:-4]),
        "missing": file.unlink,
        "no manifest": (newest / checkpoint.MANIFEST).unlink,
        "broken manifest": lambda: (newest / checkpoint.MANIFEST).write_text("{"),
        "state": lambda: (newest / checkpoint.STATE).write_text(json.dumps({"step": 3})),
    }
    damages[damage]()
    found = checkpoint.find(tmp_path)
    assert found.state == {"step": 1}
    (complaint,) = found.complaints
    assert complaint.startswith("step-00000002 is not used")
    (tmp_path / checkpoint.step_name(1) / "tensors-0.safetensors").unlink()
    with pytest.raises(InputError, match="is usable"):
        checkpoint.find(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_debris(tmp_path):
    save(tmp_path, 1)
    with full_disk(100), pytest.raises(checkpoint.TrainingStopped, match="too large"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.find(tmp_path).state == {"step": 1}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**tensors(), "model.a": torch.zeros(4, 2)}, r"does not hold all of model\.a"),
        ({**tensors(), "model.a": torch.zeros(3, 1)}, r"does not hold all of model\.a"),
        ({"model.b": torch.zeros(1)}, "same tensors"),
        ({**tensors(), sorted(checkpoint.GONE)[0]: torch.zeros(())}, "same tensors"),
    ],
)
def test_tensors_of_another_model_are_refused(other, message, tmp_path):
    save(tmp_path, 1)
    with pytest.raises(InputError, match=message):
        checkpoint.load(tmp_path / checkpoint.step_name(1), other)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    checkpoint.retain(tmp_path, keep=2, best={"step": 3})
    assert [path.name[-1] for path in checkpoint.steps(tmp_path)] == ["6", "5", "3"]
