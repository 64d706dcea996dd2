"""`chiar generate` prints what model.generate produces, up to a stop sequence, without terminal control codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from chiar.cli import app
from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens import BROKEN, TextCodec
from chiar.generation.cli import SHADES
from chiar.generation.writer import Piece, Row, Sampling, TokenScore, shades, write_text
from chiar.model import modeling
from chiar.model.decoding import FastDecoder
from chiar.model.modeling import ChiarForCausalLM
from chiar.visible import visible
from small_corpora import save, tiny_model

PROMPT = "light and dark"
BYTES = TextCodec(None, None)
SHORT = st.text("ab漢", min_size=1, max_size=4)
HALF = "漢".encode()


def make(folder, tokenizer=None, preset="v3-tiny", **changes):
    tokenizer = tokenizer or Tokenizer.of_bytes()
    fields = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64, **changes}
    return save(tiny_model(preset, seed=4, **fields), folder, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("generate") / "model")


def generate(*arguments):
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    return result.exit_code, result.stdout, str(result.exception or "") + result.stderr


def expected(folder, prompt=PROMPT, **settings):
    model, tokenizer = ChiarForCausalLM.from_pretrained(folder).eval(), Tokenizer.open(folder)
    model.config.gate_generation = "prefill"
    ids = torch.tensor([tokenizer.encode_batch([prompt])[0].tolist()])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **settings})[0]
    return model, out, visible(tokenizer.decode(out.numpy())) + "\n"


def test_output_matches_transformers_generate(folder, tmp_path):
    trained = make(tmp_path / "model", Tokenizer.train(["light and dark tokens 漢 naïve " * 20], 300))
    for place, prompt in ((folder, PROMPT), (trained, "dark 漢 tokens")):
        code, output, _ = generate(place, "--prompt", prompt, "--max-new-tokens", 30)
        assert (code, output) == (0, expected(place, prompt, max_new_tokens=30)[2])


@pytest.mark.parametrize("routes", [[], ["--routes"]], ids=["plain", "routes"])
def test_fast_decoding_writes_the_same(folder, monkeypatch, routes):
    """On a CPU, where it is off by default. With routes every pass is traced, and not fast."""
    steps, step = [], FastDecoder.step
    monkeypatch.setattr(FastDecoder, "step", lambda *inputs: steps.append(1) or step(*inputs))
    arguments = [folder, "--prompt", PROMPT, "--max-new-tokens", 30, *routes]
    slow = generate(*arguments)
    assert not steps and slow == generate(*arguments, "--no-fast")
    assert generate(*arguments, "--fast") == slow
    assert len(steps) == (0 if routes else 29)  # traced passes take the ordinary path


def test_sampling_is_seeded_and_keeps_all_tokens_by_default(folder):
    drawn = [generate(folder, "--prompt", PROMPT, "--temperature", 1.5, "--seed", seed)[1] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.manual_seed(3)
    assert drawn[0] == expected(folder, max_new_tokens=64, do_sample=True, temperature=1.5, top_k=0)[2]
    greedy = generate(folder, "--prompt", PROMPT)[1]
    for option in (["--top-k", 1], *(["--temperature", t, "--top-p", 0.9] for t in (0, 1e-320, 1e-45, 1e-6))):
        assert generate(folder, "--prompt", PROMPT, *option)[1] == greedy


def test_help_explains_sampling_with_drafts():
    text = " ".join(generate("--help")[1].split())
    assert "greedy output stays the same; samples (temperature above 0) differ" in text and "distribution" in text


def test_routes_match_those_of_a_full_pass(folder):
    shown = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 1, "--routes")[1].split("\n", 1)[1]
    model, out, _ = expected(folder, max_new_tokens=1)
    with torch.no_grad():
        trace = model(out[None], output_routing=True).routing
    layers = [trace.layers[layer] for layer in trace.routed_layers]
    dark = torch.stack([(layer.choice_BT[0] == 1).float() for layer in layers]).mean(0).tolist()
    marks = [SHADES[min(int(share * 4), 3)] for share in dark]
    assert len(set(marks)) > 1
    assert shown.startswith("".join(mark + letter for mark, letter in zip(marks, PROMPT, strict=False)))


def test_dark_stack_shades_bytes_by_uncertainty(tmp_path, monkeypatch):
    folder = make(tmp_path / "model", preset="v5-tiny")
    arguments = [folder, "--prompt", PROMPT, "--max-new-tokens", 1, "--routes"]
    legend, shown = generate(*arguments)[1].split("\n", 1)
    assert "dark: rise of the predictive entropy, τ half-way" in legend and "underlined" not in legend
    model, out, _ = expected(folder, max_new_tokens=1)
    with torch.no_grad():
        layer = model(out[None], output_routing=True).routing.layers[1]
    dark = (layer.entropy_BT[0] > layer.thresholds[0]).tolist()
    routing = model(out[None], output_routing=True).routing
    routing.layers[1].thresholds, routing.layers[1].entropy_BT[0, :3] = [0.0], torch.tensor([-0.5, -0.25, 0.5])
    assert shades(routing)[:3] == [0.0, 0.0, 0.75], "a falling entropy gets the lightest shade"
    assert [mark in SHADES[2:] for mark in shown[: 2 * len(PROMPT) : 2]] == dark[: len(PROMPT)]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = generate(*arguments)[1]
    assert any(dark) == ("\x1b[1;4;" in coloured) and "underlined: passed layers 2–3" in coloured


def test_colour_depends_on_the_terminal_and_control_characters_are_escaped(folder, monkeypatch):
    _, output, _ = generate(folder, "--prompt", "\x1b[31mred\x07", "--max-new-tokens", 8)
    assert "\x1b" not in output and output.startswith("\\x1b[31mred\\x07")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, output, _ = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 1, "--routes")
    assert "\x1b[" in output and SHADES[3] not in output


def test_gate_that_sees_the_future_is_frozen_with_a_note(tmp_path, monkeypatch):
    folder, warnings = make(tmp_path / "model", gate_pool="batch"), []
    monkeypatch.setattr(modeling.logger, "warning_once", warnings.append)
    code, _, notes = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 20, "--routes")
    assert code == 0 and "g keeps its value of the prompt" in notes
    _, output, _ = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 20)
    assert output == expected(folder, max_new_tokens=20)[2] and "g keeps its value of the prompt" in warnings[0]
    code, output, message = generate(folder, "--prompt", PROMPT, "--gate", "refuse")
    assert code != 0 and not output and "generation is not defined" in message


def test_text_longer_than_in_training_is_noted_once(folder):
    for tokens, times in ((4, 0), (5, 1), (9, 1)):
        _, _, notes = generate(folder, "--prompt", "x" * 60, "--max-new-tokens", tokens)
        assert notes.count("longer than the 64 tokens of training") == times


def test_learned_positions_limit_the_text(tmp_path):
    folder = make(tmp_path / "model", preset="v2-tiny", max_position_embeddings=20)
    _, output, notes = generate(folder, "--prompt", PROMPT, "--max-new-tokens", 50)
    assert "6 tokens fit" in notes and output == expected(folder, max_new_tokens=6)[2]
    assert "shorten it" in generate(folder, "--prompt", "x" * 20)[2]


def test_bad_input_runs_load_their_best_model_and_baselines_have_no_routes(folder, tmp_path):
    wrong = {("--prompt", ""): "the prompt is empty", ("--gate", "open"): "unknown gate", ("--top-p", "0"): "above 0"}
    for arguments, message in {**wrong, ("--device", "tpu"): "unknown device"}.items():
        code, output, error = generate(folder, "--prompt", "a", *arguments)
        assert code != 0 and message in error and not output
    make(tmp_path / "best", preset="baseline-tiny")
    code, _, notes = generate(tmp_path, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert code == 0 and "its best model is used" in notes
    assert "no routed layers" in generate(tmp_path, "--prompt", "a", "--routes")[2]


def test_non_finite_logits_are_an_error(tmp_path):
    model = tiny_model()
    model.lm_head.weight.data.fill_(3e38)  # finite, so that loading succeeds
    code, output, error = generate(save(model, tmp_path, Tokenizer.of_bytes()), "--prompt", PROMPT)
    assert code != 0 and "logits are not finite" in error and not output


@pytest.fixture(scope="module")
def dark(tmp_path_factory):
    return make(tmp_path_factory.mktemp("dark") / "model", preset="v5-tiny")


WAYS = {"plain": [], "fast": ["--fast"], "speculating": ["--speculate", 4]}


@pytest.mark.parametrize("prompt", ["   ", "\n\t\n", "\0", "漢", BROKEN, "a漢 😀"])
def test_a_byte_model_continues_any_text(dark, prompt):
    """Its output need not be valid UTF-8. All ways of decoding give the same text."""
    _, _, whole = expected(dark, prompt, max_new_tokens=24)
    for way in WAYS.values():
        code, output, _ = generate(dark, "--prompt", prompt, "--max-new-tokens", 24, *way)
        assert (code, output.split()) == (0, whole.split())  # the console expands tabs
    drawn = generate(dark, "--prompt", prompt, "--max-new-tokens", 24, "--temperature", 1, "--speculate", 4)
    assert drawn[0] == 0 and " passes of the model" in drawn[2]


def test_invalid_text_and_impossible_drafts_are_rejected(dark, folder):
    for model, arguments, message in (
        (dark, ["--prompt", ""], "the prompt is empty"),
        (dark, ["--prompt", "a\udc80b"], "invalid UTF-8"),  # how Python decodes an invalid byte of an argument
        ("v5-tiny", ["--prompt", "\udcff"], "invalid UTF-8"),
        (dark, ["--prompt", "a", "--routes", "--speculate", 2], "leave out --routes or --speculate"),
        (folder, ["--prompt", "a", "--speculate", 2], "speculation needs one dark stack"),
    ):
        code, _, error = generate(model, *arguments)
        assert code != 0 and message in error


def write(data, stops=()):
    """The pieces of a text that is generated byte by byte, until a stop sequence."""
    pieces = []
    row = Row(BYTES, Sampling(len(data), stops=tuple(stops)), send=pieces.append)
    for byte in data:
        if not row.is_over:
            row.take(TokenScore(byte), set())
    return pieces


@given(st.text("ab漢", min_size=1, max_size=30), st.lists(SHORT, max_size=3))
def test_pieces_add_up_to_the_text(text, stops):
    pieces = write(text.encode(), stops)
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    # The stop sequence that is complete first applies; of several that end together, the longest.
    expected = text[: min(found)[1]] if found else text
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish == ("stop" if found else "length")
    assert all(piece.finish is None for piece in pieces[:-1])


def test_invalid_bytes_are_released_at_once():
    """Except for those that may still become a character."""
    for data in (HALF[:1] * 3 + HALF, b"\x80" * 9 + b"a", b"\xf0\x9f\x98" + HALF, b"\xff\xf0\x9f" * 4, HALF[:2] * 9):
        row = Row(BYTES, Sampling(100))
        for count, byte in enumerate(data, 1):
            row.take(TokenScore(byte), set())
            assert count - row.sent <= 3, (data, count)


@given(st.lists(st.sampled_from([0x61, 0x80, 0xBC, *HALF, *"😀é".encode(), 0xFF]), min_size=1, max_size=24))
def test_pieces_of_any_bytes_add_up(data):
    assert "".join(piece.text for piece in write(data)) == bytes(data).decode("utf-8", "replace")


def test_character_with_empty_tokens_between_its_bytes():
    first, second, third = HALF
    assert "".join(piece.text for piece in write([first, 256, second, 256, 256, third, 97])) == "漢a"
    assert len(write([first, *[256] * 40])) > 1  # does not wait for ever


def test_every_token_comes_with_a_piece():
    pieces = [Piece("a", [TokenScore(97)]), Piece("bc", [TokenScore(98), TokenScore(99)], "length")]
    assert write(b"abc", ["bx"]) == pieces
    assert [piece.text for piece in write(b"xabyabc", ["abc"])] == ["x", "aby", ""]  # held back: it may be a stop
    found = [(piece.text, len(piece.tokens)) for piece in write("é".encode() + b"\xe6")]
    assert found == [("é", 2), ("\N{REPLACEMENT CHARACTER}", 1)]  # whole characters, and the incomplete rest at the end


def test_write_text_leaves_a_model_in_training_as_it_was():
    model = tiny_model(seed=4, dropout=0.5, gate_pool="batch").train()
    text = write_text(model, BYTES, "light", Sampling(9))
    assert model.training and model.config.gate_generation == "refuse"
    model.eval()
    model.config.gate_generation = "prefill"
    ids = torch.tensor([list(b"light")])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert text == BYTES.decode(out[0, 5:].tolist())
    assert text.startswith(write_text(model, BYTES, "light", Sampling(9, stops=(text[3:5],)))) and len(text) > 5
