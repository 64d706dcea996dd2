"""One set of weights at many budgets: the loss of a model with a dark stack at several f, beside random routing.

python -m research.dial runs/bytes/runs/predictive-s0/final runs/enwiki44m-bytes --out runs/dial

Each f is calibrated on the validation split and measured on the test split. Models with experimental routers need
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


def with_random_routing(model: ChiarForCausalLM, fraction: float) -> ChiarForCausalLM:
    """A model with the same weights whose dark bytes are chosen at random."""
    config = copy.deepcopy(model.config)
    config.router, config.random_key = "random", "both"
    config.random_fraction = config.target_fraction = fraction
    randomised = ChiarForCausalLM(config)
    missing, unused = randomised.load_state_dict(model.state_dict(), strict=False)
    differing = [*missing, *(name for name in unused if ".router." not in name and "router_state" not in name)]
    require(not differing, f"with random routing the weights do not fit, they differ in {', '.join(differing)}.")
    return randomised.to(model.device).eval()


def measure(model: ChiarForCausalLM, corpus: Corpus, reading: Reading) -> dict[str, float]:
    scores, routing, length = measure_perplexity(model, corpus, corpus.split("test"), reading)
    use = [layer.use for layer in routing.layers]
    flops, fraction = count_flops(model.config, length, use).total, routing.fraction
    assert fraction is not None
    return {"fraction": fraction, "bits": scores.loss / math.log(2), "flops": flops}


def sweep(folder: str, data: Path, fractions: list[float], rows: int | None, device: str) -> list[dict[str, Any]]:
    """For each requested f, the results of the model's own routing and of random routing."""
    target, corpus = choose_device(device), Corpus.open(data)
    model = load_model(folder)[0].to(target).eval()
    require(bool(model.config.stacks), f"{folder} has no dark stack.")
    reading, valid = Reading.of(model.config, rows=rows), corpus.split("valid")
    ids = valid.read(0, min(valid.tokens, CALIBRATION_ROWS * reading.length))
    results = []
    for fraction in fractions:
        calibration = calibrate(model, batches(ids, CALIBRATION_ROWS, reading.length, 8), fraction=fraction)
        model.model.set_thresholds(calibration.thresholds(len(model.config.routed_layers)))
        own, at_random = (measure(m, corpus, reading) for m in (model, with_random_routing(model, fraction)))
        results.append({"asked": fraction, "own": own, "random": at_random})
        typer.echo(f"f {fraction:g}: {own['bits']:.4f} bits, random {at_random['bits']:.4f}")
    return results


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table("f requested", "f", "MFLOP per token", "bits", "f, random", "bits, random")
    for row in results:
        own, at_random = row["own"], row["random"]
        cells = [f"{row['asked']:g}", f"{own['fraction']:.3f}", f"{own['flops'] / 1e6:.3f}", f"{own['bits']:.4f}"]
        table.add_row(*cells, f"{at_random['fraction']:.3f}", f"{at_random['bits']:.4f}")
    return table


def main(
    model: Annotated[str, typer.Argument(help="A model folder.")],
    data: Annotated[Path, typer.Argument(help="The prepared corpus.")],
    out: Annotated[Path, typer.Option(help="New folder for dial.json.")],
    fractions: Annotated[str, typer.Option(help="Fractions f of dark bytes, separated by commas.")] = FRACTIONS,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the test split. [default: all]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Evaluate a model with a dark stack at several f, without further training."""

    def work() -> None:
        try:
            requested = [float(part) for part in fractions.split(",")]
        except ValueError:
            raise InputError(f"--fractions takes numbers separated by commas, got {fractions!r}.") from None
        with new_folder(out) as folder, torch.inference_mode():
            results = sweep(model, data, requested, rows, device)
            (folder / "dial.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        show(table_of(results))

    guarded(work)


if __name__ == "__main__":
    typer.run(main)
