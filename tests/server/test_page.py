"""The chat page: its response, and its behavior in a browser if one is installed.

The browser is Chromium, driven by playwright: ``ARMLLM_CHROMIUM`` or the path says where it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_live import Live, live, slowed, until
from torch_armllm.llm.async_llm import AsyncLLM

SECONDS = 15_000  # timeout of the browser in ms


def test_page_needs_no_key_and_no_external_resources(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("k",)) as server:
        got = httpx.get(server.base)
        assert httpx.get(f"{server.base}/v1/models").status_code == 401
        assert (
            "/" not in httpx.get(f"{server.base}/openapi.json", headers={"Authorization": "Bearer k"}).json()
        )
    assert got.status_code == 200
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in got.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(policy[name].startswith("'sha256-") for name in ("script-src", "style-src"))
    assert not re.search(
        r"https?:|//\w|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", got.text
    )
    assert not re.search(r"\s(on\w+|style|src|href)=", got.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    place = os.environ.get("ARMLLM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if place is None:
        pytest.skip("needs Chromium: ARMLLM_CHROMIUM says where it is")
    with playwright.sync_playwright() as driver:
        # the browser's sandbox needs privileges that containers lack
        started = driver.chromium.launch(executable_path=place, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A browser tab; an error in it fails the test."""
    context = browser.new_context()
    made = context.new_page()
    made.set_default_timeout(SECONDS)
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
    yield made
    context.close()
    assert not faults


def opened(page: Any, server: Live) -> list[dict[str, Any]]:
    """Loads the page; returns a list to which every chat request is appended."""
    asked: list[dict[str, Any]] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("completions") else None)
    page.on("request", lambda r: r.url.startswith(server.base) or pytest.fail(r.url))
    page.goto(server.base)
    return asked


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def events(*pieces: str, end: str | None = "stop") -> str:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    if end:
        chunks.append({"choices": [{"delta": {}, "finish_reason": end}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 21}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answers(page: Any, body: str, status: int = 200) -> None:
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body))


def test_conversation(page: Any, server: Live) -> None:
    asked = opened(page, server)
    page.click("summary")
    page.fill("#most", "8")
    page.fill("#temperature", "0")
    page.fill("#system", "be brief")
    say(page, "hello")
    page.wait_for_selector("article.assistant small:has-text('8 tokens ·')")
    figures = page.inner_text("article.assistant small")
    assert re.fullmatch(
        r"8 tokens · [\d.]+ tokens/s · \d+ in the prompt · first after [\d.]+ s · stopped at max tokens",
        figures,
    )
    answer = page.text_content("article.assistant p")
    assert answer
    page.wait_for_selector("#send:visible")
    assert page.input_value("#model") == asked[0]["model"] == "tiny"
    assert page.get_attribute("#temperature", "placeholder") == "1 (the model's)"
    assert (asked[0]["max_tokens"], asked[0]["temperature"]) == (8, 0)
    say(page, "more")
    page.wait_for_selector("article:nth-of-type(4) small:has-text('8 tokens ·')")
    roles = [message["role"] for message in asked[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == answer
    page.click("#fresh")
    assert page.locator("article").count() == 0
    say(page, "anew")
    page.wait_for_selector("article.assistant small:has-text('8 tokens ·')")
    assert [message["content"] for message in asked[2]["messages"]] == ["be brief", "anew"]


def test_stopping_ends_the_request(page: Any, server: Live, tiny_llm: AsyncLLM) -> None:
    asked = opened(page, server)
    with slowed(tiny_llm, 0.05):
        say(page, "hello")
        until(lambda: len(page.text_content("article.assistant p")) > 3)
        assert not server.idle
        page.click("#stop")
        page.wait_for_selector("small:has-text('stopped')")
        until(lambda: server.idle)
        part = page.text_content("article.assistant p")
        say(page, "go on")  # the partial output stays in the conversation
        page.wait_for_selector("article:nth-of-type(4) small:has-text('token')")
        assert asked[1]["messages"][1] == {"role": "assistant", "content": part}
        page.click("#fresh")
        until(lambda: server.idle)


def test_page_prompts_for_the_key_once(page: Any, tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("sésame k",)) as server:
        opened(page, server)
        page.wait_for_selector("dialog[open]")
        assert "requires an API key" in page.inner_text("dialog")
        page.fill("#key", "wrong")
        page.click("dialog button.main")
        page.wait_for_selector("dialog:has-text('not valid')")
        page.fill("#key", "sésame k")
        page.press("#key", "Enter")
        page.wait_for_selector("#model option", state="attached")
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert not page.is_visible("dialog")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.evaluate("sessionStorage.clear()")
        say(page, "hello")
        page.wait_for_selector("dialog[open]")
        page.click("dialog button:has-text('Cancel')")
        page.wait_for_selector("small.error:has-text('API key')")
        assert page.input_value("#text") == "hello"


def test_model_output_is_shown_as_text(page: Any, server: Live) -> None:
    said = "<img src=x onerror=alert(1)><script>alert(2)</script> & \n  ünïcode 🙂"
    opened(page, server)
    answers(page, events(said[:7], said[7:]).replace("\n", "\r\n"))
    say(page, "<b>me</b>")
    page.wait_for_selector("small:has-text('21 tokens')")
    assert page.text_content("article.assistant p") == said
    assert page.text_content("article.user p") == "<b>me</b>"
    assert page.locator("main img, main script, main b").count() == 0


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ('{"error": {"message": "too many wait"}}', 429, "too many wait"),
        ("oops", 502, "status 502"),
        ('data: {"error": {"message": "out of memory"}}\n\n', 200, "out of memory"),
        (events("x", end=None).removesuffix("data: [DONE]\n\n"), 200, "ended early"),
    ],
)
def test_errors_are_shown(page: Any, server: Live, body: str, status: int, told: str) -> None:
    asked = opened(page, server)
    answers(page, body, status)
    say(page, "hello")
    page.wait_for_selector(f"small.error:has-text('{told}')")
    answers(page, events("fine"))
    say(page, "again")
    page.wait_for_selector("small:has-text('21 tokens')")
    kept = [message["content"] for message in asked[1]["messages"]]
    assert kept == (["hello", "x", "again"] if told == "ended early" else ["again"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_layout(page: Any, server: Live, scheme: str) -> None:
    page.set_viewport_size({"width": 340, "height": 600})
    page.emulate_media(color_scheme=scheme)
    opened(page, server)
    answers(page, events("w" * 400, "\nline" * 60))
    say(page, "hello")
    page.wait_for_selector("small:has-text('21 tokens')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    assert page.evaluate("document.documentElement.scrollHeight") <= 600  # only the log scrolls
    for name in ("#send", "#text", "#model", "#fresh"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 340 and box["y"] + box["height"] <= 600
    at_end = "(m => m.scrollHeight - m.scrollTop - m.clientHeight)(document.querySelector('main'))"
    assert page.evaluate(at_end) < 60
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", shade)[0]) > 128) == (scheme == "light")
    if folder := os.environ.get("ARMLLM_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/phone-{scheme}.png")
