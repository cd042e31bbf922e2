"""Answers of a given form, with preemption, batching and other work in between."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from mainstem import SamplingParams
from mainstem.core.errors import InvalidRequest, TooManyForms
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.request import FinishReason, Output
from mainstem.text import grammar
from mainstem.text.form_queue import FormQueue
from mainstem.text.grammar import (
    MAX_FORM_CHARS,
    AnswerMask,
    Grammars,
    StructuredOutputsParams,
    choice_form,
    json_form,
    lark_form,
    regex_form,
)
from mainstem.text.schemas import closed
from mainstem.text.text_engine import TextEngine
from tests.builders import a_request, an_engine
from tests.fake_engines import a_tokenizer
from tests.waiting import until

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
        # the expected length is too low, so that pages run out
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
    assert json.dumps(value, ensure_ascii=False) == text  # the grammar fixes white space


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
def test_names_of_forms_in_vllm_are_accepted(given: dict[str, Any], form: str) -> None:
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
        ({"json": "not JSON"}, "must be an object or JSON text, got 'not JSON'"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": 5}, "must be an object"),
        ({"regex": 5}, "regex must be text"),
        ({"choice": "yes"}, "choice must be a list of texts, got 'yes'"),
        ({"choice": []}, "choices"),
    ],
)
def test_fields_that_describe_no_form_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: .*{complaint}"):
        StructuredOutputsParams(**given)


def test_only_one_field_may_give_a_form() -> None:
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


def test_an_answer_is_one_of_the_choices() -> None:
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


A, B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
CLOSED = {"properties": A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"properties": A}, CLOSED),
        ({"type": "array", "items": {"properties": A}}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [{"properties": A}, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"A": {"properties": A}}, "$ref": "#/$defs/A"},
         {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({"properties": {"x": {"properties": A}}, "additionalProperties": True},
         {"properties": {"x": CLOSED}, "additionalProperties": True}),
        ({"properties": A, "anyOf": [{"required": ["a"]}]},
         CLOSED | {"anyOf": [{"required": ["a"]}]}),
        ({"properties": {"properties": {"type": "object"}}},
         {"properties": {"properties": {"type": "object"}}, "additionalProperties": False}),
        ({"const": {"properties": A}}, None),
        ({"type": "object"}, None),
        ({"properties": A, "required": ["b"]}, None),
        ({"allOf": [{"properties": A}, {"properties": B}]}, None),
        ({"properties": A, "anyOf": [{"properties": B}]}, None),
        ({"$defs": {"A": {"properties": A}}, "allOf": [{"$ref": "#/$defs/A"}]}, None),
        ({"$defs": {"A": {"properties": A}}, "properties": B, "$ref": "#/$defs/A"}, None),
        ({"$defs": {"A/~": {"properties": A}}, "allOf": [{"$ref": "#/$defs/A~1~0"}]}, None),
        ({"$defs": {"A": {"properties": A}}, "allOf": [{"$ref": "#/$defs/A"}],
          "oneOf": [{"properties": B}]}, None),
        ({"$defs": {"A": {"properties": A}}, "$ref": "#/$defs/A", "anyOf": [{"properties": B}]},
         None),
        ({"anyOf": [{"properties": A}], "oneOf": [{"properties": B}]}, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_closed_schema_allows_only_declared_properties(
    schema: dict[str, Any], made: dict[str, Any] | None
) -> None:
    """None: the schema stays as it is."""
    assert closed(schema) == (schema if made is None else made)


def test_a_form_is_compiled_once() -> None:
    grammars = Grammars(a_tokenizer())
    assert grammars.compile(json_form(SCHEMA)) is grammars.compile(json_form(SCHEMA))


def test_no_request_waits_while_another_form_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(a_tokenizer())
    easy, hard = json_form(SCHEMA), json_form({"type": "object"})
    ready = grammars.compile(easy)
    begun, may_end = Event(), Event()
    compile_hard = grammar._matcher

    def slowly(form: str, words: LLTokenizer) -> LLMatcher:
        begun.set()
        assert may_end.wait(300)
        return compile_hard(form, words)

    monkeypatch.setattr(grammar, "_matcher", slowly)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(grammars.compile, hard)
        assert begun.wait(300)
        second = pool.submit(grammars.compile, hard)
        try:
            assert pool.submit(grammars.compile, easy).result(300) is ready
            assert grammars.find(easy) is ready
            assert grammars.find(hard) is None
            assert not first.done()
        finally:
            may_end.set()
        assert first.result(300) is second.result(300), "the form was compiled twice"


def test_a_form_that_was_refused_is_refused_again() -> None:
    grammars = Grammars(a_tokenizer())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="thing"):
            grammars.compile(json_form({"type": "thing"}))


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_settings_that_contradict_a_form_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        a_form(json_form({}), **{field: 1})


def test_a_form_that_the_vocabulary_cannot_spell_is_an_error() -> None:
    """The tokenizer has bytes that are not in the fake model's vocabulary."""
    engine = TextEngine(an_engine(64), a_tokenizer())
    engine.submit(a_request([1], sampling=a_form(regex_form("[0-9]é")), name="later"))
    (*_, last) = (output for _ in range(3) for output in engine.step())
    assert last.finish_reason is FinishReason.ERROR
    assert last.fault == "the model has no token that the form allows next"
    assert last.is_form_fault
    with pytest.raises(InvalidRequest, match="no token that the form allows"):
        engine.submit(a_request([1], sampling=a_form(regex_form("é")), name="at once"))


# --- limits on the cost of forms -----------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        regex_form("((a{1000}){1000}){2000}"),
        json_form({"type": "integer", "multipleOf": 999_983}),
        lark_form('start: %json {"multipleOf": ' + "7" * 5000 + "}"),
        json_form({"allOf": [{"multipleOf": 991}, {"multipleOf": 997}]}),
        lark_form('start: %json {"type": "integer", "multiple\\u004ff": 999983}'),
    ],
)
def test_a_form_that_costs_too_much_is_refused(form: str) -> None:
    with pytest.raises(InvalidRequest, match="too complex"):
        Grammars(a_tokenizer()).compile(form)


def test_a_refused_form_keeps_no_memory() -> None:
    """An error's frames held the parser, tens of megabytes, until garbage was collected."""
    grammars, refused = Grammars(a_tokenizer()), []
    for number in range(3):
        try:
            grammars.compile(regex_form(f"((a{{{1000 + number}}}){{1000}}){{2000}}"))
        except InvalidRequest as error:
            refused.append(error)
    frames = [frame for error in refused for frame, _ in walk_tb(error.__traceback__)]
    assert len(refused) == 3
    assert "_matcher" not in {frame.f_code.co_name for frame in frames}


def test_large_forms_are_not_refused() -> None:
    properties: dict[str, object] = {
        f"field {number}": {"enum": [f"value {value}" for value in range(20)]}
        for number in range(100)
    }
    properties["price"] = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99_999}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammars = Grammars(a_tokenizer())
    assert grammars.compile(json_form(schema)).num_bytes < 32 << 20
    grammars.compile(regex_form("[a-z ]{1,5000}"))
    grammars.compile(regex_form("(yes)?"))
    grammars.compile(regex_form("~?"))
    grammars.compile(choice_form([f"choice {number}" for number in range(1024)]))


def walk(mask: AnswerMask, num_tokens: int) -> int:
    """How many tokens an answer of capital letters has before its parser fails."""
    ids = np.resize(np.frombuffer(b"ABCDEFGHIJK", np.uint8), num_tokens).astype(np.int32) - 0x20
    for end in range(num_tokens):
        mask.allowed(ids[:end])
        if mask.fault is not None:
            return end
    return num_tokens


def test_a_full_lexer_is_renewed_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a form share its lexer: if it were not renewed, all later answers would fail."""
    monkeypatch.setattr(grammar, "_MAX_STATES", 600)
    form = Grammars(a_tokenizer()).compile(regex_form("[A-Z]{1,100000}"))
    beside = form.start()
    assert walk(beside, 50) == 50
    reached = walk(form.start(), 20_000)
    assert 300 < reached < 1000, "an answer's own text is too much for any lexer"
    assert form.generation > 0
    assert walk(form.start(), 200) == 200
    assert walk(beside, 200) == 200


def test_a_costly_form_is_not_renewed_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_STATES", 600)
    monkeypatch.setattr(grammar, "_RENEWABLE_S", -1.0)
    grammars = Grammars(a_tokenizer())
    form = grammars.compile(regex_form("[A-Z]{1,100000}"))
    assert walk(form.start(), 20_000) < 1000
    assert form.generation == 0
    assert grammars.find(regex_form("[A-Z]{1,100000}")) is None
    assert grammars.compile(regex_form("[A-Z]{1,100000}")) is not form


def test_a_parser_that_takes_long_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammar, "_MAX_SLOW_S", 0.0001)
    mask = Grammars(a_tokenizer()).compile(regex_form("[A-Z]*")).start()
    assert walk(mask, 1000) < 1000
    assert mask.fault is not None
    assert "too long" in mask.fault


def test_a_form_that_is_found_stays_longer_than_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "_MIN_BYTES", 100)
    monkeypatch.setattr(grammar, "_BYTES_PER_S", 0.0)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1000)
    grammars = Grammars(a_tokenizer())
    hot, cold = regex_form("hot"), regex_form("cold")
    for form in (hot, cold):
        grammars.compile(form)
    for number in range(20):
        assert grammars.find(hot) is not None
        grammars.compile(regex_form(f"other {number}"))
    assert grammars.find(cold) is None


def test_cached_forms_are_bounded_and_those_of_the_largest_owner_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "_MIN_BYTES", 100)
    monkeypatch.setattr(grammar, "_BYTES_PER_S", 0.0)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1000)
    grammars = Grammars(a_tokenizer())
    small = grammars.compile(regex_form("small"), "small")
    forms = [regex_form(f"large {number}") for number in range(30)]
    for form in forms:
        grammars.compile(form, "large")
    assert grammars.find(regex_form("small"), "small") is small
    assert [grammars.find(form, "large") is not None for form in forms] == [False] * 20 + [
        True
    ] * 10
    assert grammars.find(forms[-1], "small") is None, "an owner found the form of another owner"


def test_forms_in_use_are_bounded_per_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1)
    monkeypatch.setattr(grammar, "OWNER_BYTES", 20 << 20)
    grammars = Grammars(a_tokenizer())
    used = []

    def use_many() -> None:
        for number in range(50):
            used.append(grammars.compile(regex_form(f"form {number}"), "one"))

    with pytest.raises(TooManyForms, match="in use hold"):
        use_many()
    assert 5 < len(used) < 25
    grammars.compile(regex_form("another"), "two")
    used.clear()
    grammars.compile(regex_form("form again"), "one")


def test_an_owner_does_not_wait_for_all_forms_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    may_end = Event()
    compile_ = grammar._matcher

    def slowly(form: str, words: LLTokenizer) -> LLMatcher:
        begun.append(form)
        if "hard" in form:
            assert may_end.wait(300)
        return compile_(form, words)

    monkeypatch.setattr(grammar, "_matcher", slowly)
    queue = FormQueue(Grammars(a_tokenizer()))
    try:
        hard = [queue.submit(regex_form(f"hard {number}"), "one") for number in range(5)]
        until(lambda: bool(begun))
        queue.submit(regex_form("easy"), "two").result(300)
        assert [form for form in begun if "hard" in form] == [regex_form("hard 0")]
        may_end.set()
        assert all(future.result(300) for future in hard)
        assert queue.submit(regex_form("easy"), "two").done()
        with pytest.raises(InvalidRequest):
            queue.submit(regex_form("(a"), "two").result(300)
    finally:
        may_end.set()
        queue.close()
    assert queue.submit(regex_form("later"), "two").cancelled()


# --- answers that cannot continue ----------------------------------------------------------------


def test_an_answer_beyond_its_parsers_limits_ends_alone_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "_MAX_STATES", 600)
    core = an_engine(1024, max_model_len=4000)
    engine = TextEngine(core, a_tokenizer())
    endless = SamplingParams(temperature=0.0, max_tokens=3000, grammar=regex_form("[A-Z]{9999}"))
    engine.submit(a_request([1, 2, 3], sampling=endless, name="bound"))
    free = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    engine.submit(a_request([1, 2, 3], sampling=free, name="free"))
    last: dict[str, Output] = {}
    texts = {"bound": "", "free": ""}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
            texts[output.request_id] += output.text
    assert last["bound"].finish_reason is FinishReason.ERROR
    assert last["bound"].is_form_fault
    assert "reached its limits" in (last["bound"].fault or "")
    assert re.fullmatch("[A-Z]{100,}", texts["bound"])
    assert last["free"].finish_reason is FinishReason.LENGTH
    core.check()
