"""`chiar generate` shows what model.generate produces, as it comes, and nothing that harms a terminal."""

import pytest
import torch
from typer.testing import CliRunner

from chiar.cli import app
from chiar.data.tokenizers import Tokenizer
from chiar.generation.cli import SHADES
from chiar.model.decoding import FastDecoder
from chiar.model.modeling import ChiarForCausalLM
from chiar.visible import visible
from helpers import randomise, small_config

PROMPT = "light and dark"


def make(folder, tokenizer=None, preset="v3-tiny", **changes):
    tokenizer = tokenizer or Tokenizer.of_bytes()
    fields = {"vocab_size": tokenizer.vocab_size, "gate_pool": "causal", "max_position_embeddings": 64, **changes}
    randomise(ChiarForCausalLM(small_config(preset, **fields)), seed=4).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("generate") / "model")


def generate(*arguments):
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    return result.exit_code, result.stdout, str(result.exception or "") + result.stderr


def expected(folder, prompt=PROMPT, **settings):
    model, tokenizer = ChiarForCausalLM.from_pretrained(folder).eval(), Tokenizer.open(folder)
    ids = torch.tensor([tokenizer.encode_batch([prompt])[0].tolist()])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **settings})[0]
    return model, out, tokenizer.decode(out.numpy())


def test_the_output_is_what_generate_gives(folder, tmp_path):
    trained = make(tmp_path / "model", Tokenizer.train(["light and dark tokens 漢 naïve " * 20], 300))
    for place, prompt in ((folder, PROMPT), (trained, "dark 漢 tokens")):
        code, output, _ = generate(place, "--prompt", prompt, "--max-new-tokens", 30)
        assert code == 0
        assert output == visible(expected(place, prompt, max_new_tokens=30)[2]) + "\n"


@pytest.mark.parametrize("routes", [[], ["--routes"]], ids=["plain", "routes"])
def test_fast_decoding_writes_the_same(folder, monkeypatch, routes):
    """Asked for on a CPU, where it is off by itself; routes are read beside it, by traces."""
    steps, step = [], FastDecoder.step

    def recorded(decoder, *arguments):
        steps.append(1)
        return step(decoder, *arguments)

    monkeypatch.setattr(FastDecoder, "step", recorded)
    arguments = [folder, "--prompt", PROMPT, "--max-new-tokens", 30, *routes]
    slow = generate(*arguments)
    assert not steps and slow == generate(*arguments, "--no-fast")
    assert generate(*arguments, "--fast") == slow
    assert len(steps) == (0 if routes else 29)  # a traced pass is no fixed step


def test_sampling_is_seeded_and_keeps_all_tokens_unless_told(folder):
    drawn = [generate(folder, "--prompt", PROMPT, "--temperature", 1.5, "--seed", seed)[1] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.manual_seed(3)
    sampled = expected(folder, max_new_tokens=64, do_sample=True, temperature=1.5, top_k=0)[2]
    assert drawn[0] == visible(sampled) + "\n"
    greedy = generate(folder, "--prompt", PROMPT)[1]
    for option in (["--top-k", 1], *(["--temperature", t, "--top-p", 0.9] for t in (0, 1e-320, 1e-45, 1e-6))):
        assert generate(folder, "--prompt", PROMPT, *option)[1] == greedy


def test_routes_are_those_of_the_whole_text(folder):
    _, output, _ = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 1, "--routes")
    legend, shown = output.split("\n", 1)
    assert "light" in legend and "dark" in legend
    model, out, _ = expected(folder, max_new_tokens=1)
    with torch.no_grad():
        trace = model(out[None], output_routing=True).routing
    layers = [trace.layers[layer] for layer in trace.routed_layers]
    dark = torch.stack([(layer.choice_BT[0] == 1).float() for layer in layers]).mean(0).tolist()
    marks = [SHADES[min(int(share * 4), 3)] for share in dark]
    assert len(set(marks)) > 1
    assert shown.startswith("".join(mark + letter for mark, letter in zip(marks, PROMPT, strict=False)))


def test_colour_where_there_is_colour_but_a_prompt_commands_no_terminal(folder, monkeypatch):
    _, output, _ = generate(folder, "--prompt", "\x1b[31mred\x07", "--max-new-tokens", 8)
    assert "\x1b" not in output and output.startswith("\\x1b[31mred\\x07")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, output, _ = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 1, "--routes")
    assert "\x1b[" in output and SHADES[3] not in output


def test_a_gate_that_sees_the_future_is_frozen_with_a_note(tmp_path):
    folder = make(tmp_path / "model", gate_pool="batch")
    code, output, notes = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 20, "--routes")
    assert code == 0 and "stays as the prompt set it" in notes
    _, output, _ = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 20)
    model = ChiarForCausalLM.from_pretrained(folder, gate_generation="prefill").eval()
    ids = torch.tensor([list(PROMPT.encode())])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0]
    assert output == visible(Tokenizer.of_bytes().decode(out.numpy())) + "\n"
    code, output, message = generate(folder, "--prompt", PROMPT, "--gate", "refuse")
    assert code != 0 and not output and "generation is not defined" in message


def test_learned_positions_end(tmp_path):
    folder = make(tmp_path / "model", preset="v2-tiny", max_position_embeddings=20)
    code, output, notes = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 50)
    assert code == 0 and "6 tokens fit" in notes
    assert output == visible(expected(folder, max_new_tokens=6)[2]) + "\n"
    assert "shorten it" in generate(folder, "--prompt", "x" * 20)[2]


def test_bad_input_a_run_stands_for_its_best_model_and_a_baseline_has_no_routes(folder, tmp_path):
    wrong = {("--prompt", ""): "the prompt is empty", ("--gate", "open"): "unknown gate", ("--top-p", "0"): "above 0"}
    for arguments, message in {**wrong, ("--device", "tpu"): "unknown device"}.items():
        code, output, said = generate(folder, "--prompt", "a", *arguments)
        assert code != 0 and message in said and not output
    make(tmp_path / "best", preset="baseline-tiny")
    code, _, notes = generate(tmp_path, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert code == 0 and "its best model writes" in notes
    assert "no routed layers" in generate(tmp_path, "--prompt", "a", "--routes")[2]
