"""Tool calls of Llama 3: an answer that is {"name": "f", "parameters": {...}}, or several of these
separated by "; ", with or without <|python_tag|> before them. Text may come before
<|python_tag|>."""

from collections.abc import Iterator, Mapping

from mainstem.core.json import JsonView
from mainstem.text.parsers.forms import CallGrammar, Functions, Spell, tool_name
from mainstem.text.parsers.parser import overlap, read_calls
from mainstem.text.schemas import arguments_schema
from mainstem.text.tools import Part

TAG = "<|python_tag|>"
ARGUMENTS = "parameters"


class LlamaParser:
    """A call is the whole answer, or all that follows <|python_tag|>."""

    is_plain = False

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False  # the answer did not begin like a call
        self._is_call = False  # the answer may be a call, so all of it is held back

    def push(self, text: str) -> list[Part]:
        self._held += text
        return [] if self._is_call else list(self._parts())

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        calls = read_calls(held) if self._is_call else []
        return [*calls] if calls else ([held] if held else [])

    def _parts(self) -> Iterator[Part]:
        bare = self._held.lstrip()
        if not self._is_text:
            if bare.startswith("{"):
                self._is_call = True
                return
            if TAG.startswith(bare):  # nothing yet, or the beginning of the tag
                return
            self._is_text = True
        before, tag, after = self._held.partition(TAG)
        if tag:
            self._is_call, self._held = True, after
        else:
            before = self._held[: len(self._held) - overlap(self._held, TAG)]
            self._held = self._held[len(before) :]
        if before.strip() or (before and not tag):
            yield before


def llama_call(functions: Functions, _spell: Spell) -> CallGrammar:
    """Return the grammar of one call. The whole call is a schema: an answer in JSON may begin with
    the same characters, and must then be read in the same pieces."""
    schemas = {
        tool_name(place): _call_schema(function["name"], arguments_schema(function.get(ARGUMENTS)))
        for place, function in functions.items()
    }
    return CallGrammar(f"start: {' | '.join(f'@{name}' for name in schemas)}", schemas)


def _call_schema(name: object, arguments: JsonView) -> JsonView:
    properties = {"name": {"const": name}, ARGUMENTS: _moved(arguments)}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _moved(value: object) -> object:
    """A schema whose references still hold when it is the schema of the property ARGUMENTS."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: _moved(each) for key, each in value.items()}
    if isinstance(ref := value.get("$ref"), str) and ref.startswith("#"):
        made["$ref"] = f"#/properties/{ARGUMENTS}{ref[1:]}"
    return made
