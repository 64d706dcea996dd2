"""A real Chromium, as installed on this machine."""

import os
import shutil
from contextlib import contextmanager

import pytest

QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"


def executable():
    """The one named by $CHROMIUM, else the first on the path."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@contextmanager
def chromium():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed: pip install 'chiar[browser]'")
    path = executable()
    if path is None:
        pytest.skip("there is no Chromium on the path: install one, or name it in $CHROMIUM")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=[*QUIET.split(), "--no-first-run"])
        yield browser
        browser.close()


class Watched:
    """A page whose requests, errors and messages are all kept."""

    def __init__(self, browser, width=1200, height=900, **options):
        self.context = browser.new_context(viewport={"width": width, "height": height}, **options)
        self.page = self.context.new_page()
        self.requests, self.problems = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.problems.append(f"failed: {request.url}"))
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog opened"), dialog.dismiss()))

    def open(self, url):
        self.page.goto(url)
        self.page.wait_for_selector(".cell")
        return self.page
