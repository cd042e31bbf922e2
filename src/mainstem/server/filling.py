"""Computes the prefixes of apps before the first request, and pins their pages.

An app's prompt is not a tenant's secret: its pages are named without a salt, computed once for all
tenants, and pinned. The pages after them in a request are named with the tenant's salt.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Int32s
from mainstem.server.answering import EngineFault
from mainstem.server.apps_registry import AppRegistry
from mainstem.server.engine_client import EngineClient
from mainstem.server.ids import unique_ids
from mainstem.text.encoding import App, shared_prefixes

log = logging.getLogger("mainstem.server")


class AppFiller:
    """Fills apps and knows which tokens of a prompt are public. Lives on the event loop."""

    def __init__(self, engine: EngineClient, apps: AppRegistry) -> None:
        self._engine = engine
        self.apps = apps
        self._filled: dict[str, list[Int32s]] = {}  # prefixes whose pages are kept, by app
        self._ids = unique_ids()
        self.changing = asyncio.Lock()  # held while an app is changed, filled or removed
        self.num_refills = 0  # refills in progress; if there are any, not all apps are filled

    def prefixes(self, app: App) -> list[list[int]]:
        """Return the prefixes with which requests to an app begin, of plain prompts and of chats;
        raises InvalidRequest if one leaves no room."""
        prefixes = shared_prefixes(self._engine.tokenizer, app)
        for prefix in prefixes:
            if len(prefix) >= self._engine.max_model_len:
                raise InvalidRequest(
                    "prompt",
                    f"{len(prefix)} tokens leave no room in the context of "
                    f"{self._engine.max_model_len} tokens",
                )
        return prefixes

    def public_tokens(self, app: App | None, prompt_ids: Sequence[int] | Int32s) -> int:
        """Return how many leading tokens of a prompt belong to the app."""
        prefixes = () if app is None else self._filled.get(app.name, ())
        return max((_num_common(prefix, prompt_ids) for prefix in prefixes), default=0)

    async def fill(self, app: App) -> int:
        """Compute an app's prefixes and pin their pages; returns the length of the longest.

        Raises InvalidRequest if a prefix does not fit, EngineFault if the engine fails.
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
        answering = await self._engine.submit(requests)
        try:
            async for _ in answering:
                pass
        finally:
            self._engine.abandon(answering)
        self._filled[app.name] = [np.array(prefix, np.int32) for prefix in prefixes]
        num_pages = await self._engine.pin(app.name, self._filled[app.name])
        num_tokens = max(map(len, prefixes), default=0)
        facts = {"app": app.name, "prefix_tokens": num_tokens, "pinned_pages": num_pages}
        log.info("app filled", extra={"facts": facts})
        return num_tokens

    async def forget(self, name: str) -> None:
        """Unpin the pages of an app that was removed or changed, so that they can be evicted."""
        if self._filled.pop(name, None) is not None:
            await self._engine.pin(name, ())

    async def fill_all(self) -> None:
        """Fill every app. If an app cannot be filled, its first request computes its prefix."""
        self.num_refills += 1
        try:
            for name in self.apps.names:
                async with self.changing:
                    # None: the app was removed in the meantime
                    if (app := self.apps.find(name)) is not None:
                        await self._try_to_fill(app)
        finally:
            self.num_refills -= 1

    async def _try_to_fill(self, app: App) -> None:
        try:
            await self.fill(app)
        except (InvalidRequest, EngineFault) as error:
            facts = {"app": app.name, "reason": str(error)}
            log.error("app not filled", extra={"facts": facts})

    def _filling(self, prefix: Sequence[int]) -> SamplingParams:
        """Return settings for an answer that is just long enough to fill the prefix's last page.

        Only full pages are cached; a request then copies the part of the last page that it shares.
        """
        num_missing = -len(prefix) % self._engine.snapshot.page_size
        # K and V of an answer's last token are never computed
        return SamplingParams(max_tokens=num_missing + 1, temperature=0.0, ignore_eos=True)


def _num_common(prefix: Int32s, prompt_ids: Sequence[int] | Int32s) -> int:
    head = np.array(prompt_ids[: len(prefix)], np.int64)
    differs = np.flatnonzero(prefix[: len(head)] != head)
    return int(differs[0]) if len(differs) else len(head)
