"""ListOps: evaluation, generation as in the original, and its files."""

import lzma
import statistics
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiar.data.listops import GeneratedListOps, ListOpsFiles, evaluate, generate
from helpers import refused
from small_corpora import all_refused

# Rows of the published test set.
DEEP = "( ( ( ( ( ( [SM ( ( ( ( ( [MIN ( ( ( ( ( ( [MIN 5 ) ( ( ( ( [SM 5 ) 4 ) 1 ) ] ) ) 0 ) 4 ) 9 ) ] ) ) 8 ) 7 ) "
DEEP += "6 ) ] ) ) 1 ) 1 ) 7 ) 3 ) ] )"
PUBLISHED = [(0, "( ( ( ( ( [SM 6 ) 5 ) 9 ) 0 ) ] )"), (0, "( ( ( ( ( [MIN 6 ) 3 ) 5 ) 0 ) ] )"), (2, DEEP)]
EVALUATED = {"7": 7, "[MAX 2 9 [MIN 4 7 ] 0 ]": 9, "[MED 1 9 5 ]": 5, "[SM 9 9 9 ]": 7}
EVALUATED |= {"[SM [MED 0 1 ] [MAX 7 8 ] ]": 8, "[MED 1 2 ]": 1, "[MED 3 8 9 0 ]": 5}  # means, rounded down
MALFORMED = {"": "0 expressions", "1 2": "2 expressions", "[MAX 1": "never closed", "1 ]": "closes nothing"}
MALFORMED |= {"[MAX ]": "no arguments", "[AVG 1 2 ]": "'\\[AVG' is neither", "[MAX 10 ]": "'10' is neither"}


def nesting(tokens):
    return max(accumulate((len(token) > 1) - (token == "]") for token in tokens))


def without_brackets(expression):
    return [token for token in expression.split() if token not in "()"]


def test_evaluation():
    for value, expression in PUBLISHED:
        assert evaluate(expression) == evaluate(" ".join(without_brackets(expression))) == (value, expression)
    assert {expression: evaluate(expression)[0] for expression in EVALUATED} == EVALUATED
    for expression, message in MALFORMED.items():
        with pytest.raises(ValueError, match=message):
            evaluate(expression)


@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(2, 6))
def test_generated_expressions_keep_to_their_limits(seed, depth, arguments):
    tokens = generate(Random(seed), depth, arguments, False, 300) or ["1"]  # None where it grew beyond 300
    assert len(tokens) <= 300 and nesting(tokens) <= depth - 1
    value, bracketed = evaluate(" ".join(tokens))
    assert without_brackets(bracketed) == tokens
    assert bracketed.count("(") == bracketed.count(")") == sum(token != "]" for token in tokens[1:]) + tokens.count("]")
    assert evaluate(bracketed)[0] == value in range(10)


def test_the_original_preset_matches_the_published_lengths():
    """Of the 10,000 published test rows, those over 20 tokens have the quartiles 31, 50 and 103."""
    documents = list(GeneratedListOps([], "listops", examples=(6000, 0, 0)).documents("train"))
    trees = [without_brackets(document.text) for document in documents]
    quartiles = statistics.quantiles([len(tokens) for tokens in trees if len(tokens) > 20], n=4)
    # Three standard errors at these 2,000 draws are about 2, 5 and 14 tokens.
    assert quartiles == [pytest.approx(31, abs=2), pytest.approx(50, abs=5), pytest.approx(103, abs=14)]
    assert max(map(nesting, trees)) == 19
    assert all(document.text.startswith("(") for document in documents if len(document.text) > 1)


def test_the_arena_preset():
    source = GeneratedListOps([], "listops-lra", examples=(8, 2, 2))
    documents = [document for split in source.splits for document in source.documents(split)]
    assert len(documents) == 12
    for text, label in documents:
        assert 500 < len(text.split()) < 2000 and nesting(text.split()) <= 9
        assert "(" not in text and evaluate(text)[0] == label


def test_generation_is_seeded_and_splits_share_nothing():
    def draw(splits=("test", "valid", "train"), **options):
        source = GeneratedListOps([], "listops", examples=(300, 100, 100), **options)
        return {split: [document.text for document in source.documents(split)] for split in splits}

    first = draw()
    assert first == draw() != draw(seed=1)
    assert len({text for texts in first.values() for text in texts}) == 500
    # One split alone, as after a resume, is the same as all in turn.
    assert draw(splits=["train"])["train"] == first["train"]


def test_impossible_shapes_end_with_a_sentence(monkeypatch):
    cases = [({"depth": 1}, "at least 2"), ({"arguments": 1}, "at least 2"), ({"examples": (0, 1, 1)}, "at least 1")]
    for options, message in [*cases, ({"min_length": 9, "max_length": 8}, "--min-length")]:
        refused(message, GeneratedListOps, [], "listops", **options)
    monkeypatch.setattr("chiar.data.listops.PATIENCE", 2000)
    few = GeneratedListOps([], "listops", depth=2, arguments=2, examples=(500, 0, 0))
    refused("no new expression", list, few.documents("train"))


def test_published_files_and_those_of_the_arena(tmp_path):
    rows = "".join(f"{value}\t{expression}\n" for value, expression in PUBLISHED)
    (tmp_path / "train_d20s.tsv").write_text(rows + "".join(f"{n}\t{n}\n" for n in range(10)))
    (tmp_path / "test_d20s.tsv.xz").write_bytes(lzma.compress(rows.encode()))
    source = ListOpsFiles([tmp_path], "listops", fractions=(0.6, 0.4, 0.0))
    assert source.splits == ("train", "valid", "test")
    assert [(d.label, d.text) for d in source.documents("test")] == PUBLISHED
    assert len([d for split in ("train", "valid") for d in source.documents(split)]) == 13
    plain = ListOpsFiles([tmp_path / "test_d20s.tsv.xz"], "listops", brackets=False)
    assert next(plain.documents("test")).text == "[SM 6 5 9 0 ]"
    (tmp_path / "basic_val.tsv").write_text("Source\tTarget\n( ( ( [MIN 4 ) 7 ) ] )\t4\n")
    arena = ListOpsFiles([tmp_path / "basic_val.tsv"], "listops-lra")
    assert list(arena.documents("valid")) == [("( ( ( [MIN 4 ) 7 ) ] )", 4)]
    cases = {"4\t[MIN 4 7 ]\n7\t[MIN 4 7 ]\n": "line 2 .*the expression is 4, but the row says 7"}
    cases |= {"4\t[MIN 4\n": "never closed", "11\t4\n": "label '11' is none of 0, 1", "4\n": "1 columns, expected 2"}
    path = tmp_path / "valid.tsv"
    all_refused(lambda: list(ListOpsFiles([path], "listops").documents("valid")), path, cases)
    refused("one file per split", ListOpsFiles, [tmp_path], "listops")
