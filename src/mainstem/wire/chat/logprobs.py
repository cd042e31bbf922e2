"""Log-probabilities in the formats of OpenAI and vLLM."""

import codecs
from collections.abc import Sequence

from mainstem.core.json import Json
from mainstem.core.request import TokenLogprobs
from mainstem.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # used for minus infinity, which JSON does not have

Place = tuple[int, TokenLogprobs | None]  # a token and its logprobs, if known


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as readable text; if it is not whole characters, as bytes:\\x.., like OpenAI's."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a chat's choice."""
    content = []
    for entry in entries:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in pairs]
        chosen = _chat_token(entry.token_id, entry.logprob, tokenizer)
        content.append(chosen | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {
        "token": token_text(token_id, tokenizer),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class Offsets:
    """Where each token's text begins, for the logprobs of completions."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def starts(self, places: Sequence[Place]) -> list[int]:
        """Return where the next tokens begin."""
        return [self._next(token_id) for token_id, _ in places]

    def _next(self, token_id: int) -> int:
        start = self._end
        if token_id not in self._skipped:
            self._end += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start


def completion_logprobs(
    places: Sequence[Place], starts: Sequence[int], num_chars: int, tokenizer: Tokenizer
) -> Json:
    """The `logprobs` of a completion's choice, or of its next part.

    `starts`: where the tokens begin; `num_chars`: the length of the text, which a stop string may
    have cut.
    """
    return {
        "tokens": [token_text(token_id, tokenizer) for token_id, _ in places],
        "token_logprobs": [
            None if entry is None else max(entry.logprob, LEAST_LOGPROB) for _, entry in places
        ],
        "top_logprobs": [None if entry is None else _top(entry, tokenizer) for _, entry in places],
        "text_offset": [min(start, num_chars) for start in starts],
    }


def _top(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True)]
    pairs.append((entry.token_id, entry.logprob))
    top: dict[str, float] = {}
    for token_id, logprob in pairs:
        top.setdefault(token_text(token_id, tokenizer), max(logprob, LEAST_LOGPROB))
    return top


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[Json | None]:
    """The logprobs of a prompt in vLLM's format: token id -> logprob, rank and text."""
    return [None if entry is None else _prompt_place(entry, tokenizer) for entry in entries]


def _prompt_place(entry: TokenLogprobs, tokenizer: Tokenizer) -> Json:
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST_LOGPROB),
            "rank": rank,
            "decoded_token": token_text(token_id, tokenizer),
        }
        for token_id, (logprob, rank) in entry.ranked().items()
    }
