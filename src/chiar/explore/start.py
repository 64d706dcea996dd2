"""Starting the page: by hand on a port, and what it says where there is no run."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiar.errors import InputError, optional_module

DEMO = ("runs/demo/v3", "runs/demo/baseline")


def demo_runs() -> list[str]:
    """What `make demo` left below the current folder."""
    return [name for name in DEMO if (Path(name) / "best" / "config.json").is_file()]


def what_to_do() -> list[dict[str, str]]:
    """Commands that give a run to look at."""
    prepare = "chiar data prepare stdlib --out runs/stdlib"
    how = "--steps 300 --batch 8 --micro-batch 8 --length 128 --learning-rate 3e-3 --set warmup=30 --no-compile"
    train = f"chiar train v3-tiny --data runs/stdlib --out runs/v3 {how}"
    return [
        {"why": "Two small models on Python's own documentation, in a minute or two:", "command": "make demo"},
        {"why": "Or a corpus and a model of your own:", "command": f"{prepare}\n{train}"},
        {"why": "Then open it (with --beside, another next to it):", "command": "chiar explore runs/v3"},
        {"why": "Without any training, random weights show the mechanism:", "command": "chiar explore v3-tiny"},
    ]


def serve(
    names: list[str],
    host: str,
    port: int,
    most_tokens: int,
    tokenizer: Path | None,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Load the models and answer until interrupted."""
    for package in ("starlette", "uvicorn"):
        optional_module(package, "page", "the page")
    from chiar.explore.loaded import open_models
    from chiar.explore.server import Explorer, make_app

    explorer = Explorer(open_models(names, tokenizer, seed), most_tokens, host)
    listening = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    say(f"the page is at http://{shown}:{listening.getsockname()[1]}/ (Ctrl-C ends it)")
    server = make_server(make_app(explorer))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    explorer.room.thread.shutdown(wait=False, cancel_futures=True)


def make_server(app: Any) -> Any:
    import uvicorn

    settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
    return uvicorn.Server(settings)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise InputError(f"cannot listen on {host}, port {port} ({error.strerror or error}): try --port 0.") from error
