"""Mutual information where the truth is known."""

import math

import pytest
import torch

from chiar.nulltest.information import cut_at_fraction, hash_information, mutual_information, position_bins

N = 20_000


def integers(high, seed, count=N):
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_planted_dependence_is_found():
    """A binary channel that errs with probability 0.11 carries 1 − h(0.11) = 0.50 bits."""
    labels = integers(2, 0)
    errs = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.11
    truth = 1 + 0.11 * math.log2(0.11) + 0.89 * math.log2(0.89)
    found = mutual_information(labels ^ errs.long(), labels, 20, 0)
    assert found.bits == pytest.approx(truth, abs=0.02)  # four standard errors: 0.0022 · log2(0.89 / 0.11) each
    assert found.share == pytest.approx(truth, abs=0.02) and found.route_bits == pytest.approx(1, abs=0.001)


def test_independent_labels_leave_only_the_bias():
    """The bias of counting is (R − 1)(L − 1) / (2 N ln 2) bits to first order."""
    route, labels = integers(2, 2), integers(40, 3)
    found = mutual_information(route, labels, 50, 0)
    bias = 39 / (2 * N * math.log(2))
    assert found.chance == pytest.approx(bias, rel=0.15)
    assert abs(found.excess) < 4 * found.chance_deviation
    assert abs(found.adjusted) < 0.002


def test_labels_that_decide_the_route_have_all_of_it():
    labels = integers(3000, 4)
    found = mutual_information(labels % 2, labels, 20, 0)
    assert found.adjusted == pytest.approx(1.0)
    assert found.bits == pytest.approx(found.route_bits)
    assert found.chance > 0.05  # many labels: shuffled ones still seem to say something
    constant = mutual_information(torch.zeros(N, dtype=torch.long), labels, 5, 0)
    assert (constant.bits, constant.share, constant.adjusted) == (0.0, 0.0, 0.0)


def test_the_same_numbers_by_the_definition():
    route, labels = integers(3, 5, 500), integers(4, 6, 500)
    labels = torch.where(route == 0, 0, labels)
    total = 0.0
    for a in range(3):
        for b in range(4):
            joint = float(((route == a) & (labels == b)).double().mean())
            if joint:
                apart = float((route == a).double().mean()) * float((labels == b).double().mean())
                total += joint * math.log2(joint / apart)
    assert mutual_information(route, labels, 5, 0).bits == pytest.approx(total)


def test_a_hash_of_the_token_knows_classes_made_of_few_tokens():
    """Class 0 is one frequent token, so a random route by token says something about classes and nothing about parity
    of the place."""
    tokens = torch.where(integers(2, 7) == 0, 0, 1 + integers(500, 8))
    classes = (tokens > 0).long()
    place = torch.arange(N) % 2
    dark, (by_token, by_class, by_place) = hash_information(tokens, [tokens, classes, place], 0.5, 20, 0)
    assert 0.2 < dark < 0.8
    assert by_token.adjusted == pytest.approx(1.0)
    assert by_class.adjusted > 0.1 and by_class.deviation > 0
    assert abs(by_place.adjusted) < 0.002


def test_cut_and_position_bins():
    values = torch.arange(100.0)
    assert cut_at_fraction(values, 0.3).sum() == 30
    assert position_bins(torch.tensor([0, 1, 2, 3, 6, 7, 255])).tolist() == [0, 1, 1, 2, 2, 3, 8]
