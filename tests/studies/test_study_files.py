"""Studies as data: those of research/studies, users' files, what is wrong with them, and the plan."""

from pathlib import Path

import pytest

from chiar import presets
from chiar.errors import InputError
from chiar.model.load import count_parameters
from chiar.studies.results import costs_of
from chiar.studies.study import changed, find, make_plan, plain_config, removed, study_names
from chiar.training.loop import learning_rate
from commands import run

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "research" / "studies").glob("*.toml"))
RECORDED = sorted(path.parent.name for path in (ROOT / "docs" / "results").glob("*/results.json"))


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_of_a_study_can_be_built_and_counted(name):
    study = find(name)
    assert study.name == name and name in study_names()
    for variant in study.variants:
        assert not removed(variant.config)
        row = costs_of(study, variant)
        costs = row["flops_per_token"]
        assert row["parameters"] > 0
        assert costs["forward"] == pytest.approx(costs["layers"] + costs["logits"])
        assert costs["training"] >= 2.9 * costs["forward"]


def test_routers40m_and_v4_are_what_was_studied():
    study = find("routers40m")
    configs = {variant.name: plain_config(study, variant) for variant in study.variants}
    controls = {variant.name for variant in study.variants if variant.role == "control"}
    assert {"dense", "dense-post", "dense-9", "dense-6", "dense-w256", "static", "hash", "position", "soft"} <= controls
    assert 40e6 < count_parameters(configs["dense"]) < 41e6
    for config in (config for name, config in configs.items() if name not in controls):
        assert sum(config.layer_fractions()) / len(config.routed_layers) <= 0.5  # nobody gets more attention than half
    # Half the layers switched off cost what half the layers cost; straight-through over both trains on both.
    lean, six, both, soft = (
        costs_of(study, study.variant(name))["flops_per_token"]
        for name in ("static-lean", "dense-6", "learned-both", "soft")
    )
    assert lean["forward"] == six["forward"] and both["training"] == pytest.approx(3 * soft["forward"])
    for study in (find("routers40m_even"), find("routers40m_long")):
        studied = plain_config(study, study.variant("deep-eighth")).to_dict()
        size = ("hidden_size", "num_attention_heads", "num_hidden_layers", "layer_types", "intermediate_size")
        preset = presets.get("v4-16m", **{key: studied[key] for key in size}).to_dict()
        assert {key for key in preset if preset[key] != studied[key]} <= {"max_position_embeddings", "vocab_size"}


# Tables 1 and 2 of the paper, typed again from its text: validation and test perplexity; and counted parameters.
TABLES = {
    "table1": ([(45.78, 44.63), (46.75, 45.62), (46.86, 45.67), (49.62, 48.34), (49.70, 48.45)], 36_124, 500, 10),
    "table2": ([(23.73, 23.58), (27.75, 27.51), (28.81, 28.56)], 18_062, 1000, 5),
}
PARAMETERS = {
    "table1": [16_025_344, 15_765_257, 15_765_257, 15_764_225, 15_764_225],
    "table2": [404_159_488, 400_043_009, 400_043_009],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_tables_have_its_numbers_models_and_schedule(name, corpus, listops):
    study, (numbers, steps, warmup, epochs) = find(name), TABLES[name]
    assert [(variant.paper["validation"], variant.paper["test"]) for variant in study.variants] == numbers
    assert [costs_of(study, variant)["parameters"] for variant in study.variants] == PARAMETERS[name]
    assert study.tokens / epochs == pytest.approx(118e6, rel=0.005)  # the paper counts 118M tokens of WikiText-103
    plan = make_plan(changed(study, {"size": "tiny"}), [corpus] if name == "table1" else [corpus, listops])
    assert plan.steps == steps
    for one in plan.runs:
        settings, config = one.train_settings(), one.model_config()
        assert (settings.warmup, settings.batch, settings.length) == (warmup, 128, 256)
        assert (settings.learning_rate, settings.final_learning_rate, settings.clip) == (1e-4, 1e-6, 1.0)
        assert (settings.weight_decay, settings.beta1, settings.beta2) == (0.01, 0.9, 0.95)
        assert config.dropout == 0.1 and one.validate
        assert (one.after == {"thresholds": "baseline-s0"}) == bool(config.routed_layers and config.router == "entropy")
        assert (settings.mixing, len(one.data)) == (("added", 2) if one.variant == "mixed" else ("weights", 1))
    for variant in study.variants[1:]:  # the router alone is changed
        ours, default = plain_config(study, variant).to_dict(), presets.get(study.preset).to_dict()
        assert {key for key in ours if default[key] != ours[key]} <= {"router", "routing", "collapse_regulariser"}


@pytest.mark.parametrize(
    ("changes", "steps", "warmup"),
    [
        ({"tokens": 128 * 256}, 1, 1),
        ({"tokens": 2 * 128 * 256 - 1}, 1, 1),
        ({"tokens": 3_612 * 128 * 256}, 3_612, 50),
        ({"batch": 64}, 72_248, 1000),
        ({"tokens": 51_200, "batch": 8, "length": 64, "warmup": 7}, 100, 7),
    ],
)
def test_a_budget_scales_steps_and_warm_up(corpus, changes, steps, warmup):
    plan = make_plan(changed(find("table1"), {"size": "tiny", **changes}), [corpus])
    settings = plan.runs[0].train_settings()
    assert (plan.steps, settings.warmup) == (steps, warmup)
    assert settings.evaluate_every * 20 >= steps
    # The cosine is complete: the next rate would be the last.
    assert learning_rate(settings, steps) == pytest.approx(settings.final_learning_rate if steps > 1 else 1e-4, rel=0.1)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("tokens = 390", "token = 390"), "unknown field of study 'token'. Did you mean 'tokens'?"),
        (("tokens = 390", ""), "must say either epochs or tokens"),
        (("tokens = 390", "tokens = 390\nepochs = 1"), "must say either epochs or tokens"),
        (("tokens = 390", 'tokens = "all"'), "tokens of study must be a whole number, got 'all'"),
        (('baseline = "dense"', 'baseline = "dens"'), "unknown baseline variant 'dens'. Did you mean 'dense'?"),
        (('baseline = "dense"', 'baseline = "learned"'), "must be a control"),
        (('baseline = "dense"', ""), "the study says no baseline"),
        (('role = "candidate"', 'role = "winner"'), "unknown role of variant learned 'winner'"),
        (('role = "candidate"', ""), "variant learned says no role"),
        (("seeds = [1]", "seeds = [1, 1]"), "seeds must be different whole numbers"),
        (("seeds = [1]", 'seeds = ["a"]'), "seeds of variant learned must be a list of whole numbers"),
        (("seeds = [1]", "settings = { batch = 2 }"), "variant learned cannot set batch"),
        (("seeds = [1]", "fraction = 2"), "fraction must lie between 0 and 1"),
        (("seeds = [1]", "first = true"), "unknown field of variant learned 'first'"),
        (("seeds = [1]", 'after = { weights = "lerned" }'), "unknown variant before learned 'lerned'"),
        (("seeds = [1]", 'after = { biases = "dense" }'), "'biases'"),
        (("seeds = [1]", "paper = { tests = 3.0 }"), "'tests'. Did you mean 'test'?"),
        (("[variants.learned]", '[variants."a/b"]'), "becomes a folder"),
        (("seeds = [1]", "seeds ="), "is not TOML"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_gets_one_sentence(toml, replaced, message):
    path = toml(replaced)
    code, output = run("study", "show", path)
    assert code == 2
    assert message in output and str(path) in output
    assert "\n" not in output.strip()


@pytest.mark.parametrize(
    ("replaced", "more", "message"),
    [
        (("seeds = [1]", "settings = { recalibrate_every = 2 }"), [], "variant learned: recalibrate_every needs"),
        (("seeds = [1]", "settings = { ratee = 2 }"), [], "variant learned: unknown training setting 'ratee'"),
        (("light_ffn = false", "light_fnn = false"), [], "variant learned: unknown"),
        (('router = "learned"', 'router = "lerned"'), [], "unknown router 'lerned'"),
        (("tokens = 390", "tokens = 39"), [], "39 tokens is less than one step of 4 × 16 tokens"),
        (('router = "learned"', 'own_ffn = true, router = "learned"'), [], "commit bde4d4f can run it"),
        (('router = "learned"', "operators = ['skip', 'attention']"), [], "variant learned: it needs skip, which"),
        ((), ["--only", "lerned"], "unknown variant 'lerned'. Did you mean 'learned'?"),
        ((), ["--set", "steps=3"], "--set cannot set steps"),
        ((), ["--set", "micro_bath=3"], "Did you mean 'micro_batch'?"),
        ((), ["--set", "micro_batch"], "NAME=VALUE"),
        ((), ["--set", "micro_batch=3"], "does not divide into micro-batches of 3"),
        ((), ["--set", "micro_batch=two"], "micro_batch must be int"),
        ((), ["--set", "batch=0"], "batch must be at least 1"),
        ((), ["--set", "dropout=2"], "dropout must lie between 0 and 1"),
        ((), ["--set", "tokens=0"], "must be positive"),
        ((), ["--set", "size=2b"], "unknown size '2b'"),
        ((), ["--seeds", "0,x"], "--seeds takes whole numbers"),
        ((), ["--seeds", "0,0"], "seeds must be different"),
        ((), ["--device", "tpu"], "unknown device 'tpu'"),
        ((), ["--data", "CORPUS"], "give --data once, not 2 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(toml, corpus, tmp_path, replaced, more, message):
    path = toml(*([replaced] if replaced else []))
    more = [corpus if part == "CORPUS" else part for part in more]
    code, output = run("study", "run", path, "--data", corpus, "--out", tmp_path / "out", *more)
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_studies_and_data_that_do_not_fit(corpus, listops, tmp_path):
    assert "unknown study 'routers40'. Did you mean 'routers40m'?" in run("study", "show", "routers40")[1]
    assert "there is no file" in run("study", "show", tmp_path / "none.toml")[1]
    assert "is not a study" in run("study", "table", tmp_path)[1]
    tiny = changed(find("table2"), {"size": "tiny"})
    with pytest.raises(InputError, match="mixed needs more corpora: give --data 2 times"):
        make_plan(tiny, [corpus])
    with pytest.raises(InputError, match="name a text first"):
        make_plan(tiny, [listops, corpus])
    with pytest.raises(InputError, match="not a prepared corpus"):
        make_plan(tiny, [str(tmp_path)], only=["baseline"])
    # What a variant comes after is run with it, and before it.
    assert [one.name for one in make_plan(tiny, [corpus], only=["threshold"]).runs] == ["baseline-s0", "threshold-s0"]


def test_a_file_can_extend_another_study(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "tiny"\ntokens = 2048\nsettings = { batch = 4 }\n'
        '[variants.mine]\nrole = "candidate"\nconfig = { keys = "routed" }\n'
        '[variants.hash]\nrole = "control"\nconfig = { router = "random", random_fraction = 0.1 }\n'
    )
    base, study = find("tiny"), find(str(path))
    assert (study.name, study.tokens, study.settings) == ("mine", 2048, {**base.settings, "batch": 4})
    assert [v.name for v in study.variants] == [*(v.name for v in base.variants), "mine"]
    assert study.variant("hash").config["random_fraction"] == 0.1
    assert study.variant("dense") == base.variant("dense")
    # What all share can be changed by the command, but not what a variant says.
    study = changed(base, {"tokens": 1024, "batch": 4, "keys": "all", "hidden_size": 64})
    assert (study.tokens, study.settings["batch"], study.settings["micro_batch"]) == (1024, 4, 4)
    assert plain_config(study, study.variant("entropy")).keys == "routed"
    assert plain_config(study, study.variant("hash")).hidden_size == 64


def test_the_plan_and_what_is_shown_of_it(toml, corpus):
    study = find(str(toml()))
    plan = make_plan(study, [corpus])
    assert [run.name for run in plan.runs] == ["dense-s0", "hash-s0", "dense-s1", "hash-s1", "learned-s1"]
    assert {(s.batch, s.length, s.steps) for s in (one.train_settings() for one in plan.runs)} == {(4, 16, 6)}
    assert [one.name for one in make_plan(study, [corpus], ["learned", "d*"], [3]).runs] == ["dense-s3", "learned-s3"]
    epochs = make_plan(find(str(toml(("tokens = 390", "epochs = 2")))), [corpus])
    assert epochs.steps == 2 * ((epochs.corpora[0].split("train").tokens - 1) // 16) // 4
    code, output = run("study", "show", toml(), "--data", corpus)
    assert code == 0 and "384 tokens in 6 steps" in output and "257 token ids" in output
    row = next(line.split() for line in output.splitlines() if " hash: " in line)
    assert "0.250" in row and row[-2:] == ["0,", "1"]
    assert run("study", "show")[1].count("\n") == len(NAMES) + 2


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results_are_shown_with_what_was_removed_marked(name, tmp_path):
    folder = ROOT / "docs" / "results" / name
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, output = run("study", "table", folder, "--out", tmp_path / "out")
    assert code == 0
    text = (tmp_path / "out" / "table.md").read_text()
    marked = {"candidates": "mod †", "own-networks": "hash-own †", "routers40m": "thirds-time †"}.get(name)
    assert ("Commit bde4d4f" in text) == ("†" in output) == ("†" in text) and (marked or "dense") in text
    assert "dense †" not in text and (tmp_path / "out" / "pareto.svg").is_file()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not (folder / "study.toml").is_file() or run("study", "show", folder / "study.toml")[0] == 0


def test_the_file_shown_in_the_documentation_is_a_study(tmp_path):
    shown = (ROOT / "docs" / "studies.md").read_text().split("```toml\n")[1:]
    assert shown
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text.split("```")[0])
        study = find(str(path))
        assert all(costs_of(study, variant)["parameters"] for variant in study.variants)
