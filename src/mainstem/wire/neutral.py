"""The table of neutral values: for each API, the fields that are accepted only with values that
change nothing. Any other value is refused; docs/serve.md lists the fields whose every value is
neutral.
"""

from collections.abc import Mapping

from mainstem.core.json import Json, JsonView
from mainstem.core.neutral import OnlyAt
from mainstem.wire.errors import WireError


class _AtAny(OnlyAt):
    """A field without effect on the answer."""

    def takes(self, value: object) -> bool:
        return True


class _AtKeepingAll(OnlyAt):
    """A `context_management` that removes nothing."""

    def takes(self, value: object) -> bool:
        edits = value.get("edits", []) if isinstance(value, dict) and len(value) <= 1 else None
        kept = {"type": "clear_thinking_20251015", "keep": "all"}
        return isinstance(edits, list) and all(edit == kept for edit in edits)


Rules = Mapping[str, OnlyAt]

_ANY = _AtAny((), "")

# an empty `instead`: other values are refused like an unknown field
SCORES: Rules = {
    "metadata": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_retention": _ANY,
    "safety_identifier": _ANY,
    "service_tier": _ANY,
    "store": _ANY,
    "user": _ANY,
}
_ANSWERS: Rules = {
    **SCORES,
    "allowed_token_ids": OnlyAt((), "use structured_outputs with a choice or a regex"),
    "bad_words": OnlyAt(([],), "use logit_bias with -100 for their tokens"),
    "best_of": OnlyAt((1,), "ask for n answers with logprobs and keep the best"),
    "early_stopping": OnlyAt((False,), "there is no beam search"),
    "function_call": OnlyAt(("auto", "none"), "use tools and tool_choice"),
    "functions": OnlyAt(([],), "use tools"),
    "include_reasoning": OnlyAt((True,), "reasoning is always included; leave it out"),
    "length_penalty": OnlyAt((1, 1.0), "there is no beam search"),
    "logits_processors": OnlyAt(([],), "use logit_bias or structured_outputs"),
    "modalities": OnlyAt((["text"],), "only text is supported"),
    "return_tokens_as_token_ids": OnlyAt((False,), "use return_token_ids"),
    "spaces_between_special_tokens": OnlyAt((True,), "leave it out"),
    "truncation_side": OnlyAt(("left",), "the end of a prompt is kept"),
    "use_beam_search": OnlyAt((False,), "there is no beam search; use n"),
}
CHAT: Rules = {
    **_ANSWERS,
    "add_special_tokens": OnlyAt((False,), "the chat template writes them"),
    "echo": OnlyAt((False,), "only in /v1/completions"),
    "prompt_cache_options": _ANY,
    "suffix": OnlyAt(("",), "not in a chat"),
    "verbosity": OnlyAt(("medium",), "say in the prompt how long answers should be"),
}
COMPLETION: Rules = {
    **_ANSWERS,
    "add_generation_prompt": OnlyAt((True, False), "only in a chat"),
    "add_special_tokens": OnlyAt((True,), "send token ids of /tokenize, which supports it"),
    "continue_final_message": OnlyAt((False,), "only in a chat"),
    "parallel_tool_calls": OnlyAt((True, False), "only in a chat"),
    "reasoning_effort": OnlyAt((), "only in a chat"),
    "suffix": OnlyAt(("",), "text can only be continued"),
    "tool_choice": OnlyAt(("auto", "none"), "there are no tools to choose from; use a chat"),
    "tools": OnlyAt(([],), "use a chat"),
    "top_logprobs": OnlyAt((0,), "set their number with logprobs"),
}
RESPONSES: Rules = {
    "background": OnlyAt((False,), "wait for the answer, or stream it"),
    "client_metadata": _ANY,
    "context_management": OnlyAt(([],), "use truncation"),
    "context_overflow": OnlyAt((), "use truncation"),
    "conversation": OnlyAt((), "use previous_response_id"),
    "max_tool_calls": OnlyAt((), "it counts calls of built-in tools, and there are none"),
    "moderation": OnlyAt((), "there is none; leave it out"),
    "prompt": OnlyAt((), "send the text itself as instructions and input"),
    "prompt_cache_key": _ANY,
    "prompt_cache_options": _ANY,
    "prompt_cache_retention": _ANY,
    "safety_identifier": _ANY,
    "service_tier": _ANY,
    "session_id": OnlyAt((), "use previous_response_id"),
    "top_logprobs": OnlyAt((0,), "use /v1/chat/completions"),
}
MESSAGES: Rules = {
    "context_management": _AtKeepingAll((), ""),
    "diagnostics": _ANY,
    "inference_geo": _ANY,
    "mcp_servers": OnlyAt(([],), ""),
    "metadata": _ANY,
    "service_tier": _ANY,
    "speed": OnlyAt(("standard",), ""),
    "user_profile_id": _ANY,
    "workspace_id": _ANY,
}


def is_harmless(rule: OnlyAt) -> bool:
    """Whether every value of a field is neutral."""
    return rule is _ANY


def harmless(rules: Rules) -> list[str]:
    """The fields whose every value is neutral."""
    return [name for name, rule in rules.items() if is_harmless(rule)]


def without_neutral(fields: JsonView, rules: Rules) -> Json:
    """Return a body without the fields that have no effect; raises WireError for a field whose
    value is not neutral."""
    left: Json = {}
    for name, value in fields.items():
        rule = rules.get(name)
        if value is None or (rule is not None and rule.takes(value)):
            continue
        if rule is not None and rule.instead:
            message = f"{name}: {value!r:.80} is not supported: {rule.instead}"
            raise WireError("unknown_field", message, name)
        left[name] = value
    return left
