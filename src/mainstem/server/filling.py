"""Computes the prefixes of apps before anybody asks for them, and keeps their pages.

An app's prompt is no tenant's secret: its pages are named without a salt, computed once for all
tenants, and pinned. What follows them in a request is named with the tenant's salt.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import PageKey, RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Int32s
from mainstem.server.apps_registry import AppRegistry
from mainstem.server.ids import unique_ids
from mainstem.server.worker import EngineFault, Worker
from mainstem.text.encoding import App, shared_prefixes
from mainstem.text.text_engine import TextEngine

log = logging.getLogger("mainstem.server")


@dataclass(slots=True)
class _Filled:
    """What is kept for one app."""

    prefixes: list[Int32s]
    pinned: list[PageKey] = field(default_factory=list)


class AppFiller:
    """Fills apps and knows what of a prompt is public. Lives on the event loop."""

    def __init__(self, worker: Worker, apps: AppRegistry) -> None:
        self._worker = worker
        self.apps = apps
        self._filled: dict[str, _Filled] = {}
        self._ids = unique_ids()

    def prefixes(self, app: App) -> list[list[int]]:
        """What all requests to an app begin with; raises InvalidRequest if there is no room."""
        prefixes = shared_prefixes(self._worker.tokenizer, app)
        for prefix in prefixes:
            if len(prefix) >= self._worker.max_model_len:
                raise InvalidRequest(
                    "prompt",
                    f"{len(prefix)} tokens leave no room in the context of "
                    f"{self._worker.max_model_len}",
                )
        return prefixes

    def public_tokens(self, app: App | None, prompt_ids: Sequence[int] | Int32s) -> int:
        """How many leading tokens of a prompt are the app's."""
        filled = None if app is None else self._filled.get(app.name)
        if filled is None:
            return 0
        return max((_num_common(prefix, prompt_ids) for prefix in filled.prefixes), default=0)

    async def fill(self, app: App) -> int:
        """Compute an app's prefix and pin its pages; returns how many tokens it has.

        Raises InvalidRequest if it does not fit, EngineFault if the engine cannot.
        """
        prefixes = await asyncio.to_thread(self.prefixes, app)
        requests = [
            Request(
                RequestId(f"fill-{app.name}-{next(self._ids)}"),
                np.asarray(prefix),
                self._filling(prefix),
            )
            for prefix in prefixes
        ]
        answering = await self._worker.submit(requests)
        try:
            async for _ in answering:
                pass
        finally:
            self._worker.abandon(answering)
        filled = _Filled([np.array(prefix, np.int32) for prefix in prefixes])
        before, self._filled[app.name] = self._filled.get(app.name), filled
        await self._worker.call(lambda engine: _pin(engine, filled, before))
        num_tokens = max(map(len, prefixes), default=0)
        facts = {"app": app.name, "prefix_tokens": num_tokens, "pinned_pages": len(filled.pinned)}
        log.info("app filled", extra={"facts": facts})
        return num_tokens

    async def forget(self, name: str) -> None:
        """An app is gone, or has another prompt: its pages go when room is needed."""
        if (filled := self._filled.pop(name, None)) is not None:
            await self._worker.call(lambda engine: engine.engine.unpin(filled.pinned))

    async def fill_all(self) -> None:
        """Fill every app; one that cannot be filled is computed by its first request."""
        for name in self.apps.names:
            app = self.apps.find(name)
            if app is None:
                continue  # removed meanwhile
            try:
                await self.fill(app)
            except (InvalidRequest, EngineFault) as error:
                facts = {"app": name, "reason": str(error)}
                log.error("app not filled", extra={"facts": facts})

    def _filling(self, prefix: Sequence[int]) -> SamplingParams:
        """An answer just long enough to complete the prefix's last page.

        Only full pages are kept as cache; of one that begins alike the beginning is shared.
        """
        num_missing = -len(prefix) % self._worker.snapshot.page_size
        # K and V of an answer's last token are never computed
        return SamplingParams(max_tokens=num_missing + 1, temperature=0.0, ignore_eos=True)


def _pin(engine: TextEngine, filled: _Filled, before: _Filled | None) -> None:
    """Pin an app's pages instead of those it had before; on the engine's thread.

    The old ones first: pages of the same name may have come in their place.
    """
    if before is not None:
        engine.engine.unpin(before.pinned)
    filled.pinned = [key for prefix in filled.prefixes for key in engine.engine.pin(prefix, b"")]


def _num_common(prefix: Int32s, prompt_ids: Sequence[int] | Int32s) -> int:
    head = np.array(prompt_ids[: len(prefix)], np.int64)
    differs = np.flatnonzero(prefix[: len(head)] != head)
    return int(differs[0]) if len(differs) else len(head)
