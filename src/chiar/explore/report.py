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
from chiar.evaluation.compare import REPORT
from chiar.evaluation.report import EvaluationReport, cost_rows, score_rows
from chiar.explore.view import LoadedModel, open_models, route_text
from chiar.files import check_new, write_new
from chiar.plots import draw_curves, svg_text
from chiar.routing.flops import compare_flops, counted_parts, operator_shares
from chiar.routing.tables import describe_fraction
from chiar.training.run_folder import METRICS, RunFolder
from chiar.visible import visible

STATIC = Path(__file__).parent / "static"
SETTINGS = ("steps", "batch", "length", "learning_rate", "warmup", "weight_decay", "precision", "seed")
POLICY = "default-src 'none'; style-src {}; script-src {} {}; img-src data:; base-uri 'none'; form-action 'none'"
Rows = list[list[Any]]


def write_report(
    names: list[str],
    prompts: list[str],
    out: Path,
    evaluations: list[Path],
    tokenizer: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    if out.suffix != ".html":
        raise InputError(f"the page is HTML: name the file {out.with_suffix('.html').name}.")
    if not overwrite:
        check_new(out)
    saved = [Path(name) / REPORT for name in names if (Path(name) / REPORT).is_file()]
    measured = [EvaluationReport.read(path) for path in (*evaluations, *saved)]
    models = open_models(names, tokenizer, seed)
    data = [[next(route_text(loaded, prompt)) for loaded in models] for prompt in prompts]
    pair = " pair" if len(models) > 1 else ""
    parts = []
    for number, prompt in enumerate(prompts, start=1):
        place = f'<div class="panels{pair}" id="prompt-{number}"></div>'
        parts.append((f"Prompt {number}", f'<blockquote dir="auto">{shown(prompt, keep=chr(10))}</blockquote>{place}'))
    parts += [("Models", config_table(models)), ("Training", training(names)), ("Evaluation", evaluation(measured))]
    parts.append(("Counted FLOPs", flop_table(models, measured)))
    write_new(out, page("Routing of " + " and ".join(loaded.name for loaded in models), parts, data), overwrite)


def page(title: str, parts: list[tuple[str, str]], data: list[list[dict[str, Any]]]) -> str:
    """`parts`: headings and their HTML; empty ones are left out."""
    names = ("report.html", "style.css", "theme.js", "marks.js", "view.js", "report.js")
    frame, style, first, *rest = ((STATIC / name).read_text(encoding="utf-8") for name in names)
    last = "".join(rest)
    sections = (f'<section><h2 class="section">{head}</h2>{body}</section>\n' for head, body in parts if body)
    inside = {"style": style, "first": first, "last": last, "sections": "".join(sections), "views": as_data(data)}
    policy = POLICY.format(digest(style), digest(first), digest(last))
    return Template(frame).substitute(inside, policy=policy, title=shown(title), version=__version__)


def digest(text: str) -> str:
    """What a content security policy calls an inline script or style it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_data(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def shown(value: Any, keep: str = "") -> str:
    return escape(visible(str(value), keep=keep), quote=True)


def table(heads: list[str], rows: Rows, notes: list[str] | None = None) -> str:
    """The first column names the rows; `notes` stand below."""

    def line(kind: str, cells: list[Any]) -> str:
        numbers = [' class="number"' if column else "" for column in range(len(cells))]
        texts = [shown("–" if cell is None else cell) for cell in cells]
        return "".join(f"<{kind}{n}>{text}</{kind[:2]}>" for n, text in zip(numbers, texts, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = line('th scope="col"', heads)
    below = "".join(f'<p class="note">{shown(note)}</p>' for note in notes or [])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}'


def config_table(models: list[LoadedModel]) -> str:
    """What differs from the defaults or between the models."""
    usual = ChiarConfig()
    rows: Rows = [["parameters", *(f"{loaded.about['parameters']:,}" for loaded in models)]]
    for name in ChiarConfig.__annotations__:
        values = [getattr(loaded.config, name, None) for loaded in models]
        if any(value != getattr(usual, name, None) for value in values):
            rows.append([name, *(told(value) for value in values)])
    return table(["", *(loaded.name for loaded in models)], rows, ["Fields not named have their defaults."])


def told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(told(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def training(names: list[str]) -> str:
    """Curves and settings of those that are training runs."""
    runs = [Path(name) for name in names if (Path(name) / METRICS).is_file()]
    if not runs:
        return ""
    records = [RunFolder(run).read() for run in runs]
    rows: Rows = [[name, *(told(record.get("settings", {}).get(name, "–")) for record in records)] for name in SETTINGS]
    rows.append(["commit", *(str(record.get("commit") or "–")[:12] for record in records)])
    picture = base64.b64encode(svg_text(draw_curves(runs)).encode()).decode()
    curves = f'<div class="curves scroll"><img alt="training curves" src="data:image/svg+xml;base64,{picture}"></div>'
    return curves + table(["", *(run.as_posix() for run in runs)], rows)


def evaluation(measured: list[EvaluationReport]) -> str:
    """A column each; a row each figure any of them has."""
    if not measured:
        return ""
    columns = [dict((*score_rows(report.scores), *cost_rows(report))) for report in measured]
    rows = [[name, *(column.get(name) for column in columns)] for name in dict.fromkeys(n for c in columns for n in c)]
    names = [report.run or report.model for report in measured]
    where = [f"on {report.corpus} {report.split}, {report.precision} on {report.device}." for report in measured]
    return table(["", *(Path(name).name for name in names)], rows, list(map(" ".join, zip(names, where, strict=True))))


def flop_table(models: list[LoadedModel], measured: list[EvaluationReport]) -> str:
    """By part, at the trained length, for the routes of an evaluation where there is one."""
    heads, counts, notes = ["MFLOPs a token, forward"], [], []
    for loaded in models:
        config, use = loaded.config, evaluated_use(loaded, measured)
        length, shares = config.max_position_embeddings, operator_shares(config) if use is None else use
        whose = f"routes as assumed, {describe_fraction(config, None)}" if use is None else "routes as evaluated"
        notes.append(f"{loaded.name}: T = {length}" + (f", {whose}." if config.routed_layers else "."))
        savings = compare_flops(config, length, shares)
        counts += [savings.chiar, savings.baseline]
        heads += [loaded.name, "attention everywhere"]
    rows: Rows = []
    for part in counted_parts():
        if any(count.part(part) for count in counts):
            rows.append([part, *(f"{count.part(part) / 1e6:,.3f}" for count in counts)])
    rows.append(["total", *(f"{count.total / 1e6:,.3f}" for count in counts)])
    return table(heads, rows, notes)


def evaluated_use(loaded: LoadedModel, measured: list[EvaluationReport]) -> list[dict[str, float]] | None:
    """The shares an evaluation of this very model found."""
    for report in measured:
        same = Path(report.run or report.model).resolve() == Path(loaded.name).resolve()
        if same and loaded.config.routing != "soft" and report.routing.layers:
            return [layer.use for layer in report.routing.layers]
    return None
