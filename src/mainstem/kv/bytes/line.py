"""A line to a Redis or Valkey server: one connection, commands sent together, answers in order.

    thread A   call: send c1 c2 c3 ---> r1, r2, r3 as they arrive      one round trip for all
    thread B   cut_if_overdue: closes the connection --> thread A gets LineError

The client library (`redis` or `valkey`, the extra `remote`) connects, authenticates, encrypts and
parses. It is imported only when a line is opened.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import SHUT_RDWR, socket
from threading import Lock, Thread
from time import monotonic
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from mainstem.core.errors import ConfigError

CONNECT_S = 1.0  # limit for connecting, once the host's address is known
OPEN_S = 4.0  # limit for name lookup, connecting, TLS and login together
STALL_S = 2.0  # limit for the time between two bytes from the server
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
CLIENTS = ("redis", "valkey")

Command = tuple[bytes | str | int | memoryview, ...]
Reply = object  # bytes, int, str, None, or RemoteRefusal


class LineError(Exception):
    """The server cannot be reached, does not answer, or was cut off; the text says why."""


class Overdue(LineError):
    """A call took too long, and its connection was closed."""


class BadCredentials(LineError):
    """The server refused the user or password."""


@dataclass(frozen=True, slots=True)
class RemoteRefusal:
    """The server answered a command with an error."""

    kind: str  # the client's name for the error
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the account to use there."""

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address to show to people: without user and password."""
        parts = urlsplit(self.url)
        place = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        return f"{parts.scheme}://{place}"


class _Connection(Protocol):
    """The part of a client's connection that is used here."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def read_response(self) -> Reply: ...


class _Client(Protocol):
    """The part of a client's module that is used here."""

    ConnectionPool: "type[_Pool]"
    exceptions: "_Errors"


class _Pool(Protocol):
    @classmethod
    def from_url(cls, url: str, **options: object) -> "_Pool": ...
    def make_connection(self) -> _Connection: ...


class _Errors(Protocol):
    AuthenticationError: type[Exception]
    AuthorizationError: type[Exception]
    ResponseError: type[Exception]


def check_url(url: str) -> str:
    """Parse a URL; ConfigError says what is wrong with it."""
    parts = urlsplit(url)
    is_known = parts.scheme in SCHEMES and bool(parts.hostname) and _has_port(parts)
    if not is_known and (parts.scheme != "unix" or not parts.path):
        known = ", ".join(f"{scheme}://HOST:PORT" for scheme in SCHEMES)
        raise ConfigError(f"remote must be {known} or unix:///PATH")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "remote must not hold a user or password: others can see them in the list of "
            "processes. Put them into a file that --remote-secrets names"
        )
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in TLS_OPTIONS:
            known = ", ".join(sorted(TLS_OPTIONS))
            raise ConfigError(f"remote has an unknown option {name!r}. Known: {known}")
    return SCHEMES.get(parts.scheme, parts.scheme) + url[len(parts.scheme) :]


def _has_port(parts: SplitResult) -> bool:
    """Whether the port is a number or is left out."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


class _Opening(Thread):
    """Connects on a separate thread, since a name lookup may take minutes."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__(name="kv-remote-open", daemon=True)
        self._connection = connection
        self._lock = Lock()
        self._has_ended = False
        self._is_given_up = False
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._connection.connect()
        except Exception as error:
            self._error = error
        with self._lock:
            self._has_ended = True
            if self._is_given_up:
                with suppress(Exception):
                    self._connection.disconnect()

    def wait(self) -> None:
        """Return when the connection is open; raises the error of connecting, or TimeoutError."""
        self.join(OPEN_S)
        with self._lock:
            if not self._has_ended:
                self._is_given_up = True
                raise TimeoutError(f"no connection after {OPEN_S:g} s")
        if self._error is not None:
            raise self._error


class RemoteLine:
    """One connection, used by one thread; opened on first use and again after it broke."""

    def __init__(self, address: Address) -> None:
        """Raises ConfigError for an invalid address, or if no client library is installed."""
        client = _client()
        self._errors = client.exceptions
        options: dict[str, object] = {
            "socket_timeout": STALL_S,
            "socket_connect_timeout": CONNECT_S,
            "protocol": 2,
            "username": address.username,
            "password": address.password,
        }
        url = check_url(address.url)
        if url.startswith("rediss:"):
            options["ssl_check_hostname"] = True  # not every client sets this itself
        pool = client.ConnectionPool.from_url(url, **options)
        self._connection = pool.make_connection()
        self._is_open = False
        self._opening: _Opening | None = None
        self._due_s = float("inf")  # deadline of the call in progress
        self._is_cut = False

    def call(self, commands: Sequence[Command], limit_s: float) -> Iterator[Reply]:
        """Send all commands at once and yield their answers as they arrive; raises LineError. After
        `limit_s` another thread may close the connection (`cut_if_overdue`)."""
        self._is_cut = False
        self._due_s = monotonic() + limit_s
        try:
            if not self._is_open:
                self._open()
                self._is_open = True
                if self._is_cut:  # `cut_if_overdue` was called before there was a socket
                    raise TimeoutError("connecting took too long")
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            for _ in commands:
                yield self._read()
        except GeneratorExit:
            self.close()  # otherwise the next call would read these answers
            raise
        except Exception as error:  # an error of the client, or the result of a cut
            self.close()
            refusals = (self._errors.AuthenticationError, self._errors.AuthorizationError)
            kind = BadCredentials if isinstance(error, refusals) else LineError
            if self._is_cut:
                kind = Overdue
            raise kind(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            self._due_s = float("inf")

    def _open(self) -> None:
        if self._opening is not None and self._opening.is_alive():
            raise TimeoutError("the last attempt to connect has not ended")
        self._opening = _Opening(self._connection)
        self._opening.start()
        self._opening.wait()

    def cut_if_overdue(self) -> bool:
        """End an overdue call, from another thread; returns whether there was one."""
        if monotonic() < self._due_s:
            return False
        self._due_s = float("inf")
        self._is_cut = True
        # shut down the client's socket: the thread that reads from it gets an end of file
        found: socket | None = getattr(self._connection, "_sock", None)
        if found is not None:
            with suppress(OSError):
                found.shutdown(SHUT_RDWR)
        return True

    def close(self) -> None:
        self._is_open = False
        with suppress(Exception):  # it may be half open, or cut
            self._connection.disconnect()

    def _read(self) -> Reply:
        try:
            return self._connection.read_response()
        except self._errors.ResponseError as error:
            return RemoteRefusal(type(error).__name__, str(error))


def _client() -> _Client:
    for name in CLIENTS:
        with suppress(ImportError):
            client: _Client = importlib.import_module(name)
            return client
    raise ConfigError("--remote needs a client for the server: pip install 'mainstem[remote]'")
