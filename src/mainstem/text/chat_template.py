"""The chat template of a model, which turns messages into the text that the model was trained to
read.

Templates are code from the model's folder. They run in a sandbox, and get the text of users only as
data.
"""

import json
from collections.abc import Container, Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mainstem.core.errors import InvalidRequest, ModelNotFound
from mainstem.core.json import JsonView

Message = Mapping[str, object]

# the roles that templates know. Templates print the role, so users may not invent one
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_RENDERED_CHARS = 1 << 25  # limit for a rendered chat: far more than context windows hold


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks answers for training and prints its body as is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own attribute, a plain set there)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A chat template in a sandbox, with the variables and filters that Hugging Face provides."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelNotFound when the template is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.reads_tools = "tools" in variables
        except jinja2.TemplateError as error:
            raise ModelNotFound(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None,
        add_generation_prompt: bool,
        template_args: JsonView,
    ) -> str:
        """Return the conversation as text; raises InvalidRequest("messages") with the template's
        error. Roles that the template does not know are replaced by those that mean the same."""
        variables: dict[str, object] = {
            **self._special_tokens,
            "documents": None,
            **template_args,
            "messages": [self._in_known_role(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return render_bounded(self._template, variables, "messages", "the chat template")

    def _in_known_role(self, message: Message) -> Message:
        """Return a message in a role that the template knows; most drop others without an error.
        `function` is OpenAI's old name of `tool`, and some templates know only the old name."""
        knows_function = self._names("function") and not self._names("tool")
        if message["role"] == "function" and not knows_function:
            return {**message, "role": "tool"}
        if message["role"] == "developer" and "developer" not in self.source:
            return {**message, "role": "system"}
        return message

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source


# errors that template code can raise for messages it did not expect
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def render_bounded(template: jinja2.Template, variables: JsonView, field: str, name: str) -> str:
    """The text of a template; raises InvalidRequest(field) if it is longer than MAX_RENDERED_CHARS,
    or with the error of the template, which the message calls `name`."""
    parts: list[str] = []
    num_chars = 0
    try:
        for part in template.generate(variables):
            num_chars += len(part)
            if num_chars > MAX_RENDERED_CHARS:
                raise InvalidRequest(field, f"longer than {MAX_RENDERED_CHARS} characters")
            parts.append(part)
    except _TEMPLATE_FAULTS as error:
        reason = str(error) or type(error).__name__
        raise InvalidRequest(field, f"refused by {name}: {reason}") from error
    return "".join(parts)


def checked_messages(messages: object, roles: Container[str] | None) -> list[dict[str, object]]:
    """Return the messages; raises InvalidRequest unless they have the right shape and their roles
    are among `roles` (None: any). An assistant message with neither content nor calls gets an empty
    content, as in OpenAI's API; so does a tool result without content."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "must be a list with at least one message")
    return [_checked_message(message, index, roles) for index, message in enumerate(messages)]


def _checked_message(
    message: object, index: int, roles: Container[str] | None
) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages", f"message {index} must be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("messages", f"message {index} needs a role, a string")
    if roles is not None and role not in roles:
        reason = f"must be one of {', '.join(ROLES)}, got {role!r:.80}"
        raise InvalidRequest(f"messages[{index}].role", reason)
    if message.get("content") is not None:
        return dict(message)
    if role in ("tool", "function"):
        return {**message, "content": ""}
    if role != "assistant":
        raise InvalidRequest(f"messages[{index}].content", "must be a text, got null")
    calls = {"tool_calls", "function_call"}
    if any(message.get(name) for name in calls):
        return dict(message)  # templates check whether there is any content
    return {**message, "content": ""}
