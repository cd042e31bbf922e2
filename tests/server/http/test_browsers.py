"""Calls from pages of other sites are refused unless the site is allowed."""

from pathlib import Path
from socket import gethostname

import httpx
import pytest

from mainstem.cli.serve import parser
from mainstem.server.http.sites import Sites, host_names
from tests.server.running import ALICE, Running, a_server

SITE = "https://app.example.com"
ASKS = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("named", [SITE, "*"])
def test_an_allowed_site_may_send_requests_and_read_answers(named: str) -> None:
    with a_server(origins=[named], has_keys=True) as server:
        path = "/v1/completions"
        asked = server.client.options(path, headers=ASKS)  # browsers send no key with a preflight
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == named
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        headers = {"origin": SITE, "authorization": f"Bearer {ALICE}"}
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        for headers_sent, status in ((headers, 200), ({"origin": SITE}, 401)):
            reply = server.client.post(path, json=body, headers=headers_sent)
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == named
            assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize("named", [[], ["https://other.example.com"]])
def test_other_sites_may_not_send_requests(named: list[str]) -> None:
    with a_server(origins=named) as server:
        assert server.client.options("/v1/completions", headers=ASKS).status_code >= 400
        body = {"prompt": "x", "max_tokens": 2}
        reply = server.client.post("/v1/completions", json=body, headers={"origin": SITE})
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(("named", "status"), [([], 403), ([SITE], 200), (["*"], 200)])
def test_a_page_of_another_site_needs_permission_even_without_preflight(
    named: list[str], status: int
) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    with a_server(origins=named) as server:
        for relation in ("cross-site", "same-site"):  # same-site: for example, another port
            headers = {"origin": SITE, "sec-fetch-site": relation}
            reply = server.client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == status
        own = {"origin": str(server.client.base_url), "sec-fetch-site": "same-origin"}
        assert server.client.post("/v1/completions", json=body, headers=own).status_code == 200
        assert server.client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_request_of_a_page_needs_a_content_type() -> None:
    body = b'{"prompt": "x", "max_tokens": 2}'  # without a type, browsers send it to any site
    with a_server(origins=[SITE]) as server:
        for headers, status in (({"origin": SITE}, 415), ({}, 200)):
            reply = server.client.post("/v1/completions", content=body, headers=headers)
            assert reply.status_code == status


@pytest.mark.parametrize(
    ("host", "origin", "is_allowed"),
    [
        ("192.168.1.5:8000", "http://192.168.1.5:8000", True),
        ("box:8000", "http://box:8000", True),
        ("chat.example.com", "https://chat.example.com", True),  # a proxy speaks TLS
        ("chat.example.com:443", "https://chat.example.com", True),
        ("box:8000", "http://box:8001", False),
        ("box:8000", "http://evil.example", False),
        ("box:8000", "http://box.evil.example:8000", False),
        ("box:8000", "null", False),  # a sandboxed frame, a file
        ("box:8000", "", False),
        ("box:8000", None, True),  # no browser
    ],
)
def test_a_plain_http_server_checks_the_origin_of_a_page(
    host: str, origin: str | None, is_allowed: bool
) -> None:
    """Browsers send no Sec-Fetch-Site to plain HTTP servers."""
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    sites = Sites(hosts=["*"])
    assert (sites.refusal("POST", "/v1/files", headers) is None) == is_allowed
    assert (sites.refusal("DELETE", "/v1/files/x", headers) is None) == is_allowed
    assert sites.refusal("GET", "/v1/models", headers) is None


def test_an_upload_from_another_site_is_refused(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as server:

        def upload(origin: str) -> httpx.Response:
            headers, form = {"origin": origin}, {"purpose": "batch"}
            files = {"file": ("in.jsonl", b"{}")}
            return server.client.post("/v1/files", headers=headers, data=form, files=files)

        refused = upload("http://evil.example")
        assert refused.status_code == 403
        assert "--allowed-origins" in refused.json()["error"]["message"]
        assert upload(server.url).status_code == 200


NAMES = [
    ("localhost", True),
    ("LOCALHOST:8000", True),
    ("app.localhost:8000", True),
    ("localhost.", True),
    ("127.0.0.1:8000", True),
    ("127.8.9.1", True),
    ("[::1]:8000", True),
    ("10.0.0.7:8000", True),
    ("box.example.com:8000", True),
    ("Box.Example.com.", True),
    ("evil.example", False),
    ("evil.example:8000", False),
    ("127.0.0.1.evil.example", False),
    ("localhost.evil.example", False),
    ("localhost:8000@evil.example", False),
    ("", False),
    ("evil.example, localhost", False),
]


@pytest.mark.parametrize(("name", "is_known"), NAMES)
def test_the_host_header_must_name_the_server(name: str, is_known: bool) -> None:
    """This prevents DNS rebinding: a page whose name was pointed at this machine sends its own
    name."""
    sites = Sites(hosts=["box.example.com"])
    headers = [(b"host", name.encode())]
    assert (sites.refusal("GET", "/", headers) is None) == is_known
    assert (sites.refusal("POST", "/v1/completions", headers) is None) == is_known
    assert sites.refusal("GET", "/health", headers) is None, "load balancers may use any name"
    both = [*headers, (b"host", b"localhost")]
    assert (sites.refusal("GET", "/", both) is None) == is_known


def test_requests_with_another_host_name_are_refused(server: Running, locked: Running) -> None:
    rebound = {"host": "evil.example"}
    refused = server.client.get("/v1/models", headers=rebound)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in refused.json()["error"]["message"]
    assert server.client.get("/ready", headers=rebound).status_code == 200
    keyed = rebound | {"authorization": f"Bearer {ALICE}"}
    # with keys any name is allowed, for example behind a proxy
    assert locked.client.get("/v1/models", headers=keyed).status_code == 200


def test_allowed_hosts_also_apply_to_servers_with_keys() -> None:
    with a_server(has_keys=True, hosts=["chat.example.com"]) as server:
        key = {"authorization": f"Bearer {ALICE}"}
        for name, status in (("chat.example.com", 200), ("evil.example", 403)):
            reply = server.client.get("/v1/models", headers=key | {"host": name})
            assert reply.status_code == status


def test_this_machines_name_is_allowed_if_others_can_reach_it() -> None:
    own = gethostname().lower()
    assert host_names("127.0.0.1", ["a.example"]) == ["127.0.0.1", "a.example"]
    assert host_names("localhost", []) == ["localhost"]
    assert host_names("0.0.0.0", []) == ["0.0.0.0", own]
    assert host_names("Box", []) == ["box", own]


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a b", ""])
def test_an_allowed_host_has_no_scheme_and_no_port(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--allowed-hosts", name])
    assert "a name without a port" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
def test_the_page_cannot_be_framed(server: Running, path: str) -> None:
    headers = server.get(path).headers
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["x-frame-options"] == "DENY"
