"""Calls from pages of other sites: refused by browsers unless the site was named."""

import pytest

from tests.server.running import ALICE, a_server

SITE = "https://app.example.com"
ASKS = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("named", [SITE, "*"])
def test_a_named_site_may_ask_and_read_the_answer(named: str) -> None:
    with a_server(origins=[named], has_keys=True) as server:
        path = "/v1/completions"
        asked = server.client.options(path, headers=ASKS)  # browsers send no key with this
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
def test_other_sites_may_not(named: list[str]) -> None:
    with a_server(origins=named) as server:
        assert server.client.options("/v1/completions", headers=ASKS).status_code >= 400
        body = {"prompt": "x", "max_tokens": 2}
        reply = server.client.post("/v1/completions", json=body, headers={"origin": SITE})
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(("named", "status"), [([], 403), ([SITE], 200), (["*"], 200)])
def test_what_browsers_send_without_asking_is_refused_here(named: list[str], status: int) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    with a_server(origins=named) as server:
        for relation in ("cross-site", "same-site"):  # the latter: another port, say
            headers = {"origin": SITE, "sec-fetch-site": relation}
            reply = server.client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == status
        own = {"origin": str(server.client.base_url), "sec-fetch-site": "same-origin"}
        assert server.client.post("/v1/completions", json=body, headers=own).status_code == 200
        assert server.client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_page_must_say_the_type_of_a_body() -> None:
    body = b'{"prompt": "x", "max_tokens": 2}'  # without a type browsers send it to any site
    with a_server() as server:
        for headers, status in (({"origin": SITE}, 415), ({}, 200)):
            reply = server.client.post("/v1/completions", content=body, headers=headers)
            assert reply.status_code == status
