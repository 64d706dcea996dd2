"""The page and the report in a real Chromium: typed, dragged, compared, continued; no error, no outside request."""

import time
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from page_server import save_model, serving

from chromium import NoBrowser, Watched, chromium
from commands import run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium() as found:
            yield found
    except NoBrowser as error:
        pytest.skip(str(error))


@pytest.fixture
def watched(browser, request):
    """Fails a test whose page said anything on the console, or asked anybody but this machine."""
    made = Watched(browser, **getattr(request, "param", {}))
    yield made
    made.context.close()
    assert made.problems == []
    assert {urlsplit(url).hostname for url in made.requests if not url.startswith(("data:", "file:"))} <= {"127.0.0.1"}


@pytest.fixture
def page(watched, served):
    return watched.open(served.url)


def panel(page, number=0):
    return page.locator("article.panel").nth(number)


def pieces(page, number=0):
    return panel(page, number).locator(".token").all_text_contents()


def until(page, true):
    """Playwright's own waiting would evaluate strings inside the page, which its policy forbids."""
    deadline = time.monotonic() + 15
    while not page.evaluate(true):
        assert time.monotonic() < deadline, true
        page.wait_for_timeout(20)


def wait_for_tokens(page, count):
    until(page, f"document.querySelector('article.panel .words').querySelectorAll('.token').length === {count}")
    until(page, "!document.querySelector('.stale')")


def type_text(page, text):
    page.fill("#text", text)
    wait_for_tokens(page, len(text.encode()))


def figure(page, name, number=0):
    entry = panel(page, number).locator(".figures div", has_text=name).locator("dd")
    return entry.evaluate("node => node.firstChild.textContent")


def drag(page, share, number=0):
    """The slider to a share for attention, and wait for the answer."""
    panel(page, number).locator("select").select_option("share")
    slider = panel(page, number).locator("input[type=range]")
    with page.expect_response(lambda r: "api/route" in r.url and f'"value":{share:g}' in (r.request.post_data or "")):
        slider.evaluate(
            "(node, value) => { node.value = value; node.dispatchEvent(new Event('input', {bubbles: true})); }", share
        )
    until(page, "!document.querySelector('.stale')")


def test_typed_text_is_shown_token_by_token(page):
    type_text(page, "dark light")
    assert "".join(pieces(page)) == "dark light"
    colours = panel(page).locator(".token").evaluate_all("nodes => nodes.map(n => n.style.backgroundColor)")
    assert len(set(colours)) > 1
    assert panel(page).locator(".cell").count() == 10 * 4 + 2  # and two in the legend
    assert "10 of at most 256 tokens" in page.inner_text("#status")
    controls = page.locator("button, input, select, textarea, [role=img], [role=grid]")
    named = "nodes => nodes.map(n => n.labels?.length || n.getAttribute('aria-label') || n.textContent.trim())"
    assert controls.count() > 20 and all(controls.evaluate_all(named))  # for screen readers
    assert page.get_attribute("#status", "aria-live") == "polite" and page.get_attribute("html", "lang") == "en"


def test_the_slider_reroutes_with_loss_and_flops(page):
    type_text(page, "some tokens to be sent one way or the other")
    seen = []
    for share in (0.0, 1.0):
        drag(page, share)
        assert figure(page, "Sent to attention") == f"{share:.0%}"
        seen.append((figure(page, "Loss"), figure(page, "Counted FLOPs")))
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    assert panel(page).locator(".figures em").count() >= 2  # differences from the model as it is
    panel(page).get_by_role("button", name="Reset").click()
    until(page, "!document.querySelector('.figures em')")


def test_bytes_are_coloured_by_entropy_or_by_route_and_the_stack_is_shown_once(watched, tmp_path):
    with serving([str(save_model(tmp_path / "v5", "v5-tiny"))]) as server:
        page = watched.open(server.url)
        type_text(page, "light and dark bytes")

        def colours():
            return panel(page).locator(".token").evaluate_all("nodes => nodes.map(n => n.style.backgroundColor)")

        by_entropy = colours()
        assert "predictive entropy" in panel(page).locator(".legend").first.inner_text()
        page.locator(".compare select").select_option("route")
        assert set(colours()) <= {"rgb(250, 205, 50)", "rgb(8, 40, 100)"} and len(set(by_entropy)) > 3
        assert panel(page).locator("tbody tr td:first-child").all_text_contents() == ["1", "2–3", "4"]
        assert panel(page).locator(".histograms figure").count() == 1 and panel(page).locator(".null").count() == 0
        drag(page, 1.0)
        assert figure(page, "Sent to attention") == "100%" and set(colours()) == {"rgb(8, 40, 100)"}


def test_two_models_stand_side_by_side(page, folders):
    assert page.locator("article.panel h2").all_text_contents() == folders
    boxes = [panel(page, n).bounding_box() for n in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[1]["x"] > boxes[0]["x"] + boxes[0]["width"]
    assert panel(page, 0).locator("input[type=range]").count() == 1
    assert "nothing to move" in panel(page, 1).inner_text()
    assert panel(page, 1).locator(".cell.dark").count() > 0


def test_a_text_is_continued_as_one_watches_until_it_is_stopped_or_breaks_off(page, watched, served, monkeypatch):
    def carry_on(tokens):
        page.fill("#tokens", str(tokens))
        panel(page).get_by_role("button", name="Continue").click()

    def wait_for_status(end):
        until(page, f"document.getElementById('status').textContent.endsWith('{end}')")
        until(page, "!document.getElementById('text').readOnly && !document.querySelector('.stale')")
        assert not served.explorer.streaming

    type_text(page, "go on ")
    carry_on(12)
    wait_for_status("; 12 written")
    assert page.input_value("#text").startswith("go on ") and len(page.input_value("#text")) > 6
    assert panel(page).locator(".token.written").count() >= 1 and not page.is_visible("#error")
    type_text(page, "go on ")
    carry_on(200)
    page.wait_for_selector(".token.written")
    page.keyboard.press("Escape")
    wait_for_status(", then stopped")
    monkeypatch.setattr("chiar.generation.writer.Writer.read", Mock(side_effect=RuntimeError("on purpose")))
    carry_on(12)
    page.wait_for_selector("#error:visible")
    wait_for_status("")
    watched.problems.clear()  # the browser's own notes about the broken stream


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script><img src=x onerror=alert(2)>", "\x1b[31m \u202eevil", "שלום 🎨 مرحبا", "a\nb\tc"],
    ids=["markup", "controls", "right-to-left", "lines"],
)
def test_hostile_text_is_only_text(page, text):
    page.evaluate("text => { document.getElementById('text').value = text; }", text)
    page.dispatch_event("#text", "input")
    wait_for_tokens(page, len(text.encode()))
    assert page.locator("img[src=x]").count() == 0 and page.locator("main script").count() == 0
    if text.isascii() and text.isprintable():
        assert "".join(pieces(page)) == text


def test_what_is_shown_is_of_the_text_that_stands_there(page, watched):
    def shown():
        return [panel(page, n).locator(".token, .grid .cell, .figures dd, h3:visible").count() for n in (0, 1)]

    page.evaluate("document.getElementById('text').value = 'x'.repeat(1_000_000)")
    page.dispatch_event("#text", "input")
    page.wait_for_selector("#error:visible")
    until(page, "!document.querySelector('.stale')")
    assert "longer than 20,000 bytes" in page.inner_text("#error") and page.inner_text("#status") == ""
    assert page.get_attribute("#error", "role") == "alert"
    assert shown() == [0, 0] and panel(page).locator("input[type=range]").is_disabled()
    # The browser itself notes a 413 on the console, one for each model.
    assert all("413" in problem for problem in watched.problems) and len(watched.problems) == 2
    watched.problems.clear()
    type_text(page, "short")
    assert not page.is_visible("#error") and min(shown()) > 5
    page.fill("#text", "")
    assert shown() == [0, 0] and page.inner_text("#status") == "Type something to route."


def test_messages_call_fields_what_the_screen_does(page, watched):
    for field, label in (("#tokens", "New tokens"), ("#temperature", "Temperature")):
        before = page.input_value(field)
        page.fill(field, "")
        panel(page).get_by_role("button", name="Continue").click()
        page.wait_for_selector("#error:visible")
        assert page.inner_text("#error").startswith(f"{label} must be a ")
        page.fill(field, before)
    watched.problems.clear()  # the browser's own notes about the 400


def test_a_long_text_leaves_the_summary_in_sight_and_its_limit_is_told_beyond_it(page):
    type_text(page, "x" * 64)  # as many as it was trained on
    assert "unreliable" not in page.inner_text("main")
    type_text(page, "a longer text " * 18)
    assert "Trained on texts of 64 tokens: predictions beyond that are unreliable." in panel(page).inner_text()
    for name in ("Sent to attention", "Loss", "Counted FLOPs"):
        assert panel(page).locator(".figures div", has_text=name).bounding_box()["y"] < 600
    tokens, split, routes = (panel(page).get_by_role("heading", name=n) for n in ("Tokens", "Split", "Routes"))
    tops = [heading.bounding_box()["y"] for heading in (tokens, split, routes)]
    assert tops == sorted(tops) and tops[1] < 900


def test_two_models_continue_one_prompt_and_are_compared_by_loss(page):
    type_text(page, "go on ")
    page.fill("#tokens", "12")
    page.click("#both")
    until(page, "document.getElementById('status').textContent.endsWith('; 12 and 12 written')")
    until(page, "!document.querySelector('.stale')")
    assert page.input_value("#text") == "go on "
    for number in (0, 1):
        assert "".join(pieces(page, number)).startswith("go on ")
        assert panel(page, number).locator(".token.written").count() >= 1
        assert "▸ Here the model begins" in panel(page, number).inner_text()
    page.get_by_label("Colour tokens by").select_option("loss")
    paint = "nodes => nodes.slice(0, 6).map(n => n.style.backgroundColor)"
    colours = [panel(page, n).locator(".token").evaluate_all(paint) for n in (0, 1)]
    assert [own[0] for own in colours] == ["", ""]  # nothing predicts the first
    assert all(mine and theirs and mine != theirs for mine, theirs in zip(*(own[1:] for own in colours), strict=True))
    said = [panel(page, n).locator(".token").nth(3).get_attribute("aria-label").split() for n in (0, 1)]
    assert said[0][1] == said[1][1] and {said[0][3], said[1][3]} == {"less", "more"}
    panel(page).locator(".token").nth(3).hover()
    assert " ".join(said[0][1:4]) in page.locator(".tip").inner_text()
    type_text(page, "other")
    assert "Here the model begins" not in page.inner_text("main")


def test_the_keyboard_reaches_everything(page):
    type_text(page, "keys")
    cell = panel(page).locator(".grid .cell[tabindex='0']")
    assert cell.count() == 1
    cell.focus()
    tip = page.locator(".tip")
    assert tip.is_visible() and "entropy 0." in tip.inner_text() and "threshold" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    place = page.evaluate("[document.activeElement.dataset.token, document.activeElement.dataset.layer]")
    assert place == ["1", "2"]
    assert "Layer 3" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    panel(page).locator(".grid .cell").first.hover()  # says the same
    assert "Layer 1 (not routed): spectral" in tip.inner_text() and "gate 0." in tip.inner_text()
    panel(page).locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    until(page, "!document.querySelector('.steer button').disabled")


def test_the_theme_is_switched_and_remembered(page):
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != first
    page.reload()
    page.wait_for_selector(".cell")
    assert page.evaluate(background) != first and page.inner_text("#theme") == "Light theme"


@pytest.mark.parametrize("watched", [{"width": 360, "height": 740, "has_touch": True}], indirect=True)
def test_a_phone_scrolls_in_one_direction(page):
    type_text(page, "a long line of text that has to wrap on such a narrow screen")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = [panel(page, n).bounding_box() for n in (0, 1)]
    assert boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"]
    assert panel(page).locator(".strip").count() > 1
    assert all(box["width"] <= 360 for box in boxes)
    panel(page).locator(".cell[data-layer='1']").nth(9).tap()
    assert "Layer 2" in page.locator(".tip").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_a_run_the_demo_is_offered(watched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "runs" / "demo" / "v5" / "best")
    with serving([]) as server:
        watched.page.goto(server.url)
        watched.page.wait_for_selector("#start:visible")
        assert "make demo" in watched.page.inner_text("#advice")
        assert server.explorer.models == []
        watched.page.click("#open-demo")
        watched.page.wait_for_selector(".cell")
        assert watched.page.inner_text("article.panel h2") == "runs/demo/v5"


def test_a_report_asks_for_nothing(watched, folders, tmp_path):
    out = tmp_path / "report.html"
    prompts = ("--prompt", "light and dark", "--prompt", "</script><script>alert(1)</script>")
    run("explore", folders[0], "--beside", folders[1], *prompts, "--out", out)
    page = watched.open(f"file://{out}")
    assert page.locator("article.panel").count() == 4
    assert "".join(pieces(page)) == "light and dark"
    assert "".join(pieces(page, 2)) == "</script><script>alert(1)</script>"
    assert page.locator("h2.section").all_text_contents() == ["Prompt 1", "Prompt 2", "Models"]
    assert page.locator("blockquote").all_text_contents() == [*prompts[1::2]]
    page.get_by_label("Colour tokens by").first.select_option("loss")
    assert "Loss against" in panel(page).inner_text() and "Loss against" not in panel(page, 2).inner_text()
    assert page.locator("section > .scroll tbody tr").count() > 5  # what the models differ in
    assert watched.requests == [f"file://{out}"]
    page.click("#theme")
    panel(page).locator(".grid .cell").first.hover()
    assert "gate" in page.locator(".tip").inner_text()
