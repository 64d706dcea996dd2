"""lm-evaluation-harness on our models, from local task files; its figures against our own evaluation."""

import json
import math
import sys

import huggingface_hub
import pytest
import torch
from evaluated import LENGTH, language_corpus, save, tiny_model

from chiar.data.tokens import TextCodec
from chiar.evaluation.continuations import continue_texts
from chiar.evaluation.downstream import OFFLINE, stay_offline
from chiar.evaluation.perplexity import measure_perplexity, windows
from chiar.generation.stream import Sampling
from commands import run

END = 256
BYTES = TextCodec(None, None)
TEXTS = ["light and dark tokens", "naïve 漢 filters of attention, and more than one window of them", "x"]
QUESTIONS = [
    {"question": "light or", "choices": ["dark", "noise"], "answer": 0},
    {"question": "a filter and a", "choices": ["gate", "token of it"], "answer": 1},
    {"question": "H is", "choices": ["an entropy", "no"], "answer": 0},
]
ROLLING = """task: mine_text
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CHOICE = """task: mine_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
WRITING = """task: mine_writing
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def test_the_package_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, output = run("eval", "v3-tiny", "--harness", "arc_easy")
    assert code == 2
    assert "pip install 'chiar[harness]'" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data CORPUS, or --harness TASKS"),
        (["--data", "x", "--harness", "y"], "--data CORPUS, or --harness TASKS"),
        (["--harness", "y", "--stride", "4"], "--stride is for --data"),
        (["--data", "x", "--few-shot", "1"], "--few-shot is for --harness"),
        (["--harness", " ,"], "names of tasks"),
    ],
)
def test_what_cannot_be_asked_for(options, message):
    code, output = run("eval", "v3-tiny", *options)
    assert code == 2
    assert message in output


def test_nothing_is_downloaded_though_the_hub_was_imported_before(monkeypatch):
    """As with `chiar --plugin`, whose file may import transformers."""
    for name in OFFLINE:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    stay_offline()
    assert huggingface_hub.is_offline_mode()
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        huggingface_hub.HfApi().dataset_info("some/dataset")


def test_no_data_is_downloaded_though_datasets_was_imported_before(harness, monkeypatch):
    datasets = pytest.importorskip("datasets")
    for name in OFFLINE:
        monkeypatch.setenv(name, "0")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False)
    stay_offline()
    assert datasets.config.HF_HUB_OFFLINE and datasets.config.HF_DATASETS_OFFLINE
    with pytest.raises(ConnectionError, match=r"(?i)offline"):
        datasets.load_dataset("some/dataset")


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: harness)")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, harness, model):
    """In the writing task the model is right once: there the answer is what it writes."""
    folder = tmp_path_factory.mktemp("tasks")
    answers = [written(model, QUESTIONS[0]["question"].encode(), 8), "no", "nor this"]
    questions = [{**question, "written": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    for name, text in (("text", ROLLING), ("choice", CHOICE), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(text)
    for name, lines in (("texts", [{"text": text} for text in TEXTS]), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("lm_eval") / "text")


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=LENGTH, eos_token_id=END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, corpus):
    return save(model, tmp_path_factory.mktemp("lm_eval_model") / "model", corpus)


def evaluated(folder, tasks, tmp_path, names, *options):
    code, output = run(
        "eval", folder, "--harness", names, "--harness-path", tasks, "--json", tmp_path / "out.json", *options
    )
    assert code == 0, output
    report = json.loads((tmp_path / "out.json").read_text())
    return {(score["task"], score["metric"]): score["value"] for score in report["scores"]}, report, output


def written(model, prompt, new):
    """What the model writes behind a prompt, up to a line's end."""
    settings = Sampling().configuration(model, new)
    return continue_texts(model, BYTES, [list(prompt)], ["\n"], settings, 1)[0]


def nats(model, ids, first=1):
    """log p of ids[first:], each from all before it, in one pass."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return float(logprobs[range(first - 1, len(ids) - 1), ids[first:]].sum())


def test_the_adapter_agrees_with_our_evaluation(harness, corpus, model):
    """The blocks of `chiar eval`, scored by the adapter: the same losses."""
    from chiar.evaluation.lm_eval_model import ChiarLM

    split = corpus.split("test")
    scores, _ = measure_perplexity(model, corpus, split, length=LENGTH, stride=None, batch_size=4)
    ids = split.read(0, split.tokens).tolist()
    requests = []
    for window in windows(split.tokens - 1, LENGTH, LENGTH):
        read = ids[window.start : window.start + window.inputs + 1]
        requests.append((("", ""), read[:1], read[1:]))
    adapter = ChiarLM(model, BYTES, LENGTH, batch_size=3)
    total = -sum(score for score, _ in adapter._loglikelihood_tokens(requests, disable_tqdm=True))
    assert total / scores.tokens == pytest.approx(scores.nll, abs=1e-6)
    assert adapter.cut == 0


def test_text_of_any_length(folder, tasks, tmp_path, model):
    """Each document behind the end of text; the second in several windows, the last of them with all it can see."""
    figures, report, output = evaluated(folder, tasks, tmp_path, "mine_text", "--batch-size", 2)
    total, size = 0.0, 0
    for text in TEXTS:
        ids = [END, *text.encode()]
        size += len(ids) - 1
        for start in range(0, len(ids) - 1, LENGTH):
            stop = min(start + LENGTH, len(ids) - 1)
            seen = max(0, stop - LENGTH)
            total += nats(model, ids[seen : stop + 1], start - seen + 1)
    assert figures["mine_text", "bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert report["format"] == "chiar-downstream/1"
    assert report["remarks"] == []
    assert "bits_per_byte" in output


def test_choices_and_writing(folder, tasks, tmp_path, model):
    figures, report, _ = evaluated(folder, tasks, tmp_path, "mine_choice,mine_writing", "--length", 40)
    right = 0
    for question in QUESTIONS:
        context = question["question"].encode()
        scores = [nats(model, [*context, *b" ", *choice.encode()], len(context)) for choice in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
    assert figures["mine_choice", "acc"] == pytest.approx(right / len(QUESTIONS))
    assert report["scores"][0]["documents"] == len(QUESTIONS)
    assert figures["mine_writing", "exact_match"] == pytest.approx(1 / len(QUESTIONS))
    assert report["remarks"] == []


@pytest.mark.parametrize(
    ("length", "wanted", "rooms", "cut", "short"),
    [
        (32, 8, [8, 8, 8], 1, 0),
        (32, 24, [24, 18, 8], 1, 2),
        (32, 256, [24, 18, 8], 1, 3),
        (64, None, [56, 50, 22], 0, 3),
        (2, 256, [1, 1, 1], 3, 3),
    ],
)
def test_a_prompt_keeps_what_it_can(harness, model, length, wanted, rooms, cut, short):
    """Three prompts of 8, 14 and 42 tokens, each with room of its own."""
    from lm_eval.api.instance import Instance

    from chiar.evaluation.lm_eval_model import ChiarLM

    adapter, texts = ChiarLM(model, BYTES, length, batch_size=2), [TEXTS[0][:8], TEXTS[0][:14], TEXTS[0] * 2]
    asked = {"until": ["\n"], **({} if wanted is None else {"max_gen_toks": wanted})}
    requests = [Instance("generate_until", {}, (text, asked), number) for number, text in enumerate(texts)]
    expected = [written(model, text.encode()[-(length - new) :], new) for text, new in zip(texts, rooms, strict=True)]
    assert adapter.generate_until(requests, disable_tqdm=True) == expected
    assert (adapter.cut, adapter.short) == (cut, short)


def test_no_room_to_write(folder, tasks, harness):
    code, output = run("eval", folder, "--harness", "mine_writing", "--harness-path", tasks, "--length", 1)
    assert code == 2
    assert "no room behind a prompt" in output


def test_remarks(tmp_path, tasks, corpus):
    folder = save(tiny_model(max_position_embeddings=LENGTH, eos_token_id=END, gate_pool="batch"), tmp_path / "model")
    corpus.tokenizer().save(folder)
    _, report, output = evaluated(folder, tasks, tmp_path, "mine_choice", "--rows", 1, "--length", 8)
    assert [remark.split(":")[0].split(" ")[0] for remark in report["remarks"]] == ["gate_pool", "2", "only"]
    assert "note: gate_pool" in output


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("mine_texd", "Did you mean 'mine_text'?"),
        ("lost", "a task's data cannot be read"),
        ("wrong", "a task cannot be put together"),
    ],
)
def test_tasks_that_cannot_run(folder, tasks, names, message):
    (tasks / "lost.yaml").write_text(ROLLING.replace("mine_text", "lost").replace("texts.jsonl", "nowhere.jsonl"))
    (tasks / "wrong.yaml").write_text(CHOICE.replace("mine_choice", "wrong").replace("{{choices}}", "{{other}}"))
    code, output = run("eval", folder, "--harness", names, "--harness-path", tasks)
    assert code == 2
    assert message in output


def test_no_such_folder(folder, tmp_path, harness):
    code, output = run("eval", folder, "--harness", "x", "--harness-path", tmp_path / "nowhere")
    assert code == 2
    assert "there is no folder" in output
