"""Prompts before they are token ids: text, ids, or a conversation; with an app's in front or not.

`encode_prompt` turns one into the ids that the engine computes.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
PROBES = ("a", "The")  # user messages that begin differently

Json = Mapping[str, object]
Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is not rendered yet."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the text ends where the content of the last one does
    template_args: Json = field(default_factory=dict)
    tools: Sequence[Json] | None = None


Prompt: TypeAlias = "str | array[int] | Chat"


@dataclass(frozen=True, slots=True)
class App:
    """A system prompt with a name (RelayAttention R2, R7)."""

    name: str
    prompt: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidRequest("name", "1 to 64 letters, digits, '_', '-' or '.'")
        if not self.prompt.strip():
            raise InvalidRequest("prompt", "must not be empty")

    @classmethod
    def from_flag(cls, flag: str) -> "App":
        """Of `NAME=file`; raises ConfigError."""
        name, equals, path = flag.partition("=")
        if not equals:
            raise ConfigError(f"--app must be NAME=file, got {flag!r}")
        try:
            return cls(name, Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--app {name}: cannot read {path}: {error}") from None
        except InvalidRequest as error:
            raise ConfigError(f"--app {flag}: {error}") from None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation after the app's system prompt; a system message of its own is joined."""
        system: Message = {"role": "system", "content": self.prompt}
        first = messages[0]
        own = first.get("content")
        if first["role"] != "system":
            return [system, *messages]
        if not isinstance(own, str):
            raise InvalidRequest("messages", "the content of a system message must be a text")
        return [system | {"content": f"{self.prompt}\n\n{own}"}, *messages[1:]]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, app: App | None) -> list[int]:
    """Token ids of a prompt, after the app's system prompt if there is one.

    Raises InvalidRequest when the chat template refuses it.
    """
    if isinstance(prompt, array):
        return [*(tokenizer.encode(app.prompt) if app else ()), *prompt]
    text = prompt_text(tokenizer, prompt, app)
    assert text is not None
    return tokenizer.encode_plain(text) if isinstance(prompt, Chat) else tokenizer.encode(text)


def prompt_text(tokenizer: Tokenizer, prompt: Prompt, app: App | None) -> str | None:
    """A prompt as the model reads it; None where it is token ids. Raises as `encode_prompt`."""
    if isinstance(prompt, Chat):
        messages = prompt.messages if app is None else app.messages(prompt.messages)
        text = tokenizer.render_chat(
            _marked(messages) if prompt.continue_final_message else messages,
            prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            template_args=prompt.template_args,
        )
        return _up_to_mark(text) if prompt.continue_final_message else text
    if isinstance(prompt, array):
        return None
    return app.prompt + prompt if app else prompt


# after the content of a message that is to be continued; templates that trim white space take the
# end of it away, and of the content what stands before it
_MARK = "\ue0f3end of the message\ue0f3"
_FIELD = "continue_final_message"


def _marked(messages: Sequence[Message]) -> list[Message]:
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest(_FIELD, "the final message must have a text")
    return [*messages[:-1], messages[-1] | {"content": f"{content}{_MARK} "}]


def _up_to_mark(text: str) -> str:
    place = text.rfind(_MARK)
    if place < 0:
        raise InvalidRequest(_FIELD, "the chat template leaves the final message out")
    is_whole = text.startswith(" ", place + len(_MARK))
    return text[:place] if is_whole else text[:place].rstrip()


def shared_prefixes(tokenizer: Tokenizer, app: App) -> list[list[int]]:
    """The ids that all requests to an app begin with: those of chats, and of plain prompts.

    Found by encoding prompts that begin differently, so the last token may be left out: it can
    merge with what follows.
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
