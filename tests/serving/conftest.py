import pytest
from served import serving

from chiar.data.tokenizers import Tokenizer
from small_corpora import save, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model of the paper's kind, gate over the batch included: what neighbours could change shows."""
    model = tiny_model(seed=8, gate_pool="batch", max_position_embeddings=64)
    return save(model, tmp_path_factory.mktemp("serving") / "model", Tokenizer.of_bytes())


@pytest.fixture(scope="session")
def server(folder):
    with serving(folder, "--rows", 4, "--waiting", 8, "--max-body", 10_000) as served:
        yield served
