"""The apps of a server: named system prompts, computed before the first request.

An app's prompt is not a tenant's secret: its pages are named without a salt, computed once for all
tenants, and pinned. The pages after them in a request are named with the tenant's salt.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.files import remove_leftovers, write_whole
from mainstem.core.ids import RequestId, unique_ids
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Int32s
from mainstem.server.link.answering import EngineFault
from mainstem.server.link.engine_client import EngineClient
from mainstem.server.pins import num_common
from mainstem.text.encoding import App, shared_prefixes
from mainstem.wire.calls import Call
from mainstem.wire.errors import WireError

MAX_APPS = 256
VERSION = 1  # version of the file's format

log = logging.getLogger("mainstem.server")


class AppFile:
    """Keeps apps in a file: `{"version": 1, "apps": {name: prompt}}`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, App]:
        """Return the apps; none if there is no file. Raises ConfigError if the file cannot be
        read."""
        remove_leftovers(self._path)
        try:
            record = json.loads(self._path.read_bytes())
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']!r}, not {VERSION}")
            return {name: App(name, prompt) for name, prompt in record["apps"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        except InvalidRequest as error:
            wrong = str(error)
        raise ConfigError(f"cannot read the apps in {self._path} ({wrong}): repair or remove it")

    def save(self, apps: Mapping[str, App]) -> None:
        """Replace the file atomically; raises OSError."""
        record = {"version": VERSION, "apps": {name: app.prompt for name, app in apps.items()}}
        write_whole(self._path, json.dumps(record).encode())


class AppRegistry:
    """The apps of a server, by name. One caller at a time may change it; any thread may read.

    Apps added while the server runs are kept in `file`, if there is one. At the next start, apps
    given by flags replace kept apps of the same name.
    """

    def __init__(self, given: Sequence[App], file: AppFile | None = None) -> None:
        self.given = {app.name: app for app in given}
        if len(self.given) < len(given):
            names = [app.name for app in given]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"--app {twice} is given twice")
        self._file = file
        self._kept = {} if file is None else file.load()
        self._apps = self._kept | self.given

    @property
    def names(self) -> list[str]:
        return sorted(self._apps)

    def find(self, name: str) -> App | None:
        return self._apps.get(name)

    def add(self, app: App) -> None:
        """Add an app, or replace the one of the same name. Raises InvalidRequest if there are too
        many, OSError if it cannot be saved; in both cases nothing changes."""
        if app.name not in self._apps and len(self._apps) >= MAX_APPS:
            raise InvalidRequest("name", f"there are {MAX_APPS} apps already")
        self._keep(self._kept | {app.name: app})
        self._apps[app.name] = app

    def remove(self, name: str) -> bool:
        """Remove an app; returns whether there was one. Its pages are evicted when room is needed.
        Raises OSError like `add`."""
        if name in self._kept:
            self._keep({other: app for other, app in self._kept.items() if other != name})
        return self._apps.pop(name, None) is not None

    def _keep(self, apps: dict[str, App]) -> None:
        if self._file is not None:
            self._file.save(apps)
            self._kept = apps

    def resolve(self, call: Call, model_names: Sequence[str]) -> tuple[str, App | None]:
        """Return the model name for the reply, and the app that `model: "M:NAME"` or `app` names.

        Raises WireError if there is no such model or app.
        """
        if call.model is None or call.model in model_names:
            base, app_name = call.model or model_names[0], call.app
        else:
            base, _, app_name = call.model.rpartition(":")
            if base not in model_names or self.find(app_name) is None:
                message = f"the model {call.model!r} does not exist; GET /v1/models lists them"
                raise WireError("model_not_found", message, "model")
            if call.app is not None and call.app != app_name:
                message = f"app: is {call.app!r}, but the model names {app_name!r}"
                raise WireError("invalid_value", message, "app")
        if app_name is None:
            return base, None
        app = self.find(app_name)
        if app is None:
            raise WireError("app_not_found", f"there is no app {app_name!r}", "app")
        if call.has_echo:
            raise WireError("invalid_value", "echo: cannot be used with an app", "echo")
        return f"{base}:{app_name}", app


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
        return max(
            (num_common(each, np.array(prompt_ids[: len(each)], np.int64)) for each in prefixes),
            default=0,
        )

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
