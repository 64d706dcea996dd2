"""The page's view of chosen prompts as one HTML file: styles, scripts, data and pictures are all inside it."""

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from chiar import __version__
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.evaluation.compare import REPORT
from chiar.evaluation.report import EvaluationReport, cost_rows, score_rows
from chiar.explore.loaded import LoadedModel, open_models
from chiar.explore.view import route_view
from chiar.files import check_new, write_new
from chiar.plots import draw_curves, svg_text
from chiar.routing.flops import compare_flops, counted_parts, operator_shares
from chiar.routing.tables import describe_fraction
from chiar.training.run_folder import METRICS, RunFolder
from chiar.visible import visible

STATIC = Path(__file__).parent / "static"
SETTINGS = ("steps", "batch", "length", "learning_rate", "warmup", "weight_decay", "precision", "seed")
UNTOLD = ("architectures", "transformers_version")


@dataclass(frozen=True)
class Part:
    """A section: its heading and its HTML."""

    heading: str
    body: str


def write_report(
    names: list[str], prompts: list[str], out: Path, evaluations: list[Path], tokenizer: Path | None, seed: int
) -> None:
    if out.suffix != ".html":
        raise InputError(f"reports are HTML: name the file {out.with_suffix('.html').name}.")
    check_new(out)
    measured = [EvaluationReport.read(path) for path in (*evaluations, *saved_evaluations(names))]
    models = open_models(names, tokenizer, seed)
    views = [[route_view(loaded, prompt) for loaded in models] for prompt in prompts]
    parts = [Part("Models", config_table(models)), *training_parts(names), *evaluation_parts(measured)]
    parts.append(Part("Counted FLOPs", flop_table(models, measured)))
    write_new(out, page(models, prompts, views, parts))


def saved_evaluations(names: list[str]) -> list[Path]:
    """The evaluation.json somebody saved in a run."""
    return [Path(name) / REPORT for name in names if (Path(name) / REPORT).is_file()]


def page(models: list[LoadedModel], prompts: list[str], views: list[list[dict]], parts: list[Part]) -> str:
    title = "Routing of " + " and ".join(loaded.name for loaded in models)
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    first, last = (STATIC / "theme.js").read_text(encoding="utf-8"), joined_scripts()
    policy = (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(first)} {digest(last)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    pair = " pair" if len(models) > 1 else ""
    texts = "".join(
        f'<section><h2 class="section">Prompt {number}</h2><blockquote dir="auto">{shown(prompt, keep=chr(10))}'
        f'</blockquote><div class="panels{pair}" id="prompt-{number}"></div></section>\n'
        for number, prompt in enumerate(prompts, start=1)
    )
    sections = "".join(f'<section><h2 class="section">{p.heading}</h2>{p.body}</section>\n' for p in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{shown(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script>{first}</script>
</head>
<body class="report">
<header class="masthead"><h1>Chiaroscuro <span>{shown(title)}</span></h1>
<button type="button" id="theme" class="quiet" aria-label="Switch between light and dark theme">Dark theme</button>
</header>
<main>
{texts}{sections}</main>
<footer>Written by chiar {__version__}. Light tokens take the cheap filter, dark ones attention. FLOPs are counted, not
measured. This file asks for nothing outside itself.</footer>
<script type="application/json" id="views">{as_data(views)}</script>
<script>{last}</script>
</body>
</html>
"""


def joined_scripts() -> str:
    return "".join((STATIC / name).read_text(encoding="utf-8") for name in ("marks.js", "view.js", "report.js"))


def digest(text: str) -> str:
    """What a content security policy calls an inline script or style it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_data(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def shown(value: Any, keep: str = "") -> str:
    return escape(visible(str(value), keep=keep), quote=True)


def table(heads: list[str], rows: list[list[Any]]) -> str:
    """The first column names the rows."""
    head = "".join(f'<th scope="col"{cell_class(n)}>{shown(name)}</th>' for n, name in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(f"<td{cell_class(n)}>{shown('–' if cell is None else cell)}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell_class(column: int) -> str:
    return ' class="number"' if column else ""


def config_table(models: list[LoadedModel]) -> str:
    """What differs from the defaults or between the models."""
    usual, heads = ChiarConfig(), ["", *(loaded.name for loaded in models)]
    rows: list[list[Any]] = [["parameters", *(f"{loaded.about['parameters']:,}" for loaded in models)]]
    for name in ChiarConfig.__annotations__:
        values = [getattr(loaded.config, name, None) for loaded in models]
        if name not in UNTOLD and any(value != getattr(usual, name, None) for value in values):
            rows.append([name, *(told(value) for value in values)])
    return table(heads, rows) + remarks(["Fields not named have their defaults."])


def told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(told(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def training_parts(names: list[str]) -> list[Part]:
    """Curves and settings of those that are training runs."""
    runs = [Path(name) for name in names if (Path(name) / METRICS).is_file()]
    if not runs:
        return []
    records = [RunFolder(run).read() for run in runs]
    settings = [record.get("settings", {}) for record in records]
    rows: list[list[Any]] = [[name, *(told(s.get(name, "–")) for s in settings)] for name in SETTINGS]
    rows.append(["commit", *(str(record.get("commit") or "–")[:12] for record in records)])
    heads = ["", *(run.as_posix() for run in runs)]
    picture = base64.b64encode(svg_text(draw_curves(runs)).encode()).decode()
    curves = f'<div class="curves scroll"><img alt="training curves" src="data:image/svg+xml;base64,{picture}"></div>'
    return [Part("Training", curves + table(heads, rows))]


def evaluation_parts(measured: list[EvaluationReport]) -> list[Part]:
    """A column each; a row each figure any of them has."""
    if not measured:
        return []
    columns = [dict((*score_rows(report.scores), *cost_rows(report))) for report in measured]
    rows = [[name, *(column.get(name) for column in columns)] for name in dict.fromkeys(n for c in columns for n in c)]
    heads = ["", *(Path(report.run or report.model).name for report in measured)]
    notes = [
        f"{report.run or report.model} on {report.corpus} {report.split}, {report.precision} on {report.device}."
        for report in measured
    ]
    return [Part("Evaluation", table(heads, rows) + remarks(notes))]


def remarks(notes: list[str]) -> str:
    return "".join(f'<p class="note">{shown(note)}</p>' for note in notes)


def flop_table(models: list[LoadedModel], measured: list[EvaluationReport]) -> str:
    """By part, at the trained length, for the routes of an evaluation where there is one."""
    columns, notes = [], []
    for loaded in models:
        config = loaded.config
        length = config.max_position_embeddings
        use = evaluated_use(loaded, measured)
        shares = operator_shares(config) if use is None else use
        whose = f"routes as assumed, {describe_fraction(config, None)}" if use is None else "routes as evaluated"
        notes.append(f"{loaded.name}: T = {length}" + (f", {whose}." if config.routed_layers else "."))
        columns.append(compare_flops(config, length, shares))
    heads = ["MFLOPs a token, forward"]
    for loaded in models:
        heads += [loaded.name, "attention everywhere"]
    rows: list[list[Any]] = []
    for part in counted_parts():
        counts = [count.part(part) for savings in columns for count in (savings.chiar, savings.baseline)]
        if any(counts):
            rows.append([part, *(f"{count / 1e6:,.3f}" for count in counts)])
    totals = [count.total for savings in columns for count in (savings.chiar, savings.baseline)]
    rows.append(["total", *(f"{total / 1e6:,.3f}" for total in totals)])
    return table(heads, rows) + remarks(notes)


def evaluated_use(loaded: LoadedModel, measured: list[EvaluationReport]) -> list[dict[str, float]] | None:
    """The shares an evaluation of this very model found."""
    for report in measured:
        same = Path(report.run or report.model).resolve() == Path(loaded.name).resolve()
        if same and loaded.config.routing != "soft" and report.routing.layers:
            return [layer.use for layer in report.routing.layers]
    return None
