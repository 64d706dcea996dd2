"""How `chiar explore` begins and ends; what it exports is one file that asks for nothing and shows text as text."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from page_server import save_model

from chiar.evaluation.report import EvaluationReport, LanguageScores, LayerUse, RoutingUse
from chiar.explore.report import STATIC, digest, table
from chiar.model.load import load_config
from chiar.plots import LIGHT, NAMES, RAMPS
from commands import run

HOSTILE = '</script><script>alert("x")</script> & \u202e \x1b[31m'


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    prompts = ("--prompt", "light and dark", "--prompt", HOSTILE)
    code, said = run("explore", folders[0], "--beside", folders[1], *prompts, "--export", out)
    assert code == 0 and f"wrote {out}" in said
    return out


def scripts(text):
    return re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)


def test_the_views_are_those_of_the_page(written, served):
    views = json.loads(next(body for attributes, body in scripts(written.read_text()) if 'id="views"' in attributes))
    assert len(views) == 2
    for prompt, pair in zip(["light and dark", HOSTILE], views, strict=True):
        for number, view in enumerate(pair):
            assert view == served.post("/api/route", {"model": number, "text": prompt}).json()


def test_nothing_comes_from_elsewhere_and_text_stays_text(written, folders):
    text = written.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    allowed = [body for attributes, body in scripts(text) if "application/json" not in attributes]
    allowed += re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(allowed) == 3 and all(digest(body) in policy for body in allowed) and "unsafe" not in policy
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not any(word in outside for word in ("http:", "https:", "@import", "url("))
    assert not re.search(r'\b(?:src|href)="(?!data:)', outside)
    assert "alert(&quot;x&quot;)" in text and 'alert("x")' not in text and "\x1b" not in text and "\u202e" not in text
    assert "<b>" not in table({"<b>": {"<b>": "<b>", "a": ["<b>"]}}, ["<b>"])
    assert all(f">{heading}</h2>" in text for heading in ("Models", "Prompt 1", "Prompt 2"))
    assert "hidden_size" in text and f"{load_config(folders[0] + '/best').hidden_size}" in text
    assert "Training</h2>" not in text and "Evaluation</h2>" not in text


def test_nothing_is_overwritten_unasked(written, folders):
    before, arguments = written.read_text(), ("explore", folders[0], "--prompt", "a", "--export", written)
    code, said = run(*arguments)
    assert code == 2 and "exists already" in said and written.read_text() == before
    assert run(*arguments, "--overwrite")[0] == 0 and written.read_text() != before


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "positions", "v2-tiny", max_position_embeddings=20)
    for words, message in {
        "v3-tiny --prompt a --export x.pdf": "name the file x.html",
        "v3-tiny --prompt= --export x.html": "the text is empty",
        "v3-tiny --prompt a --export x.html --evaluation none.json": "there is no file",
        "v3-tiny --export x.html": "go together",
        "v3-tiny --prompt a": "go together",
        "v3-tiny --beside v3-tiny --prompt a --export x.html": "named twice",
        f"positions --prompt {'x' * 21} --export x.html": "20 are the most",
        "nowhere/at-all": "no folder",
        "v9-tiny": "unknown preset",
        "--beside v3-tiny": "--beside needs a first model",
        "v3-16m": "--tokenizer",
    }.items():
        code, said = run("explore", *words.split(), "--port", 0)
        assert code == 2 and message in said, words
    assert [path.name for path in tmp_path.iterdir()] == ["positions"]


def test_what_keeps_the_page_from_starting(folders, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run("explore", folders[0], "--port", taken.getsockname()[1])
    assert code == 2 and "cannot listen" in said and "--port 0" in said
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = run("explore", folders[0], "--port", 0)
    assert code == 2 and "pip install 'chiar[page]'" in said


@pytest.mark.slow
def test_it_serves_until_interrupted(tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-m", "chiar", "explore", "v3-tiny", "--port", "0"]
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[4]
            assert url.startswith("http://127.0.0.1:")
            wish = {"text": "light and dark", "tokens": 200}
            with httpx.stream("POST", f"{url}api/continue", json=wish, timeout=30) as response:
                next(response.iter_lines())
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_run_brings_its_curves_settings_and_evaluation(tmp_path):
    folder = tmp_path / "run"
    save_model(folder / "best")
    config = load_config(str(folder / "best"))
    settings = {"steps": 20, "batch": 8, "length": 16, "learning_rate": 0.003, "seed": 7}
    record = {"config": config.to_dict(), "settings": settings, "commit": "abcdef0123456789"}
    (folder / "run.json").write_text(json.dumps(record))
    records = [{"step": step, "loss": 5.0 - step / 10, "rate": 1e-3, "use": [[0.4, 0.6]] * 2} for step in (1, 10, 20)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    use = [LayerUse(layer, {"spectral": 0.75, "attention": 0.25}) for layer in config.routed_layers]
    scores = LanguageScores(tokens=1234, nll=4.321, words=900, lines=30, bytes=5000)
    evaluated = EvaluationReport(
        *(str(folder / "best"), str(folder), "corpus", "0" * 64, "test", 16, None, None, 16, "fp32", "cpu"),
        *(scores, RoutingUse(use, None, None), 1e6, 2e6, 16),
    )
    (folder / "evaluation.json").write_text(evaluated.to_json())
    assert run("explore", folder, "--prompt", "light", "--export", tmp_path / "report.html")[0] == 0
    text = (tmp_path / "report.html").read_text()
    assert ">Training</h2>" in text and ">Evaluation</h2>" in text
    assert "data:image/svg+xml;base64," in text and "abcdef012345<" in text
    assert "1,234" in text and "4.3210" in text


def test_the_scripts_have_the_colours_and_names_of_pictures():
    script = (STATIC / "marks.js").read_text()
    numbers = r"\[(\d+), (\d+), (\d+)\]"
    ramps = {
        name: (tuple(map(int, ends[:3])), tuple(map(int, ends[3:])))
        for name, *ends in re.findall(rf"(\w+): \[{numbers}, {numbers}\]", script)
    }
    assert ramps == {"light": LIGHT, **RAMPS}
    assert all(f'{name}: "{words}"' in script for name, words in NAMES.items() if name not in ("skip", "bypass"))
