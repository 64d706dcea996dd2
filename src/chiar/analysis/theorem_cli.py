"""`chiar theorem`. Heavy imports happen inside the verb."""

from pathlib import Path
from typing import Annotated

import typer


def theorem(
    width: Annotated[str, typer.Option(metavar="D,D,…", help="Numbers of features.")] = "16,64,256,1024",
    rho: Annotated[str, typer.Option(metavar="ρ,ρ,…", help="Correlations of neighbouring features.")] = "0.5,0.9,0.99",
    shuffles: Annotated[int, typer.Option(min=1, help="Random orders of the features.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of everything drawn at random.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers to a new file, - to print.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them to a new .svg file.")] = None,
) -> None:
    """Check Theorem 1's premise: the DCT against the KLT for features correlated with their neighbours, and shuffled.

    Needs no model. What the theorem means for the states of a model is measured by chiar nulltest.
    """
    from chiar.analysis.theorem import check_theorem, to_json, to_table
    from chiar.analysis.theorem_picture import draw_theorem
    from chiar.cli import check_svg, show, write_json
    from chiar.files import check_new, write_new

    printed = json is not None and str(json) == "-"
    for new in (picture, None if printed else json):
        if new is not None:
            check_new(new)
    if picture is not None:
        check_svg(picture)
    checks = check_theorem(
        [int(n) for n in numbers(width, "--width", whole=True)], numbers(rho, "--rho"), shuffles, seed
    )
    if not printed:
        show(to_table(checks))
    if picture is not None:
        write_new(picture, draw_theorem(checks))
        typer.echo(f"wrote {picture}", err=printed)
    if json is not None:
        write_json(json, to_json(checks))


def numbers(text: str, option: str, whole: bool = False) -> list[float]:
    from chiar.errors import InputError

    try:
        return [int(part) if whole else float(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise InputError(f"{option} takes {kind} separated by commas, got {text!r}.") from None
