"""A null test in the terminal: one table a question."""

from rich.table import Table

from chiar.nulltest.compaction import KLT, NOISE
from chiar.nulltest.flips import Mean, Worth
from chiar.nulltest.report import LayerNull, NullTest
from chiar.nulltest.white import PERCENTILES

SIGNALS = {"route": "route", "hash": "random hash of the token"}


def report_tables(report: NullTest) -> list[Table | str]:
    shown: list[Table | str] = [whiteness_table(report), information_table(report)]
    shown += [class_table(report), contrast_table(report)]
    if report.worth is not None:
        shown.append(worth_table(report))
    shown.append(compaction_table(report))
    return [*shown, *(f"note: {remark}" for remark in report.remarks)]


def new_table(title: str, *columns: str) -> Table:
    return Table(*columns, title=f"\n{title}", title_justify="left", box=None)


def name_of(layer: LayerNull) -> str:
    return f"{layer.layer + 1} {layer.kind}"


def whiteness_table(report: NullTest) -> Table:
    kind = "exact" if report.null_exact else "sampled"
    table = new_table(
        f"1. H of each layer's input against white noise of width {report.width} "
        f"({report.null_mean:.4f} ± {report.null_deviation:.4f}, {kind}); {report.tokens:,} tokens of {report.corpus} "
        f"{report.split}; effect and spread in σ of the noise; "
        "in brackets the KS of independent noise, and of one noise vector a distinct token",
        "layer", "basis", "mean", "sd", *(f"p{p}" for p in PERCENTILES), "effect", "spread", "KS", "τ", "f",
    )  # fmt: skip
    noise = [f"{report.null_percentiles[str(p)]:.4f}" for p in PERCENTILES]
    table.add_row("–", "noise", f"{report.null_mean:.4f}", f"{report.null_deviation:.4f}", *noise, "0", "1", "", "", "")
    for layer in report.layers:
        for number, row in enumerate(layer.whiteness):
            cuts = ", ".join(f"{t:.4f}" for t in layer.thresholds or [])
            table.add_row(
                name_of(layer) if number == 0 else "",
                row.basis,
                f"{row.mean:.4f}",
                f"{row.deviation:.4f}",
                *(f"{row.percentiles[str(p)]:.4f}" for p in PERCENTILES),
                f"{row.effect:+.2f} ± {row.effect_error:.2f}",
                f"{row.spread:.2f}",
                f"{row.distance:.3f} ({row.distance_expected:.3f}, {row.distance_repeated:.3f})",
                cuts if number == 0 else "",
                f"{layer.dark:.1%}" if number == 0 and layer.dark is not None else "",
            )
    return table


def information_table(report: NullTest) -> Table:
    table = new_table(
        f"2. What the route says about a token: mutual information in bits ({report.shuffles} shuffles: the bias "
        "of counting) and adjusted share, 0 = chance, 1 = it decides the route",
        "layer", "signal", "dark", "route's bits", "token identity", "", "word class", "", "position", "",
    )  # fmt: skip
    for layer in report.layers:
        for number, signal in enumerate(layer.signals):
            cells = []
            for found in (signal.token, signal.word_class, signal.position):
                spread = "" if found.deviation is None else f" ± {found.deviation:.4f}"
                cells += [f"{found.bits:.4f}{spread} ({found.chance:.4f})", f"{found.adjusted:.1%}"]
            name = SIGNALS.get(signal.name, f"H, {signal.name}")
            bits = f"{signal.token.route_bits:.3f}"
            table.add_row(name_of(layer) if number == 0 else "", name, f"{signal.dark:.1%}", bits, *cells)
    return table


def class_table(report: NullTest) -> Table:
    table = new_table(
        "3. H by word class, in σ of the noise from its mean, and the share that is light "
        "(H at most the median where a layer has no route); * function words",
        "class", "tokens", *(f"layer {layer.layer + 1}" for layer in report.layers),
    )  # fmt: skip
    for row, first in enumerate(report.layers[0].classes):
        cells = [f"{layer.classes[row].effect:+.2f} {layer.classes[row].light:.0%}" for layer in report.layers]
        table.add_row(first.name + (" *" if first.function else ""), f"{first.tokens:,}", *cells)
    return table


def contrast_table(report: NullTest) -> Table:
    table = new_table(
        "   Function words against content words: difference of mean H in σ of the noise ± standard error (equal "
        "tokens count once), and P(H of a function word < H of a content word)",
        "words", "function", "content", *(f"layer {layer.layer + 1}" for layer in report.layers),
    )  # fmt: skip
    for row, first in enumerate(report.layers[0].contrasts):
        cells = []
        for layer in report.layers:
            found = layer.contrasts[row]
            error = "" if found.error is None else f" ± {found.error:.2f}"
            cells.append(f"{found.difference:+.2f}{error}, {found.separation:.2f}")
        table.add_row(first.words, f"{first.function_tokens:,}", f"{first.content_tokens:,}", *cells)
    return table


def worth_table(report: NullTest) -> Table:
    bins = [f"H bin {number + 1}" for number in range(report.bins)]
    table = new_table(
        "4. Change of the loss when one token's route is flipped, and attention's benefit over the filter by bins of "
        "rising H: nats summed over the token's and later predictions ± standard error (flips)",
        "layer", "light → attention", "dark → filter", *bins, "r(H, benefit)", "rank r",
    )  # fmt: skip
    assert report.worth is not None
    for layer in report.layers:
        if layer.worth is not None:
            table.add_row(str(layer.layer + 1), *worth_cells(layer.worth))
    table.add_row("all", *worth_cells(report.worth))
    return table


def worth_cells(worth: Worth) -> list[str]:
    means = [worth.to_attention, worth.to_filter, *worth.benefit]
    error = "" if worth.correlation_error is None else f" ± {worth.correlation_error:.2f}"
    rs = [f"{r:+.2f}{error}" if r is not None else "–" for r in (worth.pearson, worth.spearman)]
    return [*map(mean_cell, means), *rs]


def mean_cell(found: Mean) -> str:
    if found.mean is None:
        return "–"
    error = "" if found.error is None else f" ± {found.error:.4f}"
    return f"{found.mean:+.4f}{error} ({found.flips})"


def compaction_table(report: NullTest) -> Table:
    widths = sorted({row.k for row in report.layers[0].compaction})
    k = widths[len(widths) // 2]
    table = new_table(
        f"5. Share of a token's energy in the first {k} of {report.width} coefficients / in its own {k} largest: all "
        "tokens, then by bins of rising H (other k, and without the mean: --json)",
        "layer", "basis", "all", *(f"H bin {number + 1}" for number in range(report.bins)),
    )  # fmt: skip
    for layer in report.layers:
        rows = [row for row in layer.compaction if row.k == k and not row.centred and row.basis != NOISE]
        for number, row in enumerate(rows):
            pairs = zip(row.first, row.largest, strict=True)
            cells = ["–" if a is None or b is None else f"{a:.1%} / {b:.1%}" for a, b in pairs]
            table.add_row(str(layer.layer + 1) if number == 0 else "", row.basis.replace(KLT, "KLT"), *cells)
    noise = next(row for row in report.layers[0].compaction if row.k == k and row.basis == NOISE)
    table.add_row("–", NOISE, f"{noise.first[0]:.1%} / {noise.largest[0]:.1%}", *[""] * report.bins)
    return table
