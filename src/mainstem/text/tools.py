"""Tools: what a caller offers, what the model may answer with, and calls read out of its text.

Two ways of writing a call are known, and the model's chat template tells which one it was taught:

    Hermes, Qwen   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>
    Llama 3        {"name": "f", "parameters": {...}}
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from secrets import token_hex

from mainstem.core.errors import InvalidRequest
from mainstem.text.grammar import JSON_SPACING, lark_form
from mainstem.text.tokenizer import Tokenizer

BEGIN, END = "<tool_call>", "</tool_call>"
HALF = re.compile("[\ud800-\udfff]")  # escapes can spell half a character, which no reply can hold

Json = Mapping[str, object]


class ToolFormat(Enum):
    """How a model writes a call; the value is the name of its arguments."""

    HERMES = "arguments"
    LLAMA = "parameters"


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model was taught to call tools; None: it was not, or in a way that is not known."""
    source = tokenizer.tool_template
    if source is None:
        return None
    if BEGIN in source:
        return ToolFormat.HERMES
    is_llama = "[TOOL_CALLS]" not in source and re.search(r"""["']parameters\\?["']""", source)
    return ToolFormat.LLAMA if is_llama else None


# --- what is offered -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, as the template wants them; `form` where a call is required."""

    tools: tuple[Json, ...]
    format: ToolFormat
    form: str | None = None


def offer_tools(
    tools: Sequence[Json], required: Sequence[str] | None, format: ToolFormat | None
) -> ToolUse:
    """Tools in OpenAI's form; one of those named `required` must be called, if there are any.

    Raises InvalidRequest if the model was not taught to call tools.
    """
    if format is None:
        reason = "this model's chat template has none, or writes calls in a way that is not known"
        raise InvalidRequest("tools", reason)
    if required is None:
        return ToolUse(tuple(tools), format)
    functions = [_function(tool) for tool in tools]
    callable_ = [function for function in functions if function["name"] in required]
    return ToolUse(tuple(tools), format, _call_form(callable_, format))


def _function(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def _call_form(functions: Sequence[Mapping[str, object]], format: ToolFormat) -> str:
    """One call, and nothing else."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                format.value: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", format.value],
            "additionalProperties": False,
        }
        for function in functions
    ]
    rules = [
        f"call_{index}: %json {json.dumps(call | {'x-guidance': JSON_SPACING})}"
        for index, call in enumerate(calls)
    ]
    either = " | ".join(f"call_{index}" for index in range(len(calls)))
    is_hermes = format is ToolFormat.HERMES
    start = f'start: "{BEGIN}\\n" call "\\n{END}"' if is_hermes else "start: call"
    return lark_form("\n".join([start, f"call: {either}", *rules]))


# --- what comes back -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks aloud before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made; `arguments` is JSON, as OpenAI hands it out."""

    call_id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolReader:
    """Reads calls out of one answer as it comes: pieces of text in, text and calls out.

    Text that may become a call is held back; if it does not become one it is text after all.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._held = ""
        self._is_text = False  # Llama: the answer did not begin like a call
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now."""
        self._held += text
        return list(self._hermes() if self._format is ToolFormat.HERMES else self._llama())

    def finish(self) -> list[str | ToolCall]:
        """The answer has ended: everything that is left."""
        held, self._held = self._held, ""
        calls: list[ToolCall] = []
        if self._format is ToolFormat.LLAMA:
            calls = _read_calls([held]) or _read_calls(held.split("; "))
        elif held.startswith(BEGIN):  # the end is missing
            calls = _read_calls([held.removeprefix(BEGIN)])
        if calls:
            self.num_calls += len(calls)
            return [*calls]
        return [held] if held.strip() or (held and not self.num_calls) else []

    def _hermes(self) -> Iterator[str | ToolCall]:
        """White space before a call is not part of the answer, so it is held back, too."""
        while self._held:
            before, begin, rest = self._held.partition(BEGIN)
            if not begin:
                certain = self._held[: len(self._held) - _overlap(self._held, BEGIN)].rstrip()
                self._held = self._held[len(certain) :]
                if certain:
                    yield certain
                return
            if before := before.rstrip():
                yield before
            body, end, after = rest.partition(END)
            if not end:
                self._held = begin + rest
                return
            calls = _read_calls([body])
            self.num_calls += len(calls)
            yield calls[0] if calls else begin + body + end
            self._held = after

    def _llama(self) -> Iterator[str | ToolCall]:
        """A call has the answer for itself."""
        if self._is_text or self._held.lstrip()[:1] not in ("", "{"):
            self._is_text = True
            text, self._held = self._held, ""
            if text:
                yield text


def _read_calls(texts: Sequence[str]) -> list[ToolCall]:
    """The calls that these texts are; none if one of them is not."""
    calls: list[ToolCall] = []
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name, arguments = (HALF.sub("\ufffd", text) for text in (value["name"], arguments))
        calls.append(ToolCall(f"call_{token_hex(12)}", name, arguments))
    return calls


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
