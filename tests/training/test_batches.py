"""Batches are a pure function of (seed, step, slot)."""

import numpy as np
import pytest
import torch

from chiar.data import Corpus
from chiar.training.batches import ClassificationRows, LanguageRows, Schedule, row_numbers, shuffled, slot_seed


def rows_of(corpus, length=16):
    return LanguageRows(Corpus.open(corpus).split("train"), length)


def test_a_row_is_a_block_and_its_targets_the_next_tokens(corpus):
    split = Corpus.open(corpus).split("train")
    batch = rows_of(corpus).batch(0, [0, 3])
    tokens = torch.from_numpy(split.read(0, 65).astype(np.int64))
    assert torch.equal(batch.ids, torch.stack([tokens[:16], tokens[48:64]]))
    assert torch.equal(batch.targets, torch.stack([tokens[1:17], tokens[49:65]]))


def test_no_row_repeats_inside_an_epoch_and_epochs_differ(corpus, settings):
    rows = rows_of(corpus)
    steps = 2 * rows.count // 8
    schedule = Schedule(settings(steps=steps), [rows])
    starts = []
    rows.batch = lambda corpus, numbers: starts.extend(numbers)
    for step in range(steps):
        for slot in range(schedule.slots):
            schedule.batches(step, slot)
    first, second = starts[: rows.count], starts[rows.count :]
    assert sorted(first) == list(range(rows.count))
    assert len(set(second)) == len(second)
    assert first[: len(second)] != second
    assert first != sorted(first)


def test_a_batch_may_span_epochs():
    order = [shuffled(3, epoch, 5).tolist() for epoch in range(4)]
    assert row_numbers(3, 4, 12, 5) == [order[0][4], *order[1], *order[2], order[3][0]]


def test_the_global_batch_does_not_depend_on_how_it_is_split(corpus, settings):
    """Two processes read, slot by slot, what one process reads."""
    whole = Schedule(settings(), [rows_of(corpus)])
    one = torch.cat([b.ids for slot in range(4) for b in whole.batches(5, slot)])
    two = {rank: [whole.batches(5, turn * 2 + rank)[0].ids for turn in range(2)] for rank in range(2)}
    assert torch.equal(one, torch.cat([two[0][0], two[1][0], two[0][1], two[1][1]]))


def test_a_longer_run_only_continues_a_shorter_one(corpus, labelled, settings):
    corpora = [rows_of(corpus), ClassificationRows(Corpus.open(labelled).split("train"), 64)]
    for mixing in ("weights", "added"):
        short = Schedule(settings(steps=5, mixing=mixing), corpora)
        long = Schedule(settings(steps=50, mixing=mixing), corpora)
        for step in range(5):
            for slot in range(4):
                for a, b in zip(short.batches(step, slot), long.batches(step, slot), strict=True):
                    assert a.corpus == b.corpus
                    assert torch.equal(a.ids, b.ids)


def test_weights_and_added_shares_are_kept(corpus, labelled, settings):
    corpora = [rows_of(corpus), ClassificationRows(Corpus.open(labelled).split("train"), 64)]
    drawn = Schedule(settings(steps=1000, weights=[3, 1]), corpora).uses.mean(0)
    # 4,000 draws: three standard deviations of a share of a quarter are 0.02.
    assert drawn == pytest.approx([0.75, 0.25], abs=0.02)
    added = Schedule(settings(steps=1000, mixing="added"), corpora).uses.mean(0)
    assert added[0] == 1
    assert added[1] == pytest.approx(0.25, abs=0.02)


def test_documents_are_padded_on_the_right_and_labelled(labelled):
    split = Corpus.open(labelled).split("train")
    batch = ClassificationRows(split, 8).batch(1, [0, 1, 2])
    for row in range(3):
        document = split.document(row)[:8]
        assert batch.ids[row, : len(document)].tolist() == document.tolist()
        assert batch.mask[row].sum() == len(document)
        assert batch.targets[row] == split.labels[row]


def test_every_slot_has_a_seed_of_its_own():
    seeds = {slot_seed(seed, step, slot) for seed in range(3) for step in range(20) for slot in range(4)}
    assert len(seeds) == 240
