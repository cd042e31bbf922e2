"""A headless Chromium, controlled over its debugging pipe with the standard library only."""

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from tests.needs import find_program

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--remote-debugging-pipe"
)
WAIT_S = 180.0  # Chromium may wait for a busy core for a minute
# Chromium listens on descriptor 3 and answers on 4: put the pipes there, then become Chromium
PUT_PIPES = """
import os, sys
# The first copies take the numbers 3 and 4 if these are free. So the second copies have other
# numbers, and no dup2 overwrites one of them.
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
listen, answer = [os.dup(end) for end in ends]
os.dup2(listen, 3)
os.dup2(answer, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


# in errors of Chromium: the page for which a call was meant is being replaced
GONE = (
    "navigated or closed",
    "context was destroyed",
    "Cannot find context",
    "Cannot find default",
)


class PageGone(Exception):
    """A call had no answer, because its page was replaced."""


class Page:
    """The tab that was opened last. Every call waits for its answer, at most WAIT_S."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._last_id = 0
        self._rest = b""
        self._session: str | None = None
        self._target = ""
        self.complaints: list[str] = []  # errors in the console, and exceptions

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        """Show `url` in a new tab of this size with this colour scheme, and make it the current
        one."""
        self._session = None
        self.complaints = []
        self._target = str(self._call("Target.createTarget", url="about:blank")["targetId"])
        attached = self._call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def close(self) -> None:
        """Close the tab; its requests end."""
        self._session = None
        self._call("Target.closeTarget", targetId=self._target)

    def run(self, script: str) -> object:
        """The value of a JavaScript expression."""
        reply = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        result = reply["result"]
        assert isinstance(result, dict)
        return result.get("value")

    def leave(self, script: str) -> None:
        """Run a script that may end the page before there is a value."""
        with suppress(PageGone):
            self.run(script)

    def wait(self, script: str) -> None:
        """Return when the expression is true; fails after WAIT_S. While another page is loading it
        has no value."""
        deadline_s = monotonic() + WAIT_S
        while True:
            with suppress(PageGone):
                if self.run(f"Boolean({script})"):
                    return
            assert monotonic() < deadline_s, f"never true: {script}"
            sleep(0.05)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}[key]
        press = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **press, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **press)

    def screenshot(self, path: Path) -> None:
        reply = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(str(reply["data"])))

    def _call(self, method: str, **params: object) -> dict[str, object]:
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = monotonic() + WAIT_S
        while True:
            news = self._read(deadline_s)
            if news.get("id") == self._last_id:
                fault = json.dumps(news.get("error", ""))
                if any(words in fault for words in GONE):
                    raise PageGone(fault)
                assert "error" not in news, f"{method}: {fault}"
                result = news["result"]
                assert isinstance(result, dict)
                return result
            self._notice(news)

    def _notice(self, news: dict[str, object]) -> None:
        if news.get("sessionId") != self._session:
            return  # a tab of an earlier test, whose server is gone
        said = json.dumps(news.get("params"))
        is_error = news.get("method") == "Log.entryAdded" and '"level": "error"' in said
        if is_error or news.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(said)

    def _read(self, deadline_s: float) -> dict[str, object]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        news = json.loads(message)
        assert isinstance(news, dict)
        return news


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A new browser with an empty profile; it is closed at the end."""
    chromium = find_program("chromium")
    assert chromium is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", PUT_PIPES, str(command_read), str(answer_write)),
            *(chromium, *FLAGS.split(), f"--user-data-dir={profile}"),
        ],
        pass_fds=(command_read, answer_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        yield Page(command_write, answer_read)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(command_write)
        os.close(answer_read)
