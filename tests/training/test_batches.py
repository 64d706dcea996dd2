"""Batches are a pure function of (seed, step, slot), made early or not."""

import threading
from functools import partial

import numpy as np
import pytest
import torch

from chiar.data import Corpus
from chiar.training.tasks import Prefetch, Rows, Schedule


@pytest.fixture
def settings(settings):
    """Four slots a step."""
    return partial(settings, batch=8)


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
    steps = 2 * text.count // 8
    schedule = Schedule(settings(steps=steps), [text])
    starts = []
    text.batch = lambda corpus, numbers: starts.extend(numbers)
    for step in range(steps):
        for slot in range(schedule.slots):
            schedule.batches(step, slot)
    first, second = starts[: text.count], starts[text.count :]
    assert sorted(first) == list(range(text.count)) != first
    assert len(set(second)) == len(second)
    assert first[: len(second)] != second


@pytest.mark.parametrize("mixing", ["weights", "added"])
def test_a_longer_run_only_continues_a_shorter_one(rows, settings, mixing):
    short, long = (Schedule(settings(steps=steps, mixing=mixing), rows) for steps in (5, 50))
    for step in range(5):
        for slot in range(4):
            assert_same(short.batches(step, slot), long.batches(step, slot))


def test_weights_and_added_shares_are_kept(rows, settings):
    drawn = Schedule(settings(steps=1000, weights=[3, 1]), rows).uses.mean(0)
    # 4,000 draws: three standard deviations of a share of a quarter are 0.02.
    assert drawn == pytest.approx([0.75, 0.25], abs=0.02)
    assert Schedule(settings(steps=1000, mixing="added"), rows).uses.mean(0) == pytest.approx([1, 0.25], abs=0.02)


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
    schedule = Schedule(settings(mixing="added", added_share=0.5), rows)
    prefetch = Prefetch(schedule, [1, 3], torch.device("cpu"))
    for step in (0, 1, 1, 2, 7, 3, 10, 11):
        for slot, batches in zip([1, 3], prefetch.batches(step), strict=True):
            assert_same(batches, schedule.batches(step, slot))
    assert prefetch.next is None


def test_an_error_while_making_a_batch_is_raised_where_it_is_needed(settings, rows, monkeypatch):
    def gone(*arguments):
        raise OSError("the disk is gone")

    prefetch, busy = Prefetch(Schedule(settings(), rows[:1]), [0], torch.device("cpu")), threading.Event()
    prefetch.thread.submit(busy.wait)
    assert len(prefetch.batches(0)[0][0].ids) == 2
    monkeypatch.setattr(rows[0], "batch", gone)
    busy.set()
    with pytest.raises(OSError, match="the disk is gone"):
        prefetch.batches(1)
