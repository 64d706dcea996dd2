"""Where a run's records lie on the horizontal axis: at their steps, tokens or time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from chiar.errors import InputError, unknown_name

OVER = ("steps", "tokens", "time")
UNITS = {
    "steps": ((1.0, "steps"),),
    "tokens": ((1.0, "training tokens"), (1e3, "thousand training tokens"), (1e6, "million training tokens")),
    "time": ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")),
}
REMARK = " of training, after the first step and without evaluations"


def places(run: dict[str, Any], records: Sequence[dict[str, Any]], over: str, name: str) -> list[float]:
    """One number a record: steps, tokens, or seconds since the first record.

    A record's speed is that of the steps since the one before it, evaluations left out. The first step's time is mostly
    compiling, so time begins after it.
    """
    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    steps = [float(record["step"]) for record in records]
    if over == "steps":
        return steps
    a_step = tokens_per_step(run, records, name)
    if over == "tokens":
        return [step * a_step for step in steps]
    seconds = [0.0]
    for before, record in pairwise(records):
        speed = record.get("tokens_per_second")
        if not speed:
            raise InputError(f"{name} has no tokens_per_second at step {record['step']}: draw it over steps or tokens.")
        seconds.append(seconds[-1] + (record["step"] - before["step"]) * a_step / speed)
    return seconds


def tokens_per_step(run: dict[str, Any], records: Sequence[dict[str, Any]], name: str) -> int:
    """Where every batch is rows of whole length: one text, or several by turns."""
    settings = run.get("settings", {})
    if "batch" not in settings or "length" not in settings:
        raise InputError(f"{name} does not say its batch and length in run.json: draw it over steps.")
    added = settings.get("mixing") == "added" and len(settings.get("data", [])) > 1
    if added or any("accuracy" in record for record in records):
        raise InputError(f"{name} read batches of unequal lengths, whose tokens are not recorded: draw it over steps.")
    return settings["batch"] * settings["length"]


def unit(over: str, largest: float) -> tuple[float, str]:
    """What to divide by so that numbers are short, and the name of the axis."""
    factor, axis = next((unit for unit in reversed(UNITS[over]) if largest >= 2 * unit[0]), UNITS[over][0])
    return factor, axis + (REMARK if over == "time" else "")
