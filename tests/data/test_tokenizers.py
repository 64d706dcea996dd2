"""The three tokenizers: what AutoTokenizer gives from the saved folder is what corpora are made of."""

import json
import subprocess
import sys
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chiar.data import tokenizers
from chiar.data.tokenizers import CHARACTER_OF_BYTE, END_OF_TEXT, KINDS, Tokenizer, TokenizerChoice
from helpers import refused
from small_corpora import all_refused, sentence

SAMPLE = [sentence(n, 60) for n in range(50)]
# Every kind of space, including those Python and the tokenizers library disagree about, next to everything else.
SPACES = " \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u202f\u3000\u200b"
TEXT = st.text(st.one_of(st.sampled_from(SPACES), st.sampled_from("ab 'st7²é漢!<|>\n "), st.characters(codec="utf-8")))


def gpt2_folder(folder, names=("vocab.json", "merges.txt"), entries=50_257):
    """As large as GPT-2's; merges of any two bytes make every place where words are parted visible in the ids."""
    characters = list(CHARACTER_OF_BYTE.values())
    merges = [(a, b) for a in characters for b in characters][: entries - 257]
    vocab = {token: n for n, token in enumerate([*characters, *(a + b for a, b in merges), END_OF_TEXT])}
    (folder / names[0]).write_text(json.dumps(vocab))
    (folder / names[1]).write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each kind with what AutoTokenizer opens from its folder."""
    gpt2 = Tokenizer.open(gpt2_folder(tmp_path_factory.mktemp("files")))
    pairs = {}
    for tokenizer in (Tokenizer.of_bytes(), Tokenizer.train(SAMPLE, 300), gpt2):
        folder = tmp_path_factory.mktemp(tokenizer.kind)
        tokenizer.save(folder)
        pairs[tokenizer.kind] = (tokenizer, AutoTokenizer.from_pretrained(folder), folder)
    return pairs


def test_ids_of_bytes_are_the_byte_values(pairs):
    tokenizer, auto, _ = pairs["bytes"]
    assert "".join(CHARACTER_OF_BYTE[byte] for byte in b"a \n\xad") == "aĠĊŃ"  # GPT-2's alphabet
    assert tokenizer.token_bytes == [*(bytes([i]) for i in range(256)), b""]
    assert auto.convert_tokens_to_ids([CHARACTER_OF_BYTE[i] for i in range(256)]) == list(range(256))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=TEXT)
@example(text="don't, it's, we're, I've, I'm, you'll, he'd, DON'T, ''s, !'s, ' s,  's")
@example(text="a\x1c b!\x1c!\xa0 c\u3000\n\n  d \t\r\n  ")
@example(text=f"a{END_OF_TEXT} b {END_OF_TEXT}")  # text cannot spell the end of text
def test_auto_tokenizer_agrees_and_decoding_returns_the_text(pairs, kind, text):
    tokenizer, auto, _ = pairs[kind]
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == auto(text, add_special_tokens=False)["input_ids"] == auto(text)["input_ids"]
    assert tokenizer.decode(ids) == auto.decode(ids.tolist()) == text
    assert tokenizer.end_of_text not in ids
    assert auto.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_saved_and_opened_it_is_the_same(pairs, tmp_path):
    for tokenizer, auto, folder in pairs.values():
        assert Tokenizer.open(folder).describe() == tokenizer.describe()
        assert (len(auto), auto.eos_token_id) == (tokenizer.vocab_size, tokenizer.end_of_text)
    as_large = Tokenizer("bpe", pairs["gpt2"][0].vocabulary, pairs["gpt2"][0].merges)
    as_large.save(tmp_path)
    assert Tokenizer.open(tmp_path).kind == "bpe"
    (tmp_path / "tokenizer_config.json").write_text("{}")  # as it was saved once
    assert Tokenizer.open(tmp_path).kind == "gpt2"
    for entries, dtype in [(65_536, "<u2"), (65_537, "<u4")]:
        assert Tokenizer("bpe", map(str, range(entries - 1)), ()).dtype == np.dtype(dtype)
    assert Tokenizer.train(SAMPLE, 257).merges == ()
    assert len({tokenizer.fingerprint for tokenizer, _, _ in pairs.values()}) == 3


def test_training_is_deterministic_and_does_not_depend_on_the_order(pairs):
    code = "import json, sys; from chiar.data.tokenizers import Tokenizer\n"
    code += "print(Tokenizer.train(json.load(sys.stdin)[::-1], 300).fingerprint)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(SAMPLE), check=True, capture_output=True, text=True)
    assert done.stdout.strip() == pairs["bpe"][0].fingerprint and pairs["bpe"][0].vocab_size == 300
    refused("at least 257", Tokenizer.train, SAMPLE, 256)
    refused("at most a million, got 99999999999", Tokenizer.train, SAMPLE, 99_999_999_999)


def test_a_long_text_is_trained_on_in_parts_with_the_same_result(monkeypatch):
    text = "".join(word + space for space in SPACES + "\n \n" for n in range(9) for word in sentence(n).split())
    whole = Tokenizer.train([text * 3], 400)
    monkeypatch.setattr(tokenizers, "TRAINED_AT_ONCE", 50)
    assert "".join(parts := list(tokenizers.in_parts([text]))) == text and len(parts) > 50
    assert Tokenizer.train([text * 3], 400).fingerprint == whole.fingerprint


def test_gpt2_from_any_of_its_files(tmp_path, pairs, monkeypatch):
    other = Tokenizer.open(gpt2_folder(tmp_path, ("encoder.json", "vocab.bpe")))
    assert other.kind == "gpt2" and other.describe() == pairs["gpt2"][0].describe()
    unreachable = Mock(side_effect=ConnectionError("no network\nand more"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name: str(tmp_path / name))
    assert TokenizerChoice("gpt2", from_hub=True).ready().vocab_size == 50_257
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    refused(r"could not be fetched from the Hub: no network$", TokenizerChoice("gpt2", from_hub=True).ready)


def test_choices_that_make_no_sense_are_refused(tmp_path):
    cases = {"Did you mean 'gpt2'": ["gtp2"], "--tokenizer-path": ["gpt2"], "leave it out": ["bytes", None, 300]}
    cases |= {"no files": ["bytes", tmp_path], "neither vocab.json": ["gpt2", tmp_path]}
    cases |= {"no tokenizer.json": ["bpe", tmp_path], "not a prepared corpus": [None, None, None, tmp_path]}
    for message, choice in cases.items():
        refused(message, TokenizerChoice(*choice).ready)
    assert TokenizerChoice().ready() is None


def test_damaged_tokenizers_are_refused(tmp_path):
    Tokenizer.of_bytes().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    split = {"type": "Whitespace", "add_prefix_space": False}
    cases = {"{": "not a readable tokenizer", json.dumps(stored | {"model": None}): "not a readable tokenizer"}
    for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": split}):
        cases[json.dumps(stored | change)] = "not plain byte-level BPE"
    broken = {"all 256 bytes": {"vocab": {"a": 0}}, "without gaps": {"vocab": {"a": 1}}}
    for message, change in (broken | {"merge 'a b'": {"merges": [["a", "b"]]}}).items():
        cases[json.dumps(stored | {"model": stored["model"] | change})] = message
    all_refused(lambda: Tokenizer.open(tmp_path), path, cases)
    (tmp_path / "merges.txt").write_text("")
    all_refused(lambda: Tokenizer.open(tmp_path), tmp_path / "vocab.json", {"[]": "not a readable tokenizer"})
    refused("400 entries, but GPT-2", TokenizerChoice("gpt2", path=gpt2_folder(tmp_path, entries=400)).ready)
