"""Continuations in padded batches against one forward pass each."""

import pytest
import torch
from evaluated import tiny_model

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.evaluation.continuations import Pair, StopAtText, continue_texts, fit, score_continuations
from chiar.generation.stream import Sampling

PAIRS = [Pair(list(a), list(b)) for a, b in [(b"light", b" and dark"), (b"x", b"y"), (b"filter the", b" tokens of a")]]
BYTES = TextCodec(None, None)


def alone(model, pair):
    ids = torch.tensor([pair.context + pair.continuation])
    with torch.no_grad():
        logprobs = model(ids[:, :-1]).logits[0, len(pair.context) - 1 :].double().log_softmax(-1)
    targets = torch.tensor(pair.continuation)
    return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())


@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v3-tiny"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("pool", ["causal", "sequence", "batch"])
def test_scores_are_those_of_each_row_alone(preset, batch_size, pool):
    """Also where a gate pools over a batch: such rows are read one by one."""
    model = tiny_model(preset, max_position_embeddings=64, gate_pool=pool)
    best = int(model(torch.tensor([list(b"dark")])).logits[0, -1].argmax())
    pairs = [*PAIRS, Pair(list(b"dark"), [best]), Pair(list(b"dark"), [])]
    scored = score_continuations(model, pairs, batch_size=batch_size)
    for pair, one in zip(pairs, scored, strict=True):
        if pair.continuation:
            nats, greedy = alone(model, pair)
            assert one.nats == pytest.approx(nats, abs=1e-4)  # fp32, sums of up to 12 losses of up to 20 nats
            assert one.greedy == greedy
    assert scored[3].greedy
    assert (scored[4].nats, scored[4].greedy) == (0.0, True)


def test_a_long_context_loses_its_beginning():
    assert fit(Pair([1, 2, 3, 4], [5, 6]), 3) == Pair([3, 4], [5, 6])
    assert fit(Pair([1, 2], [5, 6]), 3) == Pair([1, 2], [5, 6])
    with pytest.raises(InputError, match="raise --length"):
        fit(Pair([1], [2, 3, 4, 5]), 3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_end_at_a_stop_text(batch_size):
    model = tiny_model(max_position_embeddings=64, eos_token_id=256)
    prompts = [list(text) for text in (b"light and", b"d", b"filters")]
    settings = Sampling(24).configuration(model, 24)
    whole = continue_texts(model, BYTES, prompts, [], settings, batch_size)
    assert whole == [continue_texts(model, BYTES, [prompt], [], settings, 1)[0] for prompt in prompts]
    stop = whole[0][3:5]
    stopped = continue_texts(model, BYTES, prompts, [stop, "never this"], settings, batch_size)
    assert stopped == [text.split(stop)[0] for text in whole]


def test_tokens_that_show_nothing_hide_no_stop_text():
    rows = torch.tensor([[120, 97, 256, 256, 256, 98], [97, 99, 256, 256, 256, 98]])
    assert StopAtText(BYTES, ["ab"], 1)(rows, None).tolist() == [True, False]
    assert StopAtText(BYTES, ["ab"], 2)(rows, None).tolist() == [False, False]
