"""The flags of `mainstem batch` that spread a job over many engines."""

import argparse
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mainstem.batch.bundles import Task
from mainstem.batch.driver import Worker
from mainstem.batch.job import seeded
from mainstem.checkpoints.fetch import fetch_tokenizer
from mainstem.cli.flags import given_settings
from mainstem.cli.parser import add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.json import Json
from mainstem.text.encoding import App
from mainstem.text.parsers.formats import AUTO
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.calls import Call

ROWS_PER_WORKER = 256
OTHER_FILES = 256  # files that a job may have open besides its connections
# settings that are used here even if servers answer: the job is planned with the model's tokenizer
OF_TOKENIZER = {"model", "chat_template", "allow_special_tokens"}
HERE = "local"  # a value of --ray


@dataclass(frozen=True, slots=True)
class Team:
    """Settings that all workers of a job share."""

    config: EngineConfig
    defaults: Mapping[str, object]  # for rows that do not set them
    seed: int
    find_app: Callable[[Call], App | None]
    open_engine: Callable[[EngineConfig], TextEngine]

    def fill(self, task: Task, body: Json) -> Json:
        """A row's body with the job's defaults filled in, so that every server answers the same."""
        given = {name for name, value in body.items() if value is not None}
        if "max_completion_tokens" in given:
            given.add("max_tokens")
        filled = {name: value for name, value in self.defaults.items() if name not in given}
        filled |= {name: value for name, value in body.items() if name != "model"}
        seed = seeded(task.row, self.seed).seed
        if seed is not None:
            filled["seed"] = seed
        app = self.find_app(task.row.call)
        if app is not None:
            filled["app"] = app.name
        return filled


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "many engines", "the job is planned here and divided among them"
    )
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--workers", metavar="URL,URL", help="servers (`mainstem serve`) that answer the rows"
    )
    where.add_argument(
        "--ray", nargs="?", const=HERE, metavar="ADDRESS",
        help="run engines in Ray actors: in the cluster at ADDRESS, or without it on this machine",
    )  # fmt: skip
    flag = partial(add_flag, group)
    flag("--worker-key-file", Path, "file with the API key for --workers")
    flag("--worker-rows", int, "rows in progress at each server", ROWS_PER_WORKER)
    flag("--ray-workers", int, "number of Ray actors (one for each GPU, or one)")


def join_ray_address(argv: list[str]) -> list[str]:
    """Join `--ray` and the next word if that word is an address and not the input's name."""
    found: list[str] = []
    for place, word in enumerate(argv):
        if place and argv[place - 1] == "--ray" and _is_address(word):
            found[-1] = f"--ray={word}"
        else:
            found.append(word)
    return [f"--ray={HERE}" if word == "--ray" else word for word in found]


def _is_address(word: str) -> bool:
    host, colon, port = word.removeprefix("ray://").rpartition(":")
    return word in ("auto", HERE) or bool(host and colon and port.isdigit())


def has_workers(args: argparse.Namespace) -> bool:
    """Whether other processes answer the rows; raises ConfigError for flags that cannot be
    combined."""
    if args.worker_rows < 1:
        raise ConfigError(f"--worker-rows must be at least 1, got {args.worker_rows}")
    if args.worker_key_file is not None and args.workers is None:
        raise ConfigError("--worker-key-file needs --workers")
    if args.worker_rows != ROWS_PER_WORKER and args.workers is None:
        raise ConfigError("--worker-rows needs --workers")
    theirs = sorted(given_settings(args).keys() - OF_TOKENIZER)
    if theirs and args.workers is not None:
        flag = f"--{theirs[0].replace('_', '-')}"
        raise ConfigError(f"with --workers, give {flag} to the servers")
    has_parsers = (args.tool_call_parser, args.reasoning_parser) != (AUTO, AUTO)
    if has_parsers and args.workers is not None:
        raise ConfigError(
            "with --workers, give --tool-call-parser and --reasoning-parser to the servers"
        )
    if args.ray_workers is not None and (args.ray is None or args.ray_workers < 1):
        raise ConfigError("--ray-workers needs --ray, and must be at least 1")
    return args.workers is not None or args.ray is not None


@contextmanager
def open_team(args: argparse.Namespace, team: Team) -> Iterator[Sequence[Worker]]:
    """The workers that the flags name, for as long as the job lasts."""
    if args.workers is not None:
        yield _http_workers(args, team)
        return
    from mainstem.ray.workers import ActorSettings, ray_workers  # noqa: PLC0415  # an extra

    parts = (team.config, dict(team.defaults), team.seed, team.find_app, team.open_engine)
    settings = ActorSettings(*parts, (args.tool_call_parser, args.reasoning_parser))
    with ray_workers(args.ray, args.ray_workers, settings) as workers:
        yield workers


def _http_workers(args: argparse.Namespace, team: Team) -> Sequence[Worker]:
    try:
        from mainstem.batch.http_worker import (  # noqa: PLC0415  # an extra
            HttpWorker,
            check_url,
            read_key,
        )
    except ModuleNotFoundError:
        raise ConfigError("--workers needs httpx: pip install 'mainstem[server]'") from None
    key = None if args.worker_key_file is None else read_key(args.worker_key_file)
    urls = [url.strip() for url in args.workers.split(",") if url.strip()]
    for url in urls:
        check_url(url)
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError("--workers must name one server or more, each once")
    _allow_connections(len(urls) * args.worker_rows)
    return [HttpWorker(url, key, args.worker_rows, team.fill) for url in urls]


def _allow_connections(count: int) -> None:
    """Raise the limit of open files: each row in progress has a connection, which is an open
    file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        reason = f"needs {wanted:,} open files, more than the system allows"
        raise ConfigError(f"--worker-rows times the number of --workers {reason}") from None


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of the model that workers serve; it is needed for planning."""
    return fetch_tokenizer(config.model)
