"""The page in a real browser under a strict content security policy; also checks of its files."""

import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from tests.server_page.browser import Page
from tests.server_page.stub import ANSWER_ID, CODE, HOSTILE, StubServer, stub_server

FOLDER = files("mainstem.server") / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())
VENDORED = {"marked.js", "marked-license.txt"}
# lib/marked.esm.js of marked 18.2.0, from registry.npmjs.org
MARKED_SHA256 = "162194ea902a9d6eca6011bb42b5732991ca650e017d0375b76f4204810c6c14"


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


def wait_for_answers(page: Page, number: int) -> None:
    page.wait(f"document.querySelectorAll('.turn.assistant .actions').length === {number}")


def texts_of(page: Page, selector: str) -> object:
    return page.run(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)")


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector('{selector}').click()")


def text_of(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector('{selector}').textContent"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_loads_nothing_from_other_sites(name: str) -> None:
    text = FOLDER.joinpath(name).read_text()
    if name not in VENDORED:
        urls = set(re.findall(r"https?://[^\s\"'<>)]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    for named in re.findall(r'(?:src|href)="/page/([^"]+)"|from "\./([^"]+)"', text):
        assert (named[0] or named[1]) in NAMES


def test_the_page_has_no_inline_code_and_builds_no_html() -> None:
    html = FOLDER.joinpath("index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<style|<script(?![^>]*src=)", html)
    for name in NAMES:
        if name.endswith(".js"):
            code = FOLDER.joinpath(name).read_text()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", code)


def test_the_vendored_library_is_unchanged_and_only_its_lexer_is_used() -> None:
    found = hashlib.sha256(FOLDER.joinpath("marked.js").read_bytes()).hexdigest()
    assert found == MARKED_SHA256
    assert "MIT" in FOLDER.joinpath("marked-license.txt").read_text()
    for name in set(NAMES) - VENDORED:
        imports = re.findall(r"import (.*) from \"./marked.js\"", FOLDER.joinpath(name).read_text())
        assert imports in ([], ["{ Lexer }"])


def test_every_field_has_a_label() -> None:
    html = FOLDER.joinpath("index.html").read_text()
    for field in re.findall(r'<(?:input|textarea) id="([^"]+)"', html):
        assert f'for="{field}"' in html


def test_chat_streams_and_answers_are_shown_as_text(page: Page, server: StubServer) -> None:
    say(page, "hello")
    wait_for_answers(page, 1)
    assert text_of(page, ".turn.user .said") == "hello"
    assert text_of(page, ".turn.assistant .said").startswith(f"{HOSTILE} word0 {HOSTILE} word1")
    assert page.run("document.querySelectorAll('#log img, #log b, #recent img').length") == 0
    assert "1,536 of 1,571 prompt tokens cached" in text_of(page, ".turn.assistant .note")
    (asked,) = server.asked
    assert asked["model"] == "tiny"
    assert asked["stream"] is True
    assert asked["temperature"] is None  # the model's default, since none was set
    assert asked["stream_options"] == {"include_usage": True}

    page.run("document.getElementById('app').value = 'legal'")
    page.run("document.getElementById('temperature').value = '0.5'")
    say(page, "again")
    wait_for_answers(page, 2)
    assert server.asked[1]["model"] == "tiny:legal"
    assert server.asked[1]["temperature"] == 0.5
    messages = server.asked[1]["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]

    page.run("document.getElementById('new').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.complaints == []


def open_talk(page: Page, number: int) -> None:
    """Go to a conversation in the list; 0 is the one that changed last."""
    if page.run("document.getElementById('history').hidden"):
        click(page, "#history-button")
    page.run(f"document.querySelectorAll('#history .title')[{number}].click()")


def test_conversations_are_sessions_that_can_be_continued(page: Page, server: StubServer) -> None:
    say(page, "first")
    wait_for_answers(page, 1)
    click(page, "#new")
    say(page, "second")
    wait_for_answers(page, 1)
    click(page, "#history-button")
    assert texts_of(page, "#history .title") == ["second", "first"]
    assert texts_of(page, "#history .title[aria-current]") == ["second"]
    first, second = (asked["session_id"] for asked in server.asked)
    assert first != second
    open_talk(page, 1)
    assert page.run("document.getElementById('history').hidden") is True
    assert text_of(page, ".turn.user .said") == "first"
    say(page, "third")
    wait_for_answers(page, 2)
    assert server.asked[2]["session_id"] == first
    messages = server.asked[2]["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_conversations_are_kept_across_tabs_and_can_be_deleted(
    page: Page, server: StubServer
) -> None:
    for number, question in enumerate(("first", "second")):
        if number:
            click(page, "#new")
        say(page, question)
        wait_for_answers(page, 1)
    page.close()
    page.open(server.url, 1280, 800, "light")
    assert page.run("document.querySelectorAll('.turn').length") == 0  # a tab begins anew
    open_talk(page, 1)
    assert text_of(page, ".turn.user .said") == "first"
    click(page, "#history-button")
    click(page, "#history .delete")
    assert texts_of(page, "#history .title") == ["first"]
    assert text_of(page, "#history-deleted") == "Deleted \u201csecond\u201d."
    click(page, "#history-undo")
    assert texts_of(page, "#history .title") == ["second", "first"]
    click(page, "#history-clear")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("Object.keys(localStorage).filter((n) => n.includes('talk')).length") == 0
    page.leave("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.readyState === 'complete'")
    click(page, "#history-button")
    assert page.run("document.getElementById('history-empty').hidden") is False
    assert page.complaints == []


def test_a_system_prompt_goes_with_every_question_and_is_kept(
    page: Page, server: StubServer
) -> None:
    page.run("document.getElementById('settings-button').click()")
    page.run("document.getElementById('system').focus()")
    page.type("Be brief.")
    say(page, "first")
    wait_for_answers(page, 1)
    click(page, "#new")
    say(page, "second")
    wait_for_answers(page, 1)
    for asked in server.asked:
        messages = asked["messages"]
        assert isinstance(messages, list)
        assert messages[0] == {"role": "system", "content": "Be brief."}
    page.leave("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.readyState === 'complete'")
    assert page.run("document.getElementById('system').value") == "Be brief."
    assert page.run("document.querySelectorAll('.turn').length") == 2


def test_markdown_is_drawn_without_making_html_of_it(page: Page) -> None:
    say(page, "markdown")
    wait_for_answers(page, 1)
    assert texts_of(page, ".said [role=heading]") == ["Title & more"]
    assert texts_of(page, ".said strong, .said em") == ["bold", "slanted"]
    assert texts_of(page, ".said th") == ["a", "b"]
    assert texts_of(page, ".said td") == ["1", f"{HOSTILE}"]
    assert texts_of(page, ".said ol > li > ul > li") == ["inner"]
    assert texts_of(page, ".said a") == ["site", "picture"]
    links = page.run("[...document.querySelectorAll('.said a')].map((a) => [a.href, a.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["https://example.com/a", rel], ["http://example.com/p.png", rel]]
    assert "[bad](javascript:alert(1))" in text_of(page, ".assistant .said")
    assert page.run("document.querySelectorAll('#log img, #log b, #log script').length") == 0
    assert page.complaints == []


def test_stopping_an_answer_disconnects_and_keeps_its_text(page: Page, server: StubServer) -> None:
    say(page, "endless")
    page.wait("document.querySelector('.turn.assistant .said')?.textContent.includes('word5')")
    page.press("Escape")
    page.wait("document.querySelector('.turn.assistant .note').textContent.includes('stopped')")
    assert server.client_left.wait(300)
    assert page.run("document.querySelector('.turn.failed')") is None
    assert "word0" in text_of(page, ".turn.assistant .said")
    assert page.run("document.getElementById('send').hidden") is False


def test_stop_works_though_the_server_is_silent(page: Page, server: StubServer) -> None:
    server.is_old = True
    say(page, "slow")
    page.wait("!document.getElementById('stop').hidden")
    click(page, "#stop")
    page.wait("document.getElementById('stop').hidden")
    assert text_of(page, ".assistant .note") == "stopped"
    server.is_prompt_read.set()
    say(page, "again")
    page.wait("document.querySelector('.assistant .note')?.textContent.includes('cached')")
    assert texts_of(page, ".turn.user .said") == ["again"]  # in place of the unanswered one


def test_a_dead_server_is_reported_in_words(chrome: Page) -> None:
    with stub_server() as server:
        chrome.open(server.url, 1280, 800, "light")
        chrome.wait("document.getElementById('model').textContent === 'tiny'")
        say(chrome, "cut")
        chrome.wait("document.querySelector('.turn.failed')")
        broken = "The connection to the server broke before the answer was complete."
        assert text_of(chrome, ".turn.failed .note") == broken
    chrome.wait("document.getElementById('state').textContent === 'not reachable'")
    assert texts_of(chrome, "#running, #rate") == ["\u2013", "\u2013"]
    assert text_of(chrome, "#waiting") == ""
    assert text_of(chrome, "#stale").startswith("No connection since ")
    assert "running" not in str(texts_of(chrome, "#recent .status"))
    say(chrome, "hello")
    chrome.wait("document.querySelectorAll('.turn.failed').length === 2")
    unreachable = "The server cannot be reached. Is it still running?"
    assert texts_of(chrome, ".turn.failed .note") == [broken, unreachable]


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
    assert "chat 18" in rows[1]
    assert page.run("document.getElementById('change-key').hidden") is True  # there is no key
    assert "42 ms" in rows[1]
    assert page.complaints == []


def test_a_request_whose_client_disconnected_is_shown_as_stopped(
    server: StubServer, chrome: Page
) -> None:
    server.live["recent"][0]["state"] = "aborted"
    server.live["recent"][1]["state"] = "failed"
    chrome.open(server.url, 1280, 800, "light")
    chrome.wait("document.querySelector('#recent tbody tr')")
    assert texts_of(chrome, "#recent .status") == ["failed", "stopped"]
    failed, stopped, heading = (
        chrome.run(f"getComputedStyle(document.querySelector('#recent {part}')).color")
        for part in ("tr.failed .status", "tr.aborted .status", "th")
    )
    assert stopped == heading != failed


def test_every_card_has_an_explanation(page: Page) -> None:
    assert page.run("document.querySelectorAll('.card').length") == 4
    assert page.run(
        """[...document.querySelectorAll('.card, .live h3')].every((tipped) => {
          const tip = document.getElementById(tipped.getAttribute('aria-describedby'));
          return tipped.title.length > 30 && tip.textContent.includes(tipped.title.slice(0, 20));
        })"""
    )
    page.run("document.querySelector('.card').focus()")
    assert page.run("document.querySelector('.card .tip').offsetHeight > 10")
    click(page, "#explain")
    assert page.run(
        "[...document.querySelectorAll('.live .tip')].every((tip) => tip.offsetHeight > 10)"
    )


def test_the_page_shows_prompt_progress_until_the_first_token(
    page: Page, server: StubServer
) -> None:
    own = {
        "id": ANSWER_ID,
        "app": None,
        "prompt_tokens": 3049,
        "cached_tokens": 0,
        "computed_tokens": 1024,
        "output_tokens": 0,
        "ttft_ms": None,
        "state": "running",
    }
    say(page, "slow")
    page.wait("document.querySelector('.assistant .note').textContent === 'reading\u2026'")
    server.live["recent"].append(own)
    server.live["step"] = {"tokens": 2048, "seconds": 3.2}
    page.wait(
        "document.querySelector('.assistant .note').textContent"
        " === 'reading 3,049 tokens\u2026 34 %'"
    )
    assert text_of(page, "#recent .status") == "reading 34 %"
    assert text_of(page, "#step") == "step of 2,048 tokens: 3.20 s"
    server.is_prompt_read.set()
    wait_for_answers(page, 1)
    assert "first token" in text_of(page, ".assistant .note")
    assert page.complaints == []


def test_the_page_works_with_older_servers_that_send_no_early_id(
    page: Page, server: StubServer
) -> None:
    server.is_old = True
    say(page, "slow")
    page.wait("document.querySelector('.assistant .note').textContent === 'reading\u2026'")
    server.is_prompt_read.set()
    wait_for_answers(page, 1)
    assert page.complaints == []


def test_code_is_shown_as_code_and_copied(page: Page) -> None:
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    say(page, "code")
    wait_for_answers(page, 1)
    code = CODE.partition("```python\n")[2].partition("\n```")[0]
    assert texts_of(page, ".said > *") == [
        "Use len(x) as here:",
        f"pythonCopy{code}",
        "That is all.",
    ]
    assert texts_of(page, ".said .text code") == ["len(x)"]
    assert texts_of(page, ".said pre code") == [code]
    assert page.run("document.querySelectorAll('#log img, #log b').length") == 0
    click(page, ".code .copy")
    page.wait(f"window.copied === {json.dumps(code)}")
    page.wait("document.querySelector('.code .copy').textContent === 'Copied'")
    click(page, ".actions .copy")
    page.wait(f"window.copied === {json.dumps(CODE)}")
    assert page.complaints == []


def test_copying_works_over_plain_http_without_the_clipboard_api(page: Page) -> None:
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.run(
        "document.execCommand = (name) => {"
        " window.copied = [name, document.activeElement.value]; return true; }"
    )
    say(page, "code")
    wait_for_answers(page, 1)
    click(page, ".actions .copy")
    page.wait("document.querySelector('.actions .copy').textContent === 'Copied'")
    assert page.run("window.copied") == ["copy", CODE]


def test_the_last_answer_can_be_regenerated(page: Page, server: StubServer) -> None:
    for number, question in enumerate(("first", "second"), 1):
        say(page, question)
        wait_for_answers(page, number)
    assert texts_of(page, ".again") == ["Regenerate"]  # only the last answer has the button
    click(page, ".again")
    page.wait("document.querySelector('.turn.streaming') === null")
    wait_for_answers(page, 2)
    assert server.asked[2] == server.asked[1]
    assert texts_of(page, ".turn.user .said") == ["first", "second"]

    answers = texts_of(page, ".turn.assistant .said")
    server.fails_next = True
    click(page, ".again")
    page.wait("document.querySelector('.turn.failed')")
    assert texts_of(page, ".turn.assistant .said") == answers  # the earlier answer stays
    assert "the queue is full" in text_of(page, ".turn.failed .note")


def test_a_change_of_the_app_is_marked_in_the_conversation(page: Page) -> None:
    for number, app in enumerate(("legal", "legal", "support", ""), 1):
        page.run(f"document.getElementById('app').value = '{app}'")
        say(page, f"question {number}")
        wait_for_answers(page, number)
    words = ["App from here: support", "No app from here"]
    assert texts_of(page, ".divider") == words
    after = page.run("document.querySelector('.divider').nextSibling.textContent")
    assert after == "question 3"
    page.leave("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.readyState === 'complete'")
    wait_for_answers(page, 4)
    assert texts_of(page, ".divider") == words


def test_reload_and_back_lose_nothing(page: Page, server: StubServer) -> None:
    page.run("document.getElementById('app').value = 'legal'")
    say(page, "first")
    wait_for_answers(page, 1)
    click(page, "#new")
    say(page, "code")
    wait_for_answers(page, 1)
    page.run("document.getElementById('text').focus()")
    page.type("half a thought")
    shown = texts_of(page, ".said, .note")
    page.leave("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.readyState === 'complete'")
    wait_for_answers(page, 1)
    assert texts_of(page, ".said, .note") == shown
    assert page.run("document.getElementById('text').value") == "half a thought"
    page.wait("document.getElementById('app').value === 'legal'")

    page.leave("location.href = '/metrics'")
    page.wait("location.pathname === '/metrics' && document.readyState === 'complete'")
    page.leave("history.back()")
    page.wait("location.pathname === '/' && document.readyState === 'complete'")
    wait_for_answers(page, 1)
    assert texts_of(page, ".said, .note") == shown
    open_talk(page, 1)
    assert text_of(page, ".turn.user .said") == "first"
    page.run("document.getElementById('text').value = ''")
    say(page, "third")
    wait_for_answers(page, 2)
    assert server.asked[2]["session_id"] == server.asked[0]["session_id"]
    assert server.asked[2]["model"] == "tiny:legal"


@pytest.mark.parametrize("leave", ["location.reload()", "document.getElementById('new').click()"])
def test_an_answer_that_is_interrupted_by_leaving_is_kept_as_stopped(
    page: Page, leave: str
) -> None:
    say(page, "endless")
    page.wait("document.querySelector('.turn.assistant .said')?.textContent.includes('word5')")
    page.leave(f"window.isOld = true; {leave}")
    if "reload" in leave:
        page.wait("!window.isOld && document.readyState === 'complete'")
    else:
        page.wait("document.getElementById('stop').hidden")
        open_talk(page, 0)
    wait_for_answers(page, 1)
    assert "word5" in text_of(page, ".turn.assistant .said")
    assert text_of(page, ".turn.assistant .note").startswith("stopped")
    assert page.run("document.querySelector('.turn.failed')") is None
    assert texts_of(page, ".again") == ["Regenerate"]


def ask_for_scores(page: Page, choices: str) -> None:
    for name, text in (("context", "The capital of France is"), ("choices", choices)):
        page.run(f"document.getElementById('{name}').value = {json.dumps(text)}")
    click(page, "#score")


def test_choices_are_scored_in_a_tab(page: Page, server: StubServer) -> None:
    page.run("document.getElementById('chat-tab').focus()")
    page.press("ArrowRight")
    assert page.run("document.activeElement.id") == "scores-tab"
    assert page.run("document.querySelector('[aria-selected=true]').id") == "scores-tab"
    assert page.run("document.getElementById('chat').offsetHeight") == 0
    assert page.run("document.getElementById('new').offsetHeight") == 0  # the button for a new chat

    page.run("document.getElementById('app').value = 'legal'")
    ask_for_scores(page, f" Rome\n Paris, of course\n\n{HOSTILE}\n")
    page.wait("document.querySelectorAll('#score-table tbody tr').length === 3")
    choices = [" Rome", " Paris, of course", HOSTILE]
    prompt = "The capital of France is"
    assert server.asked == [{"prompt": prompt, "choices": choices, "app": "legal"}]
    assert texts_of(page, "#score-table .words") == choices
    assert texts_of(page, "#score-table tr.best td") == [
        *(" Paris, of course likeliest", "90.0 %", "-0.11", "3")
    ]
    assert text_of(page, "#score-note").startswith("1,536 of 1,571 tokens cached")
    widths = page.run(
        "[...document.querySelectorAll('#score-table .meter span')].map((e) => e.style.width)"
    )
    assert widths == ["5%", "90%", "5%"]

    server.fails_next = True
    click(page, "#score")
    page.wait("document.querySelector('#score-note.failed')?.textContent === 'the queue is full'")
    assert page.run("document.getElementById('score-table').hidden") is True
    click(page, "#chat-tab")
    say(page, "hello")
    wait_for_answers(page, 1)


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone_one_view_is_shown_and_nothing_overflows(
    server: StubServer, chrome: Page, width: int
) -> None:
    chrome.open(server.url, width, 640, "dark")
    chrome.wait("document.getElementById('model').textContent === 'tiny'")
    for number, (app, text) in enumerate((("legal", "code"), ("", "y" * 200)), 1):
        chrome.run(f"document.getElementById('app').value = '{app}'")
        say(chrome, text)
        wait_for_answers(chrome, number)
    for button in ("#settings-button", "#change-key", "#new", "#explain"):
        click(chrome, button)
    open_talk(chrome, 0)
    click(chrome, "#history-button")
    assert chrome.run("document.querySelector('pre').scrollWidth > innerWidth")
    ask_for_scores(chrome, f" Rome\n {'P' * 60}\n a longer choice of several words")
    chrome.wait("!document.getElementById('score-table').hidden")
    for shown, other in (("live", "chat"), ("chat", "live"), ("scores", "live")):
        view = "live" if shown == "live" else "chat"
        chrome.run(f"document.querySelector('.views [data-view={view}]').click()")
        if view == "chat":
            click(chrome, f"#{shown}-tab")
        assert chrome.run(f"document.querySelector('.{shown}').offsetHeight > 0")
        assert chrome.run(f"document.querySelector('.{other}').offsetHeight === 0")
        chrome.run("document.getElementById('state').textContent = 'not reachable'")
        outside = chrome.run(
            """[...document.querySelectorAll('body *:not(pre *, .scroll *)')]
              .filter((e) => e.getBoundingClientRect().right > innerWidth
                          || (e.scrollWidth > e.clientWidth + 1
                              && getComputedStyle(e).overflowX === 'auto'
                              && !e.matches('pre, .scroll')))
              .map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert outside == []
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_key_is_asked_for_only_when_needed_and_kept_for_the_tab(chrome: Page) -> None:
    with stub_server("secret") as server:
        chrome.open(server.url, 1280, 800, "light")
        chrome.wait("!document.getElementById('key').hidden")
        chrome.type("s\u0435cret")  # the second letter is Cyrillic
        chrome.press("Enter")
        chrome.wait("document.getElementById('key-hint').textContent.includes('U+0435')")
        assert chrome.run("document.getElementById('key').hidden") is False
        assert chrome.run("sessionStorage.getItem('mainstem-key')") is None
        chrome.type("wrong")  # replaces the first text
        chrome.press("Enter")
        chrome.wait("document.getElementById('key-hint').textContent.includes('not accept')")
        chrome.run("document.getElementById('key-text').focus()")
        chrome.type("secret")
        chrome.press("Enter")
        chrome.wait("document.getElementById('model').textContent === 'tiny'")
        assert chrome.run("document.getElementById('key').hidden") is True
        kept = str(chrome.run("JSON.stringify({...localStorage})"))
        assert "secret" not in kept
        click(chrome, "#metrics-open")
        chrome.wait("document.getElementById('metrics-text').textContent === 'a_metric 1'")
        click(chrome, "#metrics-close")
        say(chrome, "hello")
        chrome.wait("document.querySelector('.assistant .note')?.textContent.includes('cached')")
        click(chrome, "#change-key")
        assert chrome.run("document.getElementById('key').hidden") is False
        click(chrome, "#key-cancel")
        assert chrome.run("document.getElementById('key').hidden") is True
        click(chrome, "#change-key")
        chrome.type("another")
        chrome.press("Enter")
        chrome.wait("document.getElementById('key-hint').textContent.includes('not accept')")


def test_a_tab_with_a_key_that_cannot_be_sent_asks_again(chrome: Page) -> None:
    with stub_server("secret") as server:
        chrome.open(server.url, 1280, 800, "light")
        chrome.wait("!document.getElementById('key').hidden")
        chrome.run("sessionStorage.setItem('mainstem-key', '\u0436')")
        chrome.leave("window.isOld = true; location.reload()")
        chrome.wait("!window.isOld && document.readyState === 'complete'")
        chrome.wait("document.getElementById('key-hint')?.textContent.includes('asks for a key')")
        chrome.type("secret")
        chrome.press("Enter")
        chrome.wait("document.getElementById('model').textContent === 'tiny'")


def test_two_tabs_show_the_same_conversation_and_lose_no_turn(
    page: Page, server: StubServer
) -> None:
    say(page, "first")
    wait_for_answers(page, 1)
    page.run("window.talk = Object.keys(localStorage).find((name) => name.includes('talk'))")
    kept = str(page.run("localStorage.getItem(window.talk)"))
    turns = json.loads(kept)["turns"]
    added = json.loads(kept) | {"version": 2, "turns": [*turns, {**turns[0], "content": "theirs"}]}
    page.run(f"localStorage.setItem(window.talk, {json.dumps(json.dumps(added))})")
    # a tab hears of what others changed; this event stands for another tab's change
    page.run(
        "dispatchEvent(new StorageEvent('storage', {key: window.talk,"
        " newValue: localStorage.getItem(window.talk)}))"
    )
    assert texts_of(page, ".turn.user .said") == ["first", "theirs"]
    page.run(f"localStorage.setItem(window.talk, {json.dumps(json.dumps(added | {'version': 9}))})")
    say(page, "mine")
    page.wait("document.querySelectorAll('.turn.user').length === 2")
    wait_for_answers(page, 2)
    click(page, "#history-button")
    assert page.run("document.querySelectorAll('#history li').length") == 2  # one is a copy
