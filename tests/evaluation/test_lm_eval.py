"""lm-evaluation-harness on our models, from local task files; its figures against plain forward passes."""

import json
import math
import sys

import huggingface_hub
import pytest
import torch

from chiar.data.tokenizers import TokenizerChoice
from chiar.data.tokens import TextCodec
from chiar.evaluation.cli import OFFLINE, prepare_harness
from chiar.evaluation.harness import Reading
from commands import run
from helpers import refused
from small_corpora import measured_corpus, save, tiny_model

END, LENGTH = 256, 16
BYTES = TextCodec(None, None)
TEXTS = ["light and dark tokens", "naïve 漢 filters of attention, and more than one window of them", "x"]
QUESTIONS = [
    {"question": "light or", "choices": ["dark", "noise"], "answer": 0},
    {"question": "a filter and a", "choices": ["gate", "token of it"], "answer": 1},
    {"question": "H is", "choices": ["an entropy", "no"], "answer": 0},
]
# What is asked, what is right, and in what figure.
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
ROLLING["metric_list"] = [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}]
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}
CHOICE |= {"doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
WRITING = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{written}}"}
WRITING["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
WRITING["metric_list"] = [{"metric": "exact_match"}]


def test_what_cannot_be_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for options, message in (
        ([], "give --data or --harness"),
        (["--data", "x", "--harness", "y"], "--data CORPUS or --harness TASKS"),
        (["--data", "x", "--few-shot", "1"], "are for --harness"),
        (["--harness", "y", "--stride", "4"], "--stride is for --data"),
        (["--harness", "arc_easy"], "pip install 'chiar[harness]'"),
    ):
        code, output = run("eval", "v3-tiny", *options)
        assert code == 2 and message in output


def test_nothing_is_downloaded_though_the_libraries_were_imported_before(monkeypatch):
    """As with `chiar --plugin`, whose file may import transformers."""
    for name in OFFLINE:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    prepare_harness(False)
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        huggingface_hub.HfApi().dataset_info("some/dataset")


@pytest.fixture(scope="module")
def downstream():
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: harness)")
    import chiar.evaluation.downstream

    return chiar.evaluation.downstream


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=LENGTH, eos_token_id=END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """Without a tokenizer: bytes."""
    return save(model, tmp_path_factory.mktemp("lm_eval_model") / "model")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, downstream, model):
    """In the writing task the model is right once: there the answer is what it writes."""
    folder = tmp_path_factory.mktemp("tasks")
    answers = [written(model, QUESTIONS[0]["question"].encode(), 8), "no", "nor this"]
    questions = [{**question, "written": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    known = {"mine_text": ("texts", ROLLING), "mine_choice": ("questions", CHOICE), "lost": ("nowhere", ROLLING)}
    known["mine_writing"] = "questions", WRITING
    known["wrong"] = "questions", {**CHOICE, "doc_to_choice": "{{other}}"}
    for name, (data, told) in known.items():
        told = {"task": name, "dataset_path": "json", "test_split": "test", **told}
        told["dataset_kwargs"] = {"data_files": {"test": f"{data}.jsonl"}}
        (folder / f"{name}.yaml").write_text(json.dumps(told))  # which is YAML
    for name, lines in (("texts", [{"text": text} for text in TEXTS]), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def evaluated(folder, tasks, tmp_path, names, *options):
    out = tmp_path / "out.json"
    code, output = run("eval", folder, "--harness", names, "--harness-path", tasks, "--json", out, *options)
    assert code == 0, output
    report = json.loads(out.read_text())
    return {(score["task"], score["metric"]): score["value"] for score in report["scores"]}, report, output


def written(model, prompt, new, stop="\n"):
    """What the model writes behind a prompt, up to a line's end."""
    ids = model.generate(torch.tensor([list(prompt)]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
    return BYTES.decode(ids[: ids.index(END)] if END in ids else ids).split(stop)[0]


def nats(model, ids, first=1):
    """log p of ids[first:], each from all before it, in one pass, and whether greedy decoding writes them."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[first - 1 :]
    targets = torch.tensor(ids[first:])
    return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())


@pytest.mark.parametrize(("preset", "pool"), [("v1-tiny", "causal"), ("v3-tiny", "causal"), ("v3-tiny", "batch")])
def test_scores_are_those_of_each_row_alone(downstream, preset, pool):
    """Also where a gate pools: such rows are read one by one, as HFLM pads without a mask."""
    model = tiny_model(preset, max_position_embeddings=64, eos_token_id=END, gate_pool=pool)
    best = int(model(torch.tensor([list(b"dark")])).logits[0, -1].argmax())
    pairs = [(b"light", b" and dark"), (b"x", b"y"), (b"filter the", b" tokens of a"), (b"dark", [best])]
    requests = [(("", str(number)), list(a), list(b)) for number, (a, b) in enumerate(pairs)]
    lm = downstream.ChiarLM(model, BYTES, Reading(64, batch_size=3))
    scored = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    for (_, context, continuation), (total, greedy) in zip(requests, scored, strict=True):
        alone = nats(model, context + continuation, len(context))
        assert total == pytest.approx(alone[0], abs=1e-4)  # fp32, sums of up to 12 losses of up to 20 nats
        assert greedy == alone[1]
    assert scored[3][1]
    refused("raise --length", lm._loglikelihood_tokens, [(("", ""), [1], [2] * 65)], disable_tqdm=True)


def test_text_of_any_length(folder, tasks, tmp_path, model):
    """Each document behind the end of text; the second in several windows, the last of them with all it can see."""
    figures, report, output = evaluated(folder, tasks, tmp_path, "mine_text", "--batch", 2)
    total, size = 0.0, 0
    for text in TEXTS:
        ids = [END, *text.encode()]
        size += len(ids) - 1
        for start in range(0, len(ids) - 1, LENGTH):
            stop = min(start + LENGTH, len(ids) - 1)
            seen = max(0, stop - LENGTH)
            total += nats(model, ids[seen : stop + 1], start - seen + 1)[0]
    assert figures["mine_text", "bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert report["format"] == "chiar-downstream/1" and report["remarks"] == [] and "bits_per_byte" in output


def test_choices_and_writing_of_several_models(folder, tasks, tmp_path, model, corpus):
    figures, report, _ = evaluated(folder, tasks, tmp_path, "mine_choice,mine_writing", "--length", 40)
    right = 0
    for question in QUESTIONS:
        context = question["question"].encode()
        scores = [nats(model, [*context, *b" ", *choice.encode()], len(context)) for choice in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
    assert figures["mine_choice", "acc"] == pytest.approx(right / len(QUESTIONS))
    assert report["scores"][0]["documents"] == len(QUESTIONS) and report["remarks"] == []
    assert figures["mine_writing", "exact_match"] == pytest.approx(1 / len(QUESTIONS))
    bpe = measured_corpus(tmp_path / "bpe", tokenizer=TokenizerChoice("bpe", vocab_size=270))
    other = tiny_model(vocab_size=280, max_position_embeddings=LENGTH, eos_token_id=bpe.end_of_text, gate_pool="batch")
    models = [folder, save(other, tmp_path / "other", bpe.tokenizer())]
    options = ["--harness", "mine_choice", "--harness-path", tasks, "--rows", 1, "--length", 8]
    code, output = run("eval", *models, *options, "--json", tmp_path / "both.json")
    assert code == 0 and "note: gate_pool" in output
    ours, theirs = json.loads((tmp_path / "both.json").read_text())
    assert [remark.split(" ")[0] for remark in ours["remarks"]] == ["2", "only"]
    assert theirs["remarks"][0].startswith("gate_pool 'batch'")


@pytest.mark.parametrize(
    ("length", "wanted", "rooms", "cut"),
    [(32, 8, [8, 8, 8], 1), (32, 24, [24, 18, 8], 2), (64, None, [56, 50, 22], 3), (2, 256, [1, 1, 1], 3)],
)
def test_a_prompt_keeps_what_it_can(downstream, model, length, wanted, rooms, cut):
    """Three prompts of 8, 14 and 42 tokens, each with room of its own."""
    from lm_eval.api.instance import Instance

    lm, texts = downstream.ChiarLM(model, BYTES, Reading(length)), [TEXTS[0][:8], TEXTS[0][:14], TEXTS[0] * 2]
    asked = {"until": ["\n"], **({} if wanted is None else {"max_gen_toks": wanted})}
    requests = [Instance("generate_until", {}, (text, asked), number) for number, text in enumerate(texts)]
    expected = [written(model, text.encode()[-(length - new) :], new) for text, new in zip(texts, rooms, strict=True)]
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    assert lm.cut == cut


def test_tasks_that_cannot_run(folder, tasks):
    for names, options, message in (
        ("mine_texd", [], "Did you mean 'mine_text'?"),
        ("lost", [], "a task's data cannot be read"),
        ("wrong", [], "a task cannot be built"),
        ("mine_writing", ["--length", 1], "no room after a prompt"),
        ("x", ["--harness-path", "nowhere"], "there is no folder"),
    ):
        code, output = run("eval", folder, "--harness", names, "--harness-path", tasks, *options)
        assert code == 2 and message in output
