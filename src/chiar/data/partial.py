"""The folder beside the result where work is kept until it is complete: `.NAME.partial`."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chiar.data.encoding import WorkerDied
from chiar.errors import InputError
from chiar.files import check_new, hold

INPUTS = "inputs.json"
LOCK = "lock"


@contextmanager
def partial_folder(out: Path, inputs: dict[str, Any], note: Callable[[str], None]) -> Iterator[Path]:
    """Becomes `out` when the block ends well.

    Work found there is kept if it was begun with equal `inputs` and cleared otherwise. It survives a kill, a full disk
    or an interruption; input that is refused leaves nothing behind.
    """
    out = Path(os.path.abspath(out))
    check_new(out)
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        hold(lock, f"another process is preparing {out} right now.")
        recorded = folder / INPUTS
        if not recorded.is_file() or recorded.read_text(encoding="utf-8") != _canonical(inputs):
            if recorded.is_file():
                note(f"an unfinished {out.name} from other inputs or options was there; it is begun anew.")
            _clear(folder)
            recorded.write_text(_canonical(inputs), encoding="utf-8")
        else:
            note(f"going on with the unfinished {out.name}.")
        try:
            yield folder
        except WorkerDied:
            raise
        except InputError:
            shutil.rmtree(folder)
            raise
        check_new(out)
        recorded.unlink()
        (folder / LOCK).unlink()
        if out.exists():
            out.rmdir()
        os.replace(folder, out)


def _canonical(inputs: dict[str, Any]) -> str:
    return json.dumps(inputs, sort_keys=True, indent=1)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
