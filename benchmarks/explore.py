"""How fast the routing explorer is for a user: over HTTP, and in Chromium.

    OMP_NUM_THREADS=2 python benchmarks/explore.py [--size 16m] [--tokens 512] [--repeats 9]

`chiar explore` serves a byte-level model with random weights in another process. The page is interactive once it has
drawn its first text and the slider can be moved. Without Chromium or playwright the browser rows are omitted.
"""

import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from chiar import presets
from chiar.data.tokenizers import Tokenizer
from chiar.model.modeling import ChiarForCausalLM
from chromium import NoBrowser, Watched, chromium, served
from timing import elapsed, hardware, make_parser

TEXT = "Light tokens take the cheap filter and dark ones attend to everything before them. "
MOVED = """value => new Promise(done => {
  const slider = document.querySelector('input[type=range]'), words = document.querySelector('.words');
  const redrawn = (_, observer) => { observer.disconnect(); requestAnimationFrame(() => done()); };
  new MutationObserver(redrawn).observe(words, {childList: true});
  slider.value = value;
  slider.dispatchEvent(new Event('input', {bubbles: true}));
})"""


@contextmanager
def served_model(size: str) -> Iterator[str]:
    """The URL of `chiar explore` with a random model of this size."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        logging.disable_progress_bar()
        ChiarForCausalLM(presets.get(f"v3-{size}", gate_pool="causal")).save_pretrained(folder)
        Tokenizer.of_bytes().save(Path(folder))
        with served([folder]) as url:
            yield url


def request_route(url: str, text: str, steer: dict[str, Any] | None) -> None:
    body = json.dumps({"model": 0, "text": text, "steer": steer}).encode()
    request = urllib.request.Request(f"{url}api/route", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        json.load(response)


def time_calls(work: Callable[[int], object], repeats: int) -> list[float]:
    """The milliseconds of each call."""
    return [1e3 * elapsed(partial(work, number)) for number in range(repeats)]


def over_http(url: str, text: str, repeats: int) -> dict[str, list[float]]:
    request_route(url, text, None)
    plain = time_calls(lambda n: request_route(url, text, None), repeats)
    shares = [{"kind": "share", "value": (n + 1) / (repeats + 1)} for n in range(repeats)]
    moved = time_calls(lambda n: request_route(url, text, shares[n]), repeats)
    return {"route the text (HTTP)": plain, "route the text with another share (HTTP)": moved}


def in_chromium(url: str, text: str, repeats: int) -> dict[str, list[float]]:
    with chromium() as browser:
        # Each in its own context, so that nothing is cached; the context is created outside the timing.
        pages = [Watched(browser) for _ in range(repeats)]
        loads = time_calls(lambda n: pages[n].open(url).wait_for_selector("input[type=range]:not([disabled])"), repeats)
        for page in pages:
            page.context.close()
        page = Watched(browser).open(url)
        page.locator("select").select_option("share")
        with page.expect_response("**/api/route"):
            page.fill("#text", text)
        page.wait_for_selector(f".token[data-token='{len(text) - 1}']")
        page.wait_for_timeout(500)
        moves = time_calls(lambda n: page.evaluate(MOVED, (n + 1) / (repeats + 1)), repeats)
    return {
        "first page load to interactive (Chromium)": loads[:1],
        "later page loads": loads[1:],
        "slider moved until tokens redrawn": moves,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, device=False)
    parser.add_argument("--size", choices=("400m", "16m", "tiny"), default="16m")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    text = (TEXT * (options.tokens // len(TEXT) + 1))[: options.tokens]
    with served_model(options.size) as url:
        rows = over_http(url, text, options.repeats)
        try:
            rows |= in_chromium(url, text, options.repeats)
        except NoBrowser as error:
            print(f"note: {error}", file=sys.stderr)
    where = f"{hardware('cpu')}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    print(f"v3-{options.size}, {options.tokens} tokens; {where}\n")
    print("| what | median ms | fastest | slowest | n |\n|---|---|---|---|---|")
    for name, times in rows.items():
        print(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} | {len(times)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
