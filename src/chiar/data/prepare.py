"""From a source to a folder of shards: streaming, on several processes, resumable, the same bytes each time."""

import codecs
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from chiar import __version__
from chiar.data.documents import Source
from chiar.data.encoding import Encoded, encode_all
from chiar.data.partial import partial_folder
from chiar.data.progress import Display, Silent
from chiar.data.shards import FORMAT, Corpus, fingerprint
from chiar.data.tokenizer_choice import TokenizerChoice
from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens_file import TokensFile
from chiar.data.writer import SplitWriter
from chiar.errors import InputError
from chiar.files import check_new

SHARD_TOKENS = 1 << 26


def prepare(
    source: Source | TokensFile,
    out: Path,
    tokenizer: TokenizerChoice,
    *,
    workers: int | None = 1,
    shard_tokens: int = SHARD_TOKENS,
    display: Display | None = None,
) -> Corpus:
    """`workers=None` takes one a core, as far as there are documents for them."""
    display = display or Silent()
    check_new(out)
    if shard_tokens < 1:
        raise InputError(f"--shard-tokens must be at least 1, got {shard_tokens}.")
    ready = tokenizer.ready()
    if ready is None and (isinstance(source, TokensFile) or "train" not in source.splits):
        what = "is tokenised already" if isinstance(source, TokensFile) else "has no train split to train a BPE on"
        raise InputError(f"{source.name} {what}: name its tokenizer, such as --tokenizer gpt2 --tokenizer-path FOLDER.")
    if isinstance(source, Source):
        workers = check_documents(source, workers)
    inputs = {
        "chiar": __version__,
        "format": FORMAT,
        "name": source.name,
        "kind": source.kind,
        "options": source.options,
        "files": [[str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns] for p in source.files],
        "tokenizer": ready.describe() if ready else {"train": tokenizer.trained_size},
        "shard_tokens": shard_tokens,
    }
    with partial_folder(out, inputs, display.note) as folder:
        used = settle_tokenizer(ready, source, tokenizer.trained_size, folder / "tokenizer", display)
        writers = []
        for split in source.splits:
            writer = SplitWriter(folder, split, used.dtype, shard_tokens, len(source.labels))
            writers.append(writer)
            try:
                if writer.entry is None:
                    if isinstance(source, Source):
                        write_text(writer, source, used, folder / "tokenizer", workers or 1, display)
                    else:
                        write_ids(writer, source, used, display)
                    writer.finish()
            finally:
                writer.close()
        write_manifest(folder, source, used, shard_tokens, {writer.split: writer.entry for writer in writers})
        for writer in writers:
            writer.remove_notes()
    return Corpus.open(out)


def check_documents(source: Source, workers: int | None) -> int:
    """No split may be empty; the number of processes to use."""
    for split in source.splits:
        if next(source.documents(split), None) is None:
            if split == "train" or source.carve is None:
                raise InputError(f"{source.name} is empty: its {split} split has no text.")
            raise InputError(
                f"{source.name} has too few documents for a {split} split: give more text, another --split-fractions, "
                f"or for plain text another --documents."
            )
    wanted = available_cores() if workers is None else workers
    if wanted < 1:
        raise InputError(f"--workers must be at least 1, got {wanted}.")
    if wanted == 1:
        return 1
    documents = sum(1 for _ in islice(source.documents(source.splits[0]), wanted))
    if documents < wanted and workers is not None:
        raise InputError(f"{workers} workers are more than the {documents} documents of {source.name}: ask for fewer.")
    return min(wanted, documents)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle_tokenizer(
    ready: Tokenizer | None, source: Source | TokensFile, size: int, folder: Path, display: Display
) -> Tokenizer:
    """The one an interrupted run has left, the one that is ready, or one trained on train."""
    if folder.is_dir():
        return Tokenizer.open(folder)
    if ready is None:
        assert isinstance(source, Source)
        display.begin("tokenizer")
        ready = Tokenizer.train((document.text for document in source.documents("train")), size)
        display.end()
    aside = folder.with_suffix(".new")
    ready.save(aside)
    os.replace(aside, folder)
    return ready


def write_text(
    writer: SplitWriter, source: Source, tokenizer: Tokenizer, folder: Path, workers: int, display: Display
) -> None:
    display.begin(writer.split, source.expected_bytes(writer.split))
    remaining = islice(source.documents(writer.split), writer.counts.documents, None)
    for encoded in encode_all(remaining, tokenizer, folder, source.kind == "classification", workers):
        writer.append(encoded)
        display.at(writer.counts)
    display.end()


def write_ids(writer: SplitWriter, source: TokensFile, tokenizer: Tokenizer, display: Display) -> None:
    display.begin(writer.split)
    for encoded in read_ids(source, writer.split, tokenizer):
        writer.append(encoded, checkpoint=False)  # words are counted across blocks, so a split is one piece of work
        display.at(writer.counts)
    if not writer.counts.tokens:
        raise InputError(f"{source.name} is empty: its {writer.split} split has no ids.")
    display.end()


def read_ids(source: TokensFile, split: str, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Counts bytes and words of the text the ids stand for, so that figures by byte and by word can be given."""
    spoken = [*tokenizer.token_bytes[:-1], b" "]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before_last_end = 0
    in_word = False
    for ids in source.blocks(split):
        if int(ids.max(initial=0)) >= tokenizer.vocab_size:
            raise InputError(
                f"{split} of {source.name} holds id {ids.max()}, outside the {tokenizer.vocab_size} entries of the "
                f"{tokenizer.kind} tokenizer: is it the right one?"
            )
        ends = np.flatnonzero(ids == tokenizer.end_of_text) + 1
        # A space stands for the end of text, which parts words but is no text itself.
        data = b"".join(map(spoken.__getitem__, ids.tolist()))
        text = decoder.decode(data)
        words = len(text.split())
        if text and in_word and not text[0].isspace():
            words -= 1
        if text:
            in_word = not text[-1].isspace()
        lengths = np.diff(ends, prepend=-before_last_end)
        before_last_end = len(ids) - int(ends[-1]) if len(ends) else before_last_end + len(ids)
        yield Encoded(ids, lengths, None, len(data) - len(ends), words, text.count("\n"))


def write_manifest(
    folder: Path, source: Source | TokensFile, tokenizer: Tokenizer, shard_tokens: int, entries: dict[str, Any]
) -> None:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "name": source.name,
        "kind": source.kind,
        "labels": list(source.labels),
        "tokenizer": tokenizer.describe(),
        "dtype": tokenizer.dtype.newbyteorder("=").name,
        "shard_tokens": shard_tokens,
        "options": source.options,
        "remarks": source.remarks(entries) if isinstance(source, Source) else [],
        "inputs": {"files": len(source.files), "bytes": sum(path.stat().st_size for path in source.files)},
        "splits": entries,
    }
    manifest["fingerprint"] = fingerprint(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")
