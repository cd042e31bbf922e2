"""The prompts that LLM accepts: one or many, as text, ids or vLLM's dictionaries.

Prompts, and the ids of a prompt, may be a list, a generator, an array or a tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.text.tokenizer import check_unicode

T = TypeVar("T")

Message = Mapping[str, object]
ScriptPrompt = (
    str | Iterable[int] | Mapping[str, object]
)  # {"prompt": text} or {"prompt_token_ids": ids}
Conversation = Sequence[Message]


class OnError(Enum):
    """What happens if a prompt of a call cannot be answered."""

    RAISE = "raise"  # the call raises: before anything runs or, if steps fail, after everything ran
    RETURN = "return"  # the call continues; the prompt's result says why


class Refusals:
    """The prompts of a call that cannot be answered, and why."""

    def __init__(self, name: str, is_lone: bool, on_error: OnError) -> None:
        """`name` is the argument with the prompts. `is_lone`: it was a single prompt, not a
        list."""
        self.reasons: dict[int, str] = {}
        self._name = name
        self._is_lone = is_lone
        self.on_error = on_error

    def at(self, index: int) -> "_At":
        """A context for the work on one prompt: an InvalidRequest is recorded, or raised again with
        the prompt's number."""
        return _At(self, index)

    def take(self, index: int, error: InvalidRequest) -> bool:
        """Record why a prompt is refused. If the call must end, raises with the prompt's number, or
        returns False for a single prompt: the error is then raised unchanged."""
        if self.on_error is OnError.RETURN:
            self.reasons[index] = str(error)
            return True
        if self._is_lone:
            return False
        is_itself = error.field in ("prompt", "messages")
        reason = error.reason if is_itself else str(error)
        raise InvalidRequest(f"{self._name}[{index}]", reason) from None


@dataclass(frozen=True, slots=True)
class _At:
    """See Refusals.at. A class for speed, since three or more are made for each prompt."""

    refusals: Refusals
    index: int

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, InvalidRequest) and self.refusals.take(self.index, error)


# --- prompts -------------------------------------------------------------------------------------


def listed_prompts(
    prompts: ScriptPrompt | Iterable[ScriptPrompt], errors: OnError | str = OnError.RAISE
) -> tuple[list[str | list[int] | None], Refusals]:
    """Return every prompt as a text or as ids; None if it was refused. A single prompt gives a list
    of one."""
    return _read_all("prompts", *_items(prompts), errors, read_prompt)


def _read_all(
    name: str,
    items: Sequence[object],
    is_lone: bool,
    errors: OnError | str,
    read: Callable[[object], T],
) -> tuple[list[T | None], Refusals]:
    """Read each item; None for those that are refused."""
    refusals = Refusals(name, is_lone, _on_error(errors))
    listed: list[T | None] = [None] * len(items)
    for index, item in enumerate(items):
        with refusals.at(index):
            listed[index] = read(item)
    return listed, refusals


def _items(prompts: object) -> tuple[list[object], bool]:
    """The prompts of a call, and whether it was a single prompt without a list."""
    given = _plain(prompts)
    if isinstance(given, str | bytes | Mapping):
        return [given], True
    if not isinstance(given, Iterable) or isinstance(given, AbstractSet):
        kind = type(given).__name__
        raise InvalidRequest("prompts", f"must be a prompt or a list of prompts, got {kind}")
    items = list(given)
    if items and all(_is_id(item) for item in items):
        return [items], True
    return items, False


def _plain(given: object) -> object:
    """Convert an array or tensor of any library to lists; anything else is returned unchanged."""
    convert = getattr(given, "tolist", None)
    return convert() if callable(convert) else given


def _is_id(item: object) -> bool:
    return isinstance(item, int) or getattr(item, "ndim", None) == 0  # a number of numpy or torch


def read_prompt(given: object) -> str | list[int]:
    """Return one prompt as a text or as ids; the ids are not checked. Raises InvalidRequest."""
    if isinstance(given, Mapping):
        given = _of_mapping(given)
    given = _plain(given)
    if isinstance(given, str):
        check_unicode("prompt", given)
        return given
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping | AbstractSet):
        raise InvalidRequest("prompt", f"must be text or token ids, got {given!r:.80}")
    ids = list(given)
    if ids and not isinstance(ids[0], int):
        ids = [_plain(item) for item in ids]
    return ids


def _of_mapping(given: Mapping[str, object]) -> object:
    names = [name for name, value in given.items() if value is not None]
    if names == ["prompt"] and isinstance(given["prompt"], str):
        return given["prompt"]
    if names == ["prompt_token_ids"] and not isinstance(given["prompt_token_ids"], str):
        return given["prompt_token_ids"]
    raise InvalidRequest("prompt", f"must have prompt or prompt_token_ids, nothing else: {names}")


# --- conversations -------------------------------------------------------------------------------


def is_conversation(given: object) -> bool:
    """Whether a prompt is a list of messages."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        return False
    return isinstance(given[0], Mapping) and "role" in given[0]


def listed_conversations(
    messages: Conversation | Iterable[Conversation], errors: OnError | str = OnError.RAISE
) -> tuple[list[list[Message] | None], Refusals]:
    """Return every conversation; None if it was refused. A single conversation gives a list of one.
    Contents in several parts are joined to one text."""
    given: object = messages
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequest("messages", "must be a list with at least one message")
    items = list(given)
    if not items:
        raise InvalidRequest("messages", "must be a list with at least one message")
    is_lone = isinstance(items[0], Mapping)
    return _read_all("messages", [items] if is_lone else items, is_lone, errors, read_conversation)


def read_conversation(messages: object) -> list[Message]:
    """Return one conversation; raises InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages", f"a conversation must be a list, got {messages!r:.80}")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: object, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages", f"message {index} must be an object: {message!r:.80}")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)]
    if len(kinds) < len(content) or set(kinds) != {"text"}:
        raise InvalidRequest("messages", f"the content of message {index} must be text: {kinds}")
    return {**message, "content": "\n".join(map(str, texts))}


# --- contexts with choices ----------------------------------------------------------------------

Context = ScriptPrompt | Conversation


def listed_contexts(
    contexts: Context | Iterable[Context], errors: OnError | str = OnError.RAISE
) -> tuple[list[str | list[int] | list[Message] | None], Refusals]:
    """Like `listed_prompts`, but a context may also be a conversation."""
    items, is_lone = ([contexts], True) if is_conversation(contexts) else _items(contexts)

    def read(item: object) -> str | list[int] | list[Message]:
        return read_conversation(item) if is_conversation(item) else read_prompt(item)

    return _read_all("contexts", items, is_lone, errors, read)


def listed_choices(
    choices: Iterable[str] | Iterable[Iterable[str]], number: int
) -> list[list[str]]:
    """The choices of each of `number` contexts; a plain list of texts is used for all of them."""
    given: object = choices
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping | AbstractSet):
        raise InvalidRequest("choices", f"must be a list of texts, got {given!r:.80}")
    items = list(given)
    if all(isinstance(item, str) for item in items):
        return [items] * number
    if any(isinstance(item, str) or not isinstance(item, Iterable) for item in items):
        raise InvalidRequest("choices", "must be texts, or a list of texts for each context")
    if len(items) != number:
        raise InvalidRequest("choices", f"{len(items)} lists given for {number} contexts")
    return [list(item) for item in items]


# --- what goes with them -------------------------------------------------------------------------


def listed_params(
    params: SamplingParams | Iterable[SamplingParams], number: int
) -> list[SamplingParams]:
    """The settings of each of `number` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * number
    given: object = params
    is_list = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    listed = list(params) if is_list else []
    if not is_list or not all(isinstance(item, SamplingParams) for item in listed):
        reason = f"must be SamplingParams, or one for each prompt, got {params!r:.80}"
        raise InvalidRequest("sampling_params", reason)
    if len(listed) != number:
        raise InvalidRequest("sampling_params", f"{len(listed)} given for {number} prompts")
    return listed


def listed_sessions(sessions: str | Iterable[str | None] | None, number: int) -> list[str | None]:
    """The session of each of `number` prompts; a plain name is accepted for a single prompt."""
    if sessions is None:
        return [None] * number
    if isinstance(sessions, str):
        if number != 1:
            reason = f"{sessions!r} is one name for {number} prompts; give a list, a name for each"
            raise InvalidRequest("sessions", reason)
        return [sessions]
    given: object = sessions
    listed = list(sessions) if isinstance(given, Iterable) else None
    if listed is None or not all(isinstance(name, str | None) for name in listed):
        raise InvalidRequest(
            "sessions", f"must be names, one for each prompt, got {sessions!r:.80}"
        )
    if len(listed) != number:
        raise InvalidRequest("sessions", f"{len(listed)} given for {number} prompts")
    return listed


def _on_error(errors: OnError | str) -> OnError:
    try:
        return OnError(errors)
    except ValueError:
        known = " or ".join(repr(each.value) for each in OnError)
        raise InvalidRequest("errors", f"must be {known}, got {errors!r}") from None
