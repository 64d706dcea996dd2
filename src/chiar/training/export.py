"""A run's best or final weights as a folder from_pretrained opens, with tokenizer and thresholds."""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from chiar.model.heads import export_model
from chiar.training import checkpoint
from chiar.training.run_folder import RunFolder
from chiar.training.tasks import TaskModel


def export(model: TaskModel, corpus: Any, folder: RunFolder, link: Path, step: int) -> None:
    """Written aside and switched: until the link changes it points to the folder it pointed to before."""
    name = f"{link.name}-{checkpoint.step_name(step)}"
    aside = folder.exports / f".{name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    export_model(model, corpus, aside)
    shutil.copytree(corpus.folder / "tokenizer", aside, dirs_exist_ok=True)
    # A step that is done again after a resume was exported before: that one stays until the link has moved.
    names = (folder.exports / (f"{name}-again-{again}" if again else name) for again in count())
    target = next(path for path in names if not path.exists())
    os.replace(aside, target)
    checkpoint.point(link, target)
    for other in (*folder.exports.glob(f"{link.name}-*"), *folder.exports.glob(f".{link.name}-*.partial")):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
