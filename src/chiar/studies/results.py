"""What the finished runs of a study measured: one record a run, one row a variant, as Markdown, CSV, JSON and picture;
and the grid before any run."""

import csv
import io
import math
import shlex
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.evaluation.compare import REPORT, read_training
from chiar.evaluation.harness import measured_shares
from chiar.evaluation.report import EvaluationReport, exponential, finite, shown
from chiar.files import write_whole
from chiar.model.load import count_parameters, load_config
from chiar.plots import draw_pareto, svg_text
from chiar.routing.flops import Shares, count_flops, operator_shares
from chiar.studies.runner import ADDED, STUDY, TIMES, VALIDATION, StudyFolder, read_json
from chiar.studies.study import LAST_COMMIT, Plan, Run, Study, Variant, common_settings, plain_config, removed, require
from chiar.training.reporting import training_flops
from chiar.training.run_folder import METRICS, RunFolder
from chiar.training.settings import TrainSettings, train_arguments

FORMAT, RESULTS = "chiar-study-results/1", "results.json"
FEW = 3
"""Up to so many seeds the spread is max − min, above it the standard deviation."""
Row = dict[str, Any]
# Heading, key and format; columns nobody has a value for are left out.
COLUMNS = (
    *(("variant", "label", ""), ("role", "role", ""), ("parameters", "parameters", ",")),
    *(("f", "fraction", ".3f"), ("layers", "layers", ",.3f"), ("÷ baseline", "layer_flops_of_baseline", ".4f")),
    *(("logits", "logits", ",.3f"), ("total", "forward", ",.3f"), ("÷ baseline", "flops_of_baseline", ".4f")),
    *(("training", "training", ",.3f"), ("test loss", "test_loss", ".4f"), ("±", "test_loss_spread", ".4f")),
    *(("Δ nats", "gap", "+.4f"), ("±", "gap_spread", ".4f"), ("paper", "paper_gap", "+.4f"), ("seeds", "numbers", "")),
    *(("valid. PPL", "validation_perplexity", ",.3f"), ("paper", "paper_validation", ".2f")),
    *(("test PPL", "test_perplexity", ",.3f"), ("paper", "paper_test", ".2f"), ("τ", "threshold", ".4f")),
    *(("g", "gate", ".3f"), ("step ms", "step_ms", ",.2f"), ("frontier", "best", "")),
)


def count_costs(config: ChiarConfig, length: int, shares: Shares) -> dict[str, float]:
    """Forward FLOPs a token: the layers, the output projection (logits) and both together. Training: with the backward
    pass, where a router that learns from every operator's output runs all of them on all tokens."""
    count = count_flops(config, length, shares)
    logits, trained = count.part("logits"), deepcopy(config)
    if config.routed_layers and not config.can_run_sparse:
        trained.routing = "soft"
        shares = operator_shares(trained)
    training = training_flops(trained, length, shares)
    return {"layers": count.total - logits, "logits": logits, "forward": count.total, "training": training}


def read_run(folder: StudyFolder, told: Run) -> Row:
    """One finished run. `step_ms` is measured in training, and only where no other run shared the device."""
    run, attempts = folder.run(told.name), folder.seconds(told.name)
    report, config = EvaluationReport.read(run / REPORT), load_config(str(run / "final"))
    stored, records = RunFolder(run).read(), RunFolder(run).read_metrics()
    settings = replace(told.train_settings(), initial=stored["settings"].get("initial", ""))
    tau = {"thresholds": config.thresholds} if "thresholds" in told.after else {}
    speed, step = read_training(run / METRICS).tokens_per_second, settings.batch * settings.length
    return {
        **{"name": told.name, "variant": told.variant, "seed": told.seed, "test_loss": report.scores.loss},
        "test_perplexity": finite(exponential(report.scores.loss)),
        "validation": [[r["step"], next(iter(r["validation"].values()))] for r in records if r.get("validation")],
        "validation_loss": EvaluationReport.read(run / VALIDATION).scores.loss if told.validate else None,
        "fraction": report.routing.fraction,
        "fraction_by_layer": {layer.layer: layer.fraction for layer in report.routing.layers},
        **{"threshold": tau.get("thresholds"), "gate": report.routing.gate},
        "gate_by_corpus": {name: g for record in records for name, g in record.get("gate", {}).items()},
        "flops_per_token": count_costs(config, settings.length, measured_shares(config, report.routing)),
        **{"parameters": count_parameters(config), "tokens": settings.steps * step, "tokens_per_second": speed},
        "step_ms": 1e3 * step / speed if speed and attempts["jobs"] == 1 else None,
        **attempts,
        **{"device": report.device, "versions": stored["versions"], "commit": stored["commit"]},
        **{"remarks": report.remarks, "declaration": told.declaration()},
        "command": ["chiar", *train_arguments(told.preset, {**told.config, **tau}, settings, run)],
    }


def collect(folder: StudyFolder) -> dict[str, Any]:
    """All of results.json. Runs finished here and runs added come in the order of the variants."""
    study, failed = folder.read(), folder.failures()
    order = [variant["name"] for variant in study["variants"]]
    every = {**folder.added(), **{told.name: read_run(folder, told) for told in folder.told_runs(finished=True)}}
    runs = sorted(every.values(), key=lambda run: (order.index(run["variant"]), run["seed"]))
    require(bool(runs), f"no run of the study in {folder.path} is finished yet.")
    times = read_json(folder.path / TIMES) if (folder.path / TIMES).is_file() else None
    rows = summarise(study, runs, times["variants"] if times else {})
    notes = [*remarks(study, rows, runs, times), *(f"{name} failed: {why}." for name, why in failed.items())]
    shared = {part: study[part] for part in ("title", "corpus", "common", "caption")}
    about = {"format": FORMAT, **shared, "declared": study["variants"], "notes": notes, "failed": failed}
    return {**about, "variants": rows, "runs": runs, "times": times}


def spread(values: list[float]) -> float | None:
    """None for one value: a spread it does not show."""
    if len(values) < 2:
        return None
    return max(values) - min(values) if len(values) <= FEW else statistics.stdev(values)


def mean(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def summarise(study: dict[str, Any], runs: list[Row], times: dict[str, Any]) -> list[Row]:
    """One record a variant with finished runs, by rising FLOPs. Differences are to the baseline of the same seed.

    `paired_loss` is the baseline's mean loss plus the mean difference: where variants have run with different seeds,
    the mean losses themselves do not compare.
    """
    baseline, rows = study["common"]["baseline"], []
    base = {run["seed"]: run for run in runs if run["variant"] == baseline}
    base_mean = mean([run["test_loss"] for run in base.values()])
    papers = {variant["name"]: variant["paper"] for variant in study["variants"] if variant.get("paper")}
    for variant in study["variants"]:
        name, own = variant["name"], [run for run in runs if run["variant"] == variant["name"]]
        if not own:
            continue
        pairs = [(run, base[run["seed"]]) for run in own if run["seed"] in base]
        losses, gaps = [run["test_loss"] for run in own], [a["test_loss"] - b["test_loss"] for a, b in pairs]
        flops = [run["flops_per_token"] for run in own]
        row: Row = {
            **{"variant": name, "role": variant["role"], "title": variant["title"]},
            **{"seeds": [run["seed"] for run in own], "parameters": own[0]["parameters"]},
            **{"test_loss": mean(losses), "test_loss_spread": spread(losses), "losses": losses},
            **{"gap": mean(gaps), "gap_spread": spread(gaps), "gap_seeds": [run["seed"] for run, _ in pairs]},
            **{"paired_loss": base_mean + mean(gaps) if gaps else None, "paired_losses": [base_mean + g for g in gaps]},
            "fraction": mean([run["fraction"] for run in own]),
            "flops_per_token": {part: mean([one[part] for one in flops]) for part in flops[0]},
            "flops_by_seed": [one["forward"] for one in flops],
            **{"flops_of_baseline": ratio(pairs, "forward"), "layer_flops_of_baseline": ratio(pairs, "layers")},
            "step_ms": times.get(name, {}).get("step_ms"),
            "step_ms_in_training": mean([run["step_ms"] for run in own]),
            "removed": removed(own[0]["declaration"]["config"]),
        }
        if paper := papers.get(name):
            validation = mean([run["validation_loss"] for run in own])
            row |= {f"paper_{part}": value for part, value in paper.items()}
            row |= {"paper_gap": math.log(paper["test"] / papers[baseline]["test"]) if baseline in papers else None}
            row |= {"validation_perplexity": validation and finite(exponential(validation))}
            row |= {"test_perplexity": finite(exponential(row["test_loss"]))}
            row |= {part: mean([run[part] for run in own]) for part in ("threshold", "gate")}
        rows.append(row)
    loss = "paired_loss" if all(row["paired_loss"] is not None for row in rows) else "test_loss"
    rows.sort(key=lambda row: (row["flops_per_token"]["forward"], row[loss]))
    for number, row in enumerate(rows):  # no other is as cheap and as good
        row["frontier"] = all(other[loss] > row[loss] for other in rows[:number])
    return rows


def ratio(pairs: list[tuple[Row, Row]], part: str) -> float | None:
    return mean([run["flops_per_token"][part] / other["flops_per_token"][part] for run, other in pairs])


def remarks(study: dict[str, Any], rows: list[Row], runs: list[Row], times: dict[str, Any] | None) -> list[str]:
    """What a reader must know before comparing."""
    common, done = study["common"], {row["variant"]: row for row in rows}
    settings, limit = TrainSettings.from_dict(common["settings"]), common["test_rows"]
    places = ", ".join(dict.fromkeys(f"{run['device']}, torch {run['versions']['torch']}" for run in runs))
    notes = [
        f"{runs[0]['tokens']:,} training tokens a run ({common['steps']:,} steps of {settings.batch} × "
        f"{settings.length}, learning rate {settings.learning_rate:g} → {settings.final_learning_rate:g}, warm-up "
        f"{settings.warmup:,} steps) of {study['corpus']}, in the same order for all variants of a seed; {places}.",
        f"Test losses are of the final weights, nats per token, fp32, in blocks of {settings.length}"
        f"{'' if limit is None else f', the first {limit}'}. Δ is to {common['baseline']} with the same seed. ± is "
        f"max − min over at most {FEW} seeds, the standard deviation over more.",
        "MFLOPs a token are counted at the measured f: forward (layers, logits, total), and training with the backward "
        "pass.",
        *study["caption"],
    ]
    for role in ("control", "candidate"):
        missing = [v["name"] for v in study["variants"] if v["role"] == role and v["name"] not in done]
        notes += [f"{role.capitalize()}s without a finished run: {', '.join(missing)}."] if missing else []
    if len({tuple(sorted(row["seeds"])) for row in rows}) > 1 and all(row["paired_loss"] is not None for row in rows):
        notes.append(
            "Variants ran with different seeds, so mean losses do not compare: the frontier and the picture take the "
            "baseline's mean loss plus Δ."
        )
    if (together := max(run["jobs"] or 1 for run in runs)) > 1:
        notes.append(f"Up to {together} runs shared the device: their speeds do not count.")
    if times is not None:
        notes.append(
            f"Step times are of chiar study time: {times['device']}, torch {times['versions']['torch']}, "
            f"{times['batch']} × {times['length']} tokens, optimiser included; the baseline again at the end took "
            f"{shown(times['drift'], '.3f')} times as long."
        )
    return list(dict.fromkeys([*notes, *(remark for run in runs for remark in run.get("remarks", []))]))


def update_tables(folder: StudyFolder) -> dict[str, Any]:
    """In the folder of a study, of what is finished; returns what results.json holds."""
    results = collect(folder)
    folder.save(RESULTS, results)
    write_tables(results, folder.path)
    return results


def write_tables(results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    headings, rows, notes = table_of(results["variants"], results["notes"])
    lines = [f"# {results['title']}", "", f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [*(f"| {' | '.join(row)} |" for row in rows), "", *(f"- {line}" for line in notes), "", "```text"]
    lines += [*(shlex.join(run["command"]) for run in results["runs"]), "```", ""]
    write_whole(out / "table.md", "\n".join(lines))
    write_whole(out / "table.csv", to_csv(results["variants"]))
    write_whole(out / "pareto.svg", draw_picture(results))


def draw_picture(results: dict[str, Any]) -> str:
    """Loss against cost, as SVG."""
    device = (results["times"] or results["runs"][0])["device"]
    return svg_text(draw_pareto(results["variants"], results["title"], device))


def read_results(path: Path) -> dict[str, Any]:
    """Of a study's folder, from its runs; of a results.json, or a folder with nothing else, as recorded."""
    if (path / STUDY).is_file():
        return collect(StudyFolder(path))
    results = read_json(path / RESULTS if path.is_dir() else path)
    right = isinstance(results, dict) and results.get("format") == FORMAT
    require(right, f"{path} does not hold the results of a study: it does not say format {FORMAT!r}.")
    declared = {run["variant"]: run["declaration"]["config"] for run in results["runs"]}
    for row in results["variants"]:
        row["removed"] = removed(declared[row["variant"]])
    return results


def table_of(rows: list[Row], notes: list[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings, rows and notes as text."""
    flat = []
    for row in rows:
        label = row["variant"] + (" †" if row["removed"] else "") + (f": {row['title']}" if row["title"] else "")
        known = {part: count / 1e6 for part, count in row.get("flops_per_token", {}).items()}
        known |= {"label": label, "numbers": ", ".join(map(str, row["seeds"]))}
        flat.append({**row, **known, "best": "yes" if row.get("frontier") else None})
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in flat)]
    text = [[shown(row.get(key), form) for _, key, form in columns] for row in flat]
    mark = f"† is no longer declared: what it needs was removed from the code. Commit {LAST_COMMIT} can run it."
    return [column[0] for column in columns], text, [*notes, *([mark] if any(row["removed"] for row in rows) else [])]


def to_csv(rows: list[Row]) -> str:
    """Full precision; seeds separated by spaces, FLOPs in columns of their own, other lists left out."""
    text, lines = io.StringIO(), []
    for row in rows:
        plain = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
        flops = {f"flops_{part}": count for part, count in row["flops_per_token"].items()}
        lines.append({**plain, **flops, "seeds": " ".join(map(str, row["seeds"]))})
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def grid(study: Study, variants: list[Variant], plan: Plan | None = None) -> tuple[list[Row], list[str]]:
    """The variants before any run, their FLOPs counted at the f each aims at; and notes."""
    settings, vocabulary = common_settings(study), plan.corpora[0].vocab_size if plan else None
    rows, whole = [], costs_of(study, study.variant(study.baseline), vocabulary)["flops_per_token"]["forward"]
    for variant in variants:
        row: Row = {"variant": variant.name, "role": variant.role, "title": variant.title}
        row |= {"seeds": study.seeds if variant.seeds is None else variant.seeds, "removed": removed(variant.config)}
        if not row["removed"]:
            row |= costs_of(study, variant, vocabulary)
            row["flops_of_baseline"] = row["flops_per_token"]["forward"] / whole
        rows.append(row)
    step = settings.batch * settings.length
    trained = f"{plan.steps * step:,} tokens in {plan.steps:,} steps" if plan else study.duration
    kind = f"{vocabulary:,} token ids" if plan else "the preset's vocabulary: --data takes a corpus's"
    return rows, [
        f"each run trains on {trained}, {settings.batch} × {settings.length} a step.",
        f"MFLOPs a token, forward, counted at the target f ({kind}); training with the backward pass.",
    ]


def costs_of(study: Study, variant: Variant, vocabulary: int | None = None) -> Row:
    """Parameters, FLOPs and mean f of a variant as declared."""
    config = plain_config(study, variant, vocabulary)
    try:
        shares = operator_shares(config, variant.fraction)
    except InputError as error:
        raise InputError(f"variant {variant.name}: {error}") from error
    costs = count_costs(config, common_settings(study).length, shares)
    fraction = mean([share["attention"] for share in shares])
    return {"parameters": count_parameters(config), "flops_per_token": costs, "fraction": fraction}


def add_results(folder: StudyFolder, path: Path, say: Callable[[str], None] = print) -> None:
    """Takes the runs of a results.json from elsewhere into the folder, which is begun where there is none: they count
    as done, and no weights are needed."""
    results = read_results(path)
    with folder.held():
        here, known = {told.name for told in folder.told_runs(finished=True)}, folder.added()
        for run in results["runs"]:
            same = known.get(run["name"], run)["test_loss"] == run["test_loss"] and run["name"] not in here
            require(same, f"run {run['name']} of {path} is finished in {folder.path} too: say yourself which counts.")
        folder.begin({**results, "variants": results["declared"], "caption": results.get("caption", [])})
        added = {run["name"]: run for run in results["runs"] if run["name"] not in known}
        folder.save(ADDED, {**known, **added})
        say(f"added {', '.join(added) if added else 'nothing new'}")
        times, stored = results["times"], folder.path / TIMES
        if times is not None:
            own = read_json(stored) if stored.is_file() else {**times, "variants": {}}
            if all(own[part] == value for part, value in times.items() if part not in ("variants", "drift")):
                folder.save(TIMES, {**own, "variants": {**times["variants"], **own["variants"]}})
            else:
                say("its step times are of another machine than those here and were left out")
