"""The page's view of chosen prompts as one HTML file: styles, scripts, data and pictures are all inside it."""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from chiar import __version__
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.evaluation.report import REPORT, EvaluationReport, cost_rows, score_rows
from chiar.explore.view import STATIC, LoadedModel, route_text
from chiar.files import check_new, write_new
from chiar.plots import draw_curves, svg_text
from chiar.training.run_folder import METRICS, RunFolder
from chiar.visible import visible

FILES = ("report.html", "style.css", "theme.js", "marks.js", "view.js", "report.js")
SETTINGS = ("steps", "batch", "length", "learning_rate", "warmup", "weight_decay", "precision", "seed")
POLICY = "default-src 'none'; style-src {}; script-src {} {}; img-src data:; base-uri 'none'; form-action 'none'"
Columns = dict[str, dict[str, Any]]


def write_report(models: list[LoadedModel], prompts: list[str], out: Path, more: list[Path], overwrite: bool) -> None:
    """`more`: evaluations beside those in the models' own folders."""
    if out.suffix != ".html":
        raise InputError(f"the page is HTML: name the file {out.with_suffix('.html').name}.")
    if not overwrite:
        check_new(out)
    saved = [loaded.path / REPORT for loaded in models if (loaded.path / REPORT).is_file()]
    measured = [EvaluationReport.read(path) for path in (*more, *saved)]
    data = [[next(route_text(loaded, prompt)) for loaded in models] for prompt in prompts]
    parts, pair = {}, " pair" if len(models) > 1 else ""
    for number, prompt in enumerate(prompts, start=1):
        place = f'<div class="panels{pair}" id="prompt-{number}"></div>'
        parts[f"Prompt {number}"] = f'<blockquote dir="auto">{shown(prompt, keep=chr(10))}</blockquote>{place}'
    columns = {
        f"{r.run or r.model} on {r.corpus} {r.split}": dict((*score_rows(r.scores), *cost_rows(r))) for r in measured
    }
    where = [f"{r.run or r.model}: on {r.corpus} {r.split}, {r.precision} on {r.device}." for r in measured]
    evaluation = table(columns, where) if measured else ""
    parts |= {"Models": config_table(models), "Training": training(models), "Evaluation": evaluation}
    frame, style, first, *rest = ((STATIC / name).read_text(encoding="utf-8") for name in FILES)
    last, views = "".join(rest), json.dumps(data, allow_nan=False)
    for mark in "&<>":  # JSON that cannot end the element it stands in
        views = views.replace(mark, f"\\u{ord(mark):04x}")
    sections = (f'<section><h2 class="section">{head}</h2>{body}</section>\n' for head, body in parts.items() if body)
    inside = {"style": style, "first": first, "last": last, "sections": "".join(sections), "views": views}
    policy = POLICY.format(digest(style), digest(first), digest(last))
    title = shown("Routing of " + " and ".join(loaded.name for loaded in models))
    write_new(out, Template(frame).substitute(inside, policy=policy, title=title, version=__version__), overwrite)


def digest(text: str) -> str:
    """What a content security policy calls an inline script or style it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def shown(value: Any, keep: str = "") -> str:
    return escape(visible(str(value), keep=keep), quote=True)


def table(columns: Columns, notes: list[str]) -> str:
    """A row for each figure that any of the columns has; `notes` stand below."""

    def told(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(map(told, value))
        return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else shown(value)

    head = "".join(f'<th scope="col" class="number">{shown(name)}</th>' for name in columns)
    rows = []
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        cells = "".join(f'<td class="number">{told(column.get(name))}</td>' for column in columns.values())
        rows.append(f"<tr><td>{shown(name)}</td>{cells}</tr>")
    below = "".join(f'<p class="note">{shown(note)}</p>' for note in notes)
    whole = f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return f'<div class="scroll"><table>{whole}</table></div>{below}'


def config_table(models: list[LoadedModel]) -> str:
    """What differs from the defaults or between the models."""
    columns: Columns = {loaded.name: {"parameters": f"{loaded.about['parameters']:,}"} for loaded in models}
    for name in ChiarConfig.__annotations__:
        if any(getattr(loaded.config, name, None) != getattr(ChiarConfig(), name, None) for loaded in models):
            for loaded in models:
                columns[loaded.name][name] = getattr(loaded.config, name, None)
    return table(columns, ["Fields not named have their defaults."])


def training(models: list[LoadedModel]) -> str:
    runs = [loaded.path for loaded in models if (loaded.path / METRICS).is_file()]
    if not runs:
        return ""
    columns: Columns = {}
    for run in runs:
        record = RunFolder(run).read()
        settings = {name: record.get("settings", {}).get(name) for name in SETTINGS}
        columns[run.as_posix()] = {**settings, "commit": str(record.get("commit") or "–")[:12]}
    picture = base64.b64encode(svg_text(draw_curves(runs)).encode()).decode()
    curves = f'<div class="curves scroll"><img alt="training curves" src="data:image/svg+xml;base64,{picture}"></div>'
    return curves + table(columns, [])
