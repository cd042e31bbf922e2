"""The page with the server it belongs to, over the fake runner."""

import re
from collections.abc import Iterator

import pytest

from mainstem.text.encoding import App
from tests.fake_engines import FakeEngines
from tests.server.running import ALICE, Running, a_server
from tests.server_page.browser import Page
from tests.waiting import until

POLITE = App("polite", "You answer politely and never lose your patience with anybody. " * 4)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with a_server([POLITE], engines=FakeEngines(8192, max_model_len=7000)) as made:
        yield made


@pytest.fixture
def page(running: Running, chrome: Page) -> Iterator[Page]:
    chrome.open(running.url, 1280, 800, "light")
    chrome.wait("document.getElementById('app').options.length === 2")
    yield chrome
    chrome.close()
    running.settle()


def ask(page: Page, text: str, max_tokens: int) -> None:
    page.run(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")


def test_a_conversation_with_an_app_finds_its_prompt_cached(page: Page, running: Running) -> None:
    page.run("document.getElementById('app').value = 'polite'")
    ask(page, "Hello?", 8)
    page.wait("document.querySelector('.assistant .note')?.textContent.includes('cached')")
    ask(page, "And again?", 8)
    page.wait("document.querySelectorAll('.assistant .note')[1]?.textContent.includes('cached')")
    page.wait("document.querySelectorAll('#recent tbody tr').length >= 2")
    row = "document.querySelector('#recent tbody tr').innerText"
    page.wait(f"{row}.includes('finished')")  # it is asked for from time to time
    assert "polite" in str(page.run(row))
    shown = str(page.run("document.querySelectorAll('.assistant .note')[1].textContent"))
    found = re.search(r"(\d+) of \d+ prompt tokens cached", shown)
    assert found is not None
    assert int(found[1]) > len(POLITE.prompt) // 2
    assert page.complaints == []


def test_choices_are_scored(page: Page) -> None:
    page.run("document.getElementById('scores-tab').click()")
    page.run("document.getElementById('context').value = 'The capital of France is'")
    page.run("document.getElementById('choices').value = ' Rome\\n Paris'")
    page.run("document.getElementById('score').click()")
    page.wait("document.querySelectorAll('#score-table tbody tr').length === 2")
    assert page.run("document.querySelectorAll('#score-table tr.best').length") == 1
    assert " tokens cached" in str(page.run("document.getElementById('score-note').textContent"))
    page.run("document.getElementById('choices').value = ' '")
    page.run("document.getElementById('score').click()")
    page.wait("document.querySelector('#score-note.failed')?.textContent.includes('choices')")


def test_the_tree_shows_sharing_and_a_client_that_disconnects_frees_its_pages(
    page: Page, running: Running
) -> None:
    running.pause(0.05)  # each answer would take five minutes
    for question in ("How are you?", "Me too."):
        status = page.run(
            f"""
            window.aside ??= new AbortController();
            fetch("/v1/chat/completions", {{
              method: "POST",
              headers: {{"Content-Type": "application/json"}},
              signal: window.aside.signal,
              body: JSON.stringify({{
                model: "fake:polite", max_tokens: 6000, stream: true, ignore_eos: true,
                messages: [{{role: "user", content: "{question}"}}],
              }}),
            }}).then((reply) => reply.status)
            """
        )
        assert status == 200
    page.wait("document.querySelector('#stems li p')?.textContent.startsWith('2 sequences share')")
    assert page.run("document.getElementById('running').textContent") == "2"
    page.run("window.aside.abort()")
    until(lambda: running.gateway.engine.num_open == 0)
    page.wait("!document.getElementById('stems-empty').hidden")


def test_a_server_with_keys_is_used_after_the_key_is_given(chrome: Page) -> None:
    with a_server([POLITE], has_keys=True) as locked:
        chrome.open(locked.url, 390, 844, "dark")
        chrome.wait("!document.getElementById('key').hidden")
        chrome.type(ALICE)
        chrome.press("Enter")
        chrome.wait("document.getElementById('model').textContent === 'fake'")
        ask(chrome, "Hello?", 4)
        chrome.wait("document.querySelector('.assistant .note')?.textContent.includes('cached')")
        chrome.close()
        locked.settle()
