"""The page's view of chosen prompts as one HTML file with all its styles, scripts, data and pictures."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from chiar import __version__
from chiar.config import ChiarConfig
from chiar.errors import optional_module, require
from chiar.evaluation.report import REPORT, EvaluationReport, figures
from chiar.explore.view import STATIC, LoadedModel, open_models, route_text
from chiar.files import check_new, write_new
from chiar.plots.curves import draw_curves
from chiar.plots.figure import svg_text
from chiar.training.run_folder import METRICS, RunFolder
from chiar.visible import visible

FILES = ("report.html", "style.css", "theme.js", "marks.js", "view.js", "report.js")
SETTINGS = ("steps", "batch", "length", "learning_rate", "warmup", "weight_decay", "precision", "seed")
POLICY = "default-src 'none'; style-src {}; script-src {} {}; img-src data:; base-uri 'none'; form-action 'none'"
Columns = dict[str, dict[str, Any]]


def write_report(
    names: list[str], prompts: list[str], out: Path, more: list[Path], overwrite: bool, **how: Any
) -> None:
    """`more`: evaluation reports besides those in the models' folders. `how`: options of `open_models`, which runs
    after all checks."""
    runs, saved = ([Path(name) for name in names if Path(name, file).is_file()] for file in (METRICS, REPORT))
    require(out.suffix == ".html", f"the page is HTML: name the file {out.with_suffix('.html').name}.")
    check_new(out, overwrite)
    if runs:
        optional_module("matplotlib", "plots", "a page with the curves of a run")
    measured = [EvaluationReport.read(path) for path in (*more, *(folder / REPORT for folder in saved))]
    models = open_models(names, **how)
    frame, style, first, *rest = ((STATIC / name).read_text(encoding="utf-8") for name in FILES)
    last, data = "".join(rest), json.dumps([*sections(models, prompts, runs, measured)], allow_nan=False)
    for mark in "&<>":  # so that the JSON cannot close its script element
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    title = escape("Routing of " + " and ".join(loaded.name for loaded in models))
    parts = {"style": style, "first": first, "last": last, "sections": data, "title": title, "version": __version__}
    policy = POLICY.format(digest(style), digest(first), digest(last))
    write_new(out, Template(frame).substitute(parts, policy=policy), overwrite)


def digest(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def sections(
    models: list[LoadedModel], prompts: list[str], runs: list[Path], measured: list[EvaluationReport]
) -> Iterator[dict[str, Any]]:
    """The sections of the page as data: a title, and a prompt with its views, or a table and perhaps a picture."""
    for number, prompt in enumerate(prompts, start=1):
        views = [next(route_text(loaded, prompt)) for loaded in models]
        yield {"title": f"Prompt {number}", "prompt": visible(prompt, keep="\n"), "views": views}
    configs: Columns = {loaded.name: {"parameters": f"{loaded.about['parameters']:,}"} for loaded in models}
    for name in ChiarConfig.__annotations__:
        if any(getattr(loaded.config, name, None) != getattr(ChiarConfig(), name, None) for loaded in models):
            for loaded in models:
                configs[loaded.name][name] = getattr(loaded.config, name, None)
    yield {"title": "Models", "notes": ["Fields not listed have their defaults."], **table(configs)}
    if runs:
        settings: Columns = {}
        for run in runs:
            record = RunFolder(run).read()
            own = {name: record.get("settings", {}).get(name) for name in SETTINGS}
            settings[run.as_posix()] = {**own, "commit": str(record.get("commit") or "–")[:12]}
        picture = base64.b64encode(svg_text(draw_curves(runs)).encode()).decode()
        yield {"title": "Training", "picture": f"data:image/svg+xml;base64,{picture}", **table(settings)}
    if measured:
        names = [f"{r.run or r.model} on {r.corpus} {r.split}" for r in measured]
        scores = [figures(report) for report in measured]
        notes = [visible(f"{name}, {r.precision} on {r.device}.") for name, r in zip(names, measured, strict=True)]
        yield {"title": "Evaluation", "notes": notes, **table(dict(zip(names, scores, strict=True)))}


def table(columns: Columns) -> dict[str, Any]:
    """A row for each name that any column has, as text that is safe to show."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(map(shown, value))
        return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else visible(str(value), keep="")

    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[shown(name), *(shown(column.get(name)) for column in columns.values())] for name in names]
    return {"head": ["", *map(shown, columns)], "rows": rows}
