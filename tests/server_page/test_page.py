"""The page in a real browser under a strict content security policy, and as files."""

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from tests.server_page.browser import Page
from tests.server_page.stub import HOSTILE, StubServer, stub_server

NAMES = ("index.html", "page.js", "chat.js", "live.js", "numbers.js", "page.css", "icon.svg")


@pytest.fixture
def server() -> Iterator[StubServer]:
    with stub_server() as made:
        yield made


@pytest.fixture
def page(server: StubServer, chrome: Page) -> Page:
    chrome.open(server.url, 1280, 800, "light")
    chrome.wait("document.getElementById('model').textContent === 'tiny'")
    return chrome


def say(page: Page, text: str) -> None:
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")


def text_of(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector('{selector}').textContent"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_needs_nothing_from_elsewhere(name: str) -> None:
    text = (files("mainstem.server") / "page" / name).read_text()
    urls = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    for named in re.findall(r'(?:src|href)="/page/([^"]+)"|from "\./([^"]+)"', text):
        assert (named[0] or named[1]) in NAMES


def test_the_page_has_no_inline_code_and_builds_no_html() -> None:
    folder = files("mainstem.server") / "page"
    html = folder.joinpath("index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<style|<script(?![^>]*src=)", html)
    for name in NAMES:
        if name.endswith(".js"):
            code = folder.joinpath(name).read_text()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", code)
            assert "localStorage" not in code


def test_every_field_has_a_label() -> None:
    html = (files("mainstem.server") / "page" / "index.html").read_text()
    for field in re.findall(r'<(?:input|textarea) id="([^"]+)"', html):
        assert f'for="{field}"' in html


def test_chat_streams_and_what_a_model_says_stays_text(page: Page, server: StubServer) -> None:
    say(page, "hello")
    page.wait("document.querySelector('.turn.assistant .note').textContent")
    assert text_of(page, ".turn.user .said") == "hello"
    assert text_of(page, ".turn.assistant .said").startswith(f"{HOSTILE} word0 {HOSTILE} word1")
    assert page.run("document.querySelectorAll('#log img, #log b, #recent img').length") == 0
    assert "1,536 of 1,571 prompt tokens cached" in text_of(page, ".turn.assistant .note")
    (asked,) = server.asked
    assert asked["model"] == "tiny"
    assert asked["stream"] is True
    assert asked["temperature"] is None  # the model's own, as nobody has set one
    assert asked["stream_options"] == {"include_usage": True}

    page.run("document.getElementById('app').value = 'legal'")
    page.run("document.getElementById('temperature').value = '0.5'")
    say(page, "again")
    page.wait("document.querySelectorAll('.turn.assistant .note')[1]?.textContent")
    assert server.asked[1]["model"] == "tiny:legal"
    assert server.asked[1]["temperature"] == 0.5
    messages = server.asked[1]["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]

    page.run("document.getElementById('new').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.complaints == []


def test_conversations_are_sessions_that_can_be_taken_up_again(
    page: Page, server: StubServer
) -> None:
    assert page.run("document.getElementById('session-field').hidden") is True
    say(page, "first")
    page.wait("document.querySelector('.turn.assistant .note').textContent")
    page.run("document.getElementById('new').click()")
    say(page, "second")
    page.wait("document.querySelector('.turn.assistant .note')?.textContent")
    names = page.run("[...document.getElementById('session').options].map((o) => o.text)")
    assert names == ["second", "first"]
    first, second = (asked["session_id"] for asked in server.asked)
    assert first != second
    page.run("document.getElementById('session').selectedIndex = 1")
    page.run("document.getElementById('session').dispatchEvent(new Event('change'))")
    assert text_of(page, ".turn.user .said") == "first"
    say(page, "third")
    page.wait("document.querySelectorAll('.turn.assistant .note')[1]?.textContent")
    assert server.asked[2]["session_id"] == first
    messages = server.asked[2]["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_stopping_an_answer_hangs_up_and_keeps_what_came(page: Page, server: StubServer) -> None:
    say(page, "endless")
    page.wait("document.querySelector('.turn.assistant .said')?.textContent.includes('word5')")
    page.press("Escape")
    page.wait("document.querySelector('.turn.assistant .note').textContent.includes('stopped')")
    assert server.client_left.wait(10)
    assert "word0" in text_of(page, ".turn.assistant .said")
    assert page.run("document.getElementById('send').hidden") is False


def test_a_refusal_is_shown_and_can_be_tried_again(page: Page, server: StubServer) -> None:
    server.fails_next = True
    say(page, "hello")
    page.wait("document.querySelector('.turn.failed')")
    assert "the queue is full" in text_of(page, ".turn.failed .note")
    page.run("document.querySelector('.turn.failed button').click()")
    page.wait("document.querySelector('.turn.assistant .note').textContent.includes('cached')")
    assert server.asked[0] == server.asked[1]


def test_the_live_view_shows_the_tree_the_pages_and_the_requests(page: Page) -> None:
    stems = page.run("[...document.querySelectorAll('#stems li p')].map((p) => p.textContent)")
    assert stems == [
        "5 sequences share 1,536 tokensfrom the start",
        "3 sequences share 512 tokensfrom 1,536",
    ]
    label = page.run("document.getElementById('pages').getAttribute('aria-label')")
    assert label == "30 held, 20 cached, 50 free of 100 pages"
    assert text_of(page, "#pages-host") == "240"
    assert page.run("document.getElementById('pages-disk-item').hidden") is True
    assert text_of(page, "#saving") == "75 %"
    assert text_of(page, "#reads") == "60 %"
    assert text_of(page, "#waiting") == "2 waiting"
    rows = page.run("[...document.querySelectorAll('#recent tbody tr')].map((r) => r.innerText)")
    assert isinstance(rows, list)
    assert "running" in rows[0]  # the newest first
    assert "96 %" in rows[1]
    assert "42 ms" in rows[1]
    assert page.complaints == []


def test_on_a_phone_one_view_shows_and_nothing_overflows(server: StubServer, chrome: Page) -> None:
    chrome.open(server.url, 390, 844, "dark")
    chrome.wait("document.getElementById('model').textContent === 'tiny'")
    for view, other in (("live", "chat"), ("chat", "live")):
        chrome.run(f"document.querySelector('.views [data-view={view}]').click()")
        assert chrome.run(f"document.querySelector('.{view}').offsetHeight > 0")
        assert chrome.run(f"document.querySelector('.{other}').offsetHeight === 0")
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_key_is_asked_for_only_when_needed_and_kept_for_the_tab(chrome: Page) -> None:
    with stub_server("secret") as server:
        chrome.open(server.url, 1280, 800, "light")
        chrome.wait("!document.getElementById('key').hidden")
        chrome.type("wrong")
        chrome.press("Enter")
        chrome.wait("document.getElementById('key-hint').textContent.includes('not accept')")
        chrome.run("document.getElementById('key-text').focus()")
        chrome.type("secret")
        chrome.press("Enter")
        chrome.wait("document.getElementById('model').textContent === 'tiny'")
        assert chrome.run("document.getElementById('key').hidden") is True
        assert chrome.run("localStorage.length") == 0
        say(chrome, "hello")
        chrome.wait("document.querySelector('.assistant .note')?.textContent.includes('cached')")
