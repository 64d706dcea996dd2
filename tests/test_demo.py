"""`make demo` runs this script; here with a few steps, over what an interrupted demo left."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from chiar.model.load import load_config

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.sh"


def demo(folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DEMO_STEPS": "12", "OMP_NUM_THREADS": "1"}
    return subprocess.run(["sh", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_demo_starts_afresh_and_makes_everything(tmp_path):
    out = tmp_path / "runs" / "demo"
    (out / "baseline").mkdir(parents=True)
    (out / "baseline" / "run.json").write_text("{}")
    (out / "made-by-demo").touch()
    (tmp_path / "runs" / "mine").mkdir()
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "starting afresh" in done.stdout and "unigram entropy" in done.stdout
    compared, _, read = " ".join(done.stdout.split()).partition("gap to the baseline")
    assert compared and "12 steps of 1024 tokens" in read and "says nothing about routing" in read
    assert (
        "docs/reproduction.md, C6" in read and "## C6" in (SCRIPT.parents[1] / "docs" / "reproduction.md").read_text()
    )
    assert (tmp_path / "runs" / "mine").is_dir()
    assert load_config(str(out / "v3" / "best")).thresholds[0] != load_config("v3-tiny").layer_thresholds()[0][0]
    for name in ("curves", "routing"):
        ElementTree.fromstring((out / f"{name}.svg").read_text())


def test_a_folder_of_the_users_own_is_left_alone(tmp_path):
    out = tmp_path / "runs" / "demo"
    out.mkdir(parents=True)
    (out / "mine").write_text("keep")
    done = demo(tmp_path)
    assert done.returncode == 2 and "was not made by the demo" in done.stderr
    assert [path.name for path in out.iterdir()] == ["mine"]
