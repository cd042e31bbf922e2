"""Encodes prompts: text, ids or a conversation, with or without an app's system prompt.

`encode_prompt` turns a prompt into the token ids that the engine gets.
"""

import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.json import JsonView
from mainstem.text.control_tokens import without_marks
from mainstem.text.parts import Pending
from mainstem.text.sessions import Session, said_before
from mainstem.text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
PROBES = ("a", "The")  # user messages that begin differently
NODE_CHARS = 64  # a JSON field counts like this many characters of text

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is not rendered yet."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the content of the last message
    template_args: JsonView = field(default_factory=dict)
    tools: Sequence[JsonView] | None = None


Prompt: TypeAlias = "str | array[int] | Chat"


@dataclass(frozen=True, slots=True)
class App:
    """A system prompt with a name."""

    name: str
    prompt: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidRequest(
                "name",
                "must be 1 to 64 letters, digits, '_', '-' or '.', and not begin with '-' or '.'",
            )
        if not self.prompt.strip():
            raise InvalidRequest("prompt", "must not be empty")

    @classmethod
    def from_flag(cls, flag: str) -> "App":
        """Make an App from `NAME=file`; raises ConfigError."""
        name, equals, path = flag.partition("=")
        if not equals:
            raise ConfigError(f"--app must be NAME=file, got {flag!r}")
        try:
            return cls(name, Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--app {name}: cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--app {name}: cannot read {path}: {error}") from None
        except InvalidRequest as error:
            raise ConfigError(f"--app {flag}: {error}") from None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation with the app's system prompt before it. The conversation's own
        system or developer message is appended to that prompt."""
        system: Message = {"role": "system", "content": self.prompt}
        first = messages[0]
        own = first.get("content")
        if first["role"] not in ("system", "developer"):
            return [system, *messages]
        if not isinstance(own, str):
            raise InvalidRequest("messages", "the content of a system message must be a text")
        return [system | {"content": f"{self.prompt}\n\n{own}"}, *messages[1:]]


class PromptTooLong(InvalidRequest):
    """A prompt that has more tokens than allowed, found without encoding it."""

    def __init__(self, field: str, least_tokens: int, max_tokens: int) -> None:
        super().__init__(field, f"at least {least_tokens} tokens, more than {max_tokens}")
        self.least_tokens = least_tokens


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """A prompt rendered to text, with the ids that are known already."""

    text: str | None  # with marks in a chat (text/control_tokens.py); None: given as ids
    is_chat: bool
    pending: Pending


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, app: App | None) -> list[int]:
    """Return the token ids of a prompt, after the app's system prompt if there is one.

    Raises InvalidRequest when the chat template refuses it.
    """
    return begin_prompt(tokenizer, prompt, app).pending.finish()


def begin_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    app: App | None,
    session: Session | None = None,
    salt: bytes = b"",
    max_tokens: int = sys.maxsize,
) -> BegunPrompt:
    """Do the first step of `encode_prompt`: everything except encoding new text. Reuses the ids of
    a session if the prompt continues it, and the ids of earlier texts with the same `salt`. Raises
    PromptTooLong if a text or chat certainly exceeds `max_tokens`.
    """
    if isinstance(prompt, array):
        if app is None:
            # each id counts as 1/8 character, since work on many ids takes time, too
            return BegunPrompt(None, False, Pending(len(prompt) // 8, lambda: list(prompt)))
        after = Pending(len(app.prompt), lambda: [*tokenizer.encode(app.prompt), *prompt])
        return BegunPrompt(None, False, after)
    is_chat = isinstance(prompt, Chat)
    if isinstance(prompt, Chat):
        _check_length(tokenizer, _certain_text(prompt), is_chat, max_tokens)
    text = _text(tokenizer, prompt, app)
    _check_length(tokenizer, text, is_chat, max_tokens)
    before = said_before(session, text, tokenizer)
    if before is not None:
        assert session is not None
        rest = _look_up(tokenizer, text[len(session.text) :], is_chat, salt)
        return BegunPrompt(text, is_chat, rest.after(before.tolist()))
    if is_chat:
        return BegunPrompt(text, True, tokenizer.look_up_chat_text(text, salt))
    return BegunPrompt(text, False, Pending(len(text), lambda: tokenizer.encode(text)))


def _certain_text(chat: Chat) -> str:
    """Return, joined, the text that every template prints. Answers are left out, since some
    templates drop reasoning."""
    contents = [
        message.get("content")
        for message in chat.messages
        if isinstance(message, Mapping) and message.get("role") in ("system", "user")
    ]
    return "".join(content.strip() for content in contents if isinstance(content, str))


def _check_length(tokenizer: Tokenizer, text: str, is_chat: bool, max_tokens: int) -> None:
    """Raise PromptTooLong for a text that is certainly too long."""
    if len(text) > max_tokens:
        least = tokenizer.least_tokens(without_marks(text) if is_chat else text)
        if least > max_tokens:
            raise PromptTooLong("messages" if is_chat else "prompt", least, max_tokens)


def _look_up(tokenizer: Tokenizer, text: str, is_chat: bool, salt: bytes) -> Pending:
    if is_chat:
        return tokenizer.look_up_chat_text(text, salt)
    return Pending(len(text), lambda: tokenizer.encode_plain(text))


def _text(tokenizer: Tokenizer, prompt: "str | Chat", app: App | None) -> str:
    """Return the text of a prompt; the text of a chat has the marks of control_tokens.py."""
    if isinstance(prompt, str):
        return app.prompt + prompt if app else prompt
    messages = prompt.messages if app is None else app.messages(prompt.messages)
    render = partial(
        tokenizer.chat_text,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        template_args=prompt.template_args,
    )
    return _continued(messages, render) if prompt.continue_final_message else render(messages)


def is_short(prompts: Sequence[Prompt], max_chars: int) -> bool:
    """Whether prompts have at most about `max_chars` characters, or token ids, together."""
    room = max_chars
    for prompt in prompts:
        if isinstance(prompt, Chat):
            room = _room_left([prompt.messages, prompt.tools, prompt.template_args], room)
        else:
            room -= len(prompt)
    return room >= 0


def _room_left(value: object, room: int) -> int:
    """Return `room` minus the characters of a JSON value; stops when nothing is left."""
    if isinstance(value, str):
        return room - len(value)
    if not isinstance(value, Mapping | list | tuple):
        return room
    for item in value.values() if isinstance(value, Mapping) else value:
        room = _room_left(item, room - NODE_CHARS)
        if room < 0:
            break
    return room


_MARK = "\ue0f3end of the message\ue0f3"  # put after the content of the message to continue
_FIELD = "continue_final_message"


def _continued(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str:
    """Return the rendered text up to the end of the final message's content. Space at the end of
    the content is as the template prints it: some templates trim, or trim only line breaks.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest(_FIELD, "the final message must have a text")
    marked = render([*messages[:-1], messages[-1] | {"content": content + _MARK}])
    text, mark, after = marked.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(_FIELD, "the chat template leaves the final message out")
    if content == content.rstrip():
        return text
    # without the mark, the same follows the content, which the template may now trim
    whole, after = without_marks(render(messages)), without_marks(after)
    if not whole.endswith(after):
        return text
    printed = whole.removesuffix(after)
    return text.rstrip() + printed[len(printed.rstrip()) :]


def shared_prefixes(tokenizer: Tokenizer, app: App) -> list[list[int]]:
    """Return the ids that requests to an app begin with: for chats without a system message of
    their own, and for plain prompts. They are found by encoding prompts that differ after the app's
    prompt. Its last token may be left out, since it can merge with the text that follows.
    """
    plain = [encode_prompt(tokenizer, app.prompt + probe, None) for probe in PROBES]
    prefixes = [_common(*plain)]
    if tokenizer.has_chat_template:
        chats: list[Message] = [{"role": "user", "content": probe} for probe in PROBES]
        ids = [encode_prompt(tokenizer, Chat([message]), app) for message in chats]
        prefixes.append(_common(*ids))
    return [prefix for prefix in prefixes if prefix]


def _common(first: list[int], second: list[int]) -> list[int]:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]
