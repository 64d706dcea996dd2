"""The pictures of the routing explorer in docs/figures, from two runs of `make demo`.

    python benchmarks/explore_pictures.py runs/demo/v3 runs/demo/baseline --out docs/figures

Needs Chromium and playwright. Pictures that are there are replaced.
"""

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

from chiar.explore.report import write_report
from chiar.explore.server import Explorer
from chiar.explore.view import open_models
from chromium import NoBrowser, Watched, chromium

TEXT = "Return the number of items in the list, or raise ValueError if it is empty."
LONG = f"{TEXT} If the optional argument is given, the object is compared with each element in turn until one is equal."


@contextmanager
def served(names: list[str]) -> Iterator[str]:
    explorer, said = Explorer(open_models(names), 1024), Queue[str]()
    thread = threading.Thread(target=explorer.listen, args=(0, said.put), daemon=True)
    thread.start()
    yield said.get().split()[4]
    explorer.should_exit = True
    thread.join()


def settle(page: Any) -> None:
    page.wait_for_timeout(400)
    while page.evaluate("!!document.querySelector('.stale')"):
        page.wait_for_timeout(50)


def show(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.evaluate("document.activeElement.blur()")
    settle(page)


def move(page: Any, share: float) -> None:
    page.locator("select").first.select_option("share")
    settle(page)
    slider = page.locator("input[type=range]").first
    slider.evaluate("(n, v) => { n.value = v; n.dispatchEvent(new Event('input', {bubbles: true})); }", share)
    settle(page)


def take(page: Any, out: Path, **options: Any) -> None:
    page.screenshot(path=out, **options)
    print(f"{out}: {out.stat().st_size // 1000} kB")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = parser.parse_args(arguments)
    try:
        with chromium() as browser:
            draw(browser, options.runs, options.out)
    except NoBrowser as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(browser: Any, runs: list[str], out: Path) -> None:
    with served(runs) as url:
        page = Watched(browser, 1120, 1160).open(url)
        show(page, TEXT)
        page.locator(".grid .cell.dark").nth(2).hover()
        take(page, out / "explore-pair.png")
    with served(runs[:1]) as url:
        page = Watched(browser, 980, 900).open(url)
        page.click("#theme")
        show(page, LONG)
        move(page, 0.25)
        page.mouse.move(5, 5)
        take(page, out / "explore-moved-dark.png", full_page=True)
        phone = Watched(browser, 390, 844).open(url)
        show(phone, TEXT)
        take(phone, out / "explore-phone.png")
    report = out / "report.html"
    write_report(open_models(runs[:1]), [TEXT], report, [])
    try:
        take(Watched(browser, 1000, 1250).open(report.resolve().as_uri()), out / "explore-report.png")
    finally:
        report.unlink()


if __name__ == "__main__":
    sys.exit(main())
