import pytest
from served import serving

from chiar.data.tokenizers import Tokenizer
from chiar.model.modeling import ChiarForCausalLM
from helpers import randomise, small_config


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model of the paper's kind, gate over the batch included: what neighbours could change shows."""
    path, tokenizer = tmp_path_factory.mktemp("serving") / "model", Tokenizer.of_bytes()
    config = small_config("v3-tiny", vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    randomise(ChiarForCausalLM(config), seed=8).save_pretrained(path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="session")
def server(folder):
    with serving(folder, "--rows", 4, "--waiting", 8, "--max-body", 10_000) as served:
        yield served
