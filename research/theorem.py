"""Theorem 1's premise in numbers: how close the DCT comes to the KLT if neighbouring features are correlated, and if
the same features are shuffled. `python -m research.theorem`.

A first-order autoregression along D features has the Toeplitz covariance R[i, j] = ρ^|i−j|, as the theorem requires.
The KLT, the eigenvectors of R, is indifferent to the order of the features; the DCT is not. The features of a network
have no order, so permutations of R show what remains of the theorem. For every basis:

- coding gain: 10 log10 of the arithmetic over the geometric mean of the coefficients' variances; 0 dB for white noise;
- first share: share of energy in the first D/8 coefficients (lowest frequencies, largest eigenvalues);
- correlation: share of the squared norm of the transformed covariance off its diagonal, 0 for the KLT;
- H of vectors drawn with this covariance, as its distance from the mean H of white noise in standard deviations.
"""

import json as jsons
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer
from rich.table import Table
from scipy.linalg import toeplitz
from torch import Tensor

from chiar.console import Overwrite, guarded, show, write_json
from chiar.errors import InputError
from chiar.files import check_new
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, dct_matrix, random_orthogonal
from chiar.kernels.white_noise import white_noise_entropy
from chiar.plots.figure import COLOURS, DASHES, Line, Panel, check_figure_path, save
from research.grid import draw_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT, DRAWS = "chiar-theorem/1", 256
KEPT = 8
"""One in KEPT coefficients is kept."""
KLT, DCT, SHUFFLED, RANDOM, IDENTITY = "KLT", "DCT", "DCT, features shuffled", "random rotation", "identity"
BASES = (KLT, DCT, SHUFFLED, RANDOM, IDENTITY)
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Check:
    """One basis at one width and correlation; for shuffled features the mean over permutations."""

    width: int
    rho: float
    basis: str
    gain_db: float
    first_share: float
    correlation: float
    entropy: float
    entropy_effect: float
    gain_range: tuple[float, float] | None = None
    """Smallest and largest over permutations."""


def autoregression(width: int, rho: float) -> Tensor:
    return torch.from_numpy(toeplitz(rho ** np.arange(width, dtype=np.float64)))


@dataclass(frozen=True)
class Source:
    """A covariance of features, and vectors drawn with it."""

    rho: float
    covariance_DD: Tensor
    sample_ND: Tensor

    @classmethod
    def make(cls, width: int, rho: float, seed: int) -> "Source":
        covariance_DD = autoregression(width, rho)
        # Another seed than the random rotation, which is made of Gaussian draws too.
        noise_ND = torch.randn(DRAWS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        return cls(rho, covariance_DD, noise_ND @ torch.linalg.cholesky(covariance_DD).T)

    def check(self, basis: str, basis_DD: Tensor) -> Check:
        """The rows of `basis_DD` are the basis vectors. An orthonormal basis preserves the norm of the covariance."""
        width = len(basis_DD)
        variance_D = ((basis_DD @ self.covariance_DD) * basis_DD).sum(-1)
        diagonal = float(variance_D.square().sum() / self.covariance_DD.square().sum())
        entropy = float(spectral_entropy(self.sample_ND, Transform(whole_DD=basis_DD)).mean())
        mean, deviation = white_noise_entropy(width)
        share = float(variance_D[: max(width // KEPT, 1)].sum() / variance_D.sum())
        gain = float(10 * (variance_D.mean().log10() - variance_D.log10().mean()))
        measured = gain, share, max(1 - diagonal, 0.0), entropy, (entropy - mean) / deviation
        return Check(width, self.rho, basis, *measured)

    def check_shuffled(self, shuffles: int, seed: int) -> Check:
        """The DCT of shuffled features is the DCT with its columns shuffled."""
        dct_DD, generator = dct_matrix(len(self.covariance_DD)), torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(dct_DD), generator=generator) for _ in range(shuffles)]
        checks = [self.check(SHUFFLED, dct_DD[:, order]) for order in orders]
        gains = [check.gain_db for check in checks]
        names = ("gain_db", "first_share", "correlation", "entropy", "entropy_effect")
        means = {name: float(np.mean([getattr(check, name) for check in checks])) for name in names}
        return Check(len(dct_DD), self.rho, SHUFFLED, **means, gain_range=(min(gains), max(gains)))


def check_theorem(widths: list[int], rhos: list[float], shuffles: int = 8, seed: int = 0) -> list[Check]:
    """All of BASES, in this order, for every ρ and width."""
    if not all(2 <= width <= 4096 for width in widths):
        raise InputError(f"widths must be from 2 to 4096, got {widths}.")
    if not all(-1 < rho < 1 for rho in rhos):
        raise InputError(f"correlations must lie between −1 and 1, got {rhos}.")
    all_checks = []
    for rho, width in product(rhos, widths):
        source = Source.make(width, rho, seed)
        # Eigenvectors as rows, largest eigenvalue first.
        klt_DD = torch.linalg.eigh(source.covariance_DD)[1].T.flip(0)
        bases = {KLT: klt_DD, DCT: dct_matrix(width), RANDOM: random_orthogonal(width, seed)}
        bases[IDENTITY] = torch.eye(width, dtype=torch.float64)
        checks = {name: source.check(name, basis_DD) for name, basis_DD in bases.items()}
        checks[SHUFFLED] = source.check_shuffled(shuffles, seed)
        all_checks += [checks[name] for name in BASES]
    return all_checks


def table_of(checks: list[Check]) -> Table:
    columns = ("ρ", "D", "basis", "coding gain, dB", "range", "first D/8", "correlation left", "H", "effect")
    title = "features correlated by ρ^|i−j| (effect: H in σ of white noise from its mean)"
    table = Table(*columns, box=None, title=title, title_justify="left")
    for check in checks:
        gain_range = "" if check.gain_range is None else f"{check.gain_range[0]:.3f}–{check.gain_range[1]:.3f}"
        table.add_row(
            f"{check.rho:g}", str(check.width), check.basis, f"{check.gain_db:.3f}", gain_range,
            f"{check.first_share:.1%}", f"{check.correlation:.2%}", f"{check.entropy:.4f}",
            f"{check.entropy_effect:+.1f}",
        )  # fmt: skip
    return table


def draw_theorem(checks: list[Check]) -> "Figure":
    """Coding gain and kept energy against width, one column per ρ."""
    rhos = list(dict.fromkeys(check.rho for check in checks))
    panels = []
    for part, name in (("gain_db", "coding gain, dB"), ("first_share", f"energy in the first D/{KEPT}")):
        for rho in rhos:
            lines = []
            for basis, colour, dashes in zip(BASES, COLOURS, (*DASHES, "-"), strict=False):
                own = [check for check in checks if check.rho == rho and check.basis == basis]
                points = sorted((float(check.width), getattr(check, part)) for check in own)
                lines.append(Line(points, basis, color=colour, linestyle=dashes, marker="o"))
            panels.append(Panel(f"ρ = {rho:g}: {name}", lines, bounds=(0, 1) if part == "first_share" else None))
    title = "Theorem 1: the DCT and the optimal basis for features correlated by ρ^|i−j|"
    return draw_grid(title, panels, "D, number of features", len(rhos))


@app.command()
def theorem(
    width: Annotated[str, typer.Option(metavar="D,D,…", help="Numbers of features.")] = "16,64,256,1024",
    rho: Annotated[str, typer.Option(metavar="ρ,ρ,…", help="Correlations of neighbouring features.")] = "0.5,0.9,0.99",
    shuffles: Annotated[int, typer.Option(min=1, help="Random permutations of the features.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of everything random.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON; - prints them.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them: a new .svg, .png or .pdf file.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Check Theorem 1's premise: the DCT against the KLT for correlated neighbouring features, and shuffled ones."""
    to_stdout = str(json) == "-"
    if json is not None and not to_stdout:
        check_new(json, overwrite)
    if out is not None:
        check_figure_path(out, overwrite)
    checks = check_theorem(
        [int(n) for n in numbers(width, "--width", int)], numbers(rho, "--rho", float), shuffles, seed
    )
    if out is not None:
        save(draw_theorem(checks), out, overwrite)
        typer.echo(f"wrote {out}", err=to_stdout)
    if json is not None:
        record = {"format": FORMAT, "checks": [asdict(check) for check in checks]}
        write_json(json, jsons.dumps(record, indent=1), overwrite)
    if not to_stdout:
        show(table_of(checks))


def numbers(text: str, option: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise InputError(f"{option} takes {whole}numbers separated by commas, got {text!r}.") from None


if __name__ == "__main__":
    guarded(app)
