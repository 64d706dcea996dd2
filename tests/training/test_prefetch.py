"""Batches made early are the batches the schedule makes."""

import time

import pytest
import torch

from chiar.data import Corpus
from chiar.training.batches import Schedule
from chiar.training.prefetch import Prefetch
from chiar.training.trainer import open_rows


def assert_of_step(found, schedule, slots, step):
    for slot, batches in zip(slots, found, strict=True):
        for ours, theirs in zip(batches, schedule.batches(step, slot), strict=True):
            assert ours.corpus == theirs.corpus
            assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.targets, theirs.targets)
            assert ours.mask is None if theirs.mask is None else torch.equal(ours.mask, theirs.mask)


def test_any_order_of_steps_gives_their_own_batches(settings, corpus, labelled):
    """In order as a run, again as a step run twice, elsewhere as a resumed run, and up to the last step."""
    chosen = settings(data=[str(corpus), str(labelled)], mixing="added", added_share=0.5)
    rows = [open_rows(Corpus.open(path), "train", 16) for path in chosen.data]
    schedule = Schedule(chosen, rows)
    prefetch = Prefetch(schedule, [1, 3], torch.device("cpu"))
    for step in (0, 1, 1, 2, 7, 3, 10, 11):
        assert_of_step(prefetch.batches(step), schedule, [1, 3], step)
    assert prefetch.next is None


def test_an_error_while_making_a_batch_is_raised_where_it_is_needed(settings, corpus, monkeypatch):
    rows = open_rows(Corpus.open(corpus), "train", 16)
    prefetch = Prefetch(Schedule(settings(), [rows]), [0], torch.device("cpu"))

    def gone(*arguments):
        raise OSError("the disk is gone")

    prefetch.thread.submit(time.sleep, 0.2)  # the thread is busy until reading fails
    first = prefetch.batches(0)
    monkeypatch.setattr(rows, "batch", gone)
    assert len(first[0][0].ids) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        prefetch.batches(1)
