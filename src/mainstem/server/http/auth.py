"""API keys from files, compared in constant time, and the salt of each tenant's pages."""

import re
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from starlette.requests import Request

from mainstem.core.errors import ConfigError
from mainstem.server.http.faults import ApiError

MIN_KEY_CHARS = 16
MAX_KEYS = 1024
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of one key. A tenant never reads pages that were computed for another."""

    name: str
    salt: bytes  # salt of its pages
    is_admin: bool = False

    @property
    def owner(self) -> str:
        """The owner of the tenant's sessions, files and responses. It is derived from the key, so
        another key has others."""
        return sha256(b"mainstem sessions\0" + self.salt).hexdigest()

    def page_salt(self, cache_salt: bytes) -> bytes:
        """Return the salt of a request that has its own `cache_salt`. The result has a fixed
        length."""
        return sha256(self.salt + cache_salt).digest() if cache_salt else self.salt


def owner_of(request: Request) -> str:
    """See Tenant.owner."""
    tenant: Tenant = request.state.tenant
    return tenant.owner


ANYBODY = Tenant("", b"")  # used if no keys are set: one tenant without a salt
ADMIN = Tenant("admin", b"admin", is_admin=True)


class KeyRing:
    """The keys of one file. Only digests are kept."""

    def __init__(self, keys: dict[str, str]) -> None:
        """`keys` maps a tenant's name to its key."""
        self._tenants = [
            (sha256(key.encode()).digest(), Tenant(name, _tenant_salt(key)))
            for name, key in keys.items()
        ]

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a file of `name:key` lines; blank lines and those that begin with # are skipped.

        Raises ConfigError, without showing a key, when a line is wrong.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read key file {path}: {type(error).__name__}") from None
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, colon, key = (part.strip() for part in line.partition(":"))
            if not colon or not _NAME.fullmatch(name) or len(key) < MIN_KEY_CHARS:
                raise ConfigError(
                    f"{path}, line {number}: must be name:key, with a key of at least "
                    f"{MIN_KEY_CHARS} characters"
                )
            if name in keys or key in keys.values():
                raise ConfigError(f"{path}, line {number}: this name or key occurs twice")
            keys[name] = key
        if not 0 < len(keys) <= MAX_KEYS:
            raise ConfigError(f"{path}: must hold 1 to {MAX_KEYS} keys, has {len(keys)}")
        return cls(keys)

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._tenants]

    def find(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key. Takes the same time for every key, known or not."""
        digest = sha256(key).digest()
        found = None
        for known, tenant in self._tenants:
            if compare_digest(known, digest):
                found = tenant
        return found


def _tenant_salt(key: str) -> bytes:
    return sha256(b"mainstem tenant\0" + key.encode()).digest()


def bearer_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The key of an `Authorization: Bearer` header; empty when there is none, or several."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def shown_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The Bearer key of a request, or else its `x-api-key`, which Anthropic's clients send; empty
    if there is none. A header that occurs several times is ignored."""
    values = [value for name, value in headers if name == b"x-api-key"]
    return bearer_key(headers) or (values[0].strip() if len(values) == 1 else b"")


class Access:
    """Which tenant may use which path.

    Open to all: health, readiness and the static page, which holds no secret. `/admin/` needs an
    admin key and is closed without an admin key file. Everything else needs a tenant's key if any
    keys are set; paths that only show numbers also accept an admin key.
    """

    OPEN = frozenset({"/", "/health", "/ready"})
    NUMBERS = frozenset({"/live", "/metrics", "/version"})

    def __init__(self, keys: KeyRing | None, admin_keys: KeyRing | None) -> None:
        self._keys = keys
        self._admin_keys = admin_keys

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants that may send requests."""
        return [ANYBODY] if self._keys is None else self._keys.tenants

    def admit(self, path: str, headers: list[tuple[bytes, bytes]]) -> Tenant | None:
        """Return the tenant; None if the path needs a key and the request has no valid one."""
        key = shown_key(headers)
        if path.startswith("/admin/"):
            return self._admin(key)
        if path in self.OPEN or path.startswith("/page/") or self._keys is None:
            return ANYBODY
        found = self._keys.find(key)
        if found is None and path in self.NUMBERS:
            return self._admin(key)
        return found

    def is_counted(self, path: str) -> bool:
        """Whether requests for a path count in the rate of their key: all but those that watch or
        administer the server."""
        is_watched = path in self.OPEN or path in self.NUMBERS
        return not is_watched and not path.startswith(("/page/", "/admin/"))

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> ApiError:
        """The error for a request that `admit` refused."""
        is_admin, was_sent = path.startswith("/admin/"), bool(shown_key(headers))
        if is_admin and self._admin_keys is None:
            message = "/admin/ is closed: the server was started without --admin-key-file"
        elif was_sent:
            message = f"this {'admin' if is_admin else 'API'} key is not known to the server"
        else:
            needed = "an admin" if is_admin else "an API"
            message = f"{needed} key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        return ApiError(401, message, code="invalid_api_key", kind="authentication_error")

    def _admin(self, key: bytes) -> Tenant | None:
        is_admin = self._admin_keys is not None and self._admin_keys.find(key) is not None
        return ADMIN if is_admin else None
