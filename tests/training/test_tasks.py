"""Settings behind both commands, batches as a pure function of (seed, step, slot), and the loss of each task."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chiar.data.shards import Corpus
from chiar.layers import dark
from chiar.registry import ROUTERS
from chiar.training.cli import parse
from chiar.training.settings import TrainSettings, train_arguments
from chiar.training.tasks import Rows, Schedule, materialise, outline, read_ahead


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_a_printed_command_is_the_run(precision, settings, tmp_path):
    chosen = settings(weights=[1.0], sample="a b", precision=precision)
    words = train_arguments("v3-tiny", {"dropout": 0.5}, chosen, tmp_path)
    assert words[:4] == ["train", "v3-tiny", "--data", chosen.data[0]] and words[-2:] == ["--out", str(tmp_path)]
    given = dict(parse(word) for word in words if "=" in word)
    assert given.pop("dropout") == 0.5
    assert TrainSettings.from_dict({"precision": "auto", **given, "data": chosen.data}) == chosen


@pytest.fixture
def rows(corpus, labelled):
    return [Rows(Corpus.open(path), "train", length) for path, length in ((corpus, 16), (labelled, 64))]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.corpus == b.corpus and torch.equal(a.ids, b.ids) and torch.equal(a.targets, b.targets)
        assert a.mask is None if b.mask is None else torch.equal(a.mask, b.mask)


def test_a_row_is_a_block_and_its_targets_the_next_tokens(corpus, rows):
    batch = rows[0].batch(0, [0, 3])
    tokens = torch.from_numpy(Corpus.open(corpus).split("train").read(0, 65).astype(np.int64))
    assert torch.equal(batch.ids, torch.stack([tokens[:16], tokens[48:64]]))
    assert torch.equal(batch.targets, torch.stack([tokens[1:17], tokens[49:65]]))


def test_no_row_repeats_inside_an_epoch_and_epochs_differ(rows, settings):
    text = rows[0]
    steps, starts = 2 * text.count // 8, []
    schedule = Schedule(settings(batch=8, steps=steps), [text])
    text.batch = lambda corpus, numbers: starts.extend(numbers)
    for place in range(steps * 4):
        schedule.batches(*divmod(place, 4))
    first, second = starts[: text.count], starts[text.count :]
    assert sorted(first) == list(range(text.count)) != first
    assert len(set(second)) == len(second) and first[: len(second)] != second


@pytest.mark.parametrize(("mixing", "shares"), [("weights", [0.75, 0.25]), ("added", [1, 0.25])])
def test_shares_are_kept_and_a_longer_run_only_continues_a_shorter_one(rows, settings, mixing, shares):
    weights = [3, 1] if mixing == "weights" else None
    short, long = (Schedule(settings(batch=8, steps=n, mixing=mixing, weights=weights), rows) for n in (5, 1000))
    # 4,000 draws: three standard deviations of a share of a quarter are 0.02.
    assert long.uses.mean(0) == pytest.approx(shares, abs=0.02)
    for place in range(20):
        assert_same(short.batches(*divmod(place, 4)), long.batches(*divmod(place, 4)))


def test_documents_are_padded_on_the_right_and_labelled(labelled):
    rows = Rows(Corpus.open(labelled), "train", 8)
    batch = rows.batch(1, [0, 1, 2])
    for row in range(3):
        document = rows.split.document(row)[:8]
        assert batch.ids[row, : len(document)].tolist() == document.tolist()
        assert batch.mask[row].tolist() == [1] * len(document) + [0] * (batch.ids.shape[1] - len(document))
        assert batch.targets[row] == rows.split.labels[row]


@pytest.mark.parametrize("first", [0, 7, 11])
def test_batches_read_ahead_are_those_of_the_steps_from_the_first_to_the_last(first, settings, rows):
    schedule = Schedule(settings(batch=8, mixing="added", added_share=0.5), rows)
    made = list(read_ahead(schedule, range(1, 4, 2), first, torch.device("cpu")))
    assert len(made) == 12 - first
    for step, (one, three) in enumerate(made, start=first):
        assert_same([*one, *three], [*schedule.batches(step, 1), *schedule.batches(step, 3)])


def test_validation_is_without_the_regulariser(config):
    model = materialise(outline(config(routing="soft", collapse_regulariser=0.5, dropout=0.0), {}), seed=0)
    ids = torch.arange(24).view(2, 12)
    output = model.language(ids)
    expected = F.cross_entropy(output.logits.flatten(0, 1), ids.flatten() + 1)
    assert torch.allclose(model.eval()(ids, ids + 1, None, None).loss, expected)
    assert torch.allclose(model.train()(ids, ids + 1, None, None).loss, expected + output.routing_loss)
    assert output.routing_loss < 0


def dark_model(config, **changes):
    model = materialise(outline(config("v5-tiny", **changes), {"words": 3}), seed=0)
    return randomise_all(model), torch.arange(24).view(2, 12)


def randomise_all(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_the_early_loss_is_learned_from_and_not_reported(config):
    model, ids = dark_model(config, router="stride", early_weight=0.7)
    expected = F.cross_entropy(model.language(ids).logits.flatten(0, 1), ids.flatten() + 1)
    assert torch.allclose(model.eval()(ids, ids + 1, None, None).loss, expected)
    result = model.train()(ids, ids + 1, None, None)
    assert torch.allclose(result.loss, expected)
    result.loss.backward()
    found = model.language.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    decoded = model.language.model(ids, output_routes=True)
    early = model.language.model.stacks["1"].early(decoded.stacks[0].router_input_BTD)
    logits = model.language.lm_head(decoded.last_hidden_state)
    whole = sum(w * F.cross_entropy(x.flatten(0, 1), ids.flatten() + 1) for w, x in ((1.0, logits), (0.7, early)))
    whole.backward()
    torch.testing.assert_close(found, model.language.model.embed_tokens.weight.grad)


@pytest.mark.parametrize("head", [None, "words"])
@pytest.mark.parametrize("early_weight", [0.0, 0.2])
@pytest.mark.parametrize("router", [name for name, kind in ROUTERS.items() if kind.of_stacks])
def test_no_parameter_is_left_out(router, early_weight, head, config):
    """DDP waits for every gradient: a classifier has no use for an early head."""
    model, ids = dark_model(config, router=router, early_weight=early_weight)
    targets = ids + 1 if head is None else torch.tensor([0, 2])
    model.train()(ids, targets, torch.ones_like(ids), head).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_what_a_stack_had_no_room_for_is_told(config, go, tmp_path, monkeypatch, capsys):
    """Only a GPU has so little room; a run says so once."""
    monkeypatch.setattr(dark, "has_flash", lambda x: True)
    monkeypatch.setattr(dark, "host_looks", lambda x, training: not training)
    monkeypatch.setitem(ROUTERS, "stride", replace(ROUTERS["stride"], room=0.5))
    model, ids = dark_model(config, router="stride", target_fraction=0.5)
    model.train()
    assert model(ids, ids + 1, None, None).dropped.item() == pytest.approx(1 - 7 / 12)  # 0.5 × 0.5 × 24, and one
    assert model.eval()(ids, ids + 1, None, None).dropped.item() == 0.0
    changes = {"router": "stride", "target_fraction": 0.5}
    go("run", config("v5-tiny", **changes), steps=3, quiet=False)
    dropped = [json.loads(line)["dropped"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert dropped == [pytest.approx(1 - 9 / 16)] * 3
    assert capsys.readouterr().out.count("43.8% of dark tokens found no room in step 1") == 1
