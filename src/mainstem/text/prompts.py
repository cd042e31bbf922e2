"""What a script may hand to LLM: one prompt or many, as text, ids or vLLM's dictionaries."""

from collections.abc import Mapping, Sequence

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import SamplingParams

Message = Mapping[str, object]
ScriptPrompt = (
    str | Sequence[int] | Mapping[str, object]
)  # {"prompt": text} or {"prompt_token_ids": ids}


def listed_prompts(prompts: ScriptPrompt | Sequence[ScriptPrompt]) -> list[str | list[int]]:
    """Every prompt as a text or as ids; one alone is a list of one."""
    given: object = prompts
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping):
        return [_prompt(given, 0)]
    if not isinstance(given, Sequence):
        kind = type(given).__name__
        raise InvalidRequest("prompts", f"must be a prompt or a list of prompts, got {kind}")
    if given and all(isinstance(item, int) for item in given):
        return [list(given)]
    return [_prompt(item, index) for index, item in enumerate(given)]


def _prompt(given: object, index: int) -> str | list[int]:
    if isinstance(given, Mapping):
        given = _of_mapping(given, index)
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return list(given)
    raise InvalidRequest("prompt", f"prompt {index} must be text or token ids: {given!r:.80}")


def _of_mapping(given: Mapping[str, object], index: int) -> object:
    names = [name for name, value in given.items() if value is not None]
    if names == ["prompt"] and isinstance(given["prompt"], str):
        return given["prompt"]
    if names == ["prompt_token_ids"] and not isinstance(given["prompt_token_ids"], str):
        return given["prompt_token_ids"]
    raise InvalidRequest(
        "prompt", f"prompt {index} must have a prompt or prompt_token_ids and no more: {names}"
    )


def listed_params(
    params: SamplingParams | Sequence[SamplingParams], number: int
) -> list[SamplingParams]:
    """The settings of each of `number` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * number
    is_list = isinstance(params, Sequence)
    if not is_list or not all(isinstance(item, SamplingParams) for item in params):
        reason = f"must be SamplingParams, or one for each prompt, got {params!r:.80}"
        raise InvalidRequest("sampling_params", reason)
    if len(params) != number:
        raise InvalidRequest("sampling_params", f"{len(params)} given for {number} prompts")
    return list(params)


def listed_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """Every conversation; one alone is a list of one. Texts in parts are joined."""
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise InvalidRequest("messages", "must be a list with at least one message")
    if isinstance(given[0], Mapping):
        return [_conversation(given)]
    return [_conversation(conversation) for conversation in given]


def _conversation(messages: object) -> list[Message]:
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
