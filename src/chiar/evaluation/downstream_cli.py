"""`chiar eval --harness`. Heavy imports happen inside."""

from pathlib import Path

from chiar.errors import InputError


def check_choice(
    data: Path | None,
    harness: str | None,
    path: Path | None,
    download: bool,
    few_shot: int | None,
    split: str | None,
    stride: int | None,
) -> None:
    """A corpus or tasks, and no option of the other."""
    if (data is None) == (harness is None):
        raise InputError("say what to measure on: --data CORPUS, or --harness TASKS.")
    corpus = {"--split": split, "--stride": stride}
    tasks = {"--harness-path": path, "--harness-download": download or None, "--few-shot": few_shot}
    for option, value in (tasks if harness is None else corpus).items():
        if value is not None:
            raise InputError(f"{option} is for --{'harness' if harness is None else 'data'}: leave it out.")


def evaluate_downstream(
    model: str,
    tasks: str,
    path: Path | None,
    download: bool,
    few_shot: int | None,
    rows: int | None,
    length: int | None,
    batch_size: int,
    precision: str,
    device: str,
    json: Path | None,
) -> None:
    import logging
    import os
    import sys

    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported

    from chiar.evaluation.downstream import downstream_tables, run_tasks, stay_offline

    if not download:
        stay_offline()
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    from chiar.evaluation.cli import publish
    from chiar.files import check_new

    if json is not None and str(json) != "-":
        check_new(json)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError("--harness takes the names of tasks, separated by commas.")
    report = run_tasks(
        model,
        names,
        folder=path,
        few_shot=few_shot,
        rows=rows,
        length=length,
        batch_size=batch_size,
        precision=precision,
        device=device,
    )
    publish(report, downstream_tables(report), json)
