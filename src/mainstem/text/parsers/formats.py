"""Finds the formats in which a model writes reasoning and tool calls: by a flag, or in its chat
template.

template or flag --find_formats--> AnswerFormats --make_parser--> AnswerParser, one per answer
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.json import JsonView
from mainstem.text.grammar import joined_form, lark_form
from mainstem.text.parsers import harmony, llama, mistral, tagged
from mainstem.text.parsers.forms import json_opening, spelled
from mainstem.text.parsers.parser import AnswerParser, CallOrFormParser, PlainParser
from mainstem.text.parsers.think import ThinkParser
from mainstem.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
_LLAMA = re.compile(r"""\{\s*\\?["']name\\?["']:[^{}]{0,30}?\\?["']parameters\\?["']""")


class ToolFormat(Enum):
    """How a model writes a tool call; the value is vLLM's name of it."""

    HERMES = "hermes"
    QWEN_CODER = "qwen3_coder"
    LLAMA = "llama3_json"
    MISTRAL = "mistral"
    HARMONY = "openai"


class ReasoningFormat(Enum):
    """How a model writes its reasoning."""

    THINK = "think"
    MISTRAL = "mistral"
    HARMONY = "openai_gptoss"


THINK_MARKS: dict[Enum, tuple[str, str]] = {
    ReasoningFormat.THINK: ("<think>", "</think>"),
    ReasoningFormat.MISTRAL: ("[THINK]", "[/THINK]"),
}
MARKS: dict[Enum, tuple[str, ...]] = {  # they may be special tokens, which are left out of text
    ToolFormat.HERMES: (tagged.BEGIN, tagged.END),
    ToolFormat.QWEN_CODER: (tagged.BEGIN, tagged.END),
    ToolFormat.LLAMA: (llama.TAG,),
    ToolFormat.MISTRAL: (mistral.CALLS, mistral.ARGS, mistral.CALL_ID),
    ToolFormat.HARMONY: harmony.MARKS,
    ReasoningFormat.HARMONY: harmony.MARKS,
    **THINK_MARKS,
}
_CALLS = {
    ToolFormat.HERMES: tagged.hermes_call,
    ToolFormat.QWEN_CODER: tagged.coder_call,
    ToolFormat.LLAMA: llama.llama_call,
    ToolFormat.MISTRAL: mistral.mistral_call,
    ToolFormat.HARMONY: harmony.harmony_call,
}
_SEVERAL = (ToolFormat.HERMES, ToolFormat.QWEN_CODER)  # calls follow each other, line by line
TOOL_PARSERS = {each.value: each for each in ToolFormat}
REASONING_PARSERS = {
    **{each.value: each for each in ReasoningFormat},
    "deepseek_r1": ReasoningFormat.THINK,  # vLLM's names for the same marks
    "qwen3": ReasoningFormat.THINK,
}


# --- which one -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of tool calls and reasoning. None: the model has no such format, or an unknown
    one."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    special: Mapping[str, int] = field(default_factory=dict)  # special tokens among the marks
    # efforts of reasoning -> the template variables that ask for them
    efforts: Mapping[str, JsonView] = field(default_factory=dict)
    template: str = ""  # the chat template, which says what variables it reads

    def shown_ids(self, *formats: Enum | None) -> frozenset[int]:
        """The special tokens that parsers of these formats must see."""
        marks = {mark for each in formats if each is not None for mark in MARKS[each]}
        return frozenset(self.special[mark] for mark in marks & self.special.keys())


def find_formats(
    tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> AnswerFormats:
    """Return the formats by name or, with `auto`, as found in the chat template; raises
    ConfigError."""
    tools = TOOL_PARSERS.get(tool_parser)
    if tool_parser == AUTO:
        tools = _tools_of(tokenizer.tool_template)
    elif tokenizer.tool_template is None:
        tools = None  # the template never shows tools to the model
    reasoning = REASONING_PARSERS.get(reasoning_parser)
    if reasoning_parser == AUTO:
        reasoning = _reasoning_of(tokenizer.chat_template)
    is_harmony = reasoning is ReasoningFormat.HARMONY
    if tools is not None and reasoning is not None and (tools is ToolFormat.HARMONY) != is_harmony:
        if AUTO not in (tool_parser, reasoning_parser):
            reason = f"cannot be combined with --tool-call-parser {tool_parser}"
            raise ConfigError(f"--reasoning-parser {reasoning_parser} {reason}")
        if reasoning_parser == AUTO:
            reasoning = None
        else:
            tools = None
    marks = {mark for each in (tools, reasoning) if each is not None for mark in MARKS[each]}
    ids = {mark: tokenizer.special_id(mark) for mark in marks}
    special = {mark: token_id for mark, token_id in ids.items() if token_id is not None}
    template = tokenizer.chat_template or ""
    return AnswerFormats(tools, reasoning, special, _efforts_of(template), template)


def _efforts_of(template: str) -> dict[str, JsonView]:
    """The efforts that a template supports. `medium` is what a template without efforts does, and
    `none` what a model does that does not reason."""
    efforts: dict[str, JsonView] = {"medium": {}}
    has_efforts, has_switch = "reasoning_effort" in template, "enable_thinking" in template
    if has_efforts:
        efforts = {each: {"reasoning_effort": each} for each in ("low", "medium", "high")}
    if has_switch:
        efforts["none"] = {"enable_thinking": False}
    elif not has_efforts and "<think>" not in template:
        efforts["none"] = {}
    return efforts


def _tools_of(template: str | None) -> ToolFormat | None:
    """The first format whose marks occur in the template."""
    if template is None:
        return None
    if harmony.CHANNEL in template and harmony.CALL in template:
        return ToolFormat.HARMONY
    if tagged.BEGIN in template:
        if tagged.FUNCTION in template and "<parameter=" in template:
            return ToolFormat.QWEN_CODER
        is_other = "<arg_key>" in template or "<tool_calls>" in template  # GLM, Apriel
        return None if is_other else ToolFormat.HERMES
    if mistral.CALLS in template:
        return ToolFormat.MISTRAL
    return ToolFormat.LLAMA if _LLAMA.search(template) else None


def _reasoning_of(template: str | None) -> ReasoningFormat | None:
    if template is None:
        return None
    if harmony.CHANNEL in template and "analysis" in template:
        return ReasoningFormat.HARMONY
    for format in (ReasoningFormat.THINK, ReasoningFormat.MISTRAL):
        if any(mark in template for mark in THINK_MARKS[format]):
            return format
    return None


# --- what is offered -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how the model writes calls. `form` is set if the answer must be a
    call."""

    tools: tuple[JsonView, ...]
    format: ToolFormat
    form: str | None = None
    places: tuple[int, ...] = ()  # where the tools were in the request
    special: Mapping[str, int] = field(default_factory=dict)  # special tokens among the marks

    @property
    def functions(self) -> list[JsonView]:
        return [_function(tool) for tool in self.tools]

    def call_form(self, names: Sequence[str] | None = None) -> str:
        """The form of one call, of one of these functions; None: of any."""
        functions = {
            place: function
            for place, function in zip(self.places, self.functions, strict=True)
            if names is None or function["name"] in names
        }
        call = _CALLS[self.format](functions, spelled(self.special))
        return lark_form(call.lark, call.schemas)

    def form_beside(self, answer: str, *, has_one_call: bool) -> str:
        """The form of an answer that is a call, or else has the form `answer`. Several calls are
        possible if they are written one after the other."""
        if self.format is ToolFormat.HARMONY:
            start = harmony.call_or_final(spelled(self.special))
        elif self.format in _SEVERAL and not has_one_call:
            start = 'start: @call ("\\n" @call)* | @answer'
        else:
            start = "start: @call | @answer"
        return joined_form(start, {"call": self.call_form(), "answer": answer})

    def openings(self) -> list[str]:
        """How an answer in the form of `form_beside` begins if it is not only `answer`."""
        if self.format is ToolFormat.LLAMA:
            return [json_opening(function, llama.ARGUMENTS) for function in self.functions]
        return [MARKS[self.format][0] if self.format is not ToolFormat.HARMONY else harmony.CHANNEL]


def offer_tools(
    tools: Sequence[JsonView],
    required: Sequence[str] | None,
    formats: AnswerFormats,
    places: Sequence[int] | None = None,
) -> ToolUse:
    """Offer tools, given in OpenAI's format. If `required` names any, one of them must be called.
    `places` says where the tools were in the request; None: these are all.

    Raises InvalidRequest if the model was not taught to call tools.
    """
    format = formats.tools
    if format is None:
        raise InvalidRequest(
            "tools",
            "this model's chat template has no tools, or writes calls in an unknown format. The "
            "server can give it another template (--chat-template FILE), or the name of the format "
            "(--tool-call-parser)",
        )
    found = tuple(range(len(tools)) if places is None else places)
    use = ToolUse(tuple(tools), format, None, found, formats.special)
    return use if required is None else replace(use, form=use.call_form(required))


def _function(tool: JsonView) -> JsonView:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


# --- what comes back -----------------------------------------------------------------------------


def make_parser(
    use: ToolUse | None, reasoning: ReasoningFormat | None, *, is_call_or_form: bool = False
) -> AnswerParser:
    """Return the parser of one answer. `is_call_or_form`: the answer has the form of
    `ToolUse.form_beside`."""
    if is_call_or_form:
        assert use is not None
        return CallOrFormParser(use.openings(), make_parser(use, reasoning))
    is_harmony = reasoning is ReasoningFormat.HARMONY
    if is_harmony or (use is not None and use.format is ToolFormat.HARMONY):
        return harmony.HarmonyParser(has_reasoning=is_harmony, has_calls=use is not None)
    rest: AnswerParser = PlainParser() if use is None else _tool_parser(use)
    if reasoning is None:
        return rest
    begin, end = THINK_MARKS[reasoning]
    return ThinkParser(begin, end, rest)


def _tool_parser(use: ToolUse) -> AnswerParser:
    if use.format is ToolFormat.HERMES:
        return tagged.hermes_parser()
    if use.format is ToolFormat.QWEN_CODER:
        return tagged.coder_parser(use.functions)
    return llama.LlamaParser() if use.format is ToolFormat.LLAMA else mistral.MistralParser()


def opening_of(reasoning: ReasoningFormat, prompt_end: str, is_continued: bool) -> str:
    """Return the mark that begins reasoning if the prompt ends with it, so that the answer begins
    inside reasoning; otherwise "".

    With `is_continued` the prompt ends within an answer, and text may follow the mark.
    """
    if reasoning not in THINK_MARKS:
        return ""
    begin, end = THINK_MARKS[reasoning]
    is_inside = prompt_end.rstrip().endswith(begin)
    if is_continued:
        is_inside = prompt_end.rfind(begin) > prompt_end.rfind(end)
    return begin if is_inside else ""
