"""Where records lie over tokens and time."""

import pytest

from chiar.analysis.run_axis import places, unit
from chiar.errors import InputError

RUN = {"settings": {"batch": 4, "length": 8, "data": ["text"], "mixing": "weights"}}
RECORDS = [
    {"step": 1, "tokens_per_second": 1.0},
    {"step": 3, "tokens_per_second": 64.0},
    {"step": 10, "tokens_per_second": 56.0},
]


def test_places():
    assert places(RUN, RECORDS, "steps", "run") == [1, 3, 10]
    assert places(RUN, RECORDS, "tokens", "run") == [32, 96, 320]
    # 2 steps of 32 tokens at 64 a second, then 7 at 56; the first step compiles and is not counted.
    assert places(RUN, RECORDS, "time", "run") == [0, 1, 5]


def test_what_was_not_recorded_is_not_guessed():
    added = {"settings": {**RUN["settings"], "data": ["a", "b"], "mixing": "added"}}
    by_turns = {"settings": {**RUN["settings"], "data": ["a", "b"]}}
    assert places(by_turns, RECORDS, "tokens", "run") == [32, 96, 320]
    for run, records, over, sentence in (
        ({}, RECORDS, "tokens", "does not say its batch"),
        (added, RECORDS, "time", "unequal lengths"),
        (RUN, [*RECORDS, {"step": 11, "accuracy": {"listops": 0.5}}], "tokens", "unequal lengths"),
        (RUN, [*RECORDS, {"step": 11}], "time", "no tokens_per_second at step 11"),
        (RUN, RECORDS, "weeks", "unknown axis 'weeks'"),
    ):
        with pytest.raises(InputError, match=sentence):
            places(run, records, over, "run")


def test_units_keep_numbers_short():
    assert unit("steps", 1e9) == (1, "steps")
    assert [unit("tokens", most)[1] for most in (100, 5e4, 4.4e7)] == [
        *("training tokens", "thousand training tokens", "million training tokens")
    ]
    assert [unit("time", most)[0] for most in (100, 3000, 9000)] == [1, 60, 3600]
