"""Studies as data: those of research/studies, users' files, what is wrong with them, and the plan."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from chiar import presets
from chiar.errors import InputError
from chiar.studies.results import costs_of
from chiar.studies.study import find, make_plan
from commands import run

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "research" / "studies").glob("*.toml"))
RECORDED = sorted(path.parent.name for path in (ROOT / "docs" / "results").glob("*/results.json"))


def declared(study):
    """One run of each variant, without a corpus."""
    return {run.variant: run for run in reversed(make_plan(study, []).runs)}


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_of_a_study_can_be_built_and_counted(name, leads):
    for one in declared(find(name)).values():
        row = costs_of(one)
        assert row["parameters"] > 0
        assert row["flops_per_token"]["training"] >= 2.9 * row["flops_per_token"]["forward"]


@pytest.mark.parametrize("name", [[], ["routers40m"]])
def test_outside_a_checkout_there_are_no_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = run("study", "show", *name)
    assert code == 2 and "there is no ./research/studies here: go to a checkout of the project" in said


def test_a_variant_like_none_gets_the_list_however_long():
    code, said = run("study", "show", "bytes", "--only", "wibble")
    assert code == 2 and "unknown variant 'wibble'" in said and "Allowed: dense-6" in said


@pytest.mark.parametrize("name", ["routers40m_even", "routers40m_long"])
def test_v4_is_what_was_studied(name):
    studied = declared(find(name))["deep-eighth"].model_config().to_dict()
    size = ("hidden_size", "num_attention_heads", "num_hidden_layers", "layer_types", "intermediate_size")
    preset = presets.get("v4-16m", **{key: studied[key] for key in size}).to_dict()
    assert {key for key in preset if preset[key] != studied[key]} <= {"max_position_embeddings", "vocab_size"}


# What costs as much as predictive: in layers alone, and with the early head in the count.
EQUAL = {"tokens8k": ("dense-6", "dense-8"), "tokens50k": ("dense-6", "dense-wide"), "tokens1k": ("dense-6", "dense-6")}


@pytest.mark.parametrize("name", EQUAL)
def test_token_studies_train_far_enough_and_compare_equal_flops(name):
    study = find(name)
    rows = {variant: costs_of(one) for variant, one in declared(study).items()}
    assert all(study.tokens > 10 * row["parameters"] for row in rows.values())
    (layers, total), flops = EQUAL[name], {variant: row["flops_per_token"] for variant, row in rows.items()}
    assert study.baseline == layers
    # There is no part of a layer: a whole one is 4 to 17% of these.
    assert flops["hash"]["layers"] == pytest.approx(flops[layers]["layers"], rel=0.03)
    assert flops["predictive"]["forward"] == pytest.approx(flops[total]["forward"], rel=0.05)


# Tables 1 and 2 of the paper, typed again from its text: validation and test perplexity; and counted parameters.
TABLES = {
    "table1": ([(45.78, 44.63), (46.75, 45.62), (46.86, 45.67), (49.62, 48.34), (49.70, 48.45)], 36_124, 500, 10),
    "table2": ([(23.73, 23.58), (27.75, 27.51), (28.81, 28.56)], 18_062, 1000, 5),
}
SCHEDULE = {"batch": 128, "length": 256, "learning_rate": 1e-4, "final_learning_rate": 1e-6, "clip": 1.0}
SCHEDULE |= {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95}
PARAMETERS = {"table1": [16_025_344, *[15_765_257] * 2, *[15_764_225] * 2], "table2": [404_159_488, *[400_043_009] * 2]}


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_tables_have_its_numbers_models_and_schedule(name, corpus, listops):
    study, (numbers, steps, warmup, epochs) = find(name), TABLES[name]
    assert [(variant.paper["validation"], variant.paper["test"]) for variant in study.variants.values()] == numbers
    assert [costs_of(declared(study)[one])["parameters"] for one in study.variants] == PARAMETERS[name]
    assert study.tokens / epochs == pytest.approx(118e6, rel=0.005)  # the paper counts 118M tokens of WikiText-103
    plan = make_plan(study, [corpus] if name == "table1" else [corpus, listops])
    assert plan.steps == steps
    for one in plan.runs:
        settings, config = one.train_settings(), one.model_config()
        assert {**asdict(settings), **SCHEDULE, "warmup": warmup} == asdict(settings)
        assert config.dropout == 0.1 and one.validate
        assert (one.after == {"thresholds": "baseline-s0"}) == bool(config.routed_layers and config.router == "entropy")
        assert (settings.mixing, len(one.data)) == (("added", 2) if one.variant == "mixed" else ("weights", 1))
    for one in list(study.variants)[1:]:  # the router alone is changed
        ours, default = declared(study)[one].model_config().to_dict(), presets.get(study.preset).to_dict()
        assert {key for key in ours if default[key] != ours[key]} <= {"router", "routing", "collapse_regulariser"}


FILES = [
    ("tokens = 390", "token = 390", "unknown field of study 'token'. Did you mean 'tokens'?"),
    ("tokens = 390", "", "how long runs train: epochs or tokens"),
    ("tokens = 390", "tokens = 0", "must be positive"),
    ('baseline = "dense"', 'baseline = "learned"', "unknown control as baseline 'learned'"),
    ('role = "candidate"', 'role = "winner"', "unknown role of variant learned 'winner'"),
    ("seeds = [1]", "seeds = [-1]", "seeds must not be negative"),
    ("seeds = [1]", 'seeds = ["a"]', "seeds of variant learned must be a list such as [1, 2] or null"),
    ("seeds = [1]", "settings = { batch = 2 }", "variant learned cannot set batch"),
    ("seeds = [1]", 'after = { weights = "lerned" }', "unknown variant before learned 'lerned'"),
    ("seeds = [1]", "paper = { tests = 3.0 }", "'tests'. Did you mean 'test'?"),
    ("learned = {", '"a/b" = {', "becomes a folder"),
    ("seeds = [1]", "seeds =", "is not TOML"),
    ("length = 16", "length = 16, steps = 3", "the study cannot set steps"),
]
PLANS = [
    ("seeds = [1]", "settings = { recalibrate_every = 2 }", "variant learned: recalibrate_every needs"),
    ("seeds = [1]", "settings = { ratee = 2 }", "variant learned: unknown training setting 'ratee'"),
    ("tokens = 390", "tokens = 39", "39 tokens is less than one step of 4 × 16 tokens"),
    ('router = "learned"', 'own_ffn = true, router = "learned"', "commit bde4d4f runs it"),
    ('router = "learned"', "operators = ['skip', 'attention']", "variant learned: the operator 'skip' was removed"),
    ("micro_batch = 2", "micro_batch = 3", "does not divide into micro-batches of 3"),
]


@pytest.mark.parametrize(("before", "after", "message"), FILES + PLANS)
def test_what_is_wrong_is_one_sentence_before_anything_is_written(toml, corpus, tmp_path, before, after, message):
    path = toml((before, after))
    code, output = run("study", "run", path, "--data", corpus, "--out", tmp_path / "out")
    assert code == 2 and message in output and "\n" not in output.strip()
    assert ((before, after, message) in PLANS or str(path) in output) and not (tmp_path / "out").exists()


def test_studies_and_data_that_do_not_fit(toml, corpus, listops, tmp_path):
    for more, message in (
        (["--only", "lerned"], "unknown variant 'lerned'. Did you mean 'learned'?"),
        (["--seeds", "0,x"], "--seeds takes numbers"),
        (["--data", corpus], "give --data once, not 2 times"),
    ):
        code, output = run("study", "run", toml(), "--data", corpus, "--out", tmp_path / "out", *more)
        assert code == 2 and message in output and not (tmp_path / "out").exists()
    assert "unknown study 'routers40'. Did you mean 'routers40m'?" in run("study", "show", "routers40")[1]
    assert "is not a study" in run("study", "table", tmp_path)[1]
    table2 = find("table2")
    for data, only, message in (
        ([corpus], None, "mixed needs more corpora"),
        ([listops, corpus], None, "name a text first"),
    ):
        with pytest.raises(InputError, match=message):
            make_plan(table2, data, only)
    # What a variant comes after is run with it, and before it.
    assert [one.name for one in make_plan(table2, [corpus], ["threshold"]).runs] == ["baseline-s0", "threshold-s0"]


def test_a_file_can_extend_another_study(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "tiny"\ntokens = 2048\nsettings = { batch = 4, micro_batch = 4 }\nconfig = { keys = "all" }\n'
        '[variants.mine]\nrole = "candidate"\nconfig = { keys = "routed" }\n'
    )
    base, study = find("tiny"), find(str(path))
    assert (study.name, study.tokens, study.preset) == ("mine", 2048, base.preset)
    assert study.settings == {**base.settings, "batch": 4, "micro_batch": 4}
    assert list(study.variants) == [*base.variants, "mine"]
    # What all share is changed, but not what a variant says.
    assert [declared(study)[name].model_config().keys for name in ("static", "mine")] == ["all", "routed"]


def test_the_plan_and_what_is_shown_of_it(toml, corpus):
    study = find(str(toml()))
    plan = make_plan(study, [corpus])
    assert [run.name for run in plan.runs] == ["dense-s0", "hash-s0", "dense-s1", "hash-s1", "learned-s1"]
    again = make_plan(study, [corpus], ["learned", "d*"], "3,3")
    assert [one.name for one in again.runs] == ["dense-s3", "learned-s3"]
    epochs = make_plan(find(str(toml(("tokens = 390", "epochs = 2")))), [corpus])
    assert epochs.steps == 2 * ((epochs.corpora[0].split("train").tokens - 1) // 16) // 4
    code, output = run("study", "show", toml(), "--data", corpus)
    assert code == 0 and "384 tokens in 6 steps" in output and "257 token ids" in output
    assert "0.250" in next(line for line in output.splitlines() if line.startswith(" hash "))
    assert run("study", "show")[1].count("\n") == len(NAMES)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results_are_shown_with_what_was_removed_marked(name, tmp_path):
    folder = ROOT / "docs" / "results" / name
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, output = run("study", "table", folder, "--out", tmp_path / "out")
    assert code == 0
    text = (tmp_path / "out" / "table.md").read_text()
    marked = {"candidates": "mod †", "own-networks": "hash-own †", "routers40m": "thirds-time †"}.get(name)
    assert ("Commit bde4d4f" in text) == ("†" in output) == ("†" in text) and (marked or "") in text
    assert all(f"| {run['variant']} " in text for run in json.loads((folder / "results.json").read_text())["runs"])
    assert "dense †" not in text and (tmp_path / "out" / "pareto.svg").is_file()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
