"""How evenly the information of a text is spread over its symbols, by their surprisal under a model, in bits.

Compares models of one text under several tokenizations. gains.json holds what routing gained under each, the loss of
dense layers of equal FLOPs minus that of `predictive`, in bits/byte ({"bytes": 0.05, "bpe-8192": 0.0}):

python -m research.surprisal BYTES/runs/dense-6-s0/final runs/enwiki44m-bytes \
  TOKENS8K/runs/dense-6-s0/final runs/enwiki44m-8k --gains gains.json --out FOLDER

A byte-level model reads any corpus: a token's surprisal is then the sum over its bytes, so that only the tokenization
differs, not the model. FOLDER will hold surprisal.json, surprisal.md and surprisal.svg."""

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
GRID = np.linspace(0, 1, 101)  # shares of the symbols at which a Lorenz curve is recorded
# Heading, key and format of each column of the table.
COLUMNS = (
    ("symbols", "kind", ""), ("bytes/symbol", "bytes_per_symbol", ".3f"), ("bits/symbol", "bits_per_symbol", ".3f"),
    ("bits/byte", "bits_per_byte", ".4f"), ("Gini", "gini", ".3f"), (f"share of the top {TOP:.0%}", "top_share", ".1%"),
    ("median, bits", "0.5", ".3f"), ("90%", "0.9", ".3f"), ("99%", "0.99", ".3f"), ("gain, bits/byte", "gain", "+.4f"),
)  # fmt: skip


@dataclass
class Measurement:
    """Surprisal of the symbols of a text under one tokenization and one model."""

    kind: str  # bytes, gpt2 or bpe-VOCABULARY_SIZE
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
    quantiles: dict[str, float]  # bits per symbol
    lorenz: list[float]  # at GRID
    gain: float | None


def lorenz(values: np.ndarray) -> np.ndarray:
    """The Lorenz curve: the share of the total held by the 0, 1, … n smallest of n values; a diagonal if all are 0."""
    sums = np.concatenate([[0.0], np.sort(values.astype(np.float64)).cumsum()])
    return sums / sums[-1] if sums[-1] > 0 else np.linspace(0, 1, len(sums))


def gini(values: np.ndarray) -> float:
    """The Gini coefficient: 0 if all are equal, (n − 1) / n if one of n values has everything."""
    return float(1 - (2 * lorenz(values)[1:].sum() - 1) / len(values))


def lorenz_at(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The Lorenz curve at these shares of the values, interpolated linearly."""
    return np.interp(shares, np.linspace(0, 1, len(values) + 1), lorenz(values))


@torch.inference_mode()
def surprisals(model: ChiarForCausalLM, ids_RT: np.ndarray, batch: int) -> np.ndarray:
    """Bits of every symbol but the first of each row, given those before it in the row."""
    parts = []
    for ids_BT in torch.from_numpy(ids_RT).split(batch):
        ids_BT = ids_BT.to(model.device)
        states_ND = model.model(ids_BT[:, :-1]).last_hidden_state.flatten(0, 1)
        nats_N = linear_cross_entropy(states_ND, model.lm_head.weight, ids_BT[:, 1:].flatten(), reduction="none")
        parts.append(nats_N.double().clamp_min(0).cpu().numpy() / math.log(2))  # rounding may leave −1e-7
    return np.concatenate(parts)


def as_bytes(corpus: Corpus, ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a byte-level model that spell these tokens, and how many each token has; end of text has one."""
    end = Tokenizer.of_bytes().end_of_text
    spellings = [np.frombuffer(token, np.uint8).astype(np.int64) for token in corpus.tokenizer().token_bytes]
    spellings[corpus.end_of_text] = np.array([end])
    sizes_S = np.array([*map(len, spellings)])[ids_S]
    return np.concatenate([spellings[i] for i in ids_S]), sizes_S


def whole_symbols(bits_N: np.ndarray, sizes_S: np.ndarray) -> tuple[np.ndarray, slice]:
    """Bits summed over the ids of each symbol, and which symbols those are: all but the first and an incomplete last
    one. `sizes_S` counts the ids of each symbol; `bits_N` starts at the second id."""
    ends_S = sizes_S.cumsum() - 1  # in `bits_N`
    last = int(np.searchsorted(ends_S, len(bits_N), side="right"))
    require(last > 1, "a row holds no complete token after the first: name a model of longer sequences.")
    return np.add.reduceat(bits_N[: ends_S[last - 1]], ends_S[: last - 1]), slice(1, last)


def in_rows(ids_N: np.ndarray, length: int, rows: int | None, name: str) -> np.ndarray:
    """Complete rows, as chiar eval reads them: each starts with the last id of the row before."""
    starts = np.arange(0, len(ids_N) - length, length)[:rows]
    require(len(starts), f"split {name!r} has {len(ids_N)} symbols, a row needs {length} and one more.")
    return ids_N[starts[:, None] + np.arange(length + 1)]


def kind_of(corpus: Corpus) -> str:
    return f"bpe-{corpus.vocab_size}" if corpus.tokenizer_kind == "bpe" else corpus.tokenizer_kind


def measure(name: str, corpus: Corpus, split: str, rows: int | None, batch: int, device: str) -> Measurement:
    model, folder = load_model(name)
    require(folder, f"{name} is a preset with random weights: name a trained model.")
    require(corpus.kind == "language", f"{corpus.folder} is a {corpus.kind} corpus: surprisal needs running text.")
    length, text = model.config.max_position_embeddings, corpus.split(split)
    count = text.tokens if rows is None else min(rows * length + 1, text.tokens)  # a symbol has one id or more
    symbols_S = ids_N = text.read(0, count).astype(np.int64)
    sizes_S = np.ones_like(ids_N)
    if model.config.vocab_size == Tokenizer.of_bytes().vocab_size < corpus.vocab_size:
        ids_N, sizes_S = as_bytes(corpus, symbols_S)
    else:
        check_tokenizer(str(folder), model.config, corpus)
    bits_N = surprisals(model.to(choose_device(device)), in_rows(ids_N, length, rows, split), batch)
    require(np.isfinite(bits_N).all(), f"the losses of {name} are not finite: its training diverged.")
    bits_S, which = whole_symbols(bits_N, sizes_S)
    size = int(np.array([*map(len, corpus.tokenizer().token_bytes)])[symbols_S[which]].sum())
    total, count = float(bits_S.sum()), len(bits_S)
    about = kind_of(corpus), str(folder), corpus.name, corpus.fingerprint, length, count, size
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(bits_S, QUANTILES).tolist(), strict=True))
    top = float(1 - lorenz_at(bits_S, np.array(1 - TOP)))
    curve = lorenz_at(bits_S, GRID).tolist()
    return Measurement(*about, total / count, total / size, size / count, gini(bits_S), top, quantiles, curve, None)


def read_gains(path: Path, kinds: list[str]) -> dict[str, float]:
    """{kind: bits/byte}; InputError for a kind that is not measured."""
    check_file(path)
    with errors_as(
        f"{path} holds no gains like {{{json.dumps(kinds[0])}: 0.05}}", ValueError, TypeError, AttributeError
    ):
        gains = {str(kind): float(gain) for kind, gain in json.loads(path.read_text(encoding="utf-8")).items()}
    for kind, gain in gains.items():
        if kind not in kinds:
            raise unknown_name(f"kind of symbols in {path}", kind, kinds)
        require(math.isfinite(gain), f"the gain of {kind} in {path} is not a finite number: {gain}.")
    return gains


def draw(measurements: list[Measurement]) -> "Figure":
    """Lorenz curves and, if gains are known, gain against Gini coefficient."""
    curves, points = [Line([(0, 0), (1, 1)], "equal shares", color="#999999", linestyle=DASHES[2])], []
    for one, colour in zip(measurements, cycle(COLOURS), strict=False):
        curve = [*zip(GRID.tolist(), one.lorenz, strict=True)]
        curves.append(Line(curve, f"{one.kind}, Gini {one.gini:.2f}", color=colour))
        points += [Line([(one.gini, one.gain)], color=colour, markersize=8)] if one.gain is not None else []
    panels = [Panel("share of the information", curves, None, UNIT, "share of the symbols, least informative first")]
    if points:
        panels.append(Panel("gain of routing, bits/byte", points, (0.0, "no gain"), None, "Gini of surprisal"))
    return draw_grid("How evenly information is spread over symbols", panels, "", len(panels), 3.2, log_x=False)


def table(measurements: list[Measurement]) -> str:
    rows = [{**asdict(one), **one.quantiles} for one in measurements]
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in rows)]
    lines = [[heading for heading, *_ in columns], ["---"] * len(columns)]
    lines += [[shown(row[key], form) for _, key, form in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare(names: list[str], out: Path, gains: Path | None, split: str, **how: Any) -> None:
    optional_module("matplotlib", "plots", "the picture")
    require(len(names) % 2 == 0, f"models and corpora come in pairs, MODEL CORPUS …, got {len(names)} names.")
    corpora = [Corpus.open(path) for path in names[1::2]]
    kinds = [kind_of(corpus) for corpus in corpora]
    repeated = [kind for kind in kinds if kinds.count(kind) > 1]
    require(not repeated, f"{repeated and repeated[0]} is named twice: one model for each kind of symbols.")
    known = read_gains(gains, kinds) if gains else {}
    with new_folder(out) as folder:
        measurements = [measure(name, corpus, split, **how) for name, corpus in zip(names[::2], corpora, strict=True)]
        for one in measurements:
            one.gain = known.get(one.kind)
        record = {"format": FORMAT, "split": split, "kinds": [*map(asdict, measurements)]}
        (folder / "surprisal.json").write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        (folder / "surprisal.md").write_text(table(measurements), encoding="utf-8")
        save(draw(measurements), folder / "surprisal.svg")
    typer.echo(f"{table(measurements)}wrote {out}")


def main(
    names: Annotated[list[str], typer.Argument(metavar="MODEL CORPUS...", help="Trained models, each with a corpus.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.")],
    gains: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON: bits/byte gained by routing.")] = None,
    split: SplitName = "test",
    rows: Annotated[int | None, typer.Option(min=1, help="Rows, of the trained length. [default: all]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 16,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to run on.")] = "auto",
) -> None:
    """Surprisal of the symbols of a text: distribution, Gini and Lorenz curve for each tokenization."""
    guarded(lambda: compare(names, out, gains, split, rows=rows, batch=batch, device=device))


if __name__ == "__main__":
    typer.run(main)
