"""The installed Chromium, driven by playwright: for browser tests, timings and screenshots."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"


class NoBrowser(Exception):
    """The message says what is missing."""


def executable() -> str | None:
    """The path in $CHROMIUM, else the first Chromium on the path."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowser("playwright is not installed: pip install 'chiar[browser]'") from None
    path = executable()
    if path is None:
        raise NoBrowser("there is no Chromium on the path: install one, or set $CHROMIUM")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=[*QUIET.split(), "--no-first-run"])
        yield browser
        browser.close()


@contextmanager
def served(names: list[str]) -> Iterator[str]:
    """The URL of `chiar explore` with these models, in another process."""
    command = [sys.executable, "-m", "chiar", "explore", *names, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[4]
        finally:
            process.terminate()


class Watched:
    """A page that records its requests, errors and messages."""

    def __init__(self, browser: Any, width: int = 1200, height: int = 900, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", self.failed)
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog opened"), dialog.dismiss()))

    def failed(self, request: Any) -> None:
        """Ignores aborted streams: Chromium often reports them after a complete read, which the page itself checks."""
        if not (request.url.endswith("/api/continue") and request.failure == "net::ERR_ABORTED"):
            self.problems.append(f"failed: {request.failure} {request.url}")

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector(".cell")
        return self.page
