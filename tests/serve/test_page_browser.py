"""The page in headless Chromium, in front of a server that streams: a message, a stop, a key, an error."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Running, running

pytestmark = pytest.mark.slow

FLAGS = ["disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update"]
WAIT_S = 15.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that is installed; nothing is downloaded."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs an installed Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[f"--{flag}" for flag in FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def slow_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine at fifty tokens a second, so that there is a middle of a stream."""
    inner = engine._llm.engine
    step = inner.step

    def slowly() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(inner, "step", slowly)
    return engine


@pytest.fixture
def served_slowly(slow_engine: Any) -> Iterator[Running]:
    with running(slow_engine) as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh profile's page; no script fails and nothing is blocked."""
    context = browser.new_context()
    context.set_default_timeout(1000 * WAIT_S)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Security" in message.text else None)
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    yield page
    context.close()
    assert problems == [] and hosts <= {"127.0.0.1"}


def until(page: Any, met: Callable[[], bool], what: str) -> None:
    """Wait in here: the page's policy lets no condition be evaluated in there."""
    deadline_s = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < deadline_s, f"this did not happen: {what}"
        page.wait_for_timeout(20)


def test_chat_streams_and_stops(served_slowly: Running, page: Any) -> None:
    page.goto(served_slowly.url)
    page.wait_for_selector("#health[data-state=good]")
    assert page.text_content("#model") == "tiny"
    page.fill("[name=temperature]", "0")
    page.fill("#prompt", "<b>hello</b>")
    page.keyboard.press("Enter")
    body = page.locator(".message.assistant .body")
    page.wait_for_selector(".message.streaming .body p")
    first = body.text_content()
    until(page, lambda: len(body.text_content()) > len(first), "the text grows")
    assert page.text_content(".message.user .body") == "<b>hello</b>", "what is typed is text"
    assert page.locator(".message b").count() == 0
    until(page, lambda: page.text_content(".tile:nth-child(3) .value") == "1", "the status shows it running")
    page.click("#stop")
    page.wait_for_selector(".assistant:not(.streaming) .foot :text('stopped')")
    until(page, lambda: not served_slowly.server.llm.stats()["num_running"], "the stopped stream ends")
    assert page.is_visible("#send") and not page.is_visible("#stop")
    page.click("#clear")
    assert page.locator(".message").count() == 0 and page.is_visible("#empty")


def test_a_whole_answer_and_the_next(served: Running, page: Any) -> None:
    page.goto(served.url)
    page.fill("[name=max_tokens]", "5")
    ended = page.locator(".assistant:not(.streaming) .foot span")
    for number in (1, 2):
        page.fill("#prompt", "hi")
        page.click("#send")
        ended.nth(number - 1).wait_for()
        assert "tokens" in ended.last.text_content()


def test_an_error_is_shown_and_tried_again(served: Running, page: Any) -> None:
    page.goto(served.url)
    page.fill("#prompt", "x" * 4000)
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] :text('Error 400')")
    assert "256" in page.text_content("[role=alert] p"), "the server's own words, with its limit"
    page.click("[role=alert] button")
    page.wait_for_selector("[role=alert] :text('Error 400')")
    assert page.locator(".message.assistant").count() == 1
    # What was refused is not sent again with what comes next.
    page.fill("[name=max_tokens]", "5")
    page.fill("#prompt", "hi")
    page.keyboard.press("Enter")
    page.locator(".assistant:not(.streaming):not(.failed) .foot span").wait_for()


def test_a_key_is_asked_for(engine: Any, page: Any) -> None:
    with running(engine, api_keys={"key-a": "team-a"}) as served:
        page.goto(served.url)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-note:text('refused')")
        page.fill("#key", "key-a")
        page.keyboard.press("Enter")
        page.wait_for_selector("#health[data-state=good]")
        assert page.evaluate("localStorage.length + ' ' + document.cookie") == "0 "


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(served: Running, page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    page.goto(served.url)
    page.wait_for_selector("#health[data-state=good]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 900:
        page.click("#panel-toggle")
        assert page.is_visible("#tiles") and page.get_attribute("#panel-toggle", "aria-expanded") == "true"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
