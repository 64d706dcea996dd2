"""Surprisal per symbol: Gini and Lorenz by hand, agreement with chiar eval, and bad input."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from chiar.data.shards import Corpus
from chiar.data.tokenizers import TokenizerChoice
from chiar.evaluation.harness import evaluate
from commands import run
from research.surprisal import Measurement, draw, gini, lorenz, lorenz_at, main, whole_symbols
from small_corpora import measured_corpus, save, tiny_model

SCRIPT = typer.Typer()
SCRIPT.command()(main)


def surprisal(*arguments):
    done = CliRunner().invoke(SCRIPT, [str(one) for one in (*arguments, "--device", "cpu")])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on bytes and a model of BPE tokens of the same text, each beside its corpus."""
    place = tmp_path_factory.mktemp("surprisal")
    measured_corpus(place / "bytes")
    bpe = measured_corpus(place / "bpe", tokenizer=TokenizerChoice("bpe", vocab_size=280))
    save(tiny_model("v5-tiny", vocab_size=bpe.vocab_size), place / "bpe" / "model", bpe.tokenizer())
    paths = ["--data", place / "bytes" / "corpus", "--out", place / "bytes" / "run"]
    short = ["--steps", "2", "--batch", "4", "--micro-batch", "4", "--length", "16", "--no-compile", "--device", "cpu"]
    code, output = run("train", "v5-tiny", *paths, *short)
    assert code == 0, output
    return place


@pytest.fixture
def pairs(place):
    return [place / part for part in ("bytes/run", "bytes/corpus", "bpe/model", "bpe/corpus")]


@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_gini_of_equals_and_of_one_that_has_everything(n):
    one = np.zeros(n)
    one[n // 2] = 7.5
    # Sums of a hundred float64 shares.
    assert gini(np.full(n, 0.1)) == pytest.approx(0, abs=1e-12) and gini(np.zeros(n)) == pytest.approx(0, abs=1e-12)
    assert gini(one) == pytest.approx((n - 1) / n, abs=1e-12)


def test_gini_is_half_the_mean_difference_over_the_mean():
    values = np.random.default_rng(0).exponential(size=60)
    by_pairs = np.abs(values[:, None] - values).mean() / 2 / values.mean()
    assert gini(values) == pytest.approx(by_pairs, rel=1e-12)


def test_lorenz_by_hand():
    assert lorenz(np.array([4, 1, 3, 2])).tolist() == pytest.approx([0, 0.1, 0.3, 0.6, 1])
    assert lorenz_at(np.array([4, 1, 3, 2]), np.array([0, 0.5, 0.875, 1])).tolist() == pytest.approx([0, 0.3, 0.8, 1])


def test_measurements_agree_with_eval_and_are_drawn(pairs, tmp_path):
    (tmp_path / "gains.json").write_text('{"bytes": 0.05, "bpe-280": -0.01}')
    out = tmp_path / "out"
    code, output = surprisal(*pairs, "--rows", 6, "--batch", 4, "--gains", tmp_path / "gains.json", "--out", out)
    assert code == 0 and {path.name for path in out.iterdir()} == {f"surprisal.{end}" for end in ("json", "md", "svg")}
    record = json.loads((out / "surprisal.json").read_text())
    assert [one["kind"] for one in record["kinds"]] == ["bytes", "bpe-280"]
    for one, model, corpus in zip(record["kinds"], pairs[::2], pairs[1::2], strict=True):
        scores = evaluate(str(model), corpus, "test", rows=6, device="cpu").scores
        assert one["symbols"] == scores.tokens == 6 * 16 and one["bytes"] == scores.bytes
        assert one["bits_per_byte"] == pytest.approx(scores.derived()["bits_per_byte"], rel=1e-5)  # of fp32 logits
        assert one["bits_per_symbol"] == pytest.approx(one["bits_per_byte"] * one["bytes_per_symbol"])
        assert (one["lorenz"][0], one["lorenz"][-1]) == (0, 1) and 0 < one["gini"] < 1
        assert 0.2 < one["top_share"] == pytest.approx(1 - one["lorenz"][80])
    table = (out / "surprisal.md").read_text()
    assert table in output and "| -0.0100 |" in table and len(table.splitlines()) == 4
    assert "bpe-280, Gini" in (out / "surprisal.svg").read_text()
    measurements = [Measurement(**one) for one in record["kinds"]]
    assert len(draw(measurements).axes) == 2
    for one in measurements:
        one.gain = None
    assert len(draw(measurements).axes) == 1


def test_the_surprisal_of_a_token_is_the_sum_over_its_bytes(pairs, tmp_path):
    run, text, _, tokens = pairs
    code, output = surprisal(run, text, run, tokens, "--rows", 6, "--out", tmp_path / "out")
    assert code == 0, output
    of_bytes, of_tokens = json.loads((tmp_path / "out" / "surprisal.json").read_text())["kinds"]
    assert (of_bytes["kind"], of_tokens["kind"]) == ("bytes", "bpe-280")
    # Without the first token and an incomplete last one the text is the same.
    words = [len(word) for word in Corpus.open(tokens).tokenizer().token_bytes]
    ids = Corpus.open(tokens).split("test").read(0, 97)
    sizes = np.array([words[i] for i in ids]).cumsum()
    inside = sizes[sizes <= 6 * 16 + 1]
    assert of_tokens["symbols"] == len(inside) - 1 and of_tokens["bytes"] == inside[-1] - inside[0]


def test_bits_of_whole_symbols():
    bits, which = whole_symbols(np.array([1.0, 2, 4, 8, 16, 32]), np.array([2, 1, 3, 2]))
    assert bits.tolist() == [2, 4 + 8 + 16] and which == slice(1, 3)  # the last symbol is incomplete
    bits, which = whole_symbols(np.array([1.0, 2, 4]), np.ones(4, int))
    assert bits.tolist() == [1, 2, 4] and which == slice(1, 4)


WRONG = {
    "an unpaired name": ([0, 1, 2], None, "in pairs"),
    "one tokenization twice": ([0, 1, 0, 1], None, "bytes is named twice"),
    "another tokenizer": ([2, 1], None, "prepared with another tokenizer"),
    "no corpus": ([0, 0], None, "is not a prepared corpus"),
    "a gain for an unknown kind": ([0, 1], '{"bits": 1}', "unknown kind of symbols"),
    "a gain that is text": ([0, 1], '{"bytes": "much"}', "holds no gains like"),
    "a gain that is NaN": ([0, 1], '{"bytes": NaN}', "is not a finite number"),
}


@pytest.mark.parametrize(("chosen", "gains", "message"), WRONG.values(), ids=WRONG.keys())
def test_bad_input_gets_one_sentence(pairs, tmp_path, chosen, gains, message):
    (tmp_path / "gains.json").write_text(gains or "")
    more = ["--gains", tmp_path / "gains.json"] if gains else []
    code, output = surprisal(*(pairs[number] for number in chosen), *more, "--out", tmp_path / "out")
    assert code == 2 and message in output and not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_preset_is_refused(pairs, tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, output = surprisal(*pairs, "--out", tmp_path)
    assert code == 2 and "exists already" in output and [path.name for path in tmp_path.iterdir()] == ["mine"]
    code, output = surprisal("v5-tiny", pairs[1], "--out", tmp_path / "out")
    assert code == 2 and "random weights" in output and not (tmp_path / "out").exists()
