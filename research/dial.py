"""One set of weights for every budget: a model with a dark stack at many f, and with as many random bytes.

python -m research.dial runs/bytes/runs/predictive-s0/final runs/enwiki44m-bytes --out runs/dial

Each f is calibrated on the validation split and measured on the test split. Models of routers on trial need
`CHIAR_PLUGINS=research/leads.py`."""

import copy
import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from chiar.console import guarded, show
from chiar.data.shards import Corpus
from chiar.data.tokens import batches
from chiar.errors import InputError, require
from chiar.evaluation.harness import Reading, measure_perplexity
from chiar.files import new_folder
from chiar.model.load import choose_device, load_model
from chiar.model.modeling import ChiarForCausalLM
from chiar.routing.calibration import calibrate
from chiar.routing.flops import count_flops

FRACTIONS = "0.05,0.1,0.15,0.2,0.3,0.4,0.6"
CALIBRATION_ROWS = 200


def with_random_bytes(model: ChiarForCausalLM, fraction: float) -> ChiarForCausalLM:
    """The same weights, and a share of random bytes passes the stack."""
    config = copy.deepcopy(model.config)
    config.router, config.random_key = "random", "both"
    config.random_fraction = config.target_fraction = fraction
    made = ChiarForCausalLM(config)
    missing, left = made.load_state_dict(model.state_dict(), strict=False)
    differ = [*missing, *(name for name in left if ".router." not in name and "router_state" not in name)]
    require(not differ, f"with random bytes it would be another model, which differs in {', '.join(differ)}.")
    return made.to(model.device).eval()


def measure(model: ChiarForCausalLM, corpus: Corpus, reading: Reading) -> dict[str, float]:
    scores, routing, length = measure_perplexity(model, corpus, corpus.split("test"), reading)
    shares = [layer.use for layer in routing.layers]
    flops, share = count_flops(model.config, length, shares).total, routing.fraction
    assert share is not None
    return {"fraction": share, "bits": scores.loss / math.log(2), "flops": flops}


def turn(folder: str, data: Path, fractions: list[float], rows: int | None, device: str) -> list[dict[str, Any]]:
    """At each f: what was asked for, and what the model's own choice and a random one gave."""
    target, corpus = choose_device(device), Corpus.open(data)
    model = load_model(folder)[0].to(target).eval()
    require(bool(model.config.stacks), f"{folder} has no dark stack to turn a dial of.")
    reading, valid = Reading.of(model.config, rows=rows), corpus.split("valid")
    ids = valid.read(0, min(valid.tokens, CALIBRATION_ROWS * reading.length))
    found = []
    for fraction in fractions:
        cut = calibrate(model, batches(ids, CALIBRATION_ROWS, reading.length, 8), fraction=fraction)
        model.model.set_thresholds(cut.thresholds(len(model.config.routed_layers)))
        chance = with_random_bytes(model, fraction)
        own, at_random = (measure(chosen, corpus, reading) for chosen in (model, chance))
        found.append({"asked": fraction, "own": own, "random": at_random})
        typer.echo(f"f {fraction:g}: {own['bits']:.4f} bits, random {at_random['bits']:.4f}")
    return found


def table_of(found: list[dict[str, Any]]) -> Table:
    table = Table("f asked", "f", "MFLOP a token", "bits", "f at random", "bits at random")
    for row in found:
        own, chance = row["own"], row["random"]
        shown = [f"{row['asked']:g}", f"{own['fraction']:.3f}", f"{own['flops'] / 1e6:.3f}", f"{own['bits']:.4f}"]
        table.add_row(*shown, f"{chance['fraction']:.3f}", f"{chance['bits']:.4f}")
    return table


def main(
    model: Annotated[str, typer.Argument(help="A model folder.")],
    data: Annotated[Path, typer.Argument(help="The prepared corpus.")],
    out: Annotated[Path, typer.Option(help="A new folder for dial.json.")],
    fractions: Annotated[str, typer.Option(help="Shares of dark bytes.")] = FRACTIONS,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the test split. [default: all]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Evaluate a model with a dark stack at many f, without training."""

    def work() -> None:
        try:
            shares = [float(part) for part in fractions.split(",")]
        except ValueError:
            raise InputError(f"--fractions takes numbers separated by commas, got {fractions!r}.") from None
        with new_folder(out) as folder, torch.inference_mode():
            found = turn(model, data, shares, rows, device)
            (folder / "dial.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        show(table_of(found))

    guarded(work)


if __name__ == "__main__":
    typer.run(main)
