"""Which bytes a router makes dark, compared with the ends of words.

python -m research.coverage runs/enwiki44m-bytes runs/bytes/runs/predictive-s1/final runs/bytes/runs/space-s1/final

A word ends where the router `space` says so; the bytes from one end up to the next are a word here. Models with
experimental routers need `CHIAR_PLUGINS=research/leads.py`."""

import math
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

from chiar.console import guarded, show
from chiar.data.shards import Corpus
from chiar.errors import require
from chiar.layers.stack_routers import is_space
from chiar.model.load import choose_device, load_model

BATCH = 32


def word_ends(ids_BT: Tensor) -> Tensor:
    space_BT = is_space(ids_BT)
    ends_BT = space_BT & ~F.pad(space_BT, (1, 0))[:, :-1]
    return ends_BT.index_fill(1, torch.tensor([0]), True)


@torch.inference_mode()
def run_model(folder: str, ids_BT: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which bytes are dark, and the surprisal of each next byte in bits; both (B, T) for rows of T + 1 bytes."""
    model = load_model(folder)[0].to(device).eval()
    require(bool(model.config.stacks), f"{folder} has no dark stack.")
    dark, bits = [], []
    for rows_BT in ids_BT.to(device).split(BATCH):
        output = model.model(rows_BT[:, :-1], output_routes=True)
        losses = F.cross_entropy(model.lm_head(output.last_hidden_state).mT.float(), rows_BT[:, 1:], reduction="none")
        dark.append(output.stacks[0].dark_BT.cpu())
        bits.append(losses.cpu() / math.log(2))
    return torch.cat(dark), torch.cat(bits)


def measure(dark_BT: Tensor, bits_BT: Tensor, ends_BT: Tensor) -> dict[str, float]:
    per_word_BW = torch.zeros_like(dark_BT, dtype=torch.long).scatter_add(1, ends_BT.cumsum(1) - 1, dark_BT.long())
    dark_per_word_N = per_word_BW[torch.arange(ends_BT.shape[1]) < ends_BT.sum(1, keepdim=True)]
    return {
        "bits": bits_BT.mean().item(),
        "dark": dark_BT.double().mean().item(),
        "dark at word ends": dark_BT[ends_BT].double().mean().item(),
        "dark elsewhere": dark_BT[~ends_BT].double().mean().item(),
        "words without dark bytes": (dark_per_word_N == 0).double().mean().item(),
        "bits at word ends": bits_BT[ends_BT].mean().item(),
        "bits elsewhere": bits_BT[~ends_BT].mean().item(),
    }


def main(
    data: Annotated[Path, typer.Argument(help="A byte-level corpus; its validation split is read.")],
    models: Annotated[list[str], typer.Argument(help="Folders of models with a dark stack.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows to read.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Bytes per row.")] = 1024,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Compare models: the share of dark bytes at word ends and elsewhere, and of words without any dark byte."""

    def work() -> None:
        valid, target = Corpus.open(data).split("valid"), choose_device(device)
        count = min(rows, (valid.tokens - 1) // length)
        require(count, f"the validation split of {data} has fewer than {length + 1} bytes.")
        starts = torch.arange(count).numpy() * length
        ids_BT = torch.from_numpy(valid.rows(starts, length + 1))
        ends_BT, table = word_ends(ids_BT[:, :-1]), Table("model")
        for folder in models:
            measured = measure(*run_model(folder, ids_BT, target), ends_BT)
            if not table.rows:
                for name in measured:
                    table.add_column(name)
            table.add_row(folder, *(f"{value:.3f}" for value in measured.values()))
        show(table)

    guarded(work)


if __name__ == "__main__":
    typer.run(main)
