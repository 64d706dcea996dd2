"""Settings behind both commands, batches as a pure function of (seed, step, slot), and the loss of each task."""

import threading
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chiar.data.shards import Corpus
from chiar.training.cli import OPTIONS, SETTINGS, Launch, parse
from chiar.training.settings import TrainSettings, train_arguments
from chiar.training.tasks import Prefetch, Rows, Schedule, materialise, outline
from commands import run


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_both_commands_have_the_options_with_the_help_of_the_fields(command):
    code, shown = run(command, "--help")
    words = " ".join(shown.split())
    assert code == 0 and all(field.type.__metadata__[0].endswith(".") for field in SETTINGS.values())
    for field in (*(SETTINGS[name] for name in OPTIONS), *fields(Launch)):
        assert f"--{field.name.replace('_', '-')} " in words and field.type.__metadata__[0] in words


def test_a_printed_command_is_the_run(settings, tmp_path):
    chosen = settings(weights=[1.0], sample="a b", precision="auto")
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


@pytest.mark.parametrize("mixing", ["weights", "added"])
def test_a_longer_run_only_continues_a_shorter_one(rows, settings, mixing):
    short, long = (Schedule(settings(batch=8, steps=steps, mixing=mixing), rows) for steps in (5, 50))
    for place in range(20):
        assert_same(short.batches(*divmod(place, 4)), long.batches(*divmod(place, 4)))


def test_weights_and_added_shares_are_kept(rows, settings):
    drawn = Schedule(settings(batch=8, steps=1000, weights=[3, 1]), rows).uses.mean(0)
    # 4,000 draws: three standard deviations of a share of a quarter are 0.02.
    assert drawn == pytest.approx([0.75, 0.25], abs=0.02)
    assert Schedule(settings(batch=8, steps=1000, mixing="added"), rows).uses.mean(0) == pytest.approx(
        [1, 0.25], abs=0.02
    )


def test_documents_are_padded_on_the_right_and_labelled(labelled):
    rows = Rows(Corpus.open(labelled), "train", 8)
    batch = rows.batch(1, [0, 1, 2])
    for row in range(3):
        document = rows.split.document(row)[:8]
        assert batch.ids[row, : len(document)].tolist() == document.tolist()
        assert batch.mask[row].tolist() == [1] * len(document) + [0] * (batch.ids.shape[1] - len(document))
        assert batch.targets[row] == rows.split.labels[row]


def test_any_order_of_steps_gives_their_own_batches(settings, rows):
    """In order as a run, again as a step run twice, elsewhere as a resumed run, and up to the last step."""
    schedule = Schedule(settings(batch=8, mixing="added", added_share=0.5), rows)
    prefetch = Prefetch(schedule, [1, 3], torch.device("cpu"))
    for step in (0, 1, 1, 2, 7, 3, 10, 11):
        for slot, batches in zip([1, 3], prefetch.batches(step), strict=True):
            assert_same(batches, schedule.batches(step, slot))
    assert prefetch.next is None


def test_an_error_while_making_a_batch_is_raised_where_it_is_needed(settings, rows, monkeypatch):
    def gone(*arguments):
        raise OSError("the disk is gone")

    prefetch, busy = Prefetch(Schedule(settings(batch=8), rows[:1]), [0], torch.device("cpu")), threading.Event()
    prefetch.thread.submit(busy.wait)
    assert len(prefetch.batches(0)[0][0].ids) == 2
    monkeypatch.setattr(rows[0], "batch", gone)
    busy.set()
    with pytest.raises(OSError, match="the disk is gone"):
        prefetch.batches(1)


def test_validation_is_without_the_regulariser(config):
    model = materialise(outline(config(routing="soft", collapse_regulariser=0.5, dropout=0.0), {}), seed=0)
    ids = torch.arange(24).view(2, 12)
    targets = ids + 1
    logits = model.language(ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(model.eval()(ids, targets, None, None).loss, expected)
    regulariser = model.language(ids).routing_loss
    assert torch.allclose(model.train()(ids, targets, None, None).loss, expected + regulariser)
    assert regulariser < 0


def test_a_head_reads_the_last_real_token_and_every_head_stays_in_the_graph(config):
    model = materialise(outline(config(dropout=0.0), {"first": 3, "second": 2}), seed=0)
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    targets = torch.tensor([2, 0])
    result = model(ids, targets, mask, "first")
    states = model.language.model(ids, attention_mask=mask).last_hidden_state
    expected = F.cross_entropy(model.heads["first"](torch.stack([states[0, 11], states[1, 6]])), targets)
    assert torch.allclose(result.loss, expected)
    result.loss.backward()
    assert model.heads["first"].weight.grad.abs().max() > 0
    assert (model.heads["second"].weight.grad == 0).all()
