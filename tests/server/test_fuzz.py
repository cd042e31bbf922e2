"""Random requests made from the OpenAPI document, valid or not, never cause a 5xx or a hang."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.schemas import OpenApiSchema

from mainstem.wire.chat.bodies import ChatBody, CompletionBody
from mainstem.wire.neutral import is_harmless
from mainstem.wire.openapi import RULES, document
from tests.fake_engines import FakeEngines
from tests.server.running import ADMIN, Running, a_server
from tests.text.test_tools import HERMES

ADMIN_HEADERS = {"authorization": f"Bearer {ADMIN}"}
Case: TypeAlias = "schemathesis.Case[Any]"


def loosened() -> Any:
    """The document with bodies that may have other fields. With only known fields, of which a chat
    has seventy, requests take minutes to make up."""
    found: Any = document(has_any_role=True)
    schemas = found["components"]["schemas"]
    names = {ChatBody: "TokenizeChatBody", CompletionBody: "TokenizeTextBody"}
    for kind, rules in RULES.items():
        for title in (kind.__name__, names.get(kind, kind.__name__)):
            body = schemas[title]
            body.pop("additionalProperties", None)
            for name, rule in rules.items():
                if not is_harmless(rule) and name not in kind.__struct_fields__:
                    body["properties"].pop(name, None)
    return found


def the_schema() -> OpenApiSchema:
    schema = schemathesis.openapi.from_dict(loosened())
    schema.config.generation.update(modes=list(GenerationMode))
    return schema


schema = the_schema()
schema.config.phases.coverage.enabled = False  # 12,000 cases: see test_fuzz_long.py


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engines = FakeEngines(num_pages=512, max_model_len=800, template=HERMES)
    with a_server(engines=engines, data_dir=tmp_path_factory.mktemp("data")) as running:
        yield running
        running.settle()


def fuzz(case: Case, running: Running) -> None:
    if isinstance(case.body, dict):  # with a made-up name, no later check would be reached
        case.body.pop("model", None)
        case.body.pop("app", None)
    response = case.call(base_url=running.url, headers=ADMIN_HEADERS, timeout=300)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.headers["x-request-id"]


@schema.exclude(path="/v1/messages/count_tokens").parametrize()  # has the same body as /v1/messages
@hypothesis.settings(max_examples=4, deadline=None)
def test_random_requests_cause_no_server_error(case: Case, fuzzed: Running) -> None:
    fuzz(case, fuzzed)
