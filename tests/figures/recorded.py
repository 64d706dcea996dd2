"""Records to draw, written by hand so that every number is known."""

import json
from xml.etree import ElementTree

from chiar import presets
from chiar.evaluation.report import EvaluationReport, LanguageScores, LayerUse, RoutingUse

SVG = "{http://www.w3.org/2000/svg}"
SETTINGS = {"batch": 4, "length": 8, "micro_batch": 2, "data": ["text"], "mixing": "weights", "evaluate_rows": 4}


def write_run(folder, preset="v3-tiny", records=(), **run):
    """A run folder with what pictures need: run.json and metrics.jsonl."""
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(presets.get(preset).to_dict()))
    stored = {"config": config, "settings": SETTINGS, "data": {"text": "f1"}, **run}
    (folder / "run.json").write_text(json.dumps(stored))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def report(loss=3.0, flops=100.0, baseline=100.0, routed=False, **changes):
    layers = [LayerUse(1, {"spectral": 0.5, "attention": 0.5})] if routed else []
    known = {
        "model": "baseline-tiny", "run": None, "corpus": "text", "fingerprint": "f1", "split": "test", "length": 8,
        "stride": None, "rows": None, "batch_size": 1, "precision": "fp32", "device": "cpu",
        "scores": LanguageScores(10, loss, 5, 1, 20), "routing": RoutingUse(layers, None, None),
        "flops": flops, "baseline_flops": baseline, "flops_length": 8,
    }  # fmt: skip
    return EvaluationReport(**{**known, **changes})


def save_report(path, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(**changes).to_json())
    return path


def words(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def elements(svg, kind, name):
    return [element for element in ElementTree.fromstring(svg).iter(f"{SVG}{kind}") if element.get("class") == name]
