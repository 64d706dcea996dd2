"""Routed variants against dense ones of equal FLOPs and of equal time, in numbers worked out by hand."""

import pytest

from chiar.studies.results import all_notes, derive, summarise

RATE = {"learning_rate": 1e-3, "log_every": 10}


def a_run(variant, loss, flops, seed=0, fraction=None, after=None, kind="attention", **settings):
    told = {"settings": {**RATE, "steps": 5, "seed": seed, **settings}, "after": after or {}}
    told |= {"preset": "v5-tiny", "config": {"layer_types": [kind]}}
    known = {"variant": variant, "seed": seed, "test_loss": loss, "fraction": fraction, "declaration": told}
    costs = dict.fromkeys(("forward", "layers"), flops)
    return {**known, "flops_per_token": costs, "step_ms": None, "parameters": 1}


def rows_of(*runs, **step_ms):
    """By name, with Δ to `small`."""
    names = dict.fromkeys(run["variant"] for run in runs)
    declared = [{"name": name, "role": "control", "title": ""} for name in names]
    times = {"variants": {name: {"step_ms": value} for name, value in step_ms.items()}}
    common = {"baseline": "small", "settings": RATE}
    rows = summarise({"common": common, "times": times, "variants": declared}, list(runs))
    return {row["variant"]: row for row in derive({"common": common, "variants": rows, "runs": list(runs)})}


def routed(loss, flops, seed=0):
    return a_run("routed", loss, flops, seed, fraction=0.2, kind="dark")


SMALL, LARGE = a_run("small", 1.0, 1e6), a_run("large", 0.8, 4e6)


def test_the_curve_is_linear_in_log_flops():
    again, alone = a_run("small", 1.1, 1e6, seed=1), a_run("small", 1.2, 1e6, seed=2)
    # Seed 0 is halfway: −0.15 above −0.1. Seed 1 is at the small end: −0.01 above 0. No baseline has seed 3.
    rows = rows_of(SMALL, again, alone, LARGE, routed(0.85, 2e6), routed(1.09, 1e6, 1), routed(0.1, 2e6, 3))
    found = [rows["routed"][part] for part in ("gap_at_flops", "gap_at_flops_spread", "gap_at_time")]
    assert found == [pytest.approx(-0.03), pytest.approx(0.04), None]
    assert rows["small"]["gap_at_flops"] is None, "only routed variants are compared"
    assert any("between neighbours of small, large, the dense" in note for note in all_notes(list(rows.values()), []))


def test_between_three_only_the_neighbours_count():
    rows = rows_of(SMALL, a_run("middle", 0.7, 2e6), a_run("big", 0.5, 8e6), routed(0.7, 4e6))
    assert rows["routed"]["gap_at_flops"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "runs",
    [
        [LARGE, routed(0.9, 4.1e6)],
        [LARGE, routed(0.9, 0.9e6)],
        [LARGE, a_run("small", 1.0, 1e6, seed=1), routed(0.9, 2e6), routed(0.9, 0.9e6, seed=1)],
        [LARGE, routed(0.9, 2e6, seed=1)],
        [routed(0.9, 1e6)],
        [a_run("large", 0.8, 4e6, learning_rate=2e-3), routed(0.9, 2e6)],
        [a_run("large", 0.8, 4e6, after={"weights": "small-s0"}), routed(0.9, 2e6)],
        [a_run("large", 0.8, 4e6, kind="spectral"), routed(0.9, 2e6)],
    ],
    ids=["above", "below", "one seed below", "no baseline", "one point", "own rate", "own start", "filters"],
)
def test_where_there_is_no_curve_nothing_is_said(runs):
    rows = rows_of(SMALL, *runs)
    assert rows["routed"]["gap_at_flops"] is None and not all_notes(list(rows.values()), [])


def test_points_that_a_cheaper_one_betters_and_what_is_only_shown_change_nothing():
    worse, same = a_run("worse", 1.5, 2e6), a_run("same", 0.9, 4e6)
    rows = rows_of(SMALL, worse, a_run("large", 0.8, 4e6, log_every=7), same, routed(0.85, 2e6))
    assert rows["routed"]["gap_at_flops"] == pytest.approx(-0.05)
    assert [name for name, row in rows.items() if row["curve"]] == ["small", "large"]


def test_the_same_over_step_times():
    rows = rows_of(SMALL, LARGE, routed(0.85, 9e6), small=10.0, large=40.0, routed=20.0)
    assert rows["routed"]["gap_at_flops"] is None and rows["routed"]["gap_at_time"] == pytest.approx(-0.05)
    assert rows_of(SMALL, LARGE, routed(0.85, 9e6), small=10.0, large=40.0)["routed"]["gap_at_time"] is None


def test_bits_are_a_mean_over_all_seeds_or_not_given_and_memory_is_the_most():
    again = a_run("small", 1.1, 1e6, seed=1)
    row = rows_of(SMALL | {"bits_per_byte": 1.4, "peak_memory_gb": 3.0}, again)["small"]
    assert (row["bits_per_byte"], row["peak_memory_gb"]) == (None, 3.0)
    row = rows_of(SMALL | {"bits_per_byte": 1.4, "peak_memory_gb": 3.0}, again | {"bits_per_byte": 1.6})["small"]
    assert row["bits_per_byte"] == pytest.approx(1.5)
