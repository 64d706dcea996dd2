"""`python -m research.nulltest MODEL --data CORPUS`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from chiar.console import Overwrite, guarded, show
from chiar.files import check_new, new_folder, write_new
from chiar.plots.figure import save
from research.nulltest import nulltest
from research.nulltest.measures import KLT
from research.nulltest.pictures import pictures
from research.nulltest.report import NAME, LayerNull, Mean, NullTest

NEGLIGIBLE = 0.2  # σ of the noise: such a shift moves fewer than one token in twelve across a threshold
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


def mean_cell(value: Mean | None) -> str:
    if value is None or value.mean is None:
        return "–"
    return f"{value.mean:+.3f}" + ("" if value.error is None else f" ± {value.error:.3f}")


def cells(layer: LayerNull, k: int) -> list[str]:
    own, signal = layer.whiteness[0], layer.signals[0]
    dark = "–" if layer.dark is None else f"{layer.dark:.1%}"
    row = [f"{layer.layer + 1} {layer.kind}", dark, f"{own.effect:+.2f} ± {own.effect_error:.2f}"]
    row += [f"{own.distance:.2f} ({own.distance_expected:.2f}, {own.distance_repeated:.2f})"]
    row += [f"{one.adjusted:.1%}" for one in (signal.token, signal.word_class, signal.position)]
    row += [f"{one.difference:+.2f}, {one.separation:.2f}" for one in layer.contrasts[-1:]] or ["–"]
    worth = layer.worth
    row += [mean_cell(worth and worth.to_attention), mean_cell(worth and worth.to_filter)]
    row += ["–" if worth is None or worth.spearman is None else f"{worth.spearman:+.2f}"]
    shares = {one.basis: one.first[0] for one in layer.compaction if one.k == k and not one.centred}
    return [*row, f"{shares[own.basis]:.1%}, {shares[KLT]:.1%}"]


def summary(report: NullTest) -> Table:
    """One row per layer; the JSON has everything."""
    kind, k = "exact" if report.null_exact else "sampled", sorted({row.k for row in report.layers[0].compaction})[0]
    title = (
        f"{report.tokens:,} tokens of {report.corpus} {report.split}; white noise of width {report.width}: H "
        f"{report.null_mean:.4f} ± {report.null_deviation:.4f} ({kind})"
    )
    columns = ("layer", "f", "H in σ of noise", "KS (noise, repeated)", "token", "word class", "position")
    columns += ("function − content, P", "light → attention", "dark → filter", "rank r", f"first {k}: own, KLT")
    table = Table(*columns, title=title, title_justify="left", box=None)
    for layer in report.layers:
        table.add_row(*cells(layer, k))
    return table


def verdict_on(report: NullTest) -> str:
    """One line on the layers that route; an effect below two standard errors counts as none."""
    layers = [layer for layer in report.layers if layer.kind == "routed"] or report.layers
    farthest = max(layers, key=lambda layer: abs(layer.whiteness[0].effect))
    own = farthest.whiteness[0]
    is_noise = abs(own.effect) <= max(NEGLIGIBLE, 2 * own.effect_error)
    noise = "no more than noise" if is_noise else "not that of white noise"
    verdict = f"H is {noise} (farthest in layer {farthest.layer + 1}: {own.effect:+.2f} ± {own.effect_error:.2f} σ)"
    worth = report.worth
    if worth is None or worth.spearman is None or worth.correlation_error is None:
        return f"{verdict}; what a route is worth was not measured."
    r, error = worth.spearman, worth.correlation_error
    follows = "grows with it" if r > 2 * error else "falls with it" if r < -2 * error else "does not depend on it"
    return f"{verdict}; what attention adds to a token {follows} (rank r {r:+.2f} ± {error:.2f})."


@app.command()
def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a training run or a preset.")],
    data: Annotated[Path, typer.Option(metavar="CORPUS", help="A prepared language corpus.")],
    split: Annotated[str | None, typer.Option(help="Split of the corpus. [default: valid if there is one]")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to read, in rows spread over the split.")] = 8192,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens per row. [default: the trained length]")] = None,
    flips: Annotated[int, typer.Option(min=0, help="Routes to flip in each routed layer; 0 flips none.")] = 64,
    shuffles: Annotated[int, typer.Option(min=2, help="Label shuffles, the null of mutual information.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device; auto prefers a GPU.")] = "auto",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file of the numbers; - prints it.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="New folder for the numbers and pictures.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Test for every layer whether its routing signal is more than noise, and what a route is worth.

    Spectral entropy against white noise, in the model's basis, the identity and a random one; mutual information of
    the route with token, word class and position; changes of the loss when a route is flipped; energy compaction.
    """
    to_stdout = json is not None and str(json) == "-"
    for new in (out, None if to_stdout else json):
        if new is not None:
            check_new(new, overwrite, NAME)
    options = {"tokens": tokens, "length": length, "flips": flips, "shuffles": shuffles, "batch": batch, "seed": seed}
    report = nulltest(model, data, split, device=device, **options)
    if out is not None:
        with new_folder(out, overwrite, NAME) as aside:
            (aside / NAME).write_text(report.to_json(), encoding="utf-8")
            for name, picture in pictures(report).items():
                save(picture, aside / f"{name}.svg")
        typer.echo(f"wrote {out}", err=to_stdout)
    if to_stdout:
        return typer.echo(report.to_json())
    if json is not None:
        write_new(json, report.to_json(), overwrite)
        typer.echo(f"wrote {json}")
    if report.run is not None:
        typer.echo(f"{report.run} is a training run: its best model is tested.")
    show(summary(report))
    for remark in report.remarks:
        typer.echo(f"note: {remark}")
    typer.echo(f"verdict: {verdict_on(report)}")


if __name__ == "__main__":
    guarded(app)
