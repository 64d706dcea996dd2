"""Small models on disk, and a real server in front of them."""

import threading
import time
from contextlib import contextmanager

import httpx

from chiar.data.tokenizers import Tokenizer
from chiar.explore.server import Explorer
from chiar.explore.view import open_models
from chiar.model.modeling import ChiarForCausalLM
from chiar.web import Server, bind
from helpers import randomise, small_config


def save_model(folder, preset="v3-tiny", **changes):
    """Bytes for tokens, and thresholds its entropies lie on both sides of."""
    tokenizer = Tokenizer.of_bytes()
    fields = {"vocab_size": tokenizer.vocab_size, "gate_pool": "causal", "max_position_embeddings": 64, **changes}
    if preset == "v3-tiny" and not {"router", "target_fraction", "thresholds"} & set(changes):
        fields["thresholds"] = 0.8
    randomise(ChiarForCausalLM(small_config(preset, **fields)), seed=4).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


class Served:
    def __init__(self, explorer, port):
        self.explorer, self.room, self.url = explorer, explorer.room, f"http://127.0.0.1:{port}"

    def post(self, path, body, **more):
        return httpx.post(f"{self.url}{path}", json=body, timeout=30, **more)

    def get(self, path, **more):
        return httpx.get(f"{self.url}{path}", timeout=30, **more)


@contextmanager
def serving(names, most_tokens=256):
    explorer = Explorer(open_models(names), most_tokens)
    server, listening = Server(explorer), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(explorer, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        explorer.room.thread.shutdown()
        assert not thread.is_alive(), "the server did not end"
