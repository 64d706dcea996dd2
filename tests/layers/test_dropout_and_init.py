"""Where dropout acts and how weights begin, which no forward value at rest can show."""

import pytest
import torch
import torch.nn.functional as F

from chiar import ChiarConfig, ChiarForCausalLM, presets


@pytest.fixture
def dropped(monkeypatch):
    """Shapes F.dropout was asked to thin, with the probability, in one training pass of a one-layer model."""

    def run(kind):
        seen = []
        real = F.dropout

        def record(x, p=0.5, training=True, inplace=False):
            if training and p > 0:
                seen.append((tuple(x.shape), p))
            return real(x, p, training, inplace)

        monkeypatch.setattr(F, "dropout", record)
        config = presets.get("baseline-tiny", layer_types=[kind], meta_router=False, attn_implementation="eager")
        model = ChiarForCausalLM(config).train()
        model(torch.arange(12).view(2, 6))
        train, seen[:] = list(seen), []
        model.eval()(torch.arange(12).view(2, 6))
        return train, [entry for entry in seen if entry[1] > 0]

    return run


def test_dropout_acts_on_embeddings_attention_probabilities_and_the_ffns_hidden_and_output(dropped):
    train, _ = dropped("attention")
    width, heads = 32, 2
    assert train == [
        ((2, 6, width), 0.1),
        ((2, heads, 6, 6), 0.1),
        ((2, 6, 4 * width), 0.1),
        ((2, 6, width), 0.1),
    ]


def test_the_spectral_operator_has_no_dropout_of_its_own(dropped):
    train, _ = dropped("spectral")
    assert [shape for shape, _ in train] == [(2, 6, 32), (2, 6, 128), (2, 6, 32)]


def test_evaluation_drops_nothing():
    model = ChiarForCausalLM(presets.get("v3-tiny", dropout=0.9)).eval()
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_sdpa_drops_attention_probabilities_in_training_only(monkeypatch):
    given = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: given.append(k["dropout_p"]) or real(*a, **k)
    )
    model = ChiarForCausalLM(presets.get("baseline-tiny"))
    model.train()(torch.arange(12).view(2, 6))
    model.eval()(torch.arange(12).view(2, 6))
    assert given == [0.1] * 4 + [0.0] * 4


def test_the_papers_dropout_is_the_default():
    assert ChiarConfig().dropout == 0.1


def test_weights_begin_as_the_paper_says():
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v1-16m", layer_types=["spectral", "routed", "attention"]))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name or name.endswith("spectral.weight"):
            assert (parameter == 1).all(), name
        else:
            # N(0, 0.02): the smallest matrix has 771 entries, so its deviation is known to 2.5%.
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.003, name
    omega = model.model.layers[1].operators["rbf"].omega_Dm
    assert omega.std().item() == pytest.approx(2**0.5, rel=0.02)
