"""A Ray Serve application: replicas, each a whole server with its engine, and a router in front.

    serve run mainstem.ray.serve_app:app replicas=2
    serve deploy serve.yaml               # import_path: mainstem.ray.serve_app:app, args: {...}

Each replica is a separate deployment with one actor, so that the router, not Ray Serve, chooses
the replica. Ray Serve restarts actors that died, on any machine with free resources. docs/scale.md
has the arguments and a picture. Ray is an extra: pip install 'mainstem[ray]'.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mainstem.core.config import EngineConfig, with_arguments
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.ray.front import Front, FrontSettings
from mainstem.ray.replica import Replica, ReplicaSettings
from mainstem.ray.router import RouterKind
from mainstem.server.http.limits import ServerLimits
from mainstem.text.encoding import App

MAX_OPEN = 100_000  # requests that Ray Serve admits; the servers have their own, lower limits
HEALTH_S = 5.0  # between two health checks of a replica by Ray Serve

Count = Annotated[int, Meta(ge=1)]


class AppArguments(Struct, forbid_unknown_fields=True, frozen=True):
    """A system prompt that is computed at start, on all replicas or on some."""

    file: str
    replicas: list[Annotated[int, Meta(ge=0)]] | None = None


class Arguments(Struct, forbid_unknown_fields=True, frozen=True):
    """Arguments of the application; unknown names are refused."""

    replicas: Count = 1
    engine: dict[str, object] = {}  # settings as LLM has them: model, kv_tokens, host_gb ...
    router: Literal["affine", "random", "round-robin"] = "affine"
    served_model_name: list[str] = []
    apps: dict[str, AppArguments] = {}
    api_key_file: str | None = None  # a path that exists on every machine
    admin_key_file: str | None = None
    max_queue: Count = ServerLimits().open_answers
    max_body_bytes: Count = ServerLimits().body_bytes
    allowed_origins: list[str] = []
    allowed_hosts: list[str] = []
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0  # per replica
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    shutdown_s: Annotated[float, Meta(ge=0)] = 30.0  # for a replica to finish its answers
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def app(args: Mapping[str, Any]) -> Any:
    """The application; Ray Serve calls this with the arguments of its config or command line."""
    try:
        from ray import serve  # noqa: PLC0415  # an extra
    except ImportError:
        raise ConfigError("serve_app needs Ray Serve: pip install 'mainstem[ray]'") from None
    given = read_arguments(args)
    common = {
        "num_replicas": 1,
        "max_ongoing_requests": MAX_OPEN,
        "graceful_shutdown_timeout_s": given.shutdown_s,
        "health_check_period_s": HEALTH_S,
    }
    resources = {"num_cpus": given.num_cpus, "num_gpus": given.num_gpus}
    replicas = [
        serve.deployment(
            Replica, name=f"replica-{place}", ray_actor_options=resources, **common
        ).bind(replica_settings(given, place))
        for place in range(given.replicas)
    ]
    front = serve.deployment(Front, name="front", ray_actor_options={"num_cpus": 0}, **common)
    return front.bind(front_settings(given), replicas)


def read_arguments(args: Mapping[str, Any]) -> Arguments:
    """Read and check the arguments; raises ConfigError. From a command line, all are text."""
    try:
        given = msgspec.convert(dict(args), Arguments, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"arguments of the application: {error}") from None
    with_arguments(EngineConfig(), given.engine, "engine").check()
    for name, placed in given.apps.items():
        if placed.replicas is not None:
            wrong = [place for place in placed.replicas if place >= given.replicas]
            if wrong or not placed.replicas:
                raise ConfigError(
                    f"app {name}: replicas must be a list of numbers from 0 to {given.replicas - 1}"
                )
    return given


def replica_settings(given: Arguments, place: int) -> ReplicaSettings:
    """The settings of one replica."""
    mine = {
        name: _prompt(name, placed.file)
        for name, placed in given.apps.items()
        if placed.replicas is None or place in placed.replicas
    }
    return ReplicaSettings(
        engine=given.engine,
        names=tuple(given.served_model_name),
        apps=mine,
        api_key_file=given.api_key_file,
        admin_key_file=given.admin_key_file,
        max_queue=given.max_queue,
        max_body_bytes=given.max_body_bytes,
        allowed_origins=tuple(given.allowed_origins),
        allowed_hosts=tuple(given.allowed_hosts),
        log_level=given.log_level,
    )


def front_settings(given: Arguments) -> FrontSettings:
    some = tuple(
        (name, tuple(placed.replicas))
        for name, placed in given.apps.items()
        if placed.replicas is not None
    )
    return FrontSettings(RouterKind(given.router), some, given.max_body_bytes)


def _prompt(name: str, path: str) -> str:
    try:
        return App(name, Path(path).read_text(encoding="utf-8")).prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"app {name}: cannot read {path}: {error}") from None
    except InvalidRequest as error:
        raise ConfigError(f"app {name}: {error}") from None
