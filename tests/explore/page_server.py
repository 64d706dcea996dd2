"""Small models on disk, and a real server in front of them."""

import threading
from contextlib import contextmanager
from queue import Queue

import httpx

from chiar.data.tokenizers import Tokenizer
from chiar.explore.server import Explorer
from chiar.explore.view import open_models
from small_corpora import save, tiny_model


def save_model(folder, preset="v3-tiny", **changes):
    """Bytes for tokens, and thresholds its entropies lie on both sides of."""
    if preset == "v3-tiny" and not {"router", "target_fraction", "thresholds"} & set(changes):
        changes["thresholds"] = 0.8
    return save(tiny_model(preset, seed=4, max_position_embeddings=64, **changes), folder, Tokenizer.of_bytes())


class Served:
    def __init__(self, explorer, url):
        self.explorer, self.url = explorer, url

    def post(self, path, body, **more):
        return httpx.post(f"{self.url}{path}", json=body, timeout=30, **more)

    def get(self, path, **more):
        return httpx.get(f"{self.url}{path}", timeout=30, **more)


@contextmanager
def serving(names, most_tokens=256):
    explorer, said = Explorer(open_models(names), most_tokens), Queue()
    thread = threading.Thread(target=explorer.listen, args=(0, said.put), daemon=True)
    thread.start()
    try:
        yield Served(explorer, said.get(timeout=10).split()[4].rstrip("/"))
    finally:
        explorer.should_exit = True
        thread.join(10)
        explorer.thread.shutdown()
        assert not thread.is_alive(), "the server did not end"
