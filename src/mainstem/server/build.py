"""Joins the parts of a server, for `mainstem serve` and for replicas under Ray Serve."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time

from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.server.apps import AppRegistry
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Access
from mainstem.server.http.limits import ServerLimits
from mainstem.server.kept.recording import Recorder
from mainstem.server.kept.response_store import response_file
from mainstem.server.link.engine_client import EngineClient, Launched
from mainstem.server.served_model import ServedModel
from mainstem.text.parsers.formats import AUTO, find_formats
from mainstem.text.session_file import session_file
from mainstem.text.sessions import SessionLimits, Sessions, tokenizer_identity
from mainstem.text.tokenizer import Tokenizer

SESSIONS_FILE = "sessions.sqlite"
RESPONSES_FILE = "responses.sqlite"
STEP_MS = 250.0  # a stream's longest gap because of other requests' prompts


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a server."""

    config: EngineConfig
    names: tuple[str, ...]  # names of the model for clients
    access: Access
    apps: AppRegistry
    sampling: Mapping[str, object] = field(default_factory=dict)  # defaults for requests
    limits: ServerLimits = field(default_factory=ServerLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    parsers: tuple[str, str] = (AUTO, AUTO)  # for tool calls and for reasoning
    data_dir: Path | None = None  # folder for files and batches
    kept_in: Path | None = None  # folder for sessions and responses
    record: Path | None = None
    weights_root: Path | None = None  # folders of weights for /admin/weights are below it


def server_config(config: EngineConfig) -> EngineConfig:
    """The config of a server's engine: unless it says otherwise, steps that prompts share with
    answers take at most STEP_MS, since clients watch the answers."""
    if config.sched.step_ms is not None or config.model.deterministic:
        return config
    return replace(config, sched=replace(config.sched, step_ms=STEP_MS))


def make_gateway(
    settings: GatewaySettings, tokenizer: Tokenizer, launch: Callable[[], Launched]
) -> Gateway:
    """Start the engine, wait for it, and connect the other parts; raises ConfigError."""
    formats = find_formats(tokenizer, *settings.parsers)
    engine = EngineClient(tokenizer, launch)
    model = ServedModel(
        settings.names, int(time()), settings.sampling, str(settings.config.model), formats
    )
    gateway = Gateway(
        engine,
        model,
        settings.access,
        settings.apps,
        settings.limits,
        Sessions(settings.sessions),
    )
    if settings.data_dir is not None:
        gateway.open_batches(settings.data_dir)
    if settings.kept_in is not None:
        identity = tokenizer_identity(tokenizer)
        gateway.keep_sessions(session_file(settings.kept_in / SESSIONS_FILE, identity))
        gateway.keep_responses(response_file(settings.kept_in / RESPONSES_FILE))
    if settings.weights_root is not None:
        gateway.weights_root = settings.weights_root.resolve()
    if settings.record is not None:
        gateway.recorder = Recorder(settings.record)
    _check_apps(gateway)
    return gateway


def _check_apps(gateway: Gateway) -> None:
    """Raise ConfigError if the prompt of an app given by a flag leaves no room for an answer."""
    for name, app in gateway.apps.given.items():
        try:
            gateway.filler.prefixes(app)
        except InvalidRequest as error:
            raise ConfigError(f"--app {name}: {error}") from None
