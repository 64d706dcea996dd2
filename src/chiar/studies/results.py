"""What the finished runs of a study measured: one record a run, one summary a variant."""

import statistics
from typing import Any

from chiar.analysis.pareto import frontier
from chiar.evaluation.compare import REPORT, read_training
from chiar.evaluation.harness import measured_shares
from chiar.evaluation.report import EvaluationReport, exponential, finite
from chiar.model.load import count_parameters, load_config
from chiar.studies.costs import count_costs
from chiar.studies.folder import StudyFolder
from chiar.training.run_folder import METRICS, RunFolder
from chiar.training.settings import TrainSettings, train_arguments

FEW = 3
"""Up to so many seeds the spread is max − min, above it the standard deviation."""


def read_run(folder: StudyFolder, told: dict[str, Any]) -> dict[str, Any]:
    """One finished run. `step_ms` is measured in training, and only where no other run shared the device."""
    name = told["name"]
    run, settings = folder.run(name), TrainSettings.from_dict({**told["settings"], "data": told["data"]})
    report, config = EvaluationReport.read(run / REPORT), load_config(str(run / "final"))
    stored, attempts = RunFolder(run).read(), folder.seconds(name)
    speed = read_training(run / METRICS).tokens_per_second
    records = RunFolder(run).read_metrics()
    return {
        "name": name,
        "variant": told["variant"],
        "seed": told["seed"],
        "test_loss": report.scores.loss,
        "test_perplexity": finite(exponential(report.scores.loss)),
        "validation": [[r["step"], next(iter(r["validation"].values()))] for r in records if r.get("validation")],
        "fraction": report.routing.fraction,
        "fraction_by_layer": {layer.layer: layer.fraction for layer in report.routing.layers},
        "flops_per_token": count_costs(config, settings.length, measured_shares(config, report.routing)),
        "parameters": count_parameters(config),
        "tokens": settings.steps * settings.batch * settings.length,
        "step_ms": 1e3 * settings.batch * settings.length / speed if speed and attempts["jobs"] == 1 else None,
        **attempts,
        "device": report.device,
        "versions": stored["versions"],
        "commit": stored["commit"],
        "declaration": {part: value for part, value in told.items() if part not in ("data", "device")},
        "command": ["chiar", *train_arguments(told["preset"], told["config"], settings, run)],
    }


def read_results(folder: StudyFolder) -> list[dict[str, Any]]:
    """Of the runs finished here and of those added, in the order of the variants."""
    runs = {told["name"]: read_run(folder, told) for told in folder.finished_runs()}
    order = [variant["name"] for variant in folder.read()["variants"]]
    every = {**folder.added(), **runs}.values()
    return sorted(every, key=lambda run: (order.index(run["variant"]), run["seed"]))


def spread(values: list[float]) -> float | None:
    """None for one value: a spread it does not show."""
    if len(values) < 2:
        return None
    return max(values) - min(values) if len(values) <= FEW else statistics.stdev(values)


def summarise(study: dict[str, Any], runs: list[dict[str, Any]], times: dict[str, Any]) -> list[dict[str, Any]]:
    """One record a variant with finished runs, by rising FLOPs. Differences are to the baseline of the same seed.

    `paired_loss` is the baseline's mean loss plus the mean difference: where variants have run with different seeds,
    the mean losses themselves do not compare.
    """
    baseline = study["common"]["baseline"]
    base = {run["seed"]: run for run in runs if run["variant"] == baseline}
    base_mean = statistics.mean(run["test_loss"] for run in base.values()) if base else None
    rows = []
    for variant in study["variants"]:
        own = [run for run in runs if run["variant"] == variant["name"]]
        if not own:
            continue
        pairs = [(run, base[run["seed"]]) for run in own if run["seed"] in base]
        losses = [run["test_loss"] for run in own]
        gaps = [run["test_loss"] - other["test_loss"] for run, other in pairs]
        fractions = [run["fraction"] for run in own if run["fraction"] is not None]
        alone = [run["step_ms"] for run in own if run["step_ms"] is not None]
        timed = times.get(variant["name"])
        rows.append(
            {
                "variant": variant["name"],
                "role": variant["role"],
                "title": variant["title"],
                "seeds": [run["seed"] for run in own],
                "parameters": own[0]["parameters"],
                "test_loss": statistics.mean(losses),
                "test_loss_spread": spread(losses),
                "gap": statistics.mean(gaps) if gaps else None,
                "gap_spread": spread(gaps),
                "gap_seeds": [run["seed"] for run, _ in pairs],
                "paired_loss": base_mean + statistics.mean(gaps) if gaps and base_mean is not None else None,
                "paired_losses": [base_mean + gap for gap in gaps] if base_mean is not None else [],
                "losses": losses,
                "fraction": statistics.mean(fractions) if fractions else None,
                "flops_per_token": {
                    part: statistics.mean(run["flops_per_token"][part] for run in own)
                    for part in own[0]["flops_per_token"]
                },
                "flops_by_seed": [run["flops_per_token"]["forward"] for run in own],
                "flops_of_baseline": mean_ratio(pairs, "forward"),
                "layer_flops_of_baseline": mean_ratio(pairs, "layers"),
                "step_ms": timed["step_ms"] if timed else None,
                "step_ms_in_training": statistics.mean(alone) if alone else None,
            }
        )
    rows.sort(key=lambda row: row["flops_per_token"]["forward"])
    mark_frontier(rows)
    return rows


def mean_ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], part: str) -> float | None:
    ratios = [run["flops_per_token"][part] / other["flops_per_token"][part] for run, other in pairs]
    return statistics.mean(ratios) if ratios else None


def mark_frontier(rows: list[dict[str, Any]]) -> None:
    """Adds `frontier`: no other variant is as cheap and as good, and better in one. Losses are paired where all are."""
    paired = all(row["paired_loss"] is not None for row in rows)
    points = [(row["flops_per_token"]["forward"], row["paired_loss" if paired else "test_loss"]) for row in rows]
    best = frontier(points)
    for row, point in zip(rows, points, strict=True):
        row["frontier"] = point in best
