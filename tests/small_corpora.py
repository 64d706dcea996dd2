"""Small corpora in the layouts of their publishers or prepared as a user would, and tiny models that read them."""

import hashlib
import json
import random
from pathlib import Path

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus
from chiar.data.tokenizers import TokenizerChoice
from chiar.model.modeling import ChiarForCausalLM
from helpers import randomise, refused, small_config

BYTES = TokenizerChoice("bytes")
WHOLE = (1.0, 0.0, 0.0)
SPLITS = ("train", "valid", "test")
NAMES = ["light", "dark", "token", "filter", "attention", "entropy", "layer", "gate", "route", "model", "noise"]
WORDS = "the of many light dark filter attention carbon naïve 漢字 don't 42 , .".split()  # noqa: SIM905


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def text_file(path: Path, documents: int = 200, words: int = 12) -> Path:
    path.write_text("\n\n".join(sentence(n, words) for n in range(documents)) + "\n", encoding="utf-8")
    return path


def wikitext_folder(folder: Path, form: str = "tokens", articles: int = 5) -> dict[str, list[str]]:
    """Articles are a blank line, the title, sections and a line that only looks like a title."""
    folder.mkdir(parents=True, exist_ok=True)
    title, body = " \n = {0} {1} = \n \n {2} \n = = Section of {0} = = \n \n", " {2} \n = x = \n {2} \n"
    numbers = range(articles)
    texts = {split: [(title + body).format(split, n, sentence(n)) for n in numbers] for split in SPLITS}
    for split in SPLITS:
        (folder / f"wiki.{split}.{form}").write_text("".join(texts[split]), encoding="utf-8")
    return texts


def language_corpus(folder, documents, words=19):
    """Bytes, with all three splits."""
    lines = [f"{i} " + " ".join(NAMES[(i * k) % len(NAMES)] for k in range(1, words + 1)) for i in range(documents)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    prepare(build_source([str(folder / "text.jsonl")]), folder / "prepared", BYTES)
    return folder / "prepared"


def labelled_corpus(folder, like, *examples):
    """ListOps with the tokenizer of another corpus: so many in train, valid and test."""
    source = build_source(["listops"], depth=3, arguments=3, examples=examples)
    prepare(source, folder / "prepared", TokenizerChoice(like=like))
    return folder / "prepared"


def measured_corpus(folder: Path, name: str = "text", tokenizer: TokenizerChoice = BYTES) -> Corpus:
    """Text, whose test split has some 300 bytes, no multiple of any length; or CoLA, sentences of 1 to 9 words."""
    texts = ["\n\n".join(f"{sentence(n, 8)}\n{sentence(n + 50, 3)}" for n in range(count)) for count in (30, 3, 3)]
    files = {f"{split}.txt": text for split, text in zip(SPLITS, texts, strict=True)}
    if name == "cola":
        rows = [f"x\t{int(n % 3 > 0)}\t\t{sentence(n, 1 + n % 9)}" for n in range(23)]
        files = {"train.tsv": "\n".join(rows[:8]), "dev.tsv": "\n".join(rows)}
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n", encoding="utf-8")
    return prepare(build_source([name, str(folder)]), folder / "corpus", tokenizer)


def tiny_model(preset: str = "v3-tiny", kind: type = ChiarForCausalLM, seed: int = 1, **changes):
    """Of bytes, in fp32, with routes that mix and a gate that moves; causal unless told otherwise."""
    config = small_config(preset, **{"vocab_size": 257, "gate_pool": "causal", **changes})
    return randomise(kind(config).eval(), seed)


def save(model, folder: Path, tokenizer=None) -> Path:
    """A model folder, with a tokenizer where one is given."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash: two folders are byte-identical if these are equal."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def all_refused(make, path: Path, cases: dict):
    """Each content of the file is answered with its sentence."""
    for content, message in cases.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(message, make)
