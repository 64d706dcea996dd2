"""One run of a study in a process of its own: `python -m chiar.studies.worker FOLDER NAME JOBS`.

It ends when the study does: the study holds the other end of its standard input.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from chiar.cli import guarded
from chiar.errors import InputError


def end_with_the_study() -> None:
    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def work(folder: Path, name: str, jobs: int) -> None:
    """Train what is left of the run, then measure its final weights on the test split."""
    import torch

    from chiar.evaluation.compare import REPORT
    from chiar.evaluation.harness import evaluate
    from chiar.files import aside_of, write_whole
    from chiar.studies.folder import StudyFolder, read_json
    from chiar.training.cli import configuration
    from chiar.training.loop import TrainingStopped, train
    from chiar.training.run_folder import RUN
    from chiar.training.settings import TrainSettings

    study, began = StudyFolder(folder), time.time()
    run, told = study.run(name), read_json(study.record(name))
    settings = TrainSettings.from_dict({**told["settings"], "data": told["data"]})
    config = configuration(told["preset"], told["config"], Path(told["data"][0]))
    with study.attempts(name).open("a", encoding="utf-8") as attempts:
        attempts.write(json.dumps({"started": round(began, 1), "jobs": jobs}) + "\n")
        attempts.flush()
        aside_of(run / RUN).unlink(missing_ok=True)  # of a process killed before the run began
        try:
            train(config, settings, run, resume=(run / RUN).is_file(), device=told["device"])
        except TrainingStopped as stopped:
            raise InputError(str(stopped)) from stopped
        torch.set_float32_matmul_precision("highest")
        report = evaluate(
            str(run / "final"),
            settings.data[0],
            "test",
            length=settings.length,
            rows=told["test_rows"],
            batch_size=settings.micro_batch,
            device=told["device"],
        )
        attempts.write(json.dumps({"seconds": round(time.time() - began, 1)}) + "\n")
        attempts.flush()
        write_whole(run / REPORT, report.to_json())


if __name__ == "__main__":
    end_with_the_study()
    guarded(lambda: work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
