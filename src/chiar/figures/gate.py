"""The MetaRouter's g: its course over training, how often it took which value, and what the model gives at the end."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from chiar.analysis.chart import COLOURS, Line
from chiar.analysis.curves import DASHES, Curves, open_curves
from chiar.analysis.panels import SmallPanel, draw_grid
from chiar.errors import InputError

BARS = 50
ROWS = 64
SAMPLES = {"batch": "batches", "sequence": "rows", "causal": "tokens"}


def draw_gate(paths: list[Path], corpora: list[Path], rows: int = ROWS) -> str:
    """As the paper's two panels, for every run and corpus; with corpora also g of the trained model on them."""
    runs, axis = open_curves(paths)
    for run, path in zip(runs, paths, strict=True):
        if not any(record.get("gate") for record in run.records):
            raise InputError(f"{path} has no MetaRouter: there is no g to draw.")
    courses = {line.label: line.points for run in runs for line in run.gates()}
    looks = {label: look(label, number) for number, label in enumerate(courses)}
    panels = [
        SmallPanel(
            "over training",
            [replace(looks[label], points=points) for label, points in courses.items()],
            axis=f"{axis}; up: g",
            bounds=(-0.02, 1.02),
        ),
        SmallPanel(
            "over all logged steps",
            [outline(looks[label], torch.tensor([g for _, g in points])) for label, points in courses.items()],
            axis="g; up: share of steps",
        ),
    ]
    if corpora:
        panels.append(final_panel(runs, paths, corpora, rows, looks))
    names = ", ".join(run.name for run in runs)
    title = f"g (1: layer 1's filter, 0: bypassed): {names}"
    return draw_grid(title, panels, list(looks.values()), "", "")


def look(label: str, number: int) -> Line:
    return Line(label, [], COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)])


def outline(look: Line, values_N: Tensor) -> Line:
    """Of a histogram over [0, 1], as shares."""
    shares = (torch.histc(values_N.float(), BARS, 0.0, 1.0) / len(values_N)).tolist()
    points = [(0.0, 0.0)]
    for number, share in enumerate(shares):
        points += [(number / BARS, share), ((number + 1) / BARS, share)]
    return replace(look, points=[*points, (1.0, 0.0)], width=1.5)


def final_panel(
    runs: list[Curves], paths: list[Path], corpora: list[Path], rows: int, looks: dict[str, Line]
) -> SmallPanel:
    """Adds to `looks` what training did not log."""
    lines, pools = [], set()
    for run, path in zip(runs, paths, strict=True):
        for corpus in corpora:
            name, pool, values_N = gates_of(path, corpus, run, rows)
            label = f"{run.name}: g on {name}"
            looks.setdefault(label, look(label, len(looks)))
            pools.add(SAMPLES[pool])
            lines.append(outline(looks[label], values_N))
    what = " or ".join(sorted(pools))
    return SmallPanel("the best model on validation text", lines, axis=f"g; up: share of {what}")


@torch.no_grad()
def gates_of(path: Path, folder: Path, run: Curves, rows: int) -> tuple[str, str, Tensor]:
    """Name of the corpus, pool, and g of each batch, row or token (whatever the pool makes one value of)."""
    from chiar.data.shards import Corpus
    from chiar.model.load import check_tokenizer, load_model, resolve_model
    from chiar.training.run_folder import told
    from chiar.training.trainer import open_rows

    corpus = Corpus.open(folder)
    if "valid" not in corpus.splits:
        raise InputError(f"{folder} has no valid split to measure g on.")
    best, _ = resolve_model(str(path))
    model, _ = load_model(best)
    check_tokenizer(best, model.config, corpus)
    settings, pool = told(run.stored, "settings", run.name), model.config.gate_pool
    opened = open_rows(corpus, "valid", settings["length"])
    wanted, size, found = opened.evaluated(rows), settings["micro_batch"], []
    for first in range(0, len(wanted), size):
        batch = opened.batch(0, wanted[first : first + size])
        gate_BT = model.model(batch.ids, attention_mask=batch.mask, output_routes=True).gate_BT1[..., 0]
        real_BT = torch.ones_like(gate_BT, dtype=torch.bool) if batch.mask is None else batch.mask.bool()
        found.append({"batch": gate_BT[:1, 0], "sequence": gate_BT[:, 0]}.get(pool, gate_BT[real_BT]))
    return corpus.name, pool, torch.cat(found)
