"""The paper's tables as data: the right models, the right numbers."""

import math

import pytest

from chiar import presets
from chiar.model.load import count_parameters
from chiar.reproduce.recipes import RECIPES

# Tables 1 and 2 of the paper, typed again from its text: validation and test perplexity.
TABLES = {
    "ablation-16m": [(45.78, 44.63), (46.75, 45.62), (46.86, 45.67), (49.62, 48.34), (49.70, 48.45)],
    "scaling-400m": [(23.73, 23.58), (27.75, 27.51)],
    "mixed": [(23.73, 23.58), (27.75, 27.51), (28.81, 28.56)],
}
PARAMETERS = {
    "ablation-16m": [16_025_344, 15_765_257, 15_765_257, 15_764_225, 15_764_225],
    "scaling-400m": [404_159_488, 400_043_009],
    "mixed": [404_159_488, 400_043_009, 400_043_009],
}


def config_of(row):
    return presets.get(row.preset, **row.config)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_have_the_papers_numbers_and_parameters(name):
    rows = RECIPES[name].rows
    assert [(row.paper_validation, row.paper_test) for row in rows] == TABLES[name]
    assert [count_parameters(config_of(row)) for row in rows] == PARAMETERS[name]
    assert rows[0].preset.startswith("baseline") and not config_of(rows[0]).routed_layers


def test_the_ablation_changes_the_router_alone():
    rows = RECIPES["ablation-16m"].rows
    assert [row.preset for row in rows] == ["baseline-16m"] + ["v3-16m"] * 4
    default = presets.get("v3-16m").to_dict()
    changed = []
    for row in rows[1:]:
        config = config_of(row).to_dict()
        changed.append({key: value for key, value in config.items() if default[key] != value})
    assert changed == [
        {"router": "learned", "routing": "soft"},
        {"router": "learned", "routing": "hard"},
        {},
        {"collapse_regulariser": 0.01},
    ]


def test_schedules_are_the_papers():
    ablation, scaling, mixed = (RECIPES[name] for name in ("ablation-16m", "scaling-400m", "mixed"))
    assert (scaling.steps, scaling.warmup, scaling.epochs) == (mixed.steps, mixed.warmup, mixed.epochs)
    assert (scaling.steps, scaling.warmup, scaling.epochs) == (18_062, 1000, 5)
    assert (ablation.warmup, ablation.epochs) == (500, 10)
    # The paper counts 118M tokens of WikiText-103.
    for recipe in RECIPES.values():
        assert recipe.tokens / recipe.epochs == pytest.approx(118e6, rel=0.005)


def test_only_the_mixed_row_mixes():
    assert [(recipe.name, row.name) for recipe in RECIPES.values() for row in recipe.rows if row.mixed] == [
        ("mixed", "mixed")
    ]
    row = RECIPES["mixed"].rows[-1]
    assert row.settings["added_share"] == 0.25
    threshold = next(other for other in RECIPES["mixed"].rows if other.name == row.beside)
    assert row.paper_test - threshold.paper_test == pytest.approx(1.05)
    assert math.log(row.paper_test / threshold.paper_test) == pytest.approx(0.0375, abs=1e-4)
