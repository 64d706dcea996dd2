"""`make demo` runs this script; here with a few steps, over what an interrupted demo left."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from chiar.model.load import load_config
from chiar.routing.flops import count_flops

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.sh"


def demo(folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DEMO_STEPS": "12", "DEMO_ROWS": "4", "OMP_NUM_THREADS": "1"}
    return subprocess.run(["sh", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_demo_starts_afresh_and_makes_everything(tmp_path):
    out = tmp_path / "runs" / "demo"
    (out / "dense").mkdir(parents=True)
    (out / "dense" / "run.json").write_text("{}")
    (out / "made-by-demo").touch()
    (tmp_path / "runs" / "mine").mkdir()
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replacing the earlier demo" in done.stdout and "unigram entropy" in done.stdout
    compared, _, read = " ".join(done.stdout.split()).partition("gap to the baseline")
    assert compared and "12 steps of 2048 bytes" in read and "This early the dense model is ahead" in read
    assert "docs/bytes.md" in read and (SCRIPT.parents[1] / "docs" / "bytes.md").is_file()
    assert (tmp_path / "runs" / "mine").is_dir()
    v5, dense = (load_config(str(out / name / "best")) for name in ("v5", "dense"))
    assert v5.stacks == {2: range(2, 6)} and not dense.stacks
    assert count_flops(v5, 256).total <= count_flops(dense, 256).total
    for name in ("curves", "routing"):
        ElementTree.fromstring((out / f"{name}.svg").read_text())


def test_a_folder_of_the_users_own_is_left_alone(tmp_path):
    out = tmp_path / "runs" / "demo"
    out.mkdir(parents=True)
    (out / "mine").write_text("keep")
    done = demo(tmp_path)
    assert done.returncode == 2 and "was not made by the demo" in done.stderr
    assert [path.name for path in out.iterdir()] == ["mine"]
