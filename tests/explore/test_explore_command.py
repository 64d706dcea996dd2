"""How `chiar explore` begins and ends; what it exports is one file that asks for nothing and shows text as text."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import webbrowser
from queue import Queue
from unittest.mock import Mock

import httpx
import pytest
from page_server import save_model

from chiar.colours import LIGHT, NAMES, RAMPS, mix, uncertainty
from chiar.evaluation.report import EvaluationReport, LanguageScores, LayerUse, RoutingUse
from chiar.explore.report import STATIC, digest
from chiar.explore.server import Explorer
from chiar.model.load import load_config
from commands import run

PROMPTS = ["light and dark", '</script><script>alert("x")</script> & \u202e \x1b[31m']


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    prompts = (word for prompt in PROMPTS for word in ("--prompt", prompt))
    code, said = run("explore", folders[0], "--beside", folders[1], *prompts, "--out", out)
    assert code == 0 and f"wrote {out}" in said
    return out


def sections(path):
    """By title."""
    data = re.search(r'<script type="application/json" id="sections">(.*?)</script>', path.read_text())[1]
    assert not set("<>&") & set(data)  # nothing in it can end the element
    return {section["title"]: section for section in json.loads(data)}


def test_an_export_shows_what_the_page_does(written, served, folders):
    *shown, models = sections(written).values()
    for prompt, section in zip(PROMPTS, shown, strict=True):
        views = [served.post("/api/route", {"model": number, "text": prompt}).json() for number in (0, 1)]
        assert section["views"] == views
    assert models["title"] == "Models" and models["head"] == ["", *folders]
    width = str(load_config(folders[0] + "/best").hidden_size)
    assert ["hidden_size", width, width] in models["rows"]


def test_nothing_comes_from_elsewhere_and_text_stays_text(written):
    text = written.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    allowed = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.DOTALL)
    assert len(allowed) == 3 and all(digest(body) in policy for body in allowed) and "unsafe" not in policy
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not any(word in outside for word in ("http:", "https:", "@import", "url("))
    assert not re.search(r'\b(?:src|href)="(?!data:)', outside)
    assert 'alert("x")' not in text and "\x1b" not in text and "\u202e" not in text
    # Scripts make nodes; no string becomes markup.
    assert not any(word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"))


def test_nothing_is_overwritten_unasked_or_half(written, folders, monkeypatch):
    before, arguments = written.read_text(), ("explore", folders[0], "--prompt", "a", "--out", written)
    code, said = run(*arguments)
    assert code == 2 and "exists already" in said and written.read_text() == before
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", Mock(side_effect=OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            run(*arguments, "--overwrite")
    assert written.read_text() == before and [path.name for path in written.parent.iterdir()] == [written.name]
    assert run(*arguments, "--overwrite")[0] == 0 and written.read_text() != before


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost")])
def test_open_shows_the_page_or_the_file_in_the_browser(folders, tmp_path, monkeypatch, host, name):
    seen, served, out = Queue(), Mock(), tmp_path / "report.html"
    monkeypatch.setattr(webbrowser, "open", lambda address: seen.put(address))
    monkeypatch.setattr(Explorer, "run", served)
    assert run("explore", "--open", "--host", host, "--port", 0)[0] == 0 and served.called
    assert re.fullmatch(rf"http://{name}:\d+/", seen.get(timeout=60))
    assert run("explore", folders[0], "--prompt", "a", "--out", out, "--open")[0] == 0
    assert seen.get(timeout=60) == out.as_uri()


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


def test_a_run_brings_its_curves_settings_and_evaluation(tmp_path, monkeypatch):
    folder, out = tmp_path / "run", tmp_path / "report.html"
    config = load_config(str(save_model(folder / "best")))
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
    assert run("explore", folder, "--prompt", "light", "--out", out)[0] == 0
    training, evaluation = (sections(out)[title] for title in ("Training", "Evaluation"))
    assert training["picture"].startswith("data:image/svg+xml;base64,")
    assert ["learning_rate", "0.003"] in training["rows"] and ["commit", "abcdef012345"] in training["rows"]
    assert {"1,234", "4.3210"} <= {row[1] for row in evaluation["rows"]}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("chiar.explore.report.open_models", lambda *_, **__: pytest.fail("worked first"))
    code, said = run("explore", folder, "--prompt", "light", "--out", tmp_path / "other.html")
    assert code == 2 and "pip install 'chiar[plots]'" in said


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_says_how_uncertain_as_pictures_do():
    texts = [([0.2, 0.25, 0.3], cut) for cut in (0.1, 0.25, 0.9, None)] + [([-0.5, 0.1], -0.2), ([0.3, 0.3], 0.3)]
    layers = [{"kind": "dark", "entropy": scores, "thresholds": cut and [cut]} for scores, cut in texts]
    shown = f"{json.dumps(layers)}.map((layer) => ChiarMarks.uncertainty({{ layers: [layer] }}))"
    script = f"{(STATIC / 'marks.js').read_text()}\nconsole.log(JSON.stringify({shown}));"
    found = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == [
        pytest.approx([uncertainty(score, cut, min(scores), max(scores)) for score in scores]) for scores, cut in texts
    ]


def test_the_scripts_have_the_colours_and_names_of_pictures():
    script, numbers = (STATIC / "marks.js").read_text(), r"\[(\d+), (\d+), (\d+)\]"
    ramps = re.findall(rf"(\w+): \[{numbers}, {numbers}\]", script)
    found = {name: (tuple(map(int, ends[:3])), tuple(map(int, ends[3:]))) for name, *ends in ramps}
    assert found == {"light": LIGHT, **RAMPS}
    assert all(f'{name}: "{words}"' in script for name, words in NAMES.items())
    assert "LIGHT = RAMPS.light[1], DARK = RAMPS.attention[1]" in script  # words, from light to dark
    style, dark = (STATIC / "style.css").read_text(), RAMPS["attention"]
    assert re.findall("--dark: (#.{6})", style) == [mix(*dark, share) for share in (1, 0)]  # by light, dark theme
