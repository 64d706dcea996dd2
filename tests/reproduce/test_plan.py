"""Every choice made before anything runs: schedules, sizes, and what is refused."""

import pytest

from chiar.errors import InputError
from chiar.reproduce.plan import make_plan, parse_changes
from chiar.training.trainer import learning_rate
from commands import run


def test_the_default_is_the_papers_schedule(corpus):
    plan = make_plan("ablation-16m", [corpus], size="tiny")
    for planned in plan.rows:
        settings = planned.settings
        assert (settings.steps, settings.warmup, settings.batch, settings.length) == (36_124, 500, 128, 256)
        assert (settings.learning_rate, settings.final_learning_rate) == (1e-4, 1e-6)
        assert (settings.weight_decay, settings.clip, settings.beta1, settings.beta2) == (0.01, 1.0, 0.9, 0.95)
        assert planned.config().dropout == 0.1
    assert plan.tokens == plan.recipe.tokens == 36_124 * 128 * 256
    scaling = make_plan("scaling-400m", [corpus], size="tiny").settings
    assert (scaling.steps, scaling.warmup) == (18_062, 1000)


@pytest.mark.parametrize(
    ("budget", "changes", "steps", "warmup"),
    [
        (128 * 256, {}, 1, 1),
        (2 * 128 * 256 - 1, {}, 1, 1),
        (3_612 * 128 * 256, {}, 3_612, 50),
        (2 * 36_124 * 128 * 256, {}, 72_248, 1000),
        (36_124 * 128 * 256, {"batch": 64}, 72_248, 1000),
        (64 * 100 * 8, {"batch": 8, "length": 64}, 100, 1),
        (64 * 100 * 8, {"batch": 8, "length": 64, "warmup": 7}, 100, 7),
    ],
)
def test_a_budget_scales_steps_and_warm_up(corpus, budget, changes, steps, warmup):
    plan = make_plan("ablation-16m", [corpus], size="tiny", budget=budget, changes=changes)
    settings = plan.settings
    assert (settings.steps, settings.warmup) == (steps, warmup)
    assert plan.tokens <= budget
    assert settings.evaluate_every * 20 >= steps
    # The cosine is complete: the next rate would be the last.
    assert learning_rate(settings, steps) == pytest.approx(settings.final_learning_rate if steps > 1 else 1e-4, rel=0.1)


def test_every_row_has_the_same_settings(corpus, listops):
    plan = make_plan("mixed", [corpus, listops], size="tiny", budget=1 << 20, seed=3, changes={"micro_batch": 4})
    first = plan.rows[0].settings.to_dict()
    assert (first["seed"], first["micro_batch"]) == (3, 4)
    for planned in plan.rows:
        settings = planned.settings.to_dict()
        differing = {key: settings[key] for key in settings if settings[key] != first[key]}
        assert differing == ({"mixing": "added", "data": [corpus, listops]} if planned.row.mixed else {})
    assert [planned.preset for planned in plan.rows] == ["baseline-tiny", "v3-tiny", "v3-tiny"]
    assert [planned.calibrated for planned in plan.rows] == [False, True, True]


def test_changes_reach_settings_and_configurations(corpus):
    changes = parse_changes(["learning_rate=1e-3", "dropout=0", "gate_pool=causal", "compile=false"])
    plan = make_plan("ablation-16m", [corpus], size="tiny", changes=changes)
    for planned in plan.rows:
        assert planned.settings.learning_rate == 1e-3
        assert planned.settings.compile is False
        assert planned.config().dropout == 0
        assert planned.config().gate_pool == "causal"
    soft = plan.rows[1].config()
    assert (soft.router, soft.routing) == ("learned", "soft")


def test_thresholds_reach_calibrated_rows(corpus):
    plan = make_plan("ablation-16m", [corpus], size="tiny")
    assert [planned.row.name for planned in plan.rows if planned.calibrated] == ["threshold", "threshold-reg"]
    config = plan.rows[3].config(0.625)
    assert config.layer_thresholds() == [(0.625,), (0.625,)]
    assert plan.rows[4].config(0.625).collapse_regulariser == 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablation-61m"], "unknown recipe 'ablation-61m'. Did you mean 'ablation-16m'?"),
        (["ablation-16m", "--size", "2b"], "unknown size '2b'"),
        (["ablation-16m", "--budget", "1000"], "less than one step of 128 × 256 = 32,768"),
        (["ablation-16m", "--set", "steps=4"], "--set cannot change steps: use --budget"),
        (["ablation-16m", "--set", "seed=4"], "--set cannot change seed: use --seed"),
        (["ablation-16m", "--set", "routing=hard"], "the recipe decides it for each row"),
        (["ablation-16m", "--set", "micro_bath=4"], "Did you mean 'micro_batch'?"),
        (["ablation-16m", "--set", "micro_batch"], "NAME=VALUE"),
        (["ablation-16m", "--set", "micro_batch=3"], "does not divide into micro-batches of 3"),
        (["ablation-16m", "--set", "micro_batch=two"], "micro_batch must be int"),
        (["ablation-16m", "--set", "batch=0"], "batch must be at least 1"),
        (["ablation-16m", "--set", "dropout=2"], "dropout must lie between 0 and 1"),
        (["ablation-16m", "--set", "length=2000000", "--budget", str(10**12)], "too few for one row"),
        (["mixed"], "give --data several times"),
        (["ablation-16m", "--device", "tpu"], "unknown device 'tpu'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_writes_nothing(corpus, tmp_path, arguments, message):
    size = [] if "--size" in arguments else ["--size", "tiny"]
    code, output = run("reproduce", *arguments, *size, "--data", corpus, "--out", tmp_path / "out")
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_data_that_does_not_fit(corpus, listops, tmp_path):
    with pytest.raises(InputError, match="give --data once, not 2 times"):
        make_plan("scaling-400m", [corpus, listops], size="tiny")
    with pytest.raises(InputError, match="is a language corpus: name it first"):
        make_plan("mixed", [listops, corpus], size="tiny")
    with pytest.raises(InputError, match="not a prepared corpus"):
        make_plan("ablation-16m", [str(tmp_path)], size="tiny")
