"""The chat page: its response, and its behavior in a browser if one is installed.

The browser is Chromium, driven by playwright: ``ARMLLM_CHROMIUM`` or the path says where it is.
"""

from __future__ import annotations

import base64
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
    assert policy["img-src"] == policy["media-src"] == "data:"
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "dompurify")
    for name, count in (("script-src", 3), ("style-src", 1)):
        sources = policy[name].split()
        assert len(sources) == count and all(source.startswith("'sha256-") for source in sources)
    *libraries, own = re.findall(r"<script>(.*?)</script>", got.text, re.DOTALL)
    assert ["marked v" in libraries[0][:40], "DOMPurify" in libraries[1][:40]] == [True, True]
    page = got.text.replace(libraries[0], "").replace(libraries[1], "")
    assert own in page and "sourceMappingURL" not in got.text
    assert not re.search(
        r"https?://|[^:]//\w|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page
    )
    assert not re.search(r"\s(on\w+|style|src|href)=", page)


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
    page.wait_for_selector("#send:visible")
    answer = page.evaluate("messages[1].content")
    assert answer and answer[:1] in page.text_content("article.assistant .words")
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
        until(lambda: len(page.text_content("article.assistant .words")) > 3)
        assert not server.idle
        page.click("#stop")
        page.wait_for_selector("small:has-text('stopped')")
        until(lambda: server.idle)
        part = page.evaluate("messages[1].content")
        assert part
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


ATTACKS = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "<svg><script>alert(3)</script></svg>",
    "a <b onclick=alert(4)>bold</b> & more",
    "<iframe srcdoc='<script>alert(5)</script>'></iframe>",
    "<style>body { display: none }</style>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(6)>",
    "```html\n<script>alert(7)</script>\n```",
    '```x" onload=alert(8) y="\ncode\n```',
    "<details open ontoggle=alert(9)>",
    "![](https://example.org/leak.png)",
]


def test_model_output_never_runs(page: Any, server: Live) -> None:
    """Raw HTML is shown as text; the page also reports any violation of its policy, which fails the test."""
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    opened(page, server)
    for count, said in enumerate(ATTACKS, 1):
        answers(page, events(said[:7], said[7:]).replace("\n", "\r\n"))
        say(page, "<b>me</b>")
        page.wait_for_selector(f"article:nth-of-type({2 * count}) small:has-text('21 tokens')")
        shown = page.text_content(f"article:nth-of-type({2 * count}) .words")
        want = "<script>alert(7)</script>" if "(7)" in said else said
        assert want in shown or said.startswith("```x"), shown
    assert page.text_content("article.user .words") == "<b>me</b>"
    bad = ", ".join(f"main {tag}" for tag in ("img", "script", "b", "svg", "iframe", "style", "math"))
    assert page.locator(bad).count() == 0
    attributes = page.eval_on_selector_all(
        "main .words *", "all => [...new Set(all.flatMap(each => each.getAttributeNames()))]"
    )
    assert set(attributes) <= {"class", "type"}
    assert dialogs == []


def test_purifier_holds_without_the_renderer(browser: Any, server: Live) -> None:
    """Faults of the renderer would do no harm: handlers and addresses go, and text cannot become elements."""
    page = browser.new_page()  # not that of the fixture: the policy stops handlers, too, and tells of it
    page.goto(server.base)
    left = page.evaluate(
        """() => {
          const kept = (html) => {
            const box = document.createElement("div");
            box.append(DOMPurify.sanitize(html, RULES));
            return new XMLSerializer().serializeToString(box).replace(/ xmlns="[^"]*"/, "");
          };
          return [
            "<img src=x onerror=alert(1)>a", "<a href='javascript:alert(1)'>b</a>",
            "<p onclick=x style=y id=z>c</p>", "<a href='data:text/html,x'>d</a>",
            "<form action=x><input name=y></form>e", "<svg onload=x>f</svg>",
          ].map(kept);
        }"""
    )
    want = ["a", "<a>b</a>", "<p>c</p>", "<a>d</a>", "<input />e", ""]
    assert left == [f"<div>{each}</div>" for each in want]
    refused = """() => {
      try { document.createElement("div").innerHTML = "<i>x</i>"; return "made"; }
      catch (error) { return error.name; }
    }"""
    assert page.evaluate(refused) == "TypeError"
    page.close()


def test_markdown(page: Any, server: Live) -> None:
    said = (
        "# Title\n\nSome *em*, **strong** and `x < 1`.\n\n- one\n- two\n\n1. [link](https://example.org/a)\n"
        "2. [bad](javascript:alert(1))\n\n```python\nif a < b:\n    print('<b>')\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    opened(page, server)
    answers(page, events(*said))  # every character is a piece
    say(page, "# not a title")
    page.wait_for_selector("small:has-text('21 tokens')")
    words = page.locator("article.assistant .words")
    assert words.locator("h1").inner_text() == "Title"
    assert [words.locator(tag).first.inner_text() for tag in ("em", "strong", "p code")] == [
        "em",
        "strong",
        "x < 1",
    ]
    assert words.locator("li").count() == 4 and words.locator("td").count() == 2
    link = words.locator("a").first
    assert (link.get_attribute("href"), link.get_attribute("target")) == ("https://example.org/a", "_blank")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert words.locator("a").nth(1).get_attribute("href") is None
    assert words.locator(".code header span").inner_text() == "python"
    assert words.locator(".code pre").inner_text().strip() == "if a < b:\n    print('<b>')"
    assert page.locator("article.user h1").count() == 0
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    clipboard = "navigator.clipboard.readText()"
    words.locator(".code button").click()
    page.wait_for_selector("button:has-text('Copied')")
    assert page.evaluate(clipboard) == "if a < b:\n    print('<b>')"
    page.click("article.assistant .tools button:has-text('Copy')")
    page.wait_for_selector(".tools button:has-text('Copied')")
    assert page.evaluate(clipboard) == said
    if folder := os.environ.get("ARMLLM_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/markdown.png")


def test_pieces_render_as_the_whole(page: Any, server: Live) -> None:
    """Blocks that have ended are rendered once, however the text arrives."""
    said = (
        "# A\n\ntext\nmore\n\n- one\n\n- two\n  - three\n\n  last of two\n\n> quote\n> more\n\nTitle\n===\n\n"
        "```js\na\n\nb\n```\n\n    indented\n\n| a |\n|---|\n| 1 |\n\n"
        "---\n\n<b>x</b>\n\n1. x\n2. y\n\nthe end"
    )
    opened(page, server)
    different = page.evaluate(
        """(said) => {
          const whole = (source) => {
            const box = document.createElement("div");
            box.append(rendered(source));
            return box.innerHTML;
          };
          const card = show("assistant", "");
          const first = () => card.words.firstChild;
          let wrong = [], kept = null;
          for (const sign of said) {
            card.source += sign;
            render(card);
            if (card.words.innerHTML.replace(/\\n/g, "") !== whole(card.source).replace(/\\n/g, ""))
              wrong.push(card.source);
            if (card.settled && !kept) kept = first();
          }
          return [wrong, kept === first(), card.settled];
        }""",
        said,
    )
    assert different == [[], True, different[2]]
    assert len(said) - len("1. x\n2. y\n\nthe end") - 2 <= different[2] < len(said)


def test_edit_and_regenerate(page: Any, server: Live) -> None:
    asked = opened(page, server)
    for number, question in enumerate(("one", "two"), 1):
        answers(page, events(f"answer {number}"))
        say(page, question)
        page.wait_for_selector(f"article:nth-of-type({2 * number}) small:has-text('21 tokens')")
    answers(page, events("another"))
    page.click("article:nth-of-type(4) button:has-text('Regenerate')")
    page.wait_for_selector("article:nth-of-type(4):has-text('another') small:has-text('21 tokens')")
    assert [m["content"] for m in asked[2]["messages"]] == ["one", "answer 1", "two"]
    answers(page, events("edited"))
    page.click("article:nth-of-type(1) button:has-text('Edit')")
    page.fill("article form textarea", "nothing")
    page.press("article form textarea", "Escape")
    assert page.inner_text("article:nth-of-type(1) .words") == "one"
    page.click("article:nth-of-type(1) button:has-text('Edit')")
    assert page.input_value("article form textarea") == "one"
    page.fill("article form textarea", "uno")
    page.press("article form textarea", "Enter")
    page.wait_for_selector("article:nth-of-type(2):has-text('edited') small:has-text('21 tokens')")
    assert page.locator("article").count() == 2
    assert asked[3]["messages"] == [{"role": "user", "content": "uno"}]
    answers(page, events("last"))
    say(page, "more")
    page.wait_for_selector("article:nth-of-type(4) small:has-text('21 tokens')")
    assert [m["content"] for m in asked[4]["messages"]] == ["uno", "edited", "more"]


def test_pictures_are_attached_shown_and_sent(page: Any, server: Live) -> None:
    opened(page, server)
    assert page.locator("#attach").is_hidden()  # this model takes none
    model = {"id": "sees", "default_sampling_params": {}, "input_modalities": ["text", "image"]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events("a square")))
    asked = opened(page, server)
    page.locator("#attach").wait_for()
    square = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
    )
    file = {"name": "square.png", "mimeType": "image/png", "buffer": square}
    page.set_input_files("#files", [file])
    page.locator("#attached img").click()
    assert page.locator("#attached img").count() == 0  # a click removes it
    page.set_input_files("#files", [file])
    page.locator("#attached img").wait_for()
    say(page, "what is this")
    page.get_by_text("a square").wait_for()
    url = "data:image/png;base64," + base64.b64encode(square).decode()
    sent = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this"}]
    assert asked[0]["messages"] == [{"role": "user", "content": sent}]
    assert page.evaluate("document.querySelector('article.user img').naturalWidth") == 2
    assert page.locator("#attached img").count() == 0
    page.get_by_role("button", name="Regenerate").click()
    until(lambda: len(asked) == 2)
    assert asked[1]["messages"] == asked[0]["messages"]
    page.get_by_text("a square").wait_for()
    say(page, "and now")
    until(lambda: len(asked) == 3)
    assert [message["content"] for message in asked[2]["messages"]] == [sent, "a square", "and now"]


def test_sounds_are_attached_played_and_sent(page: Any, server: Live) -> None:
    model = {"id": "hears", "default_sampling_params": {}, "input_modalities": ["text", "audio"]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events("a bell")))
    asked = opened(page, server)
    page.locator("#attach").wait_for()
    assert page.get_attribute("#files", "accept") == "audio/*"
    files = [
        {"name": "bell.wav", "mimeType": "audio/x-wav", "buffer": b"bell"},
        {"name": "horn.mp3", "mimeType": "audio/mpeg", "buffer": b"horn"},
        {"name": "cat.png", "mimeType": "image/png", "buffer": b"cat"},  # the model takes none
    ]
    page.set_input_files("#files", files)
    page.get_by_role("button", name="Remove horn.mp3").wait_for()
    assert page.locator("#attached button").all_inner_texts() == ["bell.wav", "horn.mp3"]
    say(page, "what is this")
    page.get_by_text("a bell").wait_for()
    parts = [
        {"data": base64.b64encode(data).decode(), "format": format}
        for data, format in ((b"bell", "wav"), (b"horn", "mp3"))
    ]
    sent: list[Any] = [{"type": "input_audio", "input_audio": part} for part in parts]
    assert asked[0]["messages"] == [
        {"role": "user", "content": [*sent, {"type": "text", "text": "what is this"}]}
    ]
    assert page.locator("article.user audio[controls]").count() == 2


def test_reasoning_is_shown_apart(page: Any, server: Live) -> None:
    opened(page, server)
    thoughts: list[Any] = [
        {"choices": [{"delta": {"reasoning_content": t, "reasoning": t}}]} for t in ("<i>h", "m")
    ]
    told = "".join(f"data: {json.dumps(each)}\n\n" for each in thoughts)
    answers(page, told + events("**so**"))
    say(page, "why?")
    page.wait_for_selector("small:has-text('21 tokens')")
    thought = page.locator("article.assistant details")
    assert re.fullmatch(r"Thought for [\d.]+ s", thought.locator("summary").inner_text())
    assert thought.get_attribute("open") is None
    thought.locator("summary").click()
    assert thought.locator("p").inner_text() == "<i>hm"
    assert page.inner_text("article.assistant .words") == "so"
    assert page.evaluate("messages.map(({ content }) => content)") == ["why?", "**so**"]


def test_colors_can_be_switched(page: Any, server: Live) -> None:
    opened(page, server)

    def dark() -> bool:
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(re.findall(r"\d+", shade)[0]) < 128

    assert not dark()
    page.click("#theme")
    page.click("#theme")
    assert dark() and page.get_attribute("#theme", "aria-label") == "Colors: dark"
    page.reload()
    assert dark()
    page.click("#theme")
    assert not dark()


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
