"""The results of a study as a picture: loss against counted FLOPs, and against step time where it is known."""

from typing import Any

from chiar.analysis.pareto import Mark, Scatter, draw_scatters


def draw(results: dict[str, Any]) -> str:
    rows = results["variants"]
    paired = all(row["paired_loss"] is not None for row in rows)
    loss = "test loss, nats per token"
    if paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1:
        loss += " (baseline's mean + paired Δ)"
    panels = [
        Scatter(loss, "counted MFLOPs a token, forward", [by_flops(row, n, paired) for n, row in enumerate(rows)])
    ]
    timed, axis = step_times(results)
    if timed:
        placed = [(n, row, at) for n, (row, at) in enumerate(zip(rows, timed, strict=True)) if at is not None]
        marks = [by_time(row, n, paired, at) for n, row, at in placed]
        panels.append(Scatter(loss, axis, marks))
    return draw_scatters(results["title"], panels)


def step_times(results: dict[str, Any]) -> tuple[list[float | None], str]:
    """Those of `chiar study time`; else those of training, if every variant was trained alone."""
    rows = results["variants"]
    if results["times"] is not None:
        times = [row["step_ms"] for row in rows]
        return (times if any(times) else []), f"measured training step, ms, {results['times']['device']}"
    alone = [row["step_ms_in_training"] for row in rows]
    return (
        alone if all(alone) else []
    ), f"measured training step, ms (median in training), {results['runs'][0]['device']}"


def by_flops(row: dict[str, Any], number: int, paired: bool) -> Mark:
    mean, losses = heights(row, paired)
    flops = [
        value / 1e6
        for value, seed in zip(row["flops_by_seed"], row["seeds"], strict=True)
        if not paired or seed in row["gap_seeds"]
    ]
    at = row["flops_per_token"]["forward"] / 1e6
    return Mark(number + 1, row["variant"], row["role"], at, mean, list(zip(flops, losses, strict=True)))


def by_time(row: dict[str, Any], number: int, paired: bool, time: float) -> Mark:
    mean, losses = heights(row, paired)
    return Mark(number + 1, row["variant"], row["role"], time, mean, [(time, loss) for loss in losses])


def heights(row: dict[str, Any], paired: bool) -> tuple[float, list[float]]:
    return (row["paired_loss"], row["paired_losses"]) if paired else (row["test_loss"], row["losses"])
