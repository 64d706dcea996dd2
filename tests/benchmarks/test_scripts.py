"""The other benchmarks start on a CPU with tiny sizes and print what they promise."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import byte_decoding
import byte_models
import cpu_execution
import explore
import loop_overhead
import speculation
from small_corpora import language_corpus

BENCHMARKS = Path(explore.__file__).parent
SMALL = ["--size", "tiny", "--lengths", "8,32", "--rows", "2", "--fractions", "0.5", "--turns", "2", "--steps", "1"]


@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_a_cell_is_the_ratio_of_both_times(capsys, mode):
    assert cpu_execution.main([*SMALL, "--mode", mode, "--only", "routed", "--execution", "auto"]) == 0
    cells = re.findall(r"\| `routed` \| (\d+) \| 2 \| ([\d.]+) / ([\d.]+) = ([\d.]+) \|", capsys.readouterr().out)
    assert [length for length, *_ in cells] == ["8", "32"]
    assert cpu_execution.main([*SMALL, "--only", "mod"]) == 2, "it has no dense execution of its own"
    assert "mod" in capsys.readouterr().err


def test_bytes_read_and_written_are_timed_against_the_dense_model(capsys):
    small = ["--device", "cpu", "--prompt", "40", "--new", "5", "--turns", "2", "--rows", "2"]
    for more in ([], ["--fast"], ["--own-routes"]):
        assert byte_decoding.main([*small, "--preset", "v5-tiny", *more]) == 0
        found = capsys.readouterr().out
        assert re.search(r"generation [\d.]+ ×, prefill [\d.]+ × .*, cache [\d.]+%", found)
        assert f"torch {torch.__version__}, " in found and ", , " not in found and ", python 3." in found
        assert ("routes forced at f = 0.2" in found) == (more != ["--own-routes"])
    assert byte_decoding.main([*small, "--preset", "v4-tiny"]) == 2
    for fraction in (0.2, 0.3, 1.0):
        dark_BT = byte_decoding.dark_bytes(3, 0, 200, fraction, "cpu")
        assert (dark_BT.sum(1) - 200 * fraction).abs().max() <= 1
        assert torch.equal(dark_BT[:, 90:], byte_decoding.dark_bytes(3, 90, 110, fraction, "cpu"))


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_script_can_be_imported(path):
    runpy.run_path(str(path))


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_byte_models_are_timed_side_by_side(mode, capsys):
    small = ["--device", "cpu", "--size", "tiny", "--lengths", "32", "--tokens", "64", "--turns", "1", "--steps", "1"]
    assert byte_models.main([*small, "--mode", mode, "--no-compile", "--strict", "--only", *byte_models.NAMES]) == 0
    found = capsys.readouterr().out
    for name in byte_models.NAMES:
        assert re.search(rf"^mode {mode}, model {name}, .*, ms [\d.]+, bytes_per_second [\d.]+", found, re.MULTILINE)


def test_the_loop_is_timed_beside_a_bare_step(tmp_path, capsys):
    corpus = language_corpus(tmp_path, 200)
    small = ["--batch", "2", "--micro-batch", "2", "--length", "16", "--steps", "4", "--turn", "2"]
    loop_overhead.main([str(corpus), *small, "--device", "cpu"])
    assert re.search(r"^train\(\) takes [+-][\d.]+% over the bare step", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("peak", [0, 2_400_000])
def test_writing_beside_blt_is_timed_and_on_a_gpu_its_peak_measured(capsys, monkeypatch, peak):
    if peak:  # as if on a GPU
        monkeypatch.setattr(byte_decoding, "peak_of", lambda work, device: work() or peak)
    small = ["--device", "cpu", "--prompt", "40", "--new", "5", "--turns", "1", "--preset", "v5-tiny", "--blt"]
    assert byte_decoding.main(small) == 0
    found, held = capsys.readouterr().out, ", peak 2 MB with both models on the device" if peak else ""
    for name in ("v5-tiny", "BltForCausalLM, no cache"):
        assert re.search(rf"^{name}: \d+ ms for 5 bytes after 40, [\d.]+ bytes/s{held}$", found, re.MULTILINE)


def test_drafts_are_timed_against_plain_writing(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("light and dark, " * 9)
    small = ["--device", "cpu", "--prompt", "20", "--new", "8", "--prompts", "2", "--drafts", "1,3"]
    assert speculation.main(["v5-tiny", "--prompt-file", str(tmp_path / "text.txt"), *small]) == 0
    rows = re.findall(r"\| (greedy|temperature 1) \| (\d) \| \d+% \| [\d.]+ \|", capsys.readouterr().out)
    assert len(rows) == 4
    assert speculation.main(["v4-tiny", "--prompt-file", str(tmp_path / "text.txt"), *small]) == 2


@pytest.mark.parametrize("part", ["texts", "decode", "loss", "filter"])
def test_kernels_are_compared_and_timed(part, capsys):
    script = runpy.run_path(str(BENCHMARKS / "gpu" / "operations.py"))
    assert script["main"]([part, "--device", "cpu", "--small", "--repeats", "1"]) == 0
    found = capsys.readouterr().out
    assert "ok  " in found and "FAIL" not in found and re.search(r"[\d.]+ ms, ", found)


@pytest.mark.slow
def test_the_page_is_timed_as_a_user_meets_it(capsys):
    assert explore.main(["--size", "tiny", "--tokens", "32", "--repeats", "2"]) == 0
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) in (2, 5)  # without and with a browser
    assert all(int(fastest) <= int(median) <= int(slowest) for _, median, fastest, slowest, _ in rows)
