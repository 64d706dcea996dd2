"""The table of a study: Markdown, CSV, JSON, and the grid before any run."""

import csv
import io
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chiar.errors import InputError
from chiar.evaluation.report import shown
from chiar.files import check_file, write_whole
from chiar.model.load import count_parameters
from chiar.routing.flops import operator_shares
from chiar.studies.costs import count_costs
from chiar.studies.declaration import Study, Variant
from chiar.studies.folder import TIMES, StudyFolder, read_json
from chiar.studies.plan import plain_config
from chiar.studies.results import FEW, read_results, summarise
from chiar.training.settings import TrainSettings

if TYPE_CHECKING:
    from rich.table import Table

RESULTS_FORMAT = "chiar-study-results/1"
COLUMNS = (
    *("variant", "role", "parameters", "f", "layers", "÷ baseline", "logits", "total", "÷ baseline"),
    *("training", "test loss", "±", "Δ nats", "±", "seeds", "step ms", "frontier"),
)
CSV_COLUMNS = (
    *("variant", "role", "title", "parameters", "fraction", "flops_layers", "flops_logits", "flops_forward"),
    *(
        "flops_training",
        "flops_of_baseline",
        "layer_flops_of_baseline",
        "test_loss",
        "test_loss_spread",
        "gap",
        "gap_spread",
        "seeds",
        "step_ms",
    ),
    *("step_ms_in_training", "frontier"),
)


def write_tables(folder: StudyFolder) -> dict[str, Any]:
    """table.md, table.csv, results.json and pareto.svg of what is finished; returns what results.json holds."""
    from chiar.studies.picture import draw

    results = collect(folder)
    write_whole(folder.path / "results.json", json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False))
    write_whole(folder.path / "table.md", to_markdown(results))
    write_whole(folder.path / "table.csv", to_csv(results))
    write_whole(folder.path / "pareto.svg", draw(results))
    return results


def collect(folder: StudyFolder) -> dict[str, Any]:
    study = folder.read()
    runs = read_results(folder)
    if not runs:
        raise InputError(f"no run of the study in {folder.path} is finished yet.")
    results = {"format": RESULTS_FORMAT, "title": study["title"], "corpus": study["corpus"], "common": study["common"]}
    results["declared"] = study["variants"]
    times = read_json(folder.path / TIMES) if (folder.path / TIMES).is_file() else None
    variants = summarise(study, runs, times["variants"] if times else {})
    failed = folder.failures()
    notes = remarks(study, variants, runs, times)
    notes += [f"{name} failed: {why}." for name, why in failed.items()]
    return {**results, "notes": notes, "failed": failed, "variants": variants, "runs": runs, "times": times}


def read_saved(path: Path) -> dict[str, Any]:
    """A results.json."""
    check_file(path)
    results = read_json(path)
    if not isinstance(results, dict) or results.get("format") != RESULTS_FORMAT:
        raise InputError(f"{path} does not hold the results of a study: it does not say format {RESULTS_FORMAT!r}.")
    return results


def remarks(
    study: dict[str, Any], variants: list[dict[str, Any]], runs: list[dict[str, Any]], times: dict[str, Any] | None
) -> list[str]:
    """What a reader must know before comparing."""
    common, done = study["common"], {row["variant"] for row in variants}
    settings = TrainSettings.from_dict(common["settings"])
    seed_sets = {tuple(sorted(row["seeds"])) for row in variants}
    together = sorted({run["jobs"] for run in runs if run["jobs"] and run["jobs"] > 1})
    devices = ", ".join(dict.fromkeys(run["device"] for run in runs))
    torch = ", ".join(dict.fromkeys(run["versions"]["torch"] for run in runs))
    lines = [
        f"{runs[0]['tokens']:,} training tokens a run ({common['steps']:,} steps of {settings.batch} × "
        f"{settings.length}) of {study['corpus']}, in the same order for all variants of a seed; {devices}, torch "
        f"{torch}.",
        "Test losses are of the final weights, nats per token, fp32, in blocks of "
        f"{settings.length}{'' if common['test_rows'] is None else ', the first ' + str(common['test_rows'])}. Δ is to "
        f"{common['baseline']} with the same seed. ± is max − min over at most {FEW} seeds, the standard deviation "
        "over more.",
        "MFLOPs a token are counted at the measured f: forward (layers, logits, total), and training with the backward "
        "pass.",
    ]
    missing = [v["name"] for v in study["variants"] if v["role"] == "control" and v["name"] not in done]
    if missing:
        lines.append(f"Controls without a finished run: {', '.join(missing)}.")
    waiting = [v["name"] for v in study["variants"] if v["role"] != "control" and v["name"] not in done]
    if waiting:
        lines.append(f"Candidates without a finished run: {', '.join(waiting)}.")
    if len(seed_sets) > 1 and all(row["paired_loss"] is not None for row in variants):
        lines.append(
            "Variants ran with different seeds, so mean losses do not compare: the frontier and the picture take the "
            "baseline's mean loss plus Δ."
        )
    if together:
        lines.append(f"Up to {together[-1]} runs shared the device: their speeds do not count.")
    if times is not None:
        lines.append(
            f"Step times are of chiar study time: {times['device']}, torch {times['versions']['torch']}, "
            f"{times['batch']} × {times['length']} tokens, optimiser included; the baseline again at the end took "
            f"{shown(times['drift'], '.3f')} times as long."
        )
    return lines


def pair(mean: float | None, form: str, apart: float | None) -> list[str]:
    return [shown(mean, form), shown(apart, ".4f")]


def cells(row: dict[str, Any]) -> list[str]:
    flops = row["flops_per_token"]
    name = row["variant"] + (f": {row['title']}" if row["title"] else "")
    return [
        name,
        row["role"],
        f"{row['parameters']:,}",
        shown(row["fraction"], ".3f"),
        f"{flops['layers'] / 1e6:,.3f}",
        shown(row["layer_flops_of_baseline"], ".4f"),
        *(f"{flops[part] / 1e6:,.3f}" for part in ("logits", "forward")),
        shown(row["flops_of_baseline"], ".4f"),
        f"{flops['training'] / 1e6:,.3f}",
        *pair(row["test_loss"], ".4f", row["test_loss_spread"]),
        *pair(row["gap"], "+.4f", row["gap_spread"]),
        ", ".join(map(str, row["seeds"])),
        shown(row["step_ms"], ",.2f"),
        "yes" if row["frontier"] else "",
    ]


def to_markdown(results: dict[str, Any]) -> str:
    lines = [f"# {results['title']}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in results["variants"]]
    lines += ["", *(f"- {line}" for line in results["notes"]), "", "```text"]
    return "\n".join([*lines, *(shlex.join(run["command"]) for run in results["runs"]), "```", ""])


def to_csv(results: dict[str, Any]) -> str:
    """Full precision; seeds separated by spaces."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results["variants"]:
        flops = {f"flops_{part}": value for part, value in row["flops_per_token"].items()}
        writer.writerow({**row, **flops, "seeds": " ".join(map(str, row["seeds"]))})
    return text.getvalue()


def to_rich(results: dict[str, Any]) -> "list[Table | str]":
    from rich.table import Table

    table = Table(*COLUMNS, box=None, title=results["title"], title_justify="left")
    for row in results["variants"]:
        table.add_row(*cells(row))
    return [table, *(f"note: {line}" for line in results["notes"])]


def grid(study: Study, variants: list[Variant], vocabulary: int | None, steps: int | None) -> "list[Table | str]":
    """The variants before any run, their FLOPs counted at the f each aims at."""
    from rich.table import Table

    settings = TrainSettings.from_dict(study.settings)
    columns = ("rank", "variant", "role", "seeds", "parameters", "target f", "layers", "logits", "total", "÷ baseline")
    table = Table(*columns, "training", "what it is", box=None, title=study.title, title_justify="left")
    whole = costs_of(study, study.variant(study.baseline), vocabulary, settings.length)[1]["forward"]
    for variant in sorted(variants, key=lambda variant: variant.rank):
        parameters, costs, fraction = costs_of(study, variant, vocabulary, settings.length)
        table.add_row(
            str(variant.rank),
            variant.name,
            variant.role,
            ", ".join(map(str, study.seeds if variant.seeds is None else variant.seeds)),
            f"{parameters:,}",
            shown(fraction, ".3f"),
            *(f"{costs[part] / 1e6:,.3f}" for part in ("layers", "logits", "forward")),
            f"{costs['forward'] / whole:.4f}",
            f"{costs['training'] / 1e6:,.3f}",
            variant.title,
        )
    tokens = None if steps is None else steps * settings.batch * settings.length
    length = f"{study.epochs:g} epoch(s) of the corpus" if study.tokens is None else f"{study.tokens:,} tokens"
    trained = length if tokens is None else f"{tokens:,} tokens in {steps:,} steps"
    kind = "the preset's vocabulary: --data takes a corpus's" if vocabulary is None else f"{vocabulary:,} token ids"
    return [
        table,
        f"note: each run trains on {trained}, {settings.batch} × {settings.length} a step.",
        f"note: MFLOPs a token, forward, counted at the target f ({kind}); training with the backward pass.",
    ]


def costs_of(
    study: Study, variant: Variant, vocabulary: int | None, length: int
) -> tuple[int, dict[str, float], float | None]:
    """Parameters, FLOPs and mean f of a variant as declared."""
    config = plain_config(study, variant, vocabulary)
    try:
        shares = operator_shares(config, variant.fraction)
    except InputError as error:
        raise InputError(f"variant {variant.name}: {error}") from error
    fractions = [share["attention"] for share in shares]
    mean = sum(fractions) / len(fractions) if fractions else None
    return count_parameters(config), count_costs(config, length, shares), mean
