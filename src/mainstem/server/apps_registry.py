"""The apps of a server: named system prompts, computed before the first request."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.files import remove_leftovers, write_whole
from mainstem.text.encoding import App
from mainstem.wire.calls import Call
from mainstem.wire.errors import WireError

MAX_APPS = 256
VERSION = 1  # version of the file's format


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
