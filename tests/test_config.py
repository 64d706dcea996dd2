"""Configuration and input checks: one clear sentence for every mistake. Sizes of the presets."""

import json

import pytest
import torch

import helpers
from chiar import ChiarConfig, ChiarForCausalLM, ChiarForSequenceClassification, presets
from chiar.config_checks import CHOICES, LAST_COMMIT, REMOVED, REMOVED_OPERATORS
from chiar.kernels.white_noise import white_noise_entropy
from chiar.registry import ROUTERS

THREE = ["spectral", "rbf", "attention"]
NAN = float("nan")


def refused(match, build=ChiarConfig, /, *inputs, **fields):
    """Expect an InputError, a ValueError whose message is one line and ends like a sentence."""
    error = helpers.refused(match, build, *inputs, **fields)
    assert isinstance(error, ValueError)
    assert "\n" not in str(error) and str(error).endswith((".", "?"))


# Trainable parameters of the published models.
@pytest.mark.parametrize(
    ("preset", "routing", "parameters"),
    [
        *[("baseline-400m", None, 404_159_488), ("v3-400m", "threshold", 400_043_009)],
        *[("baseline-16m", None, 16_025_344), ("v3-16m", "threshold", 15_764_225)],
        *[("v3-16m", "soft", 15_765_257), ("v3-16m", "hard", 15_765_257)],
        *[("v2-16m", "threshold", 15_829_504), ("v1-16m", "hard", 15_898_124)],
    ],
)
def test_trainable_parameters(preset, routing, parameters):
    with torch.device("meta"):
        model = ChiarForCausalLM(presets.get(preset, routing=routing))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.requires_grad for p in model.parameters())


def test_presets_are_sorted_by_size_then_family():
    ranks = [["tiny", "16m", "50m", "400m", "1b"], list(presets.FAMILIES)]
    order = [[ranks[0].index(size), ranks[1].index(family)] for family, size in (n.split("-") for n in presets.NAMES)]
    assert order == sorted(order)


class TestDefaults:
    def test_the_default_is_v3_16m(self):
        default, preset = ChiarConfig().to_dict(), presets.get("v3-16m").to_dict()
        for name in ("bos_token_id", "eos_token_id"):
            del default[name], preset[name]
        assert default == preset
        assert ChiarConfig().dropout == 0.1

    def test_the_paper_presets(self):
        """What neither the parameter counts above nor the golden numbers check."""
        v1, v2, v3 = (presets.get(f"{family}-16m") for family in ("v1", "v2", "v3"))
        assert (v3.norm, v3.norm_position, v3.spectral_form) == ("layernorm", "post", "sublayer")
        assert (v3.keys, v3.light_ffn, v3.positions, v3.router) == ("all", True, "rope", "entropy")
        assert (v3.meta_router, v3.gate_pool, v3.gate_init) == (True, "batch", "biased")
        assert presets.get("v3-400m").layer_types == ["spectral", *["routed"] * 26, "attention"]
        assert (v1.operators, v1.router, v1.routing, v1.positions) == (THREE, "learned", "hard", "learned")
        assert (v2.operators, v2.router, v2.positions) == (["spectral", "attention"], "entropy", "learned")
        assert not v1.meta_router and not v2.meta_router
        assert presets.get("baseline-16m").layer_types == ["attention"] * 4

    @pytest.mark.parametrize(("width", "expected"), [(256, 0.869), (1024, 0.895)])
    def test_default_thresholds_are_white_noise(self, width, expected):
        mean, deviation = white_noise_entropy(width)
        assert ChiarConfig(hidden_size=width).layer_thresholds() == [(mean,)] * 2
        # To three decimals.
        assert mean == pytest.approx(expected, abs=5e-4)
        cuts = mean - 0.44 * deviation, mean + 0.44 * deviation
        assert ChiarConfig(hidden_size=width, operators=THREE).layer_thresholds() == [cuts] * 2

    def test_accepted_forms_of_thresholds(self):
        for thresholds in ([0.25, 1], [[0.25], [1.0]]):
            assert ChiarConfig(thresholds=thresholds).layer_thresholds() == [(0.25,), (1.0,)]
        assert ChiarConfig(thresholds=1).layer_thresholds() == [(1.0,)] * 2
        assert ChiarConfig(thresholds=0.5, operators=THREE).layer_thresholds() == [(0.5, 0.5)] * 2
        pairs = [[0.1, 0.2], [0.3, 0.4]]
        assert ChiarConfig(thresholds=pairs, operators=THREE).layer_thresholds() == [(0.1, 0.2), (0.3, 0.4)]

    def test_defaults_derived_from_other_fields(self):
        assert ChiarConfig(routing="soft").router == "learned"
        assert ChiarConfig(router="learned").routing == "hard"
        assert ChiarConfig(positions="learned").meta_router is False
        assert ChiarConfig(layer_types=["attention", "attention"]).meta_router is False
        assert ChiarConfig(layer_types=["attention"]).num_hidden_layers == 1
        assert ChiarConfig(num_hidden_layers=5).layer_types == ["spectral", *["routed"] * 3, "attention"]
        assert ChiarConfig(hidden_size=64).intermediate_size == 256
        every_other = ["attention", "spectral", "attention"]
        assert ChiarConfig(router="static", num_hidden_layers=5).static_operators == every_other
        assert ChiarConfig(dropout=0, entropy_dc_weight=2).dropout == 0, "an int is accepted as a float"
        assert ChiarConfig(hidden_size=12, num_attention_heads=4, positions="learned").head_size == 3
        assert ChiarConfig(trained_by="someone").trained_by == "someone", "unknown fields may come from other tools"
        dark = ChiarConfig(layer_types=["attention", "dark", "dark", "attention", "dark"], norm_position="pre")
        assert dark.stacks == {1: range(1, 3), 4: range(4, 5)} and dark.routed_layers == [1, 4]
        assert (dark.router, dark.routing, dark.target_fraction) == ("rise", "threshold", 0.2)
        assert dark.operators == ["carry", "attention"] and dark.layer_fractions() == [0.2, 0.2]
        temporal = {"layer_types": ["temporal", "routed", "routed"], "operators": ["temporal", "attention"]}
        config = ChiarConfig(router="static", **temporal)
        assert config.meta_router and config.static_operators == ["attention", "temporal"]

    def test_presets_accept_changes(self):
        assert presets.get("v3-tiny", num_hidden_layers=6).layer_types.count("routed") == 4
        assert presets.get("baseline-tiny", num_hidden_layers=6).layer_types == ["attention"] * 6
        assert presets.get("v4-tiny", num_hidden_layers=5).layer_types == ["attention", *["routed", "attention"] * 2]
        assert presets.get("v3-tiny", layer_types=["spectral", "attention"]).num_hidden_layers == 2
        assert presets.get("v1-tiny", routing="soft").router == "learned"
        assert presets.get("v1-tiny", routing="threshold").router == "entropy"
        assert presets.get("v5-tiny", num_hidden_layers=5).layer_types == ["attention", *["dark"] * 3, "attention"]
        assert presets.get("v5-tiny", router="random").target_fraction == 0.2
        assert presets.get("v3-tiny", attn_implementation="eager")._attn_implementation == "eager"
        assert presets.get("v3-tiny", num_labels=5).num_labels == 5


class TestRoundTrip:
    @pytest.mark.parametrize("preset", presets.NAMES)
    def test_presets(self, preset, tmp_path):
        config = presets.get(preset)
        config.save_pretrained(tmp_path)
        assert ChiarConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()

    def test_an_invalid_field_is_refused_on_saving_and_building(self, tmp_path):
        config = presets.get("v3-tiny")
        config.keys = "rooted"
        refused("unknown keys 'rooted'", config.save_pretrained, tmp_path)
        refused("unknown keys 'rooted'", ChiarForCausalLM, config)


OTHER = {name: not value if isinstance(value, bool) else 3 for name, value in REMOVED.items()}
REMOVED_USES = [(f"{name}=.*", {name: OTHER[name]}) for name in OTHER if name != "temporal_channels"]
REMOVED_USES += [(f"the operator '{name}'", {"operators": [name, "attention"]}) for name in REMOVED_OPERATORS]


class TestRemovedFields:
    """Files with removed fields load if the values are the supported ones; else the error names the commit to use."""

    def test_supported_values_load(self):
        saved = json.loads(presets.get("v4-tiny").to_json_string(use_diff=False))
        loaded = ChiarConfig.from_dict({**saved, **REMOVED, "temporal_channels": 8})
        assert loaded.to_dict() == presets.get("v4-tiny").to_dict() == presets.get("v4-tiny", **REMOVED).to_dict()
        assert not any(hasattr(loaded, name) for name in REMOVED)

    @pytest.mark.parametrize(("what", "change"), REMOVED_USES, ids=str)
    def test_other_values_and_operators_are_refused(self, what, change):
        reason = f"{what} was removed .*: commit {LAST_COMMIT} runs it"
        refused(reason, presets.get, "v3-tiny", **change)
        refused(reason, ChiarConfig.from_dict, {**presets.get("v3-tiny").to_dict(), **change})


def misspelt(name):
    """The name without its second letter: 'entropy' → 'etropy'."""
    return name[0] + name[2:]


class TestNames:
    @pytest.mark.parametrize("field", CHOICES)
    def test_the_closest_name_is_suggested(self, field):
        allowed = ", ".join(CHOICES[field])
        for name in CHOICES[field]:
            wrong = misspelt(name)
            refused(f"unknown {field} '{wrong}'. Did you mean '{name}'. Allowed: {allowed}", **{field: wrong})
        refused(f"unknown {field} 'qqq'. Allowed: {allowed}", **{field: "qqq"})

    def test_layers_and_operators(self):
        for name in ("spectral", "attention"):
            wrong = misspelt(name)
            hint = f"'{wrong}'. Did you mean '{name}'"
            refused(f"unknown layer type {hint}", layer_types=["spectral", wrong])
            refused(f"unknown operator {hint}", operators=["spectral", wrong])
            refused(f"unknown static operator {hint}", router="static", static_operators=[wrong, "spectral"])

    def test_presets(self):
        names = {"v3-16M": "v3-16m", "v3_16m": "v3-16m", "v3-tyni": "v3-tiny", "base-400m": "baseline-400m"}
        for wrong, name in names.items():
            refused(f"unknown preset '{wrong}'. Did you mean '{name}'.*Allowed: .*v3-400m", presets.get, wrong)
        refused("unknown preset 'zzz'. Allowed: baseline-tiny", presets.get, "zzz")

    def test_fields(self):
        names = {"hiden_size": "hidden_size", "threshold": "thresholds", "gatepool": "gate_pool", "droput": "dropout"}
        for wrong, name in names.items():
            reason = f"unknown configuration field '{wrong}'. Did you mean '{name}'"
            refused(reason, **{wrong: 1})
            refused(reason, presets.get, "v3-tiny", **{wrong: 1})
        for stranger in ("d_model", "tau", "wibble"):
            refused("unknown configuration field", presets.get, "v3-tiny", **{stranger: 3})


WRONG_TYPES = [
    *[("vocab_size", "50257"), ("hidden_size", 256.0), ("hidden_size", None), ("num_hidden_layers", True)],
    *[("layer_types", "routed"), ("layer_types", [1, 2, 3]), ("operators", "attention"), ("router", 3), ("keys", None)],
    *[("thresholds", "0.9"), ("thresholds", True), ("light_ffn", "yes"), ("light_ffn", 1), ("dropout", None)],
    *[("gate_skip_below", "low"), ("router_seed", 0.5), ("tie_word_embeddings", "true")],
]
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
OUT_OF_RANGE = [
    *[(f"{name} must be a positive whole number, got {v}", {name: v}) for name in SIZES for v in (0, -1)],
    ("temporal_coefficients must be a positive", {"temporal_coefficients": 0}),
    ("temporal_coefficients=17 is more than temporal_window=16", {"temporal_coefficients": 17}),
    ("temporal_window must be at least 2, got 1", {"temporal_window": 1}),
    *[("dropout must lie between 0 and 1, got", {"dropout": value}) for value in (-0.1, 1.1, NAN)],
    ("random_fraction must lie between 0 and 1, got", {"random_fraction": 2.0}),
    ("gate_skip_below must lie between 0 and 1, got", {"gate_skip_below": -1.0}),
    ("filter_init must lie between 0 and 1, got", {"filter_init": NAN}),
    *[("entropy_eps must not be negative, got", {"entropy_eps": value}) for value in (-1.0, NAN)],
    ("entropy_dc_weight must not be negative, got", {"entropy_dc_weight": -1.0}),
    ("collapse_regulariser must not be negative, got", {"collapse_regulariser": NAN}),
    ("hidden_size=256 is not divisible by num_attention_heads=3", {"num_attention_heads": 3}),
    ("head size 3 must be even", {"hidden_size": 12, "num_attention_heads": 4}),
    ("hidden_size must be at least 2", {"hidden_size": 1, "num_attention_heads": 1}),
    *[(f"num_hidden_layers={n} is too few for spectral, routed, attention", {"num_hidden_layers": n}) for n in (0, 2)],
    ("layer_types is empty", {"layer_types": []}),
    ("num_hidden_layers=5 but layer_types has 1", {"num_hidden_layers": 5, "layer_types": ["attention"]}),
]
THRESHOLDS = [
    *[(f"thresholds has {n} entries for 2 routed layers", [0.5] * n) for n in (0, 1, 3)],
    (r"thresholds are entropies between 0 and 1, got \[1.5\]", 1.5),
    (r"thresholds are entropies between 0 and 1, got \[-0.1\]", -0.1),
    (r"thresholds are entropies between 0 and 1, got \[89.5\]", [0.5, 89.5]),
    *[("thresholds are entropies between 0 and 1, got", value) for value in (NAN, ["high", 0.5], [None, 0.5])],
    (r"2 operators need 1 threshold per layer, got \[0.1, 0.2\]", [[0.1, 0.2], [0.1, 0.2]]),
    (r"2 operators need 1 threshold per layer, got \[\]", [[], []]),
]
THRESHOLDS_OF_THREE = [
    (r"3 operators need 2 thresholds per layer, got \[0.5\]", [0.5, 0.6]),
    (r"3 operators need 2 thresholds per layer", [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]]),
    (r"thresholds of a layer must be ascending .*, got \[0.6, 0.5\]", [[0.6, 0.5], [0.5, 0.6]]),
    ("thresholds are entropies between 0 and 1", [[0.5, 0.6], [0.5, 1.6]]),
]
UNMATCHED = [("entropy", "hard"), ("entropy", "soft"), ("learned", "threshold"), ("random", "hard"), ("static", "soft")]
OPERATOR_SETS = [[], ["spectral"], ["attention"], ["attention", "spectral"], ["spectral", "rbf"]]
OPERATOR_SETS += [["spectral", "spectral"], ["temporal", "spectral", "attention"]]
DARK = {"layer_types": ["attention", "dark", "dark"], "norm_position": "pre"}
STRIDE = {**DARK, "router": "stride"}
STACKS = [name for name, kind in ROUTERS.items() if not kind.of_layers]
EQUATION, STATIC = {"spectral_form": "equation"}, {"router": "static"}
COMBINATIONS = [
    *[(f"routing='{b}' does not work with router='{a}': use ", {"router": a, "routing": b}) for a, b in UNMATCHED],
    *[("is not supported: use ", {"operators": operators}) for operators in OPERATOR_SETS],
    ("spectral_form='equation' is a post-norm form", {**EQUATION, "norm_position": "pre"}),
    ("light_ffn=False needs spectral_form='sublayer'", {**EQUATION, "light_ffn": False}),
    ("filter_gamma=False needs norm_position='pre'", {"filter_gamma": False}),
    ("router_scale='probability' needs two operators", {"router_scale": "probability"}),
    ("layer 1 is 'routed'", {"meta_router": True, "layer_types": ["routed", "attention"]}),
    ("layer 1 is 'attention'", {"meta_router": True, "layer_types": ["attention"]}),
    *[(f"has {n} entries for 2 routed", {**STATIC, "static_operators": ["attention"] * n}) for n in (0, 1, 3)],
    ("unknown static operator 'rbf'", {**STATIC, "static_operators": ["rbf", "attention"]}),
    ("target_fraction needs two operators", {"target_fraction": 0.5, "operators": THREE}),
    ("target_fraction needs two operators", {"target_fraction": 0.5, "router": "random"}),
    ("target_fraction sets the thresholds", {"target_fraction": 0.5, "thresholds": 0.9}),
    ("target_fraction has 3 entries for 2", {"target_fraction": [0.5] * 3}),
    *[("target_fraction must lie strictly between", {"target_fraction": value}) for value in (0.0, 1.0)],
    ("the operator carry needs dark layers", {"operators": ["carry", "attention"]}),
    *[(f"router='{name}' is for dark stacks: routed layers take entropy", {"router": name}) for name in STACKS],
    *[(f"router='{n}' is for routed layers: dark stacks take", {**DARK, "router": n}) for n in ("entropy", "static")],
    ("is not supported with dark layers: use", {**DARK, "operators": ["spectral", "attention"]}),
    ("routed layers or dark stacks, not both", {**DARK, "layer_types": ["dark", "routed"]}),
    ("soft routing runs everything", {**DARK, "router": "learned", "routing": "soft"}),
    ("dark layers need norm_position='pre'", {"layer_types": ["dark"]}),
    ("router='space' reads bytes: .* at least 256, got 255", {**DARK, "router": "space", "vocab_size": 255}),
    ("at most every second token: .* at most 0.5, got 0.51", {**STRIDE, "target_fraction": 0.51}),
    (
        "at most 0.5, got .0.2, 0.7",
        {**STRIDE, "target_fraction": [0.2, 0.7], "layer_types": ["dark", "attention", "dark"]},
    ),
    ("strictly between 0 and 1, got 1.5", {**STRIDE, "target_fraction": 1.5}),
    ("dark stacks store thresholds with the weights", {**DARK, "thresholds": 0.5}),
    *[(f"inner_size={n} must be a positive multiple of head size", {**DARK, "inner_size": n}) for n in (0, -64, 100)],
    ("target_fraction has 2 entries for 1", {**DARK, "target_fraction": [0.2, 0.3]}),
    ("target_fraction must lie strictly between", {**DARK, "target_fraction": 1.0}),
    *[(f"window must be a positive whole number, got {n}", {"window": n}) for n in (0, -1)],
    ("early_weight must not be negative, got", {**DARK, "early_weight": -0.1}),
]


REFUSED = [
    *[(f"{name} must be .*, got ", {name: value}) for name, value in WRONG_TYPES],
    *OUT_OF_RANGE,
    *COMBINATIONS,
    *[(match, {"thresholds": thresholds}) for match, thresholds in THRESHOLDS],
    *[(match, {"thresholds": thresholds, "operators": THREE}) for match, thresholds in THRESHOLDS_OF_THREE],
]


@pytest.mark.parametrize(("match", "fields"), REFUSED, ids=str)
def test_invalid_values_are_refused(match, fields):
    refused(match, **fields)


def test_invalid_presets_are_refused():
    refused("num_hidden_layers=1 is too few for v4", presets.get, "v4-tiny", num_hidden_layers=1)
    refused("num_hidden_layers=2 is too few for v5-tiny: 2 are outside", presets.get, "v5-tiny", num_hidden_layers=2)
    config = presets.get("v3-tiny", num_labels=3, problem_type="multi_label_classification")
    refused("one label", ChiarForSequenceClassification, config)


class TestInputs:
    @pytest.fixture
    def model(self, lively):
        return lively({})

    @pytest.fixture
    def ids(self):
        return torch.arange(12).view(2, 6)

    def test_tokens(self, model, ids):
        for token in (257, 50256, -1, -100):
            wrong = ids.clone()
            wrong[1, 3] = token
            refused(f"token id {token} is outside the vocabulary 0..256: was the text encoded", model, wrong)
        for shape in ((0, 4), (2, 0)):
            refused("the input is empty", model, torch.zeros(shape, dtype=torch.long))
            refused("the input is empty", model, inputs_embeds=torch.zeros(*shape, 32))
        refused("shape", model, ids[0])
        refused("exactly one of input_ids and inputs_embeds", model)
        embeddings = model.get_input_embeddings()(ids)
        refused("exactly one of input_ids and inputs_embeds", model, ids, inputs_embeds=embeddings)

    def test_arguments(self, model, ids):
        refused("unknown argument 'atention_mask'. Did you mean 'attention_mask'", model, ids, atention_mask=ids)
        refused("logits_to_keep", model, ids, labels=ids, logits_to_keep=1)
        refused("attn_implementation='eager'", model, ids, output_attentions=True)

    def test_forced_routes(self, model, ids):
        refused("layer 0 is not routed", model, ids, forced_routes={0: torch.zeros_like(ids)})
        refused("expected int64", model, ids, forced_routes={1: torch.zeros_like(ids[:, 1:])})
        refused("expected int64", model, ids, forced_routes={1: torch.zeros_like(ids).float()})
        refused("below 2 operators", model, ids, forced_routes={1: torch.full_like(ids, 2)})

    def test_masks(self, model, ids):
        for shape in ((2, 5), (2, 7), (1, 6), (6,), (2, 1, 6, 6)):
            refused(r"attention_mask has shape .*, expected \(2, 6\)", model, ids, attention_mask=torch.ones(shape))
        cache = model(ids, use_cache=True).past_key_values
        refused(r"expected \(2, 7\)", model, ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)

    def test_set_thresholds(self, model, ids):
        before = model(ids).logits
        for thresholds in (2.0, [0.5], [0.1, 0.2, 0.3], "high"):
            refused("thresholds", model.model.set_thresholds, thresholds)
        assert model.config.thresholds is None
        torch.testing.assert_close(model(ids).logits, before, msg="the model has not changed")
