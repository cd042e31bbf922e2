"""`mainstem serve`: an OpenAI-compatible server; see docs/serve.md."""

import argparse
import asyncio
import errno
import logging
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from mainstem.checkpoints.fetch import fetch_model
from mainstem.checkpoints.progress import StageBar
from mainstem.cli import flags
from mainstem.cli.flag_types import not_negative, positive, positive_count
from mainstem.cli.kv_event_flags import add_kv_event_flags, kv_events_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.server.apps import AppFile, AppRegistry
from mainstem.server.build import GatewaySettings, make_gateway, server_config
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Access, KeyRing
from mainstem.server.http.connection import guarded_by
from mainstem.server.http.limits import ServerLimits
from mainstem.server.http.logs import LEVELS, set_up_logs
from mainstem.server.http.sites import host_names
from mainstem.server.kept.file_store import lock_folder
from mainstem.server.link.engine_client import EngineState, Launched
from mainstem.server.link.engine_process import EngineProcess
from mainstem.server.link.kv_events import KvEventsConfig
from mainstem.server.link.protocol import BeginEngine
from mainstem.server.routes import make_app
from mainstem.text.encoding import App
from mainstem.text.sessions import SessionLimits
from mainstem.text.tokenizer import Tokenizer

MIB = 1 << 20
GIB = 1 << 30
GRACE_S = 5.0  # seconds after --shutdown-s, to send the last events
APPS_FILE = "apps.json"
BACKLOG = 2048  # connections that wait to be accepted

log = logging.getLogger("mainstem.server")


def origin(text: str) -> str:
    """Return a site as browsers write it: scheme and host in lower case, without a default port. A
    different spelling would never match."""
    site = re.fullmatch(r"(https?)://([\w.-]+|\[[\da-f:.]+\])(:\d+)?", text.lower(), re.ASCII)
    if text != "*" and site is None:
        raise argparse.ArgumentTypeError(f"must be like https://example.com, or *, got {text}")
    return text.lower().removesuffix(":443" if site and site[1] == "https" else ":80")


def host_name(text: str) -> str:
    """Return a host name as browsers send it in `Host`, without the port."""
    name = text.lower().rstrip(".")
    if text != "*" and not re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a name without a port, or *, got {text}")
    return name


def parser() -> argparse.ArgumentParser:
    defaults = ServerLimits()
    made = Parser("mainstem serve", usage="%(prog)s [MODEL] [flags]", description=__doc__)
    made.add_argument("model_given", nargs="?", metavar="MODEL", help="the same as --model")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    flag = partial(add_flag, made)
    flag("--port", int, "port to listen on; 0: any free port", 8000)
    made.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model for clients (the last part of --model)",
    )
    made.add_argument(
        "--app",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a system prompt, computed at start; repeatable",
    )
    made.add_argument(
        "--allowed-origins",
        type=origin,
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="sites whose pages may call the server from a browser; *: any (none)",
    )
    made.add_argument(
        "--allowed-hosts",
        type=host_name,
        nargs="+",
        default=[],
        metavar="NAME",
        help="host names that browsers may use, besides IP addresses and localhost; "
        "*: any (with --api-key-file: any; without: --host and this machine's name)",
    )
    made.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="clients' keys, in lines of name:key (none: anybody may use the server)",
    )  # fmt: skip
    flag("--admin-key-file", Path, "keys for /admin/, in lines of name:key")
    made.add_argument(
        "--weights-root", type=Path, metavar="DIR",
        help="POST /admin/weights takes folders below this one (none)",
    )  # fmt: skip
    made.add_argument(
        "--max-weights-gib", type=positive, default=defaults.weights_bytes / GIB, metavar="GIB",
        help="limit for tensors sent to POST /admin/weights (%(default)g)",
    )  # fmt: skip
    made.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder for files, batches, sessions, responses and the apps of /admin/apps; without "
        "it, /v1/files and /v1/batches are not available",
    )
    flag("--shutdown-s", not_negative, "time to finish answers at shutdown", 30.0, metavar="S")
    made.add_argument(
        "--record",
        type=Path,
        metavar="FILE.jsonl",
        help="record each prompt's token ids and time in this file, for `mainstem bench replay`",
    )
    flags.add_generation_flag(made)
    flags.add_parser_flags(made)
    made.add_argument(
        "--log-level", choices=LEVELS, default="info", help="least severe messages to log (info)"
    )
    limits = made.add_argument_group("limits")
    flag = partial(add_flag, limits)
    flag(
        "--max-queue",
        positive_count,
        "maximum answers running and waiting, then 429",
        defaults.open_answers,
    )
    flag("--rate-limit", positive_count, "maximum requests per minute of a key (no limit)")
    flag("--max-concurrent", positive_count, "maximum open requests of a key (no limit)")
    flag(
        "--max-pinned-share",
        positive,
        "share of the device's pages that a key may pin with cache_control",
        defaults.pinned_share,
    )
    kept = SessionLimits()
    flag("--max-sessions", positive_count, "maximum sessions that are kept", kept.max_sessions)
    limits.add_argument(
        "--session-ttl-s",
        type=positive,
        default=kept.ttl_s,
        metavar="S",
        help=f"unused sessions are removed after S seconds ({kept.ttl_s:g})",
    )
    flag(
        "--max-upload-mib",
        positive_count,
        "maximum size of an uploaded file",
        defaults.upload_bytes // MIB,
    )
    flag(
        "--max-body-mib",
        positive_count,
        "maximum size of any other request",
        defaults.body_bytes // MIB,
    )
    limits.add_argument(
        "--max-stored-gib",
        type=positive,
        default=defaults.stored_bytes / GIB,
        metavar="N",
        help="maximum size of all files of a key, including answers of its batches (%(default)g)",
    )
    flag("--max-files", positive_count, "maximum number of files of a key", defaults.stored_files)
    limits.add_argument(
        "--file-ttl-s",
        type=positive,
        default=defaults.file_ttl_s,
        metavar="S",
        help=f"files and ended batches are removed after S seconds ({defaults.file_ttl_s:.0f})",
    )
    add_kv_event_flags(made)
    flags.add_engine_flags(made)
    return made


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; the model may be given with or without --model."""
    args = parser().parse_intermixed_args(argv)  # MODEL may stand between flags
    if args.model_given is not None:
        if args.model not in (None, args.model_given):
            reason = f"{args.model_given!r} and --model {args.model!r} are different models"
            raise ConfigError(f"{reason}; give one of them")
        args.model = args.model_given
    return args


Parts = tuple[Tokenizer, Callable[[], Launched]]
OpenModel = Callable[[EngineConfig, str, KvEventsConfig | None], Parts]


def open_model(config: EngineConfig, log_level: str, kv_events: KvEventsConfig | None) -> Parts:
    """The tokenizer of a model, and a function that starts a process with its engine."""
    with StageBar() as bar:
        folder, tokenizer = fetch_model(config.model, bar)
    return tokenizer, partial(
        EngineProcess.start, BeginEngine(config, str(folder), log_level, kv_events)
    )


def main(argv: list[str], open_: OpenModel = open_model) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, 1 if the engine failed for good, or 128 and the
    number of the signal that stopped the saving of pages (130: Ctrl-C).

    Errors in the flags are found before the model is loaded.
    """
    args = parse(argv)
    config = server_config(flags.engine_config(args))
    config.check()
    _check_files(args)
    kv_events = kv_events_config(args)
    limits = ServerLimits(
        body_bytes=args.max_body_mib * MIB,
        upload_bytes=args.max_upload_mib * MIB,
        open_answers=args.max_queue,
        requests_per_minute=args.rate_limit,
        open_requests=args.max_concurrent,
        stored_bytes=int(args.max_stored_gib * GIB),
        stored_files=args.max_files,
        file_ttl_s=args.file_ttl_s,
        pinned_share=args.max_pinned_share,
        weights_bytes=int(args.max_weights_gib * GIB),
    )
    keys = None if args.api_key_file is None else KeyRing.load(args.api_key_file)
    admin_keys = None if args.admin_key_file is None else KeyRing.load(args.admin_key_file)
    session_limits = SessionLimits(args.session_ttl_s, args.max_sessions)
    folder = _data_folder(args.data_dir, config.store.disk_dir)
    kept = None if args.data_dir is None else AppFile(args.data_dir / APPS_FILE)
    apps = AppRegistry([App.from_flag(flag) for flag in args.app], kept)
    names = tuple(args.served_model_name or [Path(config.model.model).name])
    with _bind(args.host, args.port) as listener:
        set_up_logs(args.log_level)
        if keys is None and not _is_loopback(args.host):
            log.warning("anybody who can reach this address may use the server; see --api-key-file")
        log.info("loading", extra={"facts": {"model": config.model.model}})  # may take minutes
        tokenizer, launch = open_(config, args.log_level, kv_events)
        settings = GatewaySettings(
            config,
            names,
            Access(keys, admin_keys),
            apps,
            flags.model_defaults(args, tokenizer),
            limits,
            session_limits,
            (args.tool_call_parser, args.reasoning_parser),
            args.data_dir,
            folder,
            args.record,
            args.weights_root,
        )
        gateway = make_gateway(settings, tokenizer, launch)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("listening", extra={"facts": {"url": url, "model": names[0]}})
        checks_hosts = keys is None or bool(args.allowed_hosts)
        hosts = host_names(args.host, args.allowed_hosts) if checks_hosts else None
        server = Server(gateway, args.shutdown_s, args.allowed_origins, hosts)
        server.run(sockets=[listener])
    if server.stopped_saving is not None:
        return 128 + server.stopped_saving
    return 1 if gateway.engine.state is EngineState.FAILED else 0


def _check_files(args: argparse.Namespace) -> None:
    """Raise ConfigError for a limit on files if there is no folder to store files in."""
    limits = ("max_upload_mib", "max_stored_gib", "max_files", "file_ttl_s")
    unset = parser()
    for name in limits if args.data_dir is None else ():
        if getattr(args, name) != unset.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without --data-dir: set it or omit {flag}")


def _data_folder(given: Path | None, disk_dir: str | None) -> Path | None:
    """Return the folder for data that outlives the process, or None. Creates it if necessary."""
    folder = given if given is not None or disk_dir is None else Path(disk_dir)
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        flag = "--disk-dir" if given is None else "--data-dir"
        raise ConfigError(f"{flag} {folder}: {error.strerror}") from None
    if given is not None:
        lock_folder(given).release()  # only a check, before the model is loaded
    return folder


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens; raises ConfigError.

    Clients that connect while the model is loaded wait for it, and a second server on the same port
    fails at once, before it loads its model.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        hint = "; use another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return bound


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """uvicorn, with a deadline for open answers. After its shutdown, uvicorn raises the signal that
    stopped it again; this class does not, so that `main` returns."""

    def __init__(
        self,
        gateway: Gateway,
        shutdown_s: float,
        origins: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
    ) -> None:
        config = uvicorn.Config(
            make_app(gateway, origins, hosts),
            loop="uvloop",
            http=guarded_by(gateway.limits),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=gateway.limits.idle_s,
            timeout_graceful_shutdown=int(shutdown_s + GRACE_S),
        )
        super().__init__(config)
        self.gateway = gateway
        self._shutdown_s = shutdown_s
        self.stopped_saving: int | None = None  # the signal that ended the saving of pages
        self._is_urgent = False  # a second signal came
        self._loop: asyncio.AbstractEventLoop | None = None  # None: the shutdown has not begun

    def handle_exit(self, sig: int, frame: object) -> None:
        """After the first signal, open answers are finished. The second ends them with an error,
        the third closes their connections. When only pages are left to save, the next signal ends
        that."""
        gateway, loop = self.gateway, self._loop
        if loop is not None and gateway.engine.state is EngineState.STOPPING:
            if self.stopped_saving is None:
                self.stopped_saving = sig
                loop.call_soon_threadsafe(gateway.engine.stop_saving)
            return
        self.force_exit = self._is_urgent
        self._is_urgent = self.should_exit
        self.should_exit = True
        if self._is_urgent and loop is not None:
            loop.call_soon_threadsafe(gateway.end_answers)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gateway = self.gateway
        gateway.is_draining = True
        log.info("shutting down", extra={"facts": {"open_requests": gateway.engine.num_open}})
        self._loop = loop = asyncio.get_running_loop()
        loop.call_later(0.0 if self._is_urgent else self._shutdown_s, gateway.end_answers)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the rest to asyncio, where signals would be lost
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self.lifespan.shutdown()
