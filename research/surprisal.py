"""How evenly the symbols of a text share its information: surprisal, the bits a model needs for each of them.

Models of one text in several kinds of symbols, and what routing gained there, the loss of plain layers of equal FLOPs
less that of `predictive`, in bits/byte (gains.json: {"bytes": 0.05, "bpe-8192": 0.0}):

python -m research.surprisal BYTES/runs/dense-6-s0/final runs/enwiki44m-bytes \
  TOKENS8K/runs/dense-6-s0/final runs/enwiki44m-8k --gains gains.json --out FOLDER

A model of bytes reads any corpus: the bits of a token are then the sum of its bytes' bits, so that only the cut into
symbols differs, not the model. FOLDER holds surprisal.json, surprisal.md and surprisal.svg."""

import json
import math
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from chiar.console import SplitName, guarded
from chiar.data.shards import Corpus
from chiar.data.tokenizers import Tokenizer, check_tokenizer
from chiar.errors import errors_as, optional_module, require, unknown_name
from chiar.evaluation.report import shown
from chiar.files import check_file, new_folder
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.model.load import choose_device, load_model
from chiar.model.modeling import ChiarForCausalLM
from chiar.plots.figure import COLOURS, DASHES, UNIT, Line, Panel, save
from research.grid import draw_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "chiar-surprisal/1"
TOP = 0.2
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
PLACES = np.linspace(0, 1, 101)  # where a curve is kept
# Heading, key and format of the table.
COLUMNS = (
    ("symbols", "kind", ""), ("bytes/symbol", "bytes_per_symbol", ".3f"), ("bits/symbol", "bits_per_symbol", ".3f"),
    ("bits/byte", "bits_per_byte", ".4f"), ("Gini", "gini", ".3f"), (f"share of the top {TOP:.0%}", "top_share", ".1%"),
    ("median, bits", "0.5", ".3f"), ("90%", "0.9", ".3f"), ("99%", "0.99", ".3f"), ("gain, bits/byte", "gain", "+.4f"),
)  # fmt: skip


@dataclass
class Measured:
    """The symbols of one kind in a text, and what a model needs for them."""

    kind: str  # bytes, gpt2 or bpe-ENTRIES
    model: str
    corpus: str
    fingerprint: str
    length: int
    symbols: int
    bytes: int
    bits_per_symbol: float
    bits_per_byte: float
    bytes_per_symbol: float
    gini: float
    top_share: float  # of all bits, in the most informative fifth of the symbols
    quantiles: dict[str, float]  # bits of a symbol
    lorenz: list[float]  # at PLACES
    gain: float | None


def lorenz(values: np.ndarray) -> np.ndarray:
    """The share of the sum that the least 0, 1, … n of n values make up; even shares where all are 0."""
    total_n = np.concatenate([[0.0], np.sort(values.astype(np.float64)).cumsum()])
    return total_n / total_n[-1] if total_n[-1] > 0 else np.linspace(0, 1, len(total_n))


def gini(values: np.ndarray) -> float:
    """0 where all are equal, (n − 1) / n where one of n has everything."""
    return float(1 - (2 * lorenz(values)[1:].sum() - 1) / len(values))


def share_below(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The Lorenz curve at shares of the values, straight between its points."""
    return np.interp(places, np.linspace(0, 1, len(values) + 1), lorenz(values))


@torch.inference_mode()
def surprisals(model: ChiarForCausalLM, ids_RT: np.ndarray, batch: int) -> np.ndarray:
    """Bits of every symbol but each row's first, given those before it in the row."""
    found = []
    for ids_BT in torch.from_numpy(ids_RT).split(batch):
        ids_BT = ids_BT.to(model.device)
        states_ND = model.model(ids_BT[:, :-1]).last_hidden_state.flatten(0, 1)
        nats_N = linear_cross_entropy(states_ND, model.lm_head.weight, ids_BT[:, 1:].flatten(), reduction="none")
        found.append(nats_N.double().clamp_min(0).cpu().numpy() / math.log(2))  # rounding may leave −1e-7
    return np.concatenate(found)


def spelled(corpus: Corpus, ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of tokens, as ids of a model of bytes, and how many each has; an end of text is one id there too."""
    end = Tokenizer.of_bytes().end_of_text
    words = [np.frombuffer(word, np.uint8).astype(np.int64) for word in corpus.tokenizer().token_bytes]
    words[corpus.end_of_text] = np.array([end])
    sizes_S = np.array([*map(len, words)])[ids_S]
    return np.concatenate([words[i] for i in ids_S]), sizes_S


def whole_symbols(bits_N: np.ndarray, sizes_S: np.ndarray) -> tuple[np.ndarray, slice]:
    """Sums of bits over symbols of so many ids, without the first symbol and what is cut off at the end, and which they
    are. `bits_N` begins with the second id."""
    ends_S = sizes_S.cumsum() - 1  # of the id behind the first
    last = int(np.searchsorted(ends_S, len(bits_N), side="right"))
    require(last > 1, "a row of the model holds no whole token behind the first: name a longer model.")
    return np.add.reduceat(bits_N[: ends_S[last - 1]], ends_S[: last - 1]), slice(1, last)


def in_rows(ids_N: np.ndarray, length: int, rows: int | None, name: str) -> np.ndarray:
    """Rows side by side, as chiar eval reads them, each from the last id of the one before; whole ones only."""
    starts = np.arange(0, len(ids_N) - length, length)[:rows]
    require(len(starts), f"split {name!r} has {len(ids_N)} symbols, not one row of {length} and the next.")
    return ids_N[starts[:, None] + np.arange(length + 1)]


def kind_of(corpus: Corpus) -> str:
    return f"bpe-{corpus.vocab_size}" if corpus.tokenizer_kind == "bpe" else corpus.tokenizer_kind


def measure(name: str, corpus: Corpus, split: str, rows: int | None, batch: int, device: str) -> Measured:
    model, folder = load_model(name)
    require(folder, f"{name} is a preset with random weights: name a trained model.")
    require(corpus.kind == "language", f"{corpus.folder} is a {corpus.kind} corpus: surprisal is of running text.")
    length, text = model.config.max_position_embeddings, corpus.split(split)
    wanted = text.tokens if rows is None else min(rows * length + 1, text.tokens)  # a symbol has an id or more
    symbols_S = ids_N = text.read(0, wanted).astype(np.int64)
    sizes_S = np.ones_like(ids_N)
    if model.config.vocab_size == Tokenizer.of_bytes().vocab_size < corpus.vocab_size:
        ids_N, sizes_S = spelled(corpus, symbols_S)
    else:
        check_tokenizer(str(folder), model.config, corpus)
    found_N = surprisals(model.to(choose_device(device)), in_rows(ids_N, length, rows, split), batch)
    require(np.isfinite(found_N).all(), f"the losses of {name} are not finite: its training diverged.")
    bits_N, which = whole_symbols(found_N, sizes_S)
    size = int(np.array([*map(len, corpus.tokenizer().token_bytes)])[symbols_S[which]].sum())
    total, count = float(bits_N.sum()), len(bits_N)
    about = kind_of(corpus), str(folder), corpus.name, corpus.fingerprint, length, count, size
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(bits_N, QUANTILES).tolist(), strict=True))
    top = float(1 - share_below(bits_N, np.array(1 - TOP)))
    curve = share_below(bits_N, PLACES).tolist()
    return Measured(*about, total / count, total / size, size / count, gini(bits_N), top, quantiles, curve, None)


def read_gains(path: Path, kinds: list[str]) -> dict[str, float]:
    """{kind: bits/byte}; InputError where a kind was not measured."""
    check_file(path)
    with errors_as(
        f"{path} holds no gains like {{{json.dumps(kinds[0])}: 0.05}}", ValueError, TypeError, AttributeError
    ):
        gains = {str(kind): float(gain) for kind, gain in json.loads(path.read_text(encoding="utf-8")).items()}
    for kind, gain in gains.items():
        if kind not in kinds:
            raise unknown_name(f"kind of symbols in {path}", kind, kinds)
        require(math.isfinite(gain), f"the gain of {kind} in {path} is no number: {gain}.")
    return gains


def draw(found: list[Measured]) -> "Figure":
    """Lorenz curves, and where gains are known these against Gini."""
    curves, points = [Line([(0, 0), (1, 1)], "all alike", color="#999999", linestyle=DASHES[2])], []
    for one, colour in zip(found, cycle(COLOURS), strict=False):
        curve = [*zip(PLACES.tolist(), one.lorenz, strict=True)]
        curves.append(Line(curve, f"{one.kind}, Gini {one.gini:.2f}", color=colour))
        points += [Line([(one.gini, one.gain)], color=colour, markersize=8)] if one.gain is not None else []
    panels = [
        Panel("share of the information", curves, None, UNIT, "share of the symbols, the least informative first")
    ]
    if points:
        panels.append(Panel("gain of routing, bits/byte", points, (0.0, "no gain"), None, "Gini of surprisal"))
    return draw_grid("How evenly symbols share a text's information", panels, "", len(panels), 3.2, sizes=False)


def table(found: list[Measured]) -> str:
    cells = [{**asdict(one), **one.quantiles} for one in found]
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in cells)]
    lines = [[heading for heading, *_ in columns], ["---"] * len(columns)]
    lines += [[shown(row[key], form) for _, key, form in columns] for row in cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare(named: list[str], out: Path, gains: Path | None, split: str, **how: Any) -> None:
    optional_module("matplotlib", "plots", "the picture")
    require(len(named) % 2 == 0, f"models and corpora come in pairs, MODEL CORPUS …, got {len(named)} names.")
    corpora = [Corpus.open(path) for path in named[1::2]]
    kinds = [kind_of(corpus) for corpus in corpora]
    twice = [kind for kind in kinds if kinds.count(kind) > 1]
    require(not twice, f"{twice and twice[0]} is named twice: one model for each kind of symbols.")
    known = read_gains(gains, kinds) if gains else {}
    with new_folder(out) as folder:
        found = [measure(name, corpus, split, **how) for name, corpus in zip(named[::2], corpora, strict=True)]
        for one in found:
            one.gain = known.get(one.kind)
        record = {"format": FORMAT, "split": split, "kinds": [*map(asdict, found)]}
        (folder / "surprisal.json").write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        (folder / "surprisal.md").write_text(table(found), encoding="utf-8")
        save(draw(found), folder / "surprisal.svg")
    typer.echo(f"{table(found)}wrote {out}")


def main(
    named: Annotated[list[str], typer.Argument(metavar="MODEL CORPUS...", help="Trained models, each with its text.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.")],
    gains: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON: bits/byte that routing gained.")] = None,
    split: SplitName = "test",
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the trained length. [default: all]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 16,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")] = "auto",
) -> None:
    """Bits of each symbol of a text: distribution, Gini, Lorenz curves, one for each kind of symbols."""
    guarded(lambda: compare(named, out, gains, split, rows=rows, batch=batch, device=device))


if __name__ == "__main__":
    typer.run(main)
