"""Decides which web pages may call the server from a browser: its own, and those of named sites.

This prevents two attacks. Cross-site requests (CSRF): a page of another site sends a form, or a
body without a type, which browsers send without a preflight; `Origin` and `Sec-Fetch-Site` reveal
it. DNS rebinding: the attacker lets the host name of a page resolve to this machine, so that the
browser takes both for one site; `Host` reveals it, because it is not a name of this server.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from socket import gethostname

from mainstem.server.http.faults import ApiError

Headers = list[tuple[bytes, bytes]]

ANY = "*"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # none of them changes anything here
PROBES = frozenset({"/health", "/ready"})  # allowed for any host name; they answer only yes or no
MAX_SHOWN = 80
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.ASCII)


def host_names(listens_on: str, allowed: Sequence[str]) -> list[str]:
    """Return the host names of a server: the name it listens on, the names it was given, and this
    machine's name if other machines can reach it."""
    names = [listens_on.lower(), *allowed]
    try:
        is_private = ip_address(listens_on).is_loopback
    except ValueError:
        is_private = listens_on == "localhost"
    return names if is_private else [*names, gethostname().lower()]


class Sites:
    """Names and sites that browsers may use."""

    def __init__(
        self, origins: Iterable[str] = (), hosts: Iterable[str] = (), checks_hosts: bool = True
    ) -> None:
        """`hosts` are allowed names in addition to addresses and loopback names. A server with keys
        need not check names: a page that uses another name has no key."""
        self._origins = frozenset(origins)
        self._hosts = frozenset(hosts)
        self._checks_hosts = checks_hosts and ANY not in self._hosts

    def refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """Return why a request is refused; None if it is allowed."""
        if self._checks_hosts and path not in PROBES:
            for value in _all(headers, b"host"):
                if not self._is_known(value):
                    return _unknown_host(value)
        if method not in SAFE_METHODS and self._is_foreign(headers):
            return _FOREIGN
        return None

    def _is_known(self, value: str) -> bool:
        """Whether a `Host` is an address, which rebinding cannot fake, or a name of this server."""
        found = _HOST.fullmatch(value.lower())
        if found is None:
            return False
        name = found[1].rstrip(".")
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser sends the request for a page of a site that is not allowed. To https
        servers and localhost, browsers send `Sec-Fetch-Site`; to others, only the page's `Origin`.
        Other clients send neither. The scheme may differ from ours if a proxy handles TLS."""
        origins = _all(headers, b"origin")
        if ANY in self._origins or (origins and self._origins.issuperset(origins)):
            return False
        relations = _all(headers, b"sec-fetch-site")
        if relations:
            return any(relation not in ("none", "same-origin") for relation in relations)
        hosts = _all(headers, b"host")
        own = {_plain(f"{scheme}://{host}") for host in hosts for scheme in ("http", "https")}
        return not own.issuperset(map(_plain, origins))


_FOREIGN = ApiError(403, "Cross-origin request refused. Allow this site with --allowed-origins.")


def _unknown_host(value: str) -> ApiError:
    shown = repr(value[:MAX_SHOWN])
    return ApiError(
        403,
        f"The host name {shown} is not one of this server's. If it should be, start the server "
        "with --allowed-hosts NAME, or with --api-key-file.",
        code="host_not_allowed",
    )


def _plain(origin: str) -> str:
    """The origin as browsers write it: without a default port."""
    plain = origin.lower()
    return plain.removesuffix(":443" if plain.startswith("https:") else ":80")


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for known, value in headers if known == name]
