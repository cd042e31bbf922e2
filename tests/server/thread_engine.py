"""An engine for a server under test. It runs on a thread instead of in a separate process, so that
tests can access it."""

import logging
import socket
from collections.abc import Callable
from threading import Thread

from mainstem.cli.serve import OpenModel, Parts
from mainstem.core.config import EngineConfig
from mainstem.server.link.engine_host import EngineHost
from mainstem.server.link.engine_process import first_word
from mainstem.server.link.kv_events import KvEventsConfig
from mainstem.server.link.protocol import Ready
from mainstem.text.text_engine import TextEngine


class ThreadEngine:
    """Has the interface of EngineProcess."""

    def __init__(self, text_engine: TextEngine) -> None:
        self.connection, self._theirs = socket.socketpair()
        self._host = EngineHost(text_engine.engine, self._theirs, text_engine.grammars)
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait_ready(self) -> Ready:
        try:
            return first_word(self.connection)
        except BaseException:
            self.connection.close()
            raise

    def kill(self) -> None:
        self.connection.close()

    def _run(self) -> None:
        with self._theirs:
            try:
                self._host.run()
            except Exception:
                logging.getLogger("mainstem.server").exception("the engine is lost")

    def end(self, within_s: float | None) -> str:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the engine did not end"
        return "it was told to"


def opener(make: Callable[[EngineConfig], TextEngine]) -> OpenModel:
    """Gives `main` of `mainstem serve` the engine that `make` makes, on a thread."""

    def open_(config: EngineConfig, log_level: str, kv_events: KvEventsConfig | None) -> Parts:
        assert kv_events is None, "only an engine in a separate process publishes KV events"
        text_engine = make(config)
        return text_engine.tokenizer, lambda: ThreadEngine(text_engine)

    return open_
