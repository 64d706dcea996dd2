"""The three tokenizers: what AutoTokenizer gives from the saved folder is what corpora are made of."""

import json
import subprocess
import sys

import numpy as np
import pytest
from corpora import sentence
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chiar.data.byte_alphabet import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE
from chiar.data.tokenizer_choice import TokenizerChoice, read_gpt2
from chiar.data.tokenizers import END_OF_TEXT, KINDS, Tokenizer
from chiar.errors import InputError

SAMPLE = [sentence(n, 60) for n in range(50)]
# Every kind of space, including those Python and the tokenizers library disagree about, next to everything else.
SPACES = " \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u202f\u3000\u200b"
TEXT = st.text(st.one_of(st.sampled_from(SPACES), st.sampled_from("ab 'st7²é漢!<|>\n "), st.characters(codec="utf-8")))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each kind with what AutoTokenizer opens from its folder."""
    pairs = {}
    # Merges of nearly any two bytes make every place where words are parted visible in the ids.
    gpt2 = read_gpt2(gpt2_folder(tmp_path_factory.mktemp("files")))
    kinds = {"bytes": Tokenizer.of_bytes(), "bpe": Tokenizer.train(SAMPLE, 300), "gpt2": gpt2}
    for name, tokenizer in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save(folder)
        pairs[name] = (tokenizer, AutoTokenizer.from_pretrained(folder), folder)
    return pairs


def gpt2_folder(folder, names=("vocab.json", "merges.txt"), entries=50_257):
    """As large as GPT-2's, with merges of our own: any two bytes, 50,000 of them."""
    characters = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    merges = [(a, b) for a in characters for b in characters][: entries - 257]
    vocab = {token: n for n, token in enumerate([*characters, *(a + b for a, b in merges), END_OF_TEXT])}
    (folder / names[0]).write_text(json.dumps(vocab))
    (folder / names[1]).write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder


def test_the_byte_alphabet_is_gpt2s():
    assert len(BYTE_OF_CHARACTER) == 256
    assert CHARACTER_OF_BYTE[ord(" ")] == "Ġ"
    assert CHARACTER_OF_BYTE[ord("\n")] == "Ċ"
    assert CHARACTER_OF_BYTE[0xAD] == "Ń"


def test_ids_of_bytes_are_the_byte_values(pairs):
    tokenizer, auto, _ = pairs["bytes"]
    assert tokenizer.vocab_size == len(auto) == 257
    assert tokenizer.end_of_text == auto.eos_token_id == 256
    assert [tokenizer.token_bytes[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert auto.convert_tokens_to_ids([CHARACTER_OF_BYTE[i] for i in range(256)]) == list(range(256))
    text = "".join(map(chr, range(0x250))) + "漢🙂"
    assert auto(text)["input_ids"] == list(text.encode()) == tokenizer.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(text=TEXT)
@example(text="don't, it's, we're, I've, I'm, you'll, he'd, DON'T, ''s, !'s, ' s,  's")
@example(text="a\x1c b!\x1c!\xa0 c\u3000\n\n  d \t\r\n  ")
def test_auto_tokenizer_agrees_and_decoding_returns_the_text(pairs, kind, text):
    tokenizer, auto, _ = pairs[kind]
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == auto(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert auto.decode(ids.tolist()) == text
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_text_cannot_spell_the_end_of_text(pairs, kind):
    tokenizer, auto, _ = pairs[kind]
    text = f"a{END_OF_TEXT} b {END_OF_TEXT}"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end_of_text not in ids
    assert ids.tolist() == auto(text)["input_ids"]
    assert auto.decode([tokenizer.end_of_text]) == END_OF_TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_opened_it_is_the_same(pairs, kind):
    tokenizer, _, folder = pairs[kind]
    assert Tokenizer.open(folder) == tokenizer
    assert Tokenizer.open(folder).fingerprint == tokenizer.fingerprint


def test_kinds_have_different_fingerprints(pairs):
    smallest = Tokenizer.train(SAMPLE, 257)
    assert smallest.vocabulary != () and smallest.merges == ()
    assert len({smallest.fingerprint, *(tokenizer.fingerprint for tokenizer, _, _ in pairs.values())}) == 4


def test_training_is_deterministic_and_does_not_depend_on_the_order():
    code = "import json, sys; from chiar.data.tokenizers import Tokenizer\n"
    code += "print(Tokenizer.train(json.load(sys.stdin)[::-1], 300).fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(SAMPLE), check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == Tokenizer.train(SAMPLE, 300).fingerprint


def test_a_trained_vocabulary_is_no_larger_than_asked_for(pairs):
    tokenizer, auto, _ = pairs["bpe"]
    assert tokenizer.vocab_size == len(auto) == 300
    assert tokenizer.end_of_text == 299
    assert Tokenizer.train(["tiny text, tiny text"], 8192).vocab_size < 300
    with pytest.raises(InputError, match="at least 257"):
        Tokenizer.train(SAMPLE, 256)


def test_large_vocabularies_take_four_bytes():
    entries = Tokenizer.of_bytes().vocabulary
    many = tuple(f"ĀĀ{chr(0x4E00 + n // 300)}{chr(0x4E00 + n % 300)}" for n in range(65_280))
    assert Tokenizer("bpe", entries + many[:65_279], ()).dtype == np.dtype("<u2")
    assert Tokenizer("bpe", entries + many, ()).dtype == np.dtype("<u4")


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2_from_either_pair_of_files(tmp_path, names):
    tokenizer = read_gpt2(gpt2_folder(tmp_path, names))
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_text) == ("gpt2", 50_257, 50_256)
    tokenizer.save(tmp_path / "saved")
    again = read_gpt2(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    auto = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in SAMPLE[:10]:
        assert auto(text)["input_ids"] == tokenizer.encode_batch([text])[0].tolist()


def test_choices_that_make_no_sense_are_refused(tmp_path):
    def refused(message, **choice):
        with pytest.raises(InputError, match=message):
            TokenizerChoice(**choice).ready()

    refused("Did you mean 'gpt2'", kind="gtp2")
    refused("--tokenizer-path", kind="gpt2")
    refused("leave it out", kind="bytes", vocab_size=300)
    refused("no files", kind="bytes", path=tmp_path)
    refused("neither vocab.json", kind="gpt2", path=tmp_path)
    refused("no tokenizer.json", kind="bpe", path=tmp_path)
    refused("not a prepared corpus", like=tmp_path)
    assert TokenizerChoice().ready() is None
    assert TokenizerChoice(vocab_size=300).trained_size == 300


def test_damaged_tokenizers_are_refused(tmp_path):
    def refused(message, read=Tokenizer.open):
        with pytest.raises(InputError, match=message):
            read(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{")
    refused("not a readable tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused("not a readable tokenizer")
    Tokenizer.of_bytes().save(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    for change, message in [
        ({"normalizer": {"type": "NFC"}}, "not plain byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace", "add_prefix_space": False}}, "not plain byte-level BPE"),
        ({"model": {**stored["model"], "vocab": {"a": 0}}}, "all 256 bytes"),
        ({"model": {**stored["model"], "vocab": {"a": 1}}}, "without gaps"),
        ({"model": {**stored["model"], "merges": [["a", "b"]]}}, "merge 'a b'"),
    ]:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**stored, **change}))
        refused(message)
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("")
    refused("not a readable GPT-2 tokenizer", read_gpt2)
    gpt2_folder(tmp_path, entries=400)
    refused("400 entries, but GPT-2", read_gpt2)


def test_the_hub_is_asked_only_by_name(monkeypatch, tmp_path):
    import huggingface_hub

    gpt2_folder(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name: str(tmp_path / name))
    assert TokenizerChoice("gpt2", from_hub=True).ready().vocab_size == 50_257

    def unreachable(repository, name):
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(InputError, match=r"could not be fetched from the Hub: no network$"):
        TokenizerChoice("gpt2", from_hub=True).ready()
