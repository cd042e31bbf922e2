"""A server that answers the page's requests from a script instead of a model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from math import log
from threading import Event, Thread
from typing import Any

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
ANSWER_ID = "chatcmpl-own"
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"
LIVE = {
    "model": "tiny",
    "uptime_s": 7400.0,
    "running": 5,
    "waiting": 2,
    "pages": {"total": 100, "held": 30, "cached": 50, "host": 240, "disk": 0, "page_size": 16},
    "stems": [
        {"id": 1, "parent": None, "tokens": 1536, "sequences": 5},
        {"id": 2, "parent": 1, "tokens": 512, "sequences": 3},
    ],
    "totals": {
        "prompt_tokens": 8000,
        "cached_tokens": 6000,
        "computed_tokens": 2000,
        "generated_tokens": 900,
        "saving_ratio": 0.75,
        "read_ratio": 0.4,
        "preemptions": 0,
    },
    "tokens_per_s": 123.4,
    "apps": ["legal", "support"],
    "recent": [
        {
            "id": "chatcmpl-0123456789abcdef00000011",
            "app": "legal",
            "prompt_tokens": 1600,
            "cached_tokens": 1536,
            "output_tokens": 40,
            "ttft_ms": 42.0,
            "state": "finished",
        },
        {
            "id": HOSTILE,
            "app": None,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "output_tokens": 0,
            "ttft_ms": None,
            "state": "running",
        },
    ],
}


CODE = f"""Use `len(x)` as here:

```python
def first(x):
    return "{HOSTILE}"  # {"long " * 60}
```

That is all."""

MARKDOWN = f"""# Title &amp; more

**bold** and *slanted*, [site](https://example.com/a), ![picture](http://example.com/p.png),
[bad](javascript:alert(1)) <script>alert(1)</script>

| a | b |
|---|---|
| 1 | {HOSTILE} |

1. outer
   - inner

<b onclick="alert(1)">block</b>
"""


class StubServer(ThreadingHTTPServer):
    """Records its requests; streams its answers in small pieces."""

    daemon_threads = True

    def __init__(self, key: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.asked: list[dict[str, object]] = []
        self.client_left = Event()
        self.fails_next = False
        self.live: dict[str, Any] = deepcopy(LIVE)
        self.is_old = False  # sends nothing before the first token
        self.is_prompt_read = Event()  # when set, the question "slow" is answered

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        page = files("mainstem.server") / "page"
        if self.path == "/":
            self._send(page.joinpath("index.html").read_bytes(), "html")
        elif self.path.startswith("/page/"):
            name = self.path.removeprefix("/page/")
            self._send(page.joinpath(name).read_bytes(), name.rpartition(".")[2])
        elif not self._has_key():
            self._send_json({"error": {"message": "no key"}}, 401)
        elif self.path == "/live":
            self._send_json(self.server.live)
        elif self.path == "/metrics":
            self._send(b"a_metric 1", "txt")
        elif self.path == "/v1/models":
            self._send_json({"object": "list", "data": [{"id": "tiny"}]})
        else:
            self._send_json({"error": {"message": "not here"}}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            self._send_json({"error": {"message": "no key"}}, 401)
            return
        self.server.asked.append(asked)
        if self.server.fails_next:
            self.server.fails_next = False
            self._send_json({"error": {"message": "the queue is full"}}, 429)
            return
        if self.path == "/v1/score":
            self._send_json(_scores(asked["choices"]))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for piece in self._pieces(asked["messages"][-1]["content"]):
                self._event({"content": piece})
        except OSError:
            self.server.client_left.set()
            return
        self._event({}, finish_reason="stop")
        details = {"cached_tokens": 1536}
        usage = {"prompt_tokens": 1571, "completion_tokens": 3, "prompt_tokens_details": details}
        self._data(json.dumps({"choices": [], "usage": usage}))
        self._data("[DONE]")

    def _pieces(self, question: str) -> Iterator[str]:
        if question == "slow":
            if not self.server.is_old:
                self._event({"role": "assistant", "content": ""})
            self.server.is_prompt_read.wait(300)
        if question == "cut":
            yield "half of an"
            raise ConnectionError
        if question == "markdown":
            yield from (MARKDOWN[start : start + 7] for start in range(0, len(MARKDOWN), 7))
            return
        if question == "code":
            yield from (CODE[start : start + 40] for start in range(0, len(CODE), 40))
            return
        for index in range(10_000 if question == "endless" else 3):
            yield f"{HOSTILE} word{index} "
            if question == "endless":
                self.server.client_left.wait(0.02)

    def _event(self, delta: dict[str, str], finish_reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        self._data(json.dumps({"id": ANSWER_ID, "choices": [choice]}))

    def _data(self, payload: str) -> None:
        self.wfile.write(f"data: {payload}\n\n".encode())
        self.wfile.flush()

    def _has_key(self) -> bool:
        key = self.server.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def _send_json(self, body: object, status: int = 200) -> None:
        self._send(json.dumps(body).encode(), "json", status)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPES.get(kind, "application/json"))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)


def _scores(choices: list[str]) -> dict[str, object]:
    """The second choice is the likeliest; the others have equal scores."""
    shares = [0.9 if place == 1 else 0.1 / (len(choices) - 1) for place in range(len(choices))]
    return {
        "choices": [
            {
                "index": place,
                "text": text,
                "probability": share,
                "logprob": log(share),
                "token_ids": [7] * len(text.split()),
            }
            for place, (text, share) in enumerate(zip(choices, shares, strict=True))
        ],
        "best": 1,
        "usage": {"prompt_tokens": 1571, "prompt_tokens_details": {"cached_tokens": 1536}},
    }


@contextmanager
def stub_server(key: str | None = None) -> Iterator[StubServer]:
    with StubServer(key) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
