"""A body becomes a Call, or an error that names a field; the OpenAPI document agrees."""

import json
from typing import Any

import pytest

from mainstem.core.request import Overflow, Rendering
from mainstem.text.encoding import Chat, Prompt
from mainstem.text.parsers.formats import AnswerFormats, ReasoningFormat, ToolFormat, find_formats
from mainstem.wire.calls import BodyLimits, Call, CallKind
from mainstem.wire.chat.bodies import ChatBody, CompletionBody
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError
from mainstem.wire.openapi import document
from tests.fake_engines import TEMPLATE, a_tokenizer

CLOCK = {"type": "function", "function": {"name": "clock"}}
HELLO = [{"role": "user", "content": "hello"}]
PARSER = CallParser(find_formats=lambda: AnswerFormats(ToolFormat.HERMES))


def chat(**fields: object) -> tuple[Call, Chat]:
    call, (prompt,) = PARSER.parse({"messages": HELLO} | fields, CallKind.CHAT)
    assert isinstance(prompt, Chat)
    return call, prompt


def completion(**fields: object) -> tuple[Call, tuple[Prompt, ...]]:
    return PARSER.parse({"prompt": "x"} | fields, CallKind.COMPLETION)


def refused(kind: CallKind, **fields: object) -> WireError:
    given: dict[str, object] = {"messages": HELLO} if kind is CallKind.CHAT else {"prompt": "x"}
    with pytest.raises(WireError) as caught:
        PARSER.parse(given | fields, kind)
    return caught.value


def test_equal_calls_share_their_sampling() -> None:
    assert chat(temperature=0.5)[0].sampling is chat(temperature=0.5)[0].sampling


def test_several_prompts_are_one_call() -> None:
    call, prompts = completion(prompt=["a", [1, 2]], n=3)
    assert len(prompts) == call.num_prompts == 2
    assert call.num_answers == 6


def test_a_message_keeps_fields_that_only_its_template_reads() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    assert chat(messages=[message])[1].messages == [message]
    of_vllm = {"role": "assistant", "content": "x", "reasoning": "why"}
    assert chat(messages=[of_vllm])[1].messages == [of_vllm | message]


def test_arguments_of_past_calls_become_objects() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    (read,) = chat(messages=[message])[1].messages
    assert read["tool_calls"] == [called | {"function": {"name": "f", "arguments": {"a": 1}}}]
    for text, arguments in (
        ("", {}), (" ", {}), (None, {}), ("null", {}), ("{", {"arguments": "{"}),
        ("[1]", {"arguments": "[1]"}),
    ):  # fmt: skip
        other = called | {"function": {"name": "f", "arguments": text}}
        (read,) = chat(messages=[message | {"tool_calls": [other]}])[1].messages
        assert read["tool_calls"] == [
            called | {"function": {"name": "f", "arguments": arguments}}
        ], text


def test_the_old_form_of_a_past_call_is_a_tool_call() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "content": None, "function_call": function}
    (read,) = chat(messages=[message])[1].messages
    called = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read == {"role": "assistant", "content": None, "tool_calls": [called]}


def test_a_content_may_be_a_single_part() -> None:
    part = {"type": "text", "text": "x"}
    assert chat(messages=[{"role": "user", "content": part}])[1].messages[0]["content"] == "x"


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        [5],
        [{"type": "function"}],
        [{"type": "f", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "ab\n"}}],
        [{"type": "function", "function": {"name": "f", "parameters": 5}}],
        [CLOCK] * 129,
    ],
)
def test_the_error_for_wrong_tools_names_the_field(tools: object) -> None:
    assert refused(CallKind.CHAT, tools=tools).param == "tools"


def test_a_choice_must_name_a_tool() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for choice in ("always", other, 5):
        assert refused(CallKind.CHAT, tools=[CLOCK], tool_choice=choice).param == "tool_choice"
    assert refused(CallKind.CHAT, tools=[], tool_choice="required").param == "tool_choice"


def test_some_of_the_tools_may_be_allowed() -> None:
    other = {"type": "function", "function": {"name": "other"}}

    def choice(mode: str, *tools: object) -> dict[str, object]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}

    call, prompt = chat(tools=[CLOCK, other], tool_choice=choice("auto", other))
    assert prompt.tools == (other,)
    assert call.sampling.grammar is None
    required, prompt = chat(tools=[CLOCK, other], tool_choice=choice("required", CLOCK))
    assert prompt.tools == (CLOCK,)
    assert required.sampling == chat(tools=[CLOCK], tool_choice="required")[0].sampling
    for wrong in (choice("auto", other), choice("auto"), choice("always", CLOCK)):
        assert refused(CallKind.CHAT, tools=[CLOCK], tool_choice=wrong).param == "tool_choice"


def test_tools_are_ignored_if_there_are_none_or_tool_choice_is_none() -> None:
    assert chat(tools=[], tool_choice="auto")[0].tools is None
    assert chat(tools=[CLOCK], tool_choice="none")[0].tools is None
    call, prompt = chat(tools=[CLOCK], tool_choice=CLOCK)
    assert call.tools is not None
    assert call.sampling.grammar == call.tools.form
    assert prompt.tools == (CLOCK,)


def test_a_required_call_goes_before_a_form_and_two_forms_exclude_each_other() -> None:
    call, _ = chat(tools=[CLOCK], tool_choice="required", response_format={"type": "json_object"})
    assert call.tools is not None
    assert call.sampling.grammar == call.tools.form
    forms = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    assert refused(CallKind.COMPLETION, **forms).param == "response_format"


def test_the_limit_of_tokens_is_named_as_the_client_named_it() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = refused(CallKind.CHAT, **{name: 0})
        assert error.param == name
        assert error.message.startswith(name)


def test_a_chat_takes_options_of_responses_that_change_nothing() -> None:
    chat(verbosity="medium", prompt_cache_options={"ttl": "1h"})
    assert refused(CallKind.CHAT, verbosity="low").param == "verbosity"


def test_a_strict_schema_allows_only_declared_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    lax, strict, by_hand = (
        completion(response_format={"type": "json_schema", "json_schema": given})[0].sampling
        for given in (
            {"schema": schema},
            {"schema": schema, "strict": True},
            {"schema": schema | {"additionalProperties": False}},
        )
    )
    assert strict.grammar == by_hand.grammar != lax.grammar


@pytest.mark.parametrize(
    ("effort", "template", "args"),
    [
        ("low", "{{ reasoning_effort }}", {"reasoning_effort": "low"}),
        ("none", "{{ enable_thinking }}", {"enable_thinking": False}),
        ("medium", "{{ enable_thinking }}", {}),
        ("medium", "", {}),
        ("none", "", {}),
        (None, "", {}),
        ("high", "", None),
        ("minimal", "{{ reasoning_effort }}", None),
        ("none", "<think>", None),
        ("low", "<think>", None),
    ],
)
def test_effort_reaches_a_template_that_supports_it(
    effort: str | None, template: str, args: dict[str, object] | None
) -> None:
    """None: the effort is refused."""
    parser = CallParser(find_formats=lambda: find_formats(a_tokenizer(template + TEMPLATE)))
    body = {"messages": HELLO, "reasoning_effort": effort}
    if args is None:
        with pytest.raises(WireError, match=f"reasoning_effort: .*{effort!r}"):
            parser.parse(body, CallKind.CHAT)
        return
    _, [prompt] = parser.parse(body, CallKind.CHAT)
    assert isinstance(prompt, Chat)
    assert prompt.template_args == args


def test_template_variables_override_the_effort() -> None:
    parser = CallParser(find_formats=lambda: find_formats(a_tokenizer("{{ reasoning_effort }}")))
    own = {"reasoning_effort": "high"}
    body = {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": own}
    _, [prompt] = parser.parse(body, CallKind.CHAT)
    assert isinstance(prompt, Chat)
    assert prompt.template_args == own


def test_scoring_is_echo_without_an_answer() -> None:
    call, _ = completion(echo=True, max_tokens=0, logprobs=1)
    assert call.is_scoring
    assert (call.sampling.max_tokens, call.sampling.prompt_logprobs) == (1, 1)
    assert not call.wants_prompt_logprobs
    assert refused(CallKind.COMPLETION, max_tokens=0).param == "max_tokens"


def test_the_default_overflow_of_a_session_is_kv() -> None:
    assert chat(session_id="a")[0].overflow is Overflow.KV
    assert chat(session_id="a", context_overflow="error")[0].overflow is Overflow.ERROR
    assert chat(context_overflow="recompute")[0].overflow is Overflow.RECOMPUTE
    important = chat(session_id="a", context_overflow="important")[0]
    assert important.overflow is Overflow.IMPORTANT
    for policy in ("kv", "important"):
        error = refused(CallKind.CHAT, context_overflow=policy)
        assert error.param == "context_overflow"
        assert f"{policy} needs a session_id" in error.message
    for session_id in ("a/b", "", "a\n", 5):
        assert refused(CallKind.CHAT, session_id=session_id).param == "session_id"
    assert refused(CallKind.CHAT, session_id="a", n=2).param == "session_id"


@pytest.mark.parametrize(
    ("options", "param"),
    [({"include_usage": 1}, "stream_options.include_usage"), ({"x": 1}, "stream_options.x")],
)
def test_the_error_names_the_field_inside_stream_options(options: object, param: str) -> None:
    assert refused(CallKind.CHAT, stream=True, stream_options=options).param == param


def test_a_body_is_bounded() -> None:
    parser = CallParser(limits=BodyLimits(max_prompts=2, max_answers=3, max_stop_chars=4))
    cases: tuple[tuple[dict[str, object], str], ...] = (
        ({"prompt": ["a", "b", "c"]}, "prompt"),
        ({"prompt": ["a", "b"], "n": 2}, "n"),
        ({"stop": ["abc", "de"]}, "stop"),
    )
    for fields, param in cases:
        with pytest.raises(WireError) as caught:
            parser.parse({"prompt": "x"} | fields, CallKind.COMPLETION)
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)


def test_values_that_change_nothing_are_accepted() -> None:
    completion(suffix="", best_of=1, user="u", no_such_field=None)
    assert refused(CallKind.COMPLETION, suffix="end").code == "unknown_field"
    assert refused(CallKind.COMPLETION, best_of=2).code == "unknown_field"
    assert completion(n=3, best_of=3)[0] == completion(n=3)[0]
    assert refused(CallKind.COMPLETION, n=2, best_of=3).code == "unknown_field"


def test_fields_of_the_other_kind_are_accepted_if_they_change_nothing() -> None:
    chat(echo=False)
    completion(tool_choice="auto")
    called = {"id": 5, "function": {"name": 5, "arguments": "{}"}}
    chat(messages=[{"role": "assistant", "content": None, "tool_calls": [called]}])


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1},
        {"length_penalty": 1, "top_logprobs": 0, "n": 1, "suffix": "", "store": True, "min_p": 0},
        {"parallel_tool_calls": True, "service_tier": "auto", "modalities": ["text"]},
        {"logit_bias": {}, "bad_words": [], "allowed_token_ids": None, "logits_processors": []},
        {"truncate_prompt_tokens": None, "truncation_side": "left", "tools": []},
        {"functions": [], "function_call": "none", "return_tokens_as_token_ids": False},
        {"spaces_between_special_tokens": True, "include_reasoning": True, "echo": False},
        {"tool_choice": "auto"},  # llama-index sends this without tools
        {"tool_choice": "none"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_that_changes_nothing_gives_the_same_call(fields: dict[str, object]) -> None:
    assert chat(**fields) == chat()
    assert completion(**fields) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True), ("use_beam_search", 0), ("length_penalty", 0.9), ("best_of", 2),
        ("early_stopping", True), ("bad_words", ["a"]), ("allowed_token_ids", []), ("suffix", "a"),
        ("truncation_side", "right"), ("logits_processors", ["a"]), ("modalities", ["audio"]),
        ("function_call", {"name": "f"}),
    ],
)  # fmt: skip
def test_a_value_that_is_not_supported_is_refused_with_advice(name: str, value: object) -> None:
    for kind in CallKind:
        error = refused(kind, **{name: value})
        assert (error.code, error.param) == ("unknown_field", name)
        assert ": " in error.message


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"json": {"type": "integer"}}, {"guided_json": {"type": "integer"}}),
        ({"json": '{"type": "integer"}'}, {"guided_json": {"type": "integer"}}),
        ({"regex": "a+", "choice": None}, {"guided_regex": "a+"}),
        ({"choice": ["a", "b"], "disable_any_whitespace": False}, {"guided_choice": ["a", "b"]}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
    ids=repr,
)
def test_structured_outputs_are_forms(given: object, same: dict[str, object]) -> None:
    assert chat(structured_outputs=given)[0].sampling == chat(**same)[0].sampling
    assert chat(structured_outputs=given)[0].sampling.grammar is not None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"json": 5}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ("a", "structured_outputs"),
    ],
    ids=repr,
)
def test_the_error_for_wrong_structured_outputs_names_the_field(given: object, param: str) -> None:
    assert refused(CallKind.COMPLETION, structured_outputs=given).param == param


def test_the_error_for_top_logprobs_names_top_logprobs() -> None:
    """The error once named `logprobs`, which is true or false in a chat."""
    for count in (21, -1):
        assert refused(CallKind.CHAT, logprobs=True, top_logprobs=count).param == "top_logprobs"
    assert refused(CallKind.CHAT, top_logprobs=2).param == "top_logprobs"
    assert refused(CallKind.COMPLETION, logprobs=21).param == "logprobs"


def test_top_p_0_is_greedy() -> None:
    assert chat(top_p=0)[0].sampling.is_greedy


@pytest.mark.parametrize(
    ("name", "value"), [("priority", 2**63), ("cache_salt", "\ud800"), ("guided_json", "[" * 5000)]
)
def test_values_that_would_fail_later_are_refused(name: str, value: object) -> None:
    assert refused(CallKind.COMPLETION, **{name: value}).code == "invalid_value"


def test_a_large_body_is_not_cached() -> None:
    parser = CallParser()
    large = {"prompt": "x", "stop_token_ids": [1] * 1000, "metadata": {"a": "b" * 10**6}}
    parser.parse(large, CallKind.COMPLETION)
    assert len(parser._known) == 0
    parser.parse({"prompt": "x", "stop_token_ids": [1]}, CallKind.COMPLETION)
    assert len(parser._known) == 1


def test_the_error_for_an_unknown_choice_names_the_known_ones() -> None:
    assert (
        "error, recompute, kv, important" in refused(CallKind.CHAT, context_overflow="drop").message
    )


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_the_document_describes_every_field(body: type) -> None:
    schemas = document()["components"]["schemas"]  # type: ignore[index]
    described = schemas[body.__name__]["properties"]
    assert set(body.__struct_fields__) <= set(described)  # type: ignore[attr-defined]
    assert described["n"]["anyOf"][0]["maximum"] == 128


def test_the_document_is_as_strict_as_the_server() -> None:
    """Issue 51: it allowed other fields and any role, and demanded `type` in system blocks."""
    schemas: Any = document()["components"]["schemas"]  # type: ignore[index]
    for name in ("ChatBody", "ResponsesBody", "MessagesBody", "BatchBody", "TokenizeChatBody"):
        assert schemas[name]["additionalProperties"] is False
    fields = schemas["ChatBody"]["properties"]
    assert fields["best_of"] == {"enum": [1, None]}
    assert "description" in fields["user"]
    assert fields["store"]["anyOf"][0] == {"type": "boolean"}
    assert "return_token_strs" in schemas["TokenizeChatBody"]["properties"]
    assert "user" in schemas["Message"]["properties"]["role"]["enum"]
    any_role: Any = document(has_any_role=True)["components"]
    assert "enum" not in any_role["schemas"]["Message"]["properties"]["role"]
    assert "OnlyTextBlock" in json.dumps(schemas["MessagesBody"]["properties"]["system"])
    assert schemas["OnlyTextBlock"]["required"] == ["text"]
    assert "type" in schemas["TextBlock"]["required"]


def test_a_refusal_is_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    said: dict[str, object] = {"role": "assistant"}
    said["content"] = [{"type": "text", "text": "Hm."}, part]
    assert chat(messages=[said])[1].messages[0]["content"] == "Hm.\nNo."
    said = {"role": "assistant", "content": None, "refusal": "No."}
    assert chat(messages=[said])[1].messages[0]["content"] == "No."
    for wrong in ({"type": "text"}, {"type": "refusal", "text": "No."}):
        error = refused(CallKind.CHAT, messages=[{"role": "assistant", "content": [wrong]}])
        assert error.param == "messages"
        assert "missing required field" in error.message


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9)[0].sampling.max_tokens == 9


def test_the_document_describes_tools_parts_and_uploads() -> None:
    found = document()
    text = json.dumps(found)
    assert '"tool"' in text  # a role
    assert "TextPart" in text
    paths = found["paths"]
    assert isinstance(paths, dict)
    assert "post" in paths["/v1/files"]


# --- bodies that differ in their prompt only -----------------------------------------------------

PROMPTS: list[object] = [
    "x", "", [], [1, 2], [1, True], [1.0], [1.5], [-1], [2**31 - 1], [2**31], [2**70], ["a"],
    ["a", "b"], [["a"]], [[1], [2]], [1, "a"], 5, {}, [None], "\ud800",
]  # fmt: skip
CHATS: list[object] = [
    [{"role": "user", "content": "x"}],
    [],
    "hi",
    [5],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": 1, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]
RESTS: list[dict[str, object]] = [
    {},
    {"temperature": 0, "max_tokens": 4},
    {"max_tokens": 4.0},
    {"max_tokens": True},
    {"max_tokens": 1},
    {"n": 3, "user": "u"},
    {"messages": CHATS[0]},
    {"prompt": "q"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"echo": True, "max_tokens": 0},
    {"chat_template_kwargs": {"a": 1}},
    {"best_of": 2},
]


@pytest.mark.parametrize("rest", RESTS, ids=repr)
def test_a_parser_that_has_seen_a_similar_body_gives_the_same_result_as_a_new_one(
    rest: dict[str, object],
) -> None:
    def read(parser: CallParser, body: dict[str, object], kind: CallKind) -> object:
        try:
            call, prompts = parser.parse(body, kind)
        except WireError as error:
            return error.code, error.message, error.param
        return call, prompts, [type(prompt) for prompt in prompts]

    seasoned = CallParser(find_formats=lambda: AnswerFormats(ToolFormat.HERMES))
    for kind, prompts in ((CallKind.COMPLETION, PROMPTS), (CallKind.CHAT, CHATS)):
        for prompt in (prompts[0], *prompts):
            body = rest | {kind.prompt_field: prompt}
            fresh = CallParser(find_formats=lambda: AnswerFormats(ToolFormat.HERMES))
            assert read(seasoned, body, kind) == read(fresh, body, kind), body


def test_marks_that_are_special_tokens_are_shown_only_if_the_answer_is_parsed() -> None:
    special = {"[TOOL_CALLS]": 7, "[ARGS]": 8, "[THINK]": 9}
    formats = AnswerFormats(ToolFormat.MISTRAL, ReasoningFormat.MISTRAL, special)
    parser = CallParser(find_formats=lambda: formats)
    plain: dict[str, object] = {"messages": HELLO}
    with_tools = plain | {"tools": [CLOCK]}

    def rendering(body: dict[str, object], kind: CallKind) -> Rendering:
        return parser.parse(body, kind)[0].rendering([1, 2, 3], a_tokenizer())

    assert rendering(plain, CallKind.CHAT).shown_ids == {9}
    assert rendering(with_tools, CallKind.CHAT).shown_ids == {7, 8, 9}
    assert rendering(with_tools | {"tool_choice": "none"}, CallKind.CHAT).shown_ids == {9}
    assert rendering({"prompt": "x"}, CallKind.COMPLETION) == Rendering()
