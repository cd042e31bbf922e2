"""The apps of a server: named system prompts, computed before anybody asks."""

from collections.abc import Sequence

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.text.encoding import App
from mainstem.wire.calls import Call
from mainstem.wire.errors import WireError

MAX_APPS = 256


class AppRegistry:
    """The apps of a server, by name. Changed on the event loop only; any thread may look."""

    def __init__(self, apps: Sequence[App]) -> None:
        self._apps: dict[str, App] = {}
        for app in apps:
            if app.name in self._apps:
                raise ConfigError(f"--app {app.name} is given twice")
            self._apps[app.name] = app

    @property
    def names(self) -> list[str]:
        return sorted(self._apps)

    def find(self, name: str) -> App | None:
        return self._apps.get(name)

    def add(self, app: App) -> None:
        """Put an app in, instead of one of the same name if there is one."""
        if app.name not in self._apps and len(self._apps) >= MAX_APPS:
            raise InvalidRequest("name", f"there are {MAX_APPS} apps already")
        self._apps[app.name] = app

    def remove(self, name: str) -> bool:
        """Whether there was such an app. Its pages go when room is needed."""
        return self._apps.pop(name, None) is not None

    def resolve(self, call: Call, model_names: Sequence[str]) -> tuple[str, App | None]:
        """The model name to reply with, and the app that `model: "M:NAME"` or `app` names.

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
