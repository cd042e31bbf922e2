"""API keys: which requests they admit, and that tenants share no cached page."""

from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError
from mainstem.server.http.auth import Access, KeyRing, bearer_key
from tests.server.running import ADMIN, ALICE, BOB, Running

OPEN = ["/health", "/ready", "/", "/page/page.js"]
CLOSED = ["/v1/models", "/v1/models/fake", "/version", "/metrics", "/live", "/openapi.json", "/x"]
ADMIN_PATHS = [
    ("GET", "/admin/apps"),
    ("PUT", "/admin/apps/x"),
    ("DELETE", "/admin/apps/x"),
    ("POST", "/admin/reset_prefix_cache"),
]


@pytest.mark.parametrize("path", OPEN)
def test_health_and_the_page_need_no_key(locked: Running, path: str) -> None:
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize("key", [None, "wrong", ALICE[:-1], ALICE + "x", ADMIN + "x"])
@pytest.mark.parametrize("path", CLOSED)
def test_everything_else_needs_a_key(locked: Running, path: str, key: str | None) -> None:
    response = locked.get(path, key)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_completions_need_a_key(locked: Running, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert locked.post(path, body).status_code == 401
    assert locked.post(path, body, "no-such-key-at-all-000").status_code == 401


@pytest.mark.parametrize("key", [ALICE, BOB])
def test_a_key_gives_access_to_the_routes(locked: Running, key: str) -> None:
    assert locked.get("/v1/models", key).status_code == 200
    assert locked.complete("x", key, max_tokens=1)


@pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
@pytest.mark.parametrize("key", [None, ALICE, "wrong"])
def test_admin_routes_need_an_admin_key(
    locked: Running, method: str, path: str, key: str | None
) -> None:
    assert locked.send(method, path, {"prompt": "x"}, key).status_code == 401


def test_an_admin_key_reads_metrics_but_cannot_send_completions(locked: Running) -> None:
    assert locked.get("/metrics", ADMIN).status_code == 200
    assert locked.get("/live", ADMIN).status_code == 200
    assert locked.post("/v1/completions", {"prompt": "x"}, ADMIN).status_code == 401


def test_admin_routes_are_closed_without_an_admin_key_file() -> None:
    access = Access(None, None)
    assert access.admit("/admin/apps", [(b"authorization", b"Bearer anything")]) is None
    assert access.admit("/v1/models", []) is not None


def test_a_tenants_prefix_is_never_a_hit_for_another(locked: Running) -> None:
    """Shown by cached tokens, and by the tokens that went through the model."""
    prompt = "a secret of one tenant that fills several pages of four tokens"

    def computed() -> int:
        totals = locked.get("/live", ADMIN).json()["totals"]
        return int(totals["computed_tokens"])

    def ask(key: str, **fields: object) -> tuple[int, int]:
        before = computed()
        usage = locked.complete(prompt, key, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], computed() - before

    assert ask(ALICE) == (0, len(prompt))
    assert ask(BOB) == (0, len(prompt))
    cached, spent = ask(ALICE)
    assert cached == len(prompt) - spent
    assert spent < 8
    assert ask(BOB, cache_salt="x") == (0, len(prompt))
    assert ask(ALICE, cache_salt="x") == (0, len(prompt))


def test_a_tenant_sees_only_its_own_requests(locked: Running) -> None:
    mine = locked.complete("mine", ALICE, max_tokens=1)["id"]
    others = locked.complete("other", BOB, max_tokens=1)["id"]
    seen = {record["id"] for record in locked.get("/live", ALICE).json()["recent"]}
    assert mine in seen
    assert others not in seen
    everything = {record["id"] for record in locked.get("/live", ADMIN).json()["recent"]}
    assert {mine, others} <= everything


def test_salts_of_tenants_differ_and_do_not_show_the_key() -> None:
    tenants = KeyRing({"alice": ALICE, "bob": BOB}).tenants
    assert tenants[0].salt != tenants[1].salt
    assert ALICE.encode() not in tenants[0].salt
    # a tenant cannot reach another's salt through cache_salt
    assert tenants[0].page_salt(b"x") != tenants[1].page_salt(b"x")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer abc")], b"abc"),
        ([(b"authorization", b"bearer  abc ")], b"abc"),
        ([(b"authorization", b"Basic abc")], b""),
        ([(b"authorization", b"abc")], b""),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], b""),
        ([], b""),
        ([(b"authorization", b"Bearer \xff\xfe")], b"\xff\xfe"),
    ],
)
def test_the_key_is_read_from_a_single_bearer_header(
    headers: list[tuple[bytes, bytes]], key: bytes
) -> None:
    assert bearer_key(headers) == key


def test_a_key_file_has_a_name_and_a_key_per_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# tenants\n\nalice: {ALICE}\nbob:{BOB}\n")
    ring = KeyRing.load(path)
    assert [tenant.name for tenant in ring.tenants] == ["alice", "bob"]
    found = ring.find(BOB.encode())
    assert found is not None
    assert found.name == "bob"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "no-colon-in-this-line\n",
        "short:key\n",
        f"bad name!:{ALICE}\n",
        f"alice:{ALICE}\nalice:{BOB}\n",
        f"alice:{ALICE}\nbob:{ALICE}\n",
    ],
)
def test_the_error_for_a_wrong_key_file_does_not_show_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.load(path)
    assert ALICE not in str(caught.value)
    with pytest.raises(ConfigError):
        KeyRing.load(tmp_path / "absent")


def test_a_refusal_says_whether_a_key_was_missing_or_wrong(locked: Running) -> None:
    def said(path: str, key: str | None) -> str:
        reply = locked.get(path, key)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        return str(reply.json()["error"]["message"])

    needed = "is needed: Authorization: Bearer KEY, or x-api-key: KEY"
    assert said("/v1/models", None) == f"an API key {needed}"
    assert said("/v1/models", "not-a-key-at-all") == "this API key is not known to the server"
    assert said("/admin/apps", None) == f"an admin key {needed}"
    assert said("/admin/apps", ALICE) == "this admin key is not known to the server"


def test_a_server_without_admin_keys_says_what_is_missing() -> None:
    refusal = Access(None, None).refusal("/admin/apps", [(b"authorization", b"Bearer x")])
    assert "--admin-key-file" in refusal.message
