"""Results of the same study from another folder or machine: their runs count as done, and no weights are needed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiar.errors import InputError
from chiar.files import write_whole
from chiar.studies.folder import ADDED, STUDY, TIMES, StudyFolder, complain, read_json
from chiar.studies.table import read_saved


def add_results(folder: StudyFolder, path: Path, say: Callable[[str], None] = print) -> None:
    """Takes the runs of a results.json into the folder, which is begun where there is none."""
    results = read_saved(path)
    folder.check_free()
    with folder.held():
        begun = (folder.path / STUDY).is_file()
        known = folder.read()["variants"] if begun else []
        if begun:
            complain(folder.read()["common"], results["common"], str(folder.path))
        for part in (folder.runs, folder.records):
            part.mkdir(parents=True, exist_ok=True)
        added = taken(folder, path, results)
        folder.write(results["title"], results["corpus"], results["common"], results["declared"], known)
        write_whole(folder.path / ADDED, json.dumps({**folder.added(), **added}, indent=1, ensure_ascii=False))
        say(f"added {', '.join(added) if added else 'nothing new'}")
        add_times(folder, results["times"], say)


def taken(folder: StudyFolder, path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The runs that are new here; those that are not must have measured the same."""
    here = {told["name"] for told in folder.finished_runs()} if (folder.path / STUDY).is_file() else set()
    added = {}
    for run in results["runs"]:
        name, known = run["name"], folder.added().get(run["name"])
        if name in here or (known is not None and known["test_loss"] != run["test_loss"]):
            raise InputError(
                f"run {name} of {path} is finished in {folder.path} too: which of the two counts is yours to say."
            )
        if known is None:
            added[name] = run
    return added


def add_times(folder: StudyFolder, times: dict[str, Any] | None, say: Callable[[str], None]) -> None:
    """Step times, where they are of the machine those in the folder are of."""
    if times is None:
        return
    path = folder.path / TIMES
    own = read_json(path) if path.is_file() else {**times, "variants": {}}
    if any(own[part] != value for part, value in times.items() if part not in ("variants", "drift")):
        say("its step times are of another machine than those here and were left out")
        return
    merged = {**own, "variants": {**times["variants"], **own["variants"]}}
    write_whole(path, json.dumps(merged, indent=1, ensure_ascii=False))
