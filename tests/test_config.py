"""Configuration and input checks: one clear sentence for every mistake; sizes of the presets."""

import json

import pytest
import torch

from chiar import ChiarConfig, ChiarForCausalLM, ChiarForSequenceClassification, presets
from chiar.config_checks import CHOICES
from chiar.errors import InputError, unknown_name
from chiar.kernels.white_noise import white_noise_entropy

THREE = ["spectral", "rbf", "attention"]


def assert_one_sentence(caught):
    """An InputError, which is a ValueError, on one line that ends like a sentence."""
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))


def refused(match, build=ChiarConfig, **fields):
    with pytest.raises(InputError, match=match) as caught:
        build(**fields)
    assert_one_sentence(caught)


class TestSizes:
    # Trainable parameters of the published models.
    @pytest.mark.parametrize(
        ("preset", "routing", "parameters"),
        [
            ("baseline-400m", None, 404_159_488),
            ("v3-400m", "threshold", 400_043_009),
            ("baseline-16m", None, 16_025_344),
            ("v3-16m", "threshold", 15_764_225),
            ("v3-16m", "soft", 15_765_257),
            ("v3-16m", "hard", 15_765_257),
            ("v2-16m", "threshold", 15_829_504),
            ("v1-16m", "hard", 15_898_124),
        ],
    )
    def test_trainable_parameters(self, preset, routing, parameters):
        with torch.device("meta"):
            model = ChiarForCausalLM(presets.get(preset, routing=routing))
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == parameters
        assert all(p.requires_grad for p in model.parameters())

    def test_learned_positions_are_counted(self):
        with torch.device("meta"):
            short, long = (
                ChiarForCausalLM(presets.get("v2-16m", max_position_embeddings=length)) for length in (256, 512)
            )
        assert sum(p.numel() for p in long.parameters()) - sum(p.numel() for p in short.parameters()) == 256 * 256


class TestDefaults:
    def test_the_default_is_v3_16m(self):
        default, preset = ChiarConfig().to_dict(), presets.get("v3-16m").to_dict()
        token_ids = {"bos_token_id", "eos_token_id"}
        assert {k: v for k, v in default.items() if k not in token_ids} == {
            k: v for k, v in preset.items() if k not in token_ids
        }

    def test_the_paper_presets(self):
        v3 = presets.get("v3-16m")
        assert (v3.hidden_size, v3.num_attention_heads, v3.num_hidden_layers, v3.vocab_size) == (256, 4, 4, 50257)
        assert v3.layer_types == ["spectral", "routed", "routed", "attention"]
        assert (v3.norm, v3.norm_position, v3.spectral_form) == ("layernorm", "post", "sublayer")
        assert (v3.keys, v3.light_ffn, v3.positions, v3.router) == ("all", True, "rope", "entropy")
        assert (v3.meta_router, v3.gate_pool, v3.gate_init) == (True, "batch", "biased")
        large = presets.get("v3-400m")
        assert (large.hidden_size, large.num_attention_heads, large.num_hidden_layers) == (1024, 16, 28)
        assert large.layer_types == ["spectral", *["routed"] * 26, "attention"]
        v1 = presets.get("v1-16m")
        assert (v1.operators, v1.router, v1.routing, v1.positions) == (THREE, "learned", "hard", "learned")
        v2 = presets.get("v2-16m")
        assert (v2.operators, v2.router, v2.positions) == (["spectral", "attention"], "entropy", "learned")
        assert not v1.meta_router and not v2.meta_router
        assert presets.get("baseline-16m").layer_types == ["attention"] * 4
        assert presets.get("baseline-16m").routed_layers == []

    @pytest.mark.parametrize(("width", "expected"), [(256, 0.869), (1024, 0.895)])
    def test_default_thresholds_are_white_noise(self, width, expected):
        config = ChiarConfig(hidden_size=width)
        mean, _ = white_noise_entropy(width)
        assert config.thresholds is None
        assert config.layer_thresholds() == [(mean,)] * 2
        # To three decimals.
        assert mean == pytest.approx(expected, abs=5e-4)

    def test_default_thresholds_of_three_operators(self):
        mean, deviation = white_noise_entropy(256)
        assert (
            ChiarConfig(operators=THREE).layer_thresholds() == [(mean - 0.44 * deviation, mean + 0.44 * deviation)] * 2
        )

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"thresholds": 0.5}, [(0.5,), (0.5,)]),
            ({"thresholds": 1}, [(1.0,), (1.0,)]),
            ({"thresholds": [0.25, 0.75]}, [(0.25,), (0.75,)]),
            ({"thresholds": [[0.25], [0.75]]}, [(0.25,), (0.75,)]),
            ({"thresholds": 0.5, "operators": THREE}, [(0.5, 0.5), (0.5, 0.5)]),
            ({"thresholds": [[0.1, 0.2], [0.3, 0.4]], "operators": THREE}, [(0.1, 0.2), (0.3, 0.4)]),
        ],
        ids=["one", "whole-number", "per-layer", "per-layer-lists", "one-for-three", "pairs"],
    )
    def test_forms_of_thresholds(self, fields, expected):
        assert ChiarConfig(**fields).layer_thresholds() == expected

    def test_what_follows_from_a_field(self):
        assert ChiarConfig(routing="soft").router == "learned"
        assert ChiarConfig(router="learned").routing == "hard"
        assert ChiarConfig(positions="learned").meta_router is False
        assert ChiarConfig(layer_types=["attention", "attention"]).meta_router is False
        assert ChiarConfig(layer_types=["attention"]).num_hidden_layers == 1
        assert ChiarConfig(num_hidden_layers=5).layer_types == ["spectral", *["routed"] * 3, "attention"]
        assert ChiarConfig(hidden_size=64).intermediate_size == 256
        assert ChiarConfig(router="static", num_hidden_layers=5).static_operators == [
            "attention",
            "spectral",
            "attention",
        ]

    def test_presets_take_changes(self):
        assert presets.get("v3-tiny", num_hidden_layers=6).layer_types.count("routed") == 4
        assert presets.get("baseline-tiny", num_hidden_layers=6).layer_types == ["attention"] * 6
        assert presets.get("v3-tiny", layer_types=["spectral", "attention"]).num_hidden_layers == 2
        assert presets.get("v3-tiny", gate_pool="causal").gate_pool == "causal"

    def test_every_other_layer_of_v4_is_routed(self):
        assert presets.get("v4-tiny").layer_types == ["routed", "attention"] * 2
        assert presets.get("v4-tiny", num_hidden_layers=5).layer_types == ["attention", *["routed", "attention"] * 2]
        with pytest.raises(InputError, match="num_hidden_layers=1 is too few for v4"):
            presets.get("v4-tiny", num_hidden_layers=1)


class TestRoundTrip:
    @pytest.mark.parametrize("preset", presets.NAMES)
    def test_presets(self, preset, tmp_path):
        config = presets.get(preset)
        for text in (config.to_json_string(), config.to_json_string(use_diff=False)):
            assert ChiarConfig.from_dict(json.loads(text)).to_dict() == config.to_dict()
        config.save_pretrained(tmp_path)
        assert ChiarConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()

    def test_options(self, option):
        fields = {key: value for key, value in option.items() if key not in ("preset", "attn_implementation")}
        config = presets.get(option.get("preset", "v3-tiny"), **fields)
        loaded = ChiarConfig.from_dict(json.loads(config.to_json_string()))
        assert loaded.to_dict() == config.to_dict()
        assert loaded.layer_thresholds() == config.layer_thresholds()
        for name, value in fields.items():
            assert getattr(loaded, name) == value

    def test_a_field_changed_to_nonsense_is_not_saved(self, tmp_path):
        config = presets.get("v3-tiny")
        config.keys = "rooted"
        with pytest.raises(InputError, match="unknown keys 'rooted'"):
            config.save_pretrained(tmp_path)

    def test_a_field_changed_to_nonsense_builds_no_model(self):
        config = presets.get("v3-tiny")
        config.num_attention_heads = 3
        with pytest.raises(InputError, match="not divisible"):
            ChiarForCausalLM(config)


def misspelt(name):
    """The name with its second letter dropped: 'entropy' → 'etropy'."""
    return name[0] + name[2:]


class TestNames:
    @pytest.mark.parametrize(
        ("field", "allowed"), [(field, name) for field, names in CHOICES.items() for name in names]
    )
    def test_the_nearest_name_is_offered(self, field, allowed):
        wrong = misspelt(allowed)
        refused(
            f"unknown {field} '{wrong}'. Did you mean '{allowed}'. Allowed: {', '.join(CHOICES[field])}",
            **{field: wrong},
        )

    @pytest.mark.parametrize("field", CHOICES)
    def test_without_a_near_name_all_are_listed(self, field):
        refused(f"unknown {field} 'qqq'. Allowed: {', '.join(CHOICES[field])}", **{field: "qqq"})

    @pytest.mark.parametrize("allowed", ["spectral", "routed", "attention"])
    def test_layer_types(self, allowed):
        wrong = misspelt(allowed)
        refused(f"unknown layer type '{wrong}'. Did you mean '{allowed}'", layer_types=["spectral", wrong])

    @pytest.mark.parametrize("allowed", THREE)
    def test_operators(self, allowed):
        wrong = misspelt(allowed)
        refused(f"unknown operator '{wrong}'. Did you mean '{allowed}'", operators=["spectral", wrong])

    def test_static_operators(self):
        refused(
            "unknown static operator 'atention'. Did you mean 'attention'",
            router="static",
            static_operators=["atention", "spectral"],
        )

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("v3-16M", "v3-16m"), ("v3_16m", "v3-16m"), ("v3-tyni", "v3-tiny"), ("base-400m", "baseline-400m")],
    )
    def test_presets(self, name, nearest):
        refused(f"unknown preset '{name}'. Did you mean '{nearest}'.*Allowed: .*v3-400m", presets.get, name=name)

    def test_a_preset_unlike_any(self):
        refused("unknown preset 'zzz'. Allowed: baseline-tiny", presets.get, name="zzz")

    @pytest.mark.parametrize(
        ("wrong", "field"),
        [
            ("hiden_size", "hidden_size"),
            ("threshold", "thresholds"),
            ("gatepool", "gate_pool"),
            ("light_fnn", "light_ffn"),
            ("droput", "dropout"),
            ("normposition", "norm_position"),
        ],
    )
    def test_misspelt_fields(self, wrong, field):
        refused(f"unknown configuration field '{wrong}'. Did you mean '{field}'", **{wrong: 1})

    def test_fields_unlike_ours_are_kept(self):
        """As transformers does: a folder may carry notes of other tools."""
        assert ChiarConfig(trained_by="someone").trained_by == "someone"

    def test_a_misspelt_field_of_a_preset(self):
        refused("unknown configuration field 'hiden_size'", presets.get, name="v3-tiny", hiden_size=8)


class TestTypes:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("vocab_size", "50257"),
            ("hidden_size", 256.0),
            ("hidden_size", None),
            ("num_hidden_layers", 4.0),
            ("num_hidden_layers", True),
            ("num_attention_heads", "4"),
            ("intermediate_size", 1.5),
            ("layer_types", "routed"),
            ("layer_types", [1, 2, 3]),
            ("operators", "attention"),
            ("router", 3),
            ("keys", None),
            ("thresholds", "0.9"),
            ("thresholds", True),
            ("light_ffn", "yes"),
            ("light_ffn", 1),
            ("meta_router", 1),
            ("dropout", None),
            ("gate_skip_below", "low"),
            ("router_seed", 0.5),
            ("static_operators", "attention"),
            ("tie_word_embeddings", "true"),
        ],
        ids=lambda value: repr(value) if not isinstance(value, str) else value,
    )
    def test_wrong_types(self, field, value):
        refused(f"{field} must be .*, got ", **{field: value})

    def test_whole_numbers_are_numbers(self):
        assert ChiarConfig(dropout=0, entropy_dc_weight=2).dropout == 0


class TestSizesAndRanges:
    @pytest.mark.parametrize(
        "field",
        [
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "rbf_features",
        ],
    )
    @pytest.mark.parametrize("value", [0, -1])
    def test_sizes_are_positive(self, field, value):
        refused(f"{field} must be a positive whole number, got {value}", **{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("dropout", -0.1),
            ("dropout", 1.1),
            ("dropout", float("nan")),
            ("random_fraction", 2.0),
            ("gate_skip_below", -1.0),
        ],
        ids=str,
    )
    def test_fractions(self, field, value):
        refused(f"{field} must lie between 0 and 1, got", **{field: value})

    @pytest.mark.parametrize("field", ["entropy_eps", "entropy_dc_weight", "collapse_regulariser"])
    @pytest.mark.parametrize("value", [-1.0, float("nan")], ids=str)
    def test_not_negative(self, field, value):
        refused(f"{field} must not be negative, got", **{field: value})

    @pytest.mark.parametrize("field", ["rope_base", "initializer_range"])
    def test_scales_are_not_negative(self, field):
        refused(f"{field} must", **{field: -1.0})

    def test_heads_divide_the_width(self):
        refused("hidden_size=256 is not divisible by num_attention_heads=3", num_attention_heads=3)

    def test_rope_needs_an_even_head(self):
        refused("head size 3 must be even", hidden_size=12, num_attention_heads=4)
        assert ChiarConfig(hidden_size=12, num_attention_heads=4, positions="learned").head_size == 3

    def test_one_coefficient_has_no_entropy(self):
        refused("hidden_size must be at least 2", hidden_size=1, num_attention_heads=1)

    @pytest.mark.parametrize("layers", [0, 1, 2])
    def test_too_few_layers(self, layers):
        refused(f"num_hidden_layers={layers} is too few for spectral, routed, attention", num_hidden_layers=layers)

    def test_no_layers(self):
        refused("layer_types is empty", layer_types=[])

    def test_layers_that_disagree(self):
        refused(
            "num_hidden_layers=5 but layer_types has 3 entries",
            num_hidden_layers=5,
            layer_types=["spectral", "routed", "attention"],
        )


class TestThresholds:
    @pytest.mark.parametrize(
        ("thresholds", "match"),
        [
            ([0.5], "thresholds has 1 entries for 2 routed layers"),
            ([0.5] * 3, "thresholds has 3 entries for 2 routed layers"),
            ([], "thresholds has 0 entries for 2 routed layers"),
            (1.5, r"thresholds are entropies between 0 and 1, got \[1.5\]"),
            (-0.1, r"thresholds are entropies between 0 and 1, got \[-0.1\]"),
            (float("nan"), "thresholds are entropies between 0 and 1"),
            ([0.5, 89.5], r"thresholds are entropies between 0 and 1, got \[89.5\]"),
            (["high", 0.5], "thresholds are entropies between 0 and 1, got"),
            ([None, 0.5], "thresholds are entropies between 0 and 1, got"),
            ([[0.1, 0.2], [0.1, 0.2]], r"2 operators need 1 threshold\(s\) a layer, got \[0.1, 0.2\]"),
            ([[], []], r"2 operators need 1 threshold\(s\) a layer, got \[\]"),
        ],
        ids=str,
    )
    def test_two_operators(self, thresholds, match):
        refused(match, thresholds=thresholds)

    @pytest.mark.parametrize(
        ("thresholds", "match"),
        [
            ([0.5, 0.6], r"3 operators need 2 threshold\(s\) a layer, got \[0.5\]"),
            ([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], r"3 operators need 2 threshold\(s\) a layer"),
            ([[0.6, 0.5], [0.5, 0.6]], r"thresholds of a layer must rise .*, got \[0.6, 0.5\]"),
            ([[0.5, 0.6], [0.5, 1.6]], "thresholds are entropies between 0 and 1"),
        ],
        ids=str,
    )
    def test_three_operators(self, thresholds, match):
        refused(match, thresholds=thresholds, operators=THREE)


class TestCombinations:
    @pytest.mark.parametrize(
        ("router", "routing"),
        [
            ("entropy", "hard"),
            ("entropy", "soft"),
            ("learned", "threshold"),
            ("random", "hard"),
            ("random", "soft"),
            ("static", "soft"),
        ],
    )
    def test_routing_without_its_router(self, router, routing):
        refused(f"routing='{routing}' does not go with router='{router}': it takes ", router=router, routing=routing)

    def test_equation_is_post_norm(self):
        refused("spectral_form='equation' is a post-norm form", spectral_form="equation", norm_position="pre")

    def test_equation_needs_the_light_ffn(self):
        refused("light_ffn=False needs spectral_form='sublayer'", spectral_form="equation", light_ffn=False)

    @pytest.mark.parametrize("first", ["routed", "attention"])
    def test_the_gate_needs_a_spectral_layer(self, first):
        refused(f"layer 1 is '{first}'", meta_router=True, layer_types=[first, "attention"])

    @pytest.mark.parametrize(
        "operators",
        [["spectral"], ["attention"], ["attention", "spectral"], ["spectral", "spectral"], ["spectral", "rbf"], []],
        ids=str,
    )
    def test_sets_of_operators(self, operators):
        refused("is not supported: use ", operators=operators)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_static_operators_for_every_layer(self, count):
        refused(
            f"static_operators has {count} entries for 2 routed layers",
            router="static",
            static_operators=["attention"] * count,
        )

    def test_static_operators_are_among_the_operators(self):
        refused("unknown static operator 'rbf'", router="static", static_operators=["rbf", "attention"])


class TestInputs:
    @pytest.fixture
    def model(self, lively):
        return lively({})

    @pytest.fixture
    def ids(self):
        return torch.arange(12).view(2, 6)

    def refused(self, match, model, *args, **kwargs):
        with pytest.raises(InputError, match=match) as caught:
            model(*args, **kwargs)
        assert_one_sentence(caught)

    @pytest.mark.parametrize("token", [257, 50256, -1, -100])
    def test_token_ids_outside_the_vocabulary(self, model, ids, token):
        ids[1, 3] = token
        self.refused(f"token id {token} is outside the vocabulary 0..256: was the text encoded", model, ids)

    @pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)], ids=str)
    def test_empty_input(self, model, shape):
        self.refused("the input is empty", model, torch.zeros(shape, dtype=torch.long))
        self.refused("the input is empty", model, inputs_embeds=torch.zeros(*shape, 32))

    def test_a_row_instead_of_a_batch(self, model, ids):
        self.refused("shape", model, ids[0])

    def test_misspelt_arguments(self, model, ids):
        self.refused("unknown argument 'atention_mask'. Did you mean 'attention_mask'", model, ids, atention_mask=ids)

    def test_labels_need_every_logit(self, model, ids):
        self.refused("logits_to_keep", model, ids, labels=ids, logits_to_keep=1)

    def test_forced_routes(self, model, ids):
        self.refused("layer 0 is not routed", model, ids, forced_routes={0: torch.zeros_like(ids)})
        self.refused("expected int64", model, ids, forced_routes={1: torch.zeros_like(ids[:, 1:])})
        self.refused("expected int64", model, ids, forced_routes={1: torch.zeros_like(ids).float()})
        self.refused("below 2 operators", model, ids, forced_routes={1: torch.full_like(ids, 2)})

    def test_both_or_neither(self, model, ids):
        self.refused("exactly one of input_ids and inputs_embeds", model)
        embeddings = model.get_input_embeddings()(ids)
        self.refused("exactly one of input_ids and inputs_embeds", model, ids, inputs_embeds=embeddings)

    @pytest.mark.parametrize("shape", [(2, 5), (2, 7), (1, 6), (6,), (2, 1, 6, 6)], ids=str)
    def test_masks_of_another_shape(self, model, ids, shape):
        self.refused(r"attention_mask has shape .*, expected \(2, 6\)", model, ids, attention_mask=torch.ones(shape))

    def test_a_mask_without_the_cached_tokens(self, model, ids):
        cache = model(ids, use_cache=True).past_key_values
        mask = torch.ones(2, 1)
        self.refused(r"expected \(2, 7\)", model, ids[:, :1], attention_mask=mask, past_key_values=cache)

    def test_attention_weights_without_eager(self, model, ids):
        self.refused("attn_implementation='eager'", model, ids, output_attentions=True)

    @pytest.mark.parametrize("thresholds", [2.0, [0.5], "high"], ids=str)
    def test_set_thresholds(self, model, thresholds):
        self.refused("thresholds", model.model.set_thresholds, thresholds)
        assert model.config.thresholds is None


class TestPresetChanges:
    def test_v1_takes_every_routing_of_the_paper(self):
        assert presets.get("v1-tiny").routing == "hard"
        assert presets.get("v1-tiny", routing="soft").router == "learned"
        assert presets.get("v1-tiny", routing="threshold").router == "entropy"

    def test_general_settings_pass_and_strangers_do_not(self):
        assert presets.get("v3-tiny", attn_implementation="eager")._attn_implementation == "eager"
        assert presets.get("v3-tiny", num_labels=5).num_labels == 5
        for stranger in ("d_model", "tau", "wibble"):
            refused("unknown configuration field", lambda **fields: presets.get("v3-tiny", **fields), **{stranger: 3})

    def test_rows_with_several_labels_are_refused(self):
        config = presets.get("v3-tiny", num_labels=3, problem_type="multi_label_classification")
        with pytest.raises(InputError, match="one label"):
            ChiarForSequenceClassification(config)


def test_a_near_miss_among_many_names_gets_no_list():
    many = [f"name_{n}" for n in range(30)]
    assert str(unknown_name("field", "nmae_7", many)) == "unknown field 'nmae_7'. Did you mean 'name_7'?"
    assert "Allowed: name_0, name_1" in str(unknown_name("field", "zzz", many))
    assert "Allowed: name_0, name_1" in str(unknown_name("field", "nmae_1", many[:2])), "few are always listed"
