"""Answers of a given form, whatever the engine does in between."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from llguidance import LLMatcher

from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.request import SamplingParams
from mainstem.text.grammar import (
    MAX_FORM_CHARS,
    Grammars,
    StructuredOutputsParams,
    choice_form,
    json_form,
    regex_form,
)
from mainstem.text.text_engine import TextEngine
from tests.batch.fake_batch import a_tokenizer
from tests.builders import a_request, an_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["red", "green"]},
        "legs": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "colour", "legs"],
    "additionalProperties": False,
}


def answers(
    prompts: list[str], sampling: SamplingParams, num_pages: int = 256, can_overlap: bool = False
) -> tuple[list[str], int]:
    """The answers to prompts that run together, and how often one was preempted."""
    preempted: list[SequencePreempted] = []
    bus = EventBus()
    bus.subscribe(SequencePreempted, preempted.append)
    core = an_engine(num_pages, can_overlap=can_overlap, bus=bus)
    engine = TextEngine(core, a_tokenizer())
    texts = {
        (str(place), index): "" for place in range(len(prompts)) for index in range(sampling.n)
    }
    for place, prompt in enumerate(prompts):
        ids = a_tokenizer().encode(prompt)
        # too low an expectation, so that pages run out
        engine.submit(a_request(ids, sampling=sampling, name=str(place), expected_tokens=1))
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id, output.index] += output.text
    core.check()
    return list(texts.values()), len(preempted)


def a_form(form: str, **fields: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=300, grammar=form, **fields)  # type: ignore[arg-type]


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "colour", "legs"]
    assert value["colour"] in ("red", "green")
    assert 2 <= len(value["legs"]) <= 3
    assert json.dumps(value, ensure_ascii=False) == text  # one spacing


def test_an_answer_has_the_schemas_form() -> None:
    texts, _ = answers(["a person", "another"], a_form(json_form(SCHEMA), n=3))
    assert len(texts) == 6
    for text in texts:
        check_person(text)


class Person:
    """Stands for a class of pydantic."""

    @staticmethod
    def model_json_schema() -> dict[str, object]:
        return SCHEMA


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"json": SCHEMA}, json_form(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, json_form(SCHEMA)),
        ({"json": Person}, json_form(SCHEMA)),
        ({"json_object": True}, json_form({"type": "object"})),
        ({"regex": "a+"}, regex_form("a+")),
        ({"choice": ("yes", "no")}, choice_form(["yes", "no"])),
        ({"grammar": "start: /a+/"}, regex_form("a+")),
    ],
)
def test_vllms_names_of_forms(given: dict[str, Any], form: str) -> None:
    described = StructuredOutputsParams(**given)
    sampling = SamplingParams(structured_outputs=described)
    assert described.form == sampling.grammar == form
    assert replace(sampling, n=2).grammar == form


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "needs one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json": "not JSON"}, "must be an object, or one as text, got 'not JSON'"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": 5}, "must be an object"),
        ({"regex": 5}, "regex must be text"),
        ({"choice": "yes"}, "choice must be a list of texts, got 'yes'"),
        ({"choice": []}, "choices"),
    ],
)
def test_what_describes_no_form_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: .*{complaint}"):
        StructuredOutputsParams(**given)


def test_a_form_is_given_once_and_as_one() -> None:
    described = StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequest, match="cannot be combined with grammar"):
        SamplingParams(structured_outputs=described, grammar=regex_form("b"))
    with pytest.raises(InvalidRequest, match="must be StructuredOutputsParams, got"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(structured_outputs=described, min_tokens=2)


@pytest.mark.parametrize("can_overlap", [False, True])
def test_a_form_survives_preemption_and_overlap(can_overlap: bool) -> None:
    prompts = [f"person number {number}" for number in range(6)]
    alone = [answers([prompt], a_form(json_form(SCHEMA)))[0][0] for prompt in prompts]
    together, num_preempted = answers(prompts, a_form(json_form(SCHEMA)), 40, can_overlap)
    assert together == alone
    assert num_preempted > 0


def test_forms_and_free_answers_run_in_one_batch() -> None:
    engine = TextEngine(an_engine(256), a_tokenizer())
    prompt = a_tokenizer().encode("the same prompt")
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.submit(a_request(prompt, sampling=free, name="free"))
    bound = a_form(regex_form("[0-9]{5}"))
    engine.submit(a_request(prompt, sampling=bound, name="bound"))
    texts = {"free": "", "bound": ""}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
    assert re.fullmatch("[0-9]{5}", texts["bound"])
    assert not re.fullmatch("[0-9]*", texts["free"])


def test_a_choice_is_one_of_them() -> None:
    texts, _ = answers([f"{n}" for n in range(8)], a_form(choice_form(["yes", "no/yes", 'a "b"'])))
    assert set(texts) <= {"yes", "no/yes", 'a "b"'}
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "thing"}, "thing"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"type": "string", "pattern": "(a"}, "unclosed"),
        ({"enum": []}, "empty"),
        ({"$ref": "#"}, "no text"),
        ([], "must be an object"),
        ({"enum": ["x" * MAX_FORM_CHARS]}, "characters"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_reason(schema: object, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as refused:
        Grammars(a_tokenizer()).compile(json_form(schema))
    assert refused.value.field == "response_format"


def test_a_form_is_compiled_once() -> None:
    grammars = Grammars(a_tokenizer())
    assert grammars.compile(json_form(SCHEMA)) is grammars.compile(json_form(SCHEMA))


def test_nobody_waits_while_another_form_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(a_tokenizer())
    easy, hard = json_form(SCHEMA), json_form({"type": "object"})
    ready = grammars.compile(easy)
    begun, may_end = Event(), Event()
    compile_hard = Grammars._matcher

    def slowly(self: Grammars, form: str) -> LLMatcher:
        begun.set()
        assert may_end.wait(20)
        return compile_hard(self, form)

    monkeypatch.setattr(Grammars, "_matcher", slowly)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(grammars.compile, hard)
        assert begun.wait(20)
        second = pool.submit(grammars.compile, hard)
        try:
            assert pool.submit(grammars.compile, easy).result(20) is ready
            assert grammars.find(easy) is ready
            assert grammars.find(hard) is None
            assert not first.done()
        finally:
            may_end.set()
        assert first.result(20) is second.result(20), "it was compiled twice"


def test_a_form_that_was_refused_is_refused_again() -> None:
    grammars = Grammars(a_tokenizer())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="thing"):
            grammars.compile(json_form({"type": "thing"}))


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_what_contradicts_a_form_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        a_form(json_form({}), **{field: 1})


def test_a_form_the_models_words_cannot_spell_ends_the_answer() -> None:
    """The tokenizer has bytes that the fake model has not."""
    texts, _ = answers(["x"], a_form(regex_form("[0-9]é")))
    assert "é" not in texts[0]
