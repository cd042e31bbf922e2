"""The fields that a router reads from a request's body."""

from typing import Any

from mainstem.ray.prompts import (
    MAX_PAGES,
    NAME_BYTES,
    PAGE_BYTES,
    app_of,
    read_request,
    session_of,
)

KEY = b"alice"


def chat(*texts: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [
        {"role": roles[min(place, 1 + place % 2)], "content": text}
        for place, text in enumerate(texts)
    ]
    return {"model": "m", "messages": messages}


def test_the_next_turn_has_the_same_first_pages() -> None:
    first = read_request(chat("s" * 5000, "question " * 300), KEY)
    second = read_request(chat("s" * 5000, "question " * 300, "answer " * 900, "more"), KEY)
    assert len(first.pages) == 3
    assert second.pages[:3] == first.pages
    assert len(second.pages) > 3
    assert second.prompt_tokens > first.prompt_tokens > 1900


def test_equal_text_after_different_text_is_another_page() -> None:
    one, two = (read_request({"prompt": c * PAGE_BYTES + "x" * PAGE_BYTES}, KEY) for c in "ab")
    assert len(one.pages) == len(two.pages) == 2
    assert not set(one.pages) & set(two.pages)


def test_each_key_salt_and_app_has_its_own_pages() -> None:
    body = {"prompt": "x" * PAGE_BYTES}
    others = [
        read_request(body, b"bob"),
        read_request(body | {"cache_salt": "s"}, KEY),
        read_request(body | {"app": "shop"}, KEY),
    ]
    pages = {request.pages[0] for request in [*others, read_request(body, KEY)]}
    assert len(pages) == 4


def test_prompts_of_all_kinds_are_read() -> None:
    ids = read_request({"prompt": list(range(1000))}, KEY)
    assert ids.prompt_tokens == 1000
    assert len(ids.pages) == 1
    several = read_request({"prompt": ["x" * PAGE_BYTES, "y"]}, KEY)
    assert several.pages == read_request({"prompt": "x" * PAGE_BYTES}, KEY).pages
    items = [{"type": "message", "role": "user", "content": "x" * PAGE_BYTES}]
    assert len(read_request({"instructions": "be kind", "input": items}, KEY).pages) == 1
    broken: dict[str, Any] = {"prompt": [[1, "x"], None], "messages": 3, "session_id": 4}
    assert read_request(broken, KEY).session is None


def test_names_of_sessions_and_stored_responses_include_the_key() -> None:
    talk = read_request({"session_id": "talk"}, KEY)
    assert talk.session == session_of("session_id", "talk", KEY)
    assert not talk.must_stay
    stored = read_request({"previous_response_id": "resp_1"}, KEY)
    assert stored.session == session_of("previous_response_id", "resp_1", KEY)
    assert stored.must_stay
    others = [("session_id", "talk", b"bob"), ("session_id", "walk", KEY)]
    others.append(("previous_response_id", "talk", KEY))
    assert talk.session not in [session_of(*other) for other in others]


def test_names_of_sessions_have_a_fixed_size() -> None:
    for name in ("", "talk", "s" * 1_000_000, "\ud800"):
        assert len(session_of("session_id", name, KEY)[1]) == NAME_BYTES


def test_apps_are_named_by_field_or_model() -> None:
    assert app_of({"app": "shop", "model": "m:other"}) == "shop"
    assert app_of({"model": "m:shop"}) == "shop"
    assert app_of({"model": "m"}) is None


def test_pages_are_bounded() -> None:
    request = read_request({"prompt": "x" * (PAGE_BYTES * (MAX_PAGES + 10))}, KEY)
    assert len(request.pages) == MAX_PAGES
