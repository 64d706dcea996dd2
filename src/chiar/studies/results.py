"""What finished runs measured: one record a run, one row a variant, as Markdown, JSON and picture; the grid before."""

import json
import math
import shlex
import statistics
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from typer import echo

from chiar import presets
from chiar.config import ChiarConfig
from chiar.config_checks import LAST_COMMIT, REMOVED, REMOVED_OPERATORS
from chiar.console import show
from chiar.errors import require
from chiar.evaluation.harness import measured_shares
from chiar.evaluation.report import REPORT, EvaluationReport, perplexity, read_training, shown
from chiar.files import write_atomic
from chiar.model.load import count_parameters, load_config
from chiar.plots.figure import svg_text
from chiar.plots.study import draw_pareto
from chiar.routing.flops import Shares, count_flops, operator_shares
from chiar.studies.runner import STUDY, VALIDATION, StudyFolder, locked_study, read_json
from chiar.studies.study import Plan, Run, make_plan
from chiar.training.reporting import training_flops
from chiar.training.run_folder import MAY_CHANGE, RunFolder
from chiar.training.settings import train_arguments

FORMAT, RESULTS = "chiar-study-results/1", "results.json"
FEW = 3  # up to so many seeds the spread is max − min, above it the standard deviation
Row = dict[str, Any]
Point = tuple[float, float, str]  # cost, Δ, variant
# Heading, key and format. Columns without values are left out.
COLUMNS = (
    ("variant", "label", ""), ("role", "role", ""), ("f", "fraction", ".3f"),
    ("MFLOPs", "forward", ",.3f"), ("÷ baseline", "flops_of_baseline", ".4f"),
    ("test loss", "test_loss", ".4f"), ("±", "test_loss_spread", ".4f"), ("test bits/byte", "bits_per_byte", ".4f"),
    ("Δ nats", "gap", "+.4f"), ("±", "gap_spread", ".4f"), ("paper", "paper_gap", "+.4f"),
    ("Δ equal FLOPs", "gap_at_flops", "+.4f"), ("±", "gap_at_flops_spread", ".4f"),
    ("Δ equal time", "gap_at_time", "+.4f"), ("seeds", "numbers", ""),
    ("valid. PPL", "validation_perplexity", ",.3f"), ("paper", "paper_validation", ".2f"),
    ("test PPL", "test_perplexity", ",.3f"), ("paper", "paper_test", ".2f"), ("τ", "threshold", ".4f"),
    ("g", "gate", ".3f"), ("step ms", "step_ms", ",.2f"), ("peak GB", "peak_memory_gb", ",.2f"),
    ("frontier", "best", ""), ("parameters", "parameters", ","),
    ("layers", "layers", ",.3f"), ("÷ baseline", "layer_flops_of_baseline", ".4f"), ("logits", "logits", ",.3f"),
    ("training", "training", ",.3f"), ("what", "title", ""),
)  # fmt: skip
# By key, notes that are added if a row has a value there.
NOTES = {
    "gap_at_flops": "Δ equal FLOPs is Δ less that of the dense curve at the same FLOPs: linear in log FLOPs between "
    "neighbours of {curve}, the dense variants that no cheaper one betters; – where a seed lies outside.",
    "gap_at_time": "Δ equal time is the same over log step ms.",
    "bits_per_byte": "Bits/byte are of the test text, whose ends are predicted too, but are no bytes.",
    "peak_memory_gb": "Peak GB is the most that a run allocated on its device.",
    "removed": f"† is no longer declared: what it needs was removed from the code. Commit {LAST_COMMIT} can run it.",
}


def count_costs(config: ChiarConfig, length: int, shares: Shares) -> dict[str, float]:
    """FLOPs a token. In training a router that learns from every operator's output runs all of them on all tokens."""
    count, trained = count_flops(config, length, shares), deepcopy(config)
    if config.routed_layers and not config.can_run_sparse:
        trained.routing = "soft"
        shares = operator_shares(trained)
    costs = {"layers": count.total - count.part("logits"), "logits": count.part("logits"), "forward": count.total}
    return {**costs, "training": training_flops(trained, length, shares)}


def read_run(folder: StudyFolder, run: Run) -> Row:
    """The record of a finished run. `step_ms` is that of training, if no other run shared the device."""
    out, jobs = folder.run(run.name), max(attempt["jobs"] for attempt in run.attempts)
    report, config, stored = EvaluationReport.read(out / REPORT), load_config(str(out / "final")), RunFolder(out).read()
    settings = replace(run.train_settings(), initial=stored["settings"].get("initial", ""))
    tau = {"thresholds": config.thresholds} if "thresholds" in run.after else {}
    speed, step = read_training(out).tokens_per_second, settings.batch * settings.length
    peaks = [record["peak_memory_gb"] for record in RunFolder(out).read_metrics() if "peak_memory_gb" in record]
    return {
        "name": run.name, "variant": run.variant, "seed": run.seed, "test_loss": report.scores.loss,
        "bits_per_byte": report.scores.derived()["bits_per_byte"], "peak_memory_gb": max(peaks, default=None),
        "validation_loss": EvaluationReport.read(out / VALIDATION).scores.loss if run.validate else None,
        "fraction": report.routing.fraction, "threshold": tau.get("thresholds"), "gate": report.routing.gate,
        "flops_per_token": count_costs(config, settings.length, measured_shares(config, report.routing)),
        "step_ms": 1e3 * step / speed if speed and jobs == 1 else None, "parameters": count_parameters(config),
        "wall_seconds": run.attempts[-1].get("seconds"), "attempts": len(run.attempts), "jobs": jobs,
        "device": report.device, "versions": stored["versions"], "commit": stored["commit"],
        "tokens": settings.steps * step, "remarks": report.remarks, "declaration": run.declaration(),
        "command": ["chiar", *train_arguments(run.preset, {**run.config, **tau}, settings, out)],
    }  # fmt: skip


def collect(folder: StudyFolder) -> dict[str, Any]:
    """The contents of results.json. The notes say what a reader must know before comparing."""
    study, common, times = folder.record, folder.record["common"], folder.record["times"]
    order = [variant["name"] for variant in study["variants"]]
    own = [read_run(folder, run) for run in folder.runs.values() if folder.finished(run.name)]
    runs = [*study["added"].values(), *own]
    require(runs, f"no run of the study in {folder.path} is finished yet.")
    runs.sort(key=lambda run: (order.index(run["variant"]), run["seed"]))
    rows, done = summarise(study, runs), {run["variant"] for run in runs}
    failed = {name: run.attempts[-1]["failed"] for name, run in folder.runs.items() if "failed" in run.attempts[-1]}
    places = ", ".join(dict.fromkeys(f"{run['device']}, torch {run['versions']['torch']}" for run in runs))
    first = "" if common["test_rows"] is None else f", the first {common['test_rows']} rows"
    notes = [
        f"{runs[0]['tokens']:,} training tokens a run of {study['corpus']}, equal for all of a seed; {places}.",
        f"Test losses are of the final weights, nats per token, fp32{first}; Δ is to {common['baseline']} of the seed.",
        f"± is max − min over at most {FEW} seeds, the standard deviation over more.",
        "MFLOPs a token are counted at the measured f: forward, and training with the backward pass.",
        *study["caption"],
    ]
    for role in ("control", "candidate"):
        missing = [v["name"] for v in study["variants"] if v["role"] == role and v["name"] not in done]
        notes += [f"{role.capitalize()}s without a finished run: {', '.join(missing)}."] if missing else []
    if len({tuple(sorted(row["seeds"])) for row in rows}) > 1 and all(row["paired_loss"] is not None for row in rows):
        notes.append("Variants ran with different seeds: frontier and picture take the baseline's mean loss plus Δ.")
    if (together := max(run["jobs"] or 1 for run in runs)) > 1:
        notes.append(f"Up to {together} runs shared the device: their speeds do not count.")
    if times:
        notes.append(f"Step times are of chiar study time: {times['device']}, torch {times['versions']['torch']}.")
    notes += dict.fromkeys(remark for run in runs for remark in run.get("remarks", []))
    notes += [f"{name} failed: {why}." for name, why in failed.items()]
    about = {part: study[part] for part in ("title", "corpus", "common", "caption", "times")}
    return {**about, "declared": study["variants"], "notes": notes, "failed": failed, "variants": rows, "runs": runs}


def spread(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return max(values) - min(values) if len(values) <= FEW else statistics.stdev(values)


def mean(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def summarise(study: dict[str, Any], runs: list[Row]) -> list[Row]:
    """One record per variant with finished runs, by rising FLOPs. Differences are to the baseline of the same seed.
    `paired_loss` is the baseline's mean loss plus the mean difference, as losses of different seeds do not compare."""
    rows, baseline, times = [], study["common"]["baseline"], (study["times"] or {"variants": {}})["variants"]
    base = {run["seed"]: run for run in runs if run["variant"] == baseline}
    base_mean = mean(run["test_loss"] for run in base.values())
    papers = {variant["name"]: variant.get("paper") for variant in study["variants"]}
    for variant in [one for one in study["variants"] if any(run["variant"] == one["name"] for run in runs)]:
        own = [run for run in runs if run["variant"] == variant["name"]]
        pairs = [(run, base[run["seed"]]) for run in own if run["seed"] in base]
        losses, gaps = [run["test_loss"] for run in own], [a["test_loss"] - b["test_loss"] for a, b in pairs]
        cost, flops = "flops_per_token", [run["flops_per_token"] for run in own]
        row: Row = {
            "variant": variant["name"], "role": variant["role"], "title": variant["title"],
            "seeds": [run["seed"] for run in own], "parameters": own[0]["parameters"],
            "test_loss": mean(losses), "test_loss_spread": spread(losses), "losses": losses,
            "gap": mean(gaps), "gap_spread": spread(gaps), "gap_seeds": [run["seed"] for run, _ in pairs],
            "paired_loss": base_mean + mean(gaps) if gaps else None, "paired_losses": [base_mean + g for g in gaps],
            "flops_per_token": {part: mean(one[part] for one in flops) for part in flops[0]},
            "flops_of_baseline": mean(a[cost]["forward"] / b[cost]["forward"] for a, b in pairs),
            "layer_flops_of_baseline": mean(a[cost]["layers"] / b[cost]["layers"] for a, b in pairs),
            "step_ms": times.get(variant["name"], {}).get("step_ms"),
            "step_ms_in_training": mean(run["step_ms"] for run in own),
            **{part: mean(run.get(part) for run in own) for part in ("fraction", "threshold", "gate")},
        }  # fmt: skip
        if paper := papers[variant["name"]]:
            validation, first = mean(run["validation_loss"] for run in own), papers[baseline]
            row |= {f"paper_{part}": value for part, value in paper.items()}
            row["validation_perplexity"] = validation and perplexity(validation)
            row["test_perplexity"] = perplexity(row["test_loss"])
            row["paper_gap"] = math.log(paper["test"] / first["test"]) if first else None
        rows.append(row)
    loss = "paired_loss" if all(row["paired_loss"] is not None for row in rows) else "test_loss"
    rows.sort(key=lambda row: (row["flops_per_token"]["forward"], row[loss]))
    for number, row in enumerate(rows):  # nothing cheaper is as good
        row["frontier"] = all(other[loss] > row[loss] for other in rows[:number])
    return rows


def is_dense(run: Row, common: dict[str, Any]) -> bool:
    """Whether all its layers are attention, and it was trained with the study's settings."""
    told, free = run["declaration"], dict.fromkeys(MAY_CHANGE["settings"] | {"seed"})
    kinds = {**presets.get(told["preset"]).to_dict(), **told["config"]}["layer_types"]
    plain = {*kinds} == {"attention"} and not told.get("after")
    return plain and told["settings"] | free == common["settings"] | free


def dense_curve(points: Iterable[Point]) -> list[Point]:
    """The points with the lowest loss at their cost or less, by rising cost."""
    curve = list[Point]()
    for point in sorted(points):
        curve += [point] if not curve or point[1] < curve[-1][1] else []
    return curve


def above(curve: list[Point], own: list[tuple[float, float]]) -> list[float]:
    """Each Δ minus that of the curve at the same cost; empty without a curve, or if a cost lies outside it."""
    costs, gaps = [point[0] for point in curve], [point[1] for point in curve]
    if len(curve) < 2 or not all(costs[0] <= cost <= costs[-1] for cost, _ in own):
        return []
    return [gap - float(np.interp(math.log(cost), np.log(costs), gaps)) for cost, gap in own]


def derive(results: dict[str, Any]) -> list[Row]:
    """The rows with everything that can be derived from rows and runs, so that old records have it too."""
    rows, runs, common = results["variants"], results["runs"], results["common"]
    base = {run["seed"]: run["test_loss"] for run in runs if run["variant"] == common["baseline"]}
    plain = {run["variant"] for run in runs if is_dense(run, common)}
    dense = [row for row in rows if row["variant"] in plain and row["gap"] is not None]
    by_flops = dense_curve((row["flops_per_token"]["forward"], row["gap"], row["variant"]) for row in dense)
    by_time = dense_curve((row["step_ms"], row["gap"], row["variant"]) for row in dense if row["step_ms"])
    derived, named = [], {name for *_, name in by_flops}
    for row in rows:
        own = [run for run in runs if run["variant"] == row["variant"]]
        routed = [run for run in own if run["fraction"] is not None and run["seed"] in base]
        gaps = [(run["flops_per_token"]["forward"], run["test_loss"] - base[run["seed"]]) for run in routed]
        at_flops = above(by_flops, gaps)
        at_time = above(by_time, [(row["step_ms"], row["gap"])] if routed and row["step_ms"] else [])
        bits, peaks = ([run.get(part) for run in own] for part in ("bits_per_byte", "peak_memory_gb"))
        more: Row = {"removed": any(map(needs_removed, own)), "curve": row["variant"] in named}
        more |= {"gap_at_flops": mean(at_flops), "gap_at_flops_spread": spread(at_flops), "gap_at_time": mean(at_time)}
        more |= {"bits_per_byte": None if None in bits else mean(bits)}
        more |= {"peak_memory_gb": max((peak for peak in peaks if peak is not None), default=None)}
        derived.append({**row, **more})
    return derived


def needs_removed(run: Row) -> bool:
    config = run["declaration"]["config"]
    lost = any(config.get(name, default) != default for name, default in REMOVED.items())
    return lost or bool({*REMOVED_OPERATORS} & {*(config.get("operators") or ())})


def write_tables(results: dict[str, Any], out: Path) -> None:
    picture = svg_text(draw_pareto(results))  # first: if drawing fails, nothing is written
    text = markdown(results["title"], results["variants"], results["notes"])
    commands = "\n".join(shlex.join(run["command"]) for run in results["runs"])
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / RESULTS, json.dumps({"format": FORMAT} | results, indent=1, ensure_ascii=False, allow_nan=False))
    write_atomic(out / "table.md", f"{text}\n```text\n{commands}\n```\n")
    write_atomic(out / "pareto.svg", picture)


def read_results(path: Path) -> dict[str, Any]:
    """Results collected from the runs of a study's folder, or read from a results.json or a folder that holds one."""
    begun = (path / STUDY).is_file()
    results = collect(StudyFolder(path)) if begun else read_json(path / RESULTS if path.is_dir() else path, FORMAT)
    return {**results, "variants": derive(results)}


def cells_of(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the columns in which some row has a value."""
    flat = []
    for row in rows:
        known = {part: count / 1e6 for part, count in row.get("flops_per_token", {}).items()}
        known |= {"label": f"{row['variant']}{' †' if row.get('removed') else ''}"}
        known |= {"numbers": ", ".join(map(str, row["seeds"])), "best": "yes" if row.get("frontier") else None}
        flat.append({**row, **known, "title": row["title"] or None})
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in flat)]
    return [c[0] for c in columns], [[shown(row.get(key), form) for _, key, form in columns] for row in flat]


def all_notes(rows: list[Row], notes: list[str]) -> list[str]:
    curve = ", ".join(row["variant"] for row in rows if row.get("curve"))
    said = {part for row in rows for part, value in row.items() if value is not None and value is not False}
    return [*notes, *(note.format(curve=curve) for part, note in NOTES.items() if part in said)]


def markdown(title: str, rows: list[Row], notes: list[str]) -> str:
    headings, cells = cells_of(rows)
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in [headings, ["-" * n for n in widths], *cells]]
    listed = [f"- {note}" for note in all_notes(rows, notes)]
    return "\n".join([f"# {title}", "", *(f"| {line} |" for line in lines), "", *listed, ""])


def show_rows(title: str, rows: list[Row], notes: list[str]) -> None:
    """Show the table and its notes in a terminal."""
    headings, cells = cells_of(rows)
    table = Table(*headings, title=title)
    for row in cells:
        table.add_row(*row)
    show(table)
    for note in all_notes(rows, notes):
        echo(f"note: {note}")


def costs_of(run: Run) -> Row:
    """Parameters, FLOPs and mean f as declared."""
    config = run.model_config()
    shares = operator_shares(config)
    costs = {"flops_per_token": count_costs(config, run.train_settings().length, shares)}
    return {**costs, "parameters": count_parameters(config), "fraction": mean(share["attention"] for share in shares)}


def show_grid(plan: Plan) -> None:
    """Show the variants before any run, with FLOPs counted at their target f."""
    study, settings, steps, rows = plan.study, plan.runs[0].train_settings(), plan.steps, []
    whole = costs_of(make_plan(study, plan.runs[0].data[:1], [study.baseline]).runs[0])["flops_per_token"]["forward"]
    for name in dict.fromkeys(run.variant for run in plan.runs):
        variant, own = study.variants[name], [run for run in plan.runs if run.variant == name]
        row: Row = {"variant": name, "role": variant.role, "title": variant.title, "seeds": [run.seed for run in own]}
        row |= costs_of(own[0])
        rows.append({**row, "flops_of_baseline": row["flops_per_token"]["forward"] / whole})
    tokens = f"{steps * settings.batch * settings.length:,} tokens in {steps:,} steps" if steps else study.duration
    kind = f"{plan.corpora[0].vocab_size:,} token ids" if steps else "the preset's vocabulary: --data takes a corpus's"
    counted = f"MFLOPs a token, forward, counted at the target f ({kind}); training with the backward pass."
    show_rows(study.title, rows, [f"Each run trains on {tokens}.", counted])


def add_results(path: Path, source: Path) -> None:
    """Add the runs of another results.json to a study's folder. They count as done; no weights are needed."""
    results = read_results(source)
    with locked_study(path) as folder:
        known, runs = folder.record["added"], {run["name"]: run for run in results["runs"]}
        for name, run in runs.items():
            same = known.get(name, run)["test_loss"] == run["test_loss"] and not folder.finished(name)
            require(same, f"run {name} of {source} is in {path} too: delete one of them.")
        echo(f"added {', '.join(name for name in runs if name not in known) or 'nothing new'}")
        theirs = results["times"]
        ours = folder.record["times"] = folder.record["times"] or theirs
        if theirs and any(ours[part] != theirs[part] for part in ("device", "batch", "length", "versions")):
            echo(f"step times of another machine ({theirs['device']}) are left out")
        elif theirs:
            ours["variants"] = theirs["variants"] | ours["variants"]
        folder.record["added"] = runs | known
        about = {part: results[part] for part in ("title", "corpus", "common")}
        folder.declare({**about, "caption": results.get("caption", []), "variants": results["declared"]}, [])
