"""MFU: which peak, which FLOPs, and when there is none."""

from types import SimpleNamespace

import pytest
import torch

from chiar import presets
from chiar.errors import InputError
from chiar.routing.flops import count_dense_execution, count_flops, operator_shares
from chiar.training.loop import train
from chiar.training.run_folder import RunFolder
from chiar.training.utilisation import Utilisation, known_peak, training_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H2000", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert known_peak(name) == peak


def test_a_dense_layer_trains_at_three_times_its_forward_pass():
    config = presets.get("baseline-tiny")
    D, V, T = config.hidden_size, config.vocab_size, 64
    layers = len(config.layer_types)
    assert training_flops(config, T) == 3 * (layers * (8 * D * D + 16 * D * D + 4 * D * T) + 2 * D * V)


def test_the_entropy_router_has_no_backward_pass_and_routing_saves_nothing():
    config = presets.get("v3-tiny")
    count = count_dense_execution(config, 64)
    routers = len(config.routed_layers) * config.hidden_size**2  # the DCT by halves
    assert training_flops(config, 64) == 3 * (count.total - routers) + routers
    learned = presets.get("v3-tiny", routing="hard")
    assert training_flops(learned, 64) == 3 * count_dense_execution(learned, 64).total


def test_a_stated_peak_gives_mfu_in_metrics(config, settings, tmp_path, capsys):
    train(config(), settings(steps=4, peak_tflops=0.5), tmp_path / "run", device="cpu")
    for record in RunFolder(tmp_path / "run").read_metrics():
        expected = record["tokens_per_second"] * training_flops(config(), 16) / 0.5e12
        assert record["mfu"] == round(expected, 4)
    assert "MFU" in capsys.readouterr().out


def test_an_unknown_peak_gives_none(config, settings, tmp_path, capsys):
    train(config(), settings(steps=2), tmp_path / "run", device="cpu")
    assert all("mfu" not in record for record in RunFolder(tmp_path / "run").read_metrics())
    assert "MFU" not in capsys.readouterr().out
    with pytest.raises(InputError, match="peak_tflops must not be negative"):
        train(config(), settings(peak_tflops=-1.0), tmp_path / "other", device="cpu")


def test_more_devices_have_a_higher_peak_and_uncounted_tokens_no_mfu(config, settings, corpus, labelled):
    from chiar.data import Corpus

    cpu, language, classes = torch.device("cpu"), Corpus.open(corpus), Corpus.open(labelled)
    chosen = settings(peak_tflops=1.0)
    one, two = (Utilisation(config(), chosen, [language], count, cpu).of(1e7, []) for count in (1, 2))
    assert one == pytest.approx(2 * two, abs=1e-4) and one > 0
    assert Utilisation(config(), chosen, [language, classes], 1, cpu).of(1e7, []) is None
    added = settings(peak_tflops=1.0, mixing="added")
    assert Utilisation(config(), added, [language, language], 1, cpu).of(1e7, []) is None


def test_sparse_execution_counts_what_was_chosen(config, settings):
    chosen, cpu = settings(peak_tflops=1.0), torch.device("cpu")
    language = SimpleNamespace(kind="language")
    model = config(dropout=0.0, execution="sparse", keys="routed")
    shares = operator_shares(model, 0.25)
    use = [[row[name] for name in model.operators] for row in shares]
    found = Utilisation(model, chosen, [language], 1, cpu).of(1e6, use)
    count = count_flops(model, chosen.length, shares)
    assert found == round(1e6 * (3 * count.total - 2 * count.part("router")) / 1e12, 4)
    assert found < Utilisation(config(dropout=0.0, keys="routed"), chosen, [language], 1, cpu).of(1e6, use)
