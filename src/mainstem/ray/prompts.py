"""Reads what a router needs from a request: session, app, and hashes of its prompt's pages.

A prompt is hashed as the text that the client sent, not as tokens. So no tokenizer is needed, and
two requests that share text share tokens, except for a few at the end. Parts are hashed in the
order of the rendered prompt (tools, system, messages), so that the next turn of a conversation
begins with the same pages.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b

import msgspec

from mainstem.ray.router import RouteRequest

PAGE_BYTES = 2048
BYTES_PER_TOKEN = 4
PAGE_TOKENS = PAGE_BYTES // BYTES_PER_TOKEN
MAX_PAGES = 4096  # only this many first pages of a prompt are hashed
FIRST_FIELDS = ("tools", "system", "instructions")  # of a body, in the order of the prompt
PROMPT_FIELDS = ("messages", "input", "prompt", "query", "text_1")
HASH_BYTES = 8
NAME_BYTES = 16
PREVIOUS = "previous_response_id"

Body = Mapping[str, object]


def read_request(body: Body, key: bytes) -> RouteRequest:
    """Return what a router needs from a body. `key` identifies the tenant: tenants share no
    pages."""
    app = app_of(body)
    session = None
    for name in ("session_id", PREVIOUS):  # the response counts more: only one replica has it
        if isinstance(body.get(name), str):
            session = session_of(name, str(body[name]), key)
    root = blake2b(msgspec.json.encode([key.hex(), app, _text(body.get("cache_salt"))]))
    pages: list[int] = []
    num_bytes = 0
    previous, rest = root.digest(), b""
    for piece in _pieces(body):
        num_bytes += len(piece)
        rest += piece
        num_new = min(len(rest) // PAGE_BYTES, MAX_PAGES - len(pages))
        for start in range(0, num_new * PAGE_BYTES, PAGE_BYTES):
            text = previous + rest[start : start + PAGE_BYTES]
            previous = blake2b(text, digest_size=HASH_BYTES).digest()
            pages.append(int.from_bytes(previous, "little"))
        rest = rest[num_new * PAGE_BYTES :] if len(pages) < MAX_PAGES else b""
    num_tokens = num_bytes // BYTES_PER_TOKEN
    must_stay = session is not None and session[0] == PREVIOUS
    return RouteRequest(pages, num_tokens, session, app, must_stay)


def session_of(kind: str, name: str, key: bytes) -> tuple[str, bytes]:
    """Return the router's name for a session or a stored response. Its size is fixed, whatever the
    length of the client's name. `key` has at most 64 bytes."""
    text = name.encode(errors="surrogatepass")
    return kind, blake2b(text, digest_size=NAME_BYTES, key=key).digest()


def app_of(body: Body) -> str | None:
    """The app that `app` or `model: "M:APP"` names."""
    if isinstance(body.get("app"), str):
        return str(body["app"])
    name, colon, app = str(body.get("model") or "").rpartition(":")
    return app if name and colon else None


def _pieces(body: Body) -> Iterator[bytes]:
    """Yield the prompt as bytes, in order. Only the first of several `prompt`s is used."""
    for name in FIRST_FIELDS:
        if body.get(name):
            yield msgspec.json.encode(body[name])
    for name in PROMPT_FIELDS:
        value = body.get(name)
        if isinstance(value, str):
            yield value.encode(errors="replace")
        elif isinstance(value, list) and value and isinstance(value[0], int):
            yield b"".join(_id_bytes(item) for item in value)
        elif isinstance(value, list) and name == "prompt" and value:
            yield from _pieces({"prompt": value[0]})
        elif isinstance(value, list):
            for item in value:
                yield msgspec.json.encode(item)


def _id_bytes(token_id: object) -> bytes:
    """Return a token id as bytes: as many as a token's text has on average."""
    number = token_id if isinstance(token_id, int) else 0
    return (number & 0xFFFF_FFFF).to_bytes(BYTES_PER_TOKEN, "little")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
