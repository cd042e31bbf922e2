"""The flag `--app NAME=FILE` of commands that read rows: defines the app of rows with `app: "NAME"`
or `model: "M:NAME"`."""

import argparse
from collections.abc import Callable, Sequence

from mainstem.core.errors import ConfigError
from mainstem.text.encoding import App
from mainstem.wire.calls import Call
from mainstem.wire.errors import WireError


def add_app_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--app", action="append", default=[], metavar="NAME=FILE",
        help="a system prompt for rows whose model is MODEL:NAME, as in `serve`; repeatable",
    )  # fmt: skip


def apps_by_name(flags: Sequence[str]) -> Callable[[Call], App | None]:
    """A function from a row to its app; it raises WireError for an unknown `app`."""
    apps: dict[str, App] = {}
    for flag in flags:
        app = App.from_flag(flag)
        if app.name in apps:
            raise ConfigError(f"--app {app.name} is given twice")
        apps[app.name] = app

    def find(call: Call) -> App | None:
        _, colon, name = (call.model or "").rpartition(":")
        # the part after a colon may belong to a model's name ("llama3:8b"), so it need not name an
        # app
        by_model = apps.get(name) if colon else None
        if call.app is None:
            return by_model
        if call.app not in apps:
            reason = f"there is no app {call.app!r}: give it with --app {call.app}=FILE"
            raise WireError("app_not_found", reason, "app")
        if by_model is not None and by_model.name != call.app:
            reason = f"app: is {call.app!r}, but the model names {by_model.name!r}"
            raise WireError("invalid_value", reason, "app")
        return apps[call.app]

    return find
