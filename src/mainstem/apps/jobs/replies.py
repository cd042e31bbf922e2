"""Answers as OpenAI writes them: the rows of a batch output, completion objects, logprobs."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from mainstem.apps.answers import TextOutput
from mainstem.apps.jobs.rows import Kind, Row, RowError
from mainstem.apps.text import Tokenizer
from mainstem.core.request import FinishReason, SamplingParams, TokenLogprobs

Json = dict[str, object]

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


@dataclass(slots=True)
class Answer:
    """One of the answers to a row, as far as it is known."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Answers:
    """All answers to a row; its prompt is not kept."""

    prompt_tokens: int
    sampling: SamplingParams
    answers: list[Answer] = field(init=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = (None,)  # that of a prompt of one token
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in range(self.sampling.n)]

    @property
    def is_finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def add(self, output: TextOutput) -> None:
        """Put news of an answer where it belongs."""
        answer = self.answers[output.index]
        answer.text += output.text
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs
        answer.finish_reason = output.finish_reason
        answer.stop_reason = output.stop_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.index == 0:
            self.cached_tokens = output.num_cached_tokens


def answer_row(row: Row, answers: Answers, model: str, tokenizer: Tokenizer, now: int) -> Json:
    """The output line of a row that was answered; `now` is in seconds since 1970."""
    name = _name(row.custom_id)
    body: Json = {
        "id": f"{'chatcmpl' if row.kind is Kind.CHAT else 'cmpl'}-{name}",
        "object": "chat.completion" if row.kind is Kind.CHAT else "text_completion",
        "created": now,
        "model": model,
        "choices": [
            _choice(row.kind, index, answers, tokenizer) for index in range(len(answers.answers))
        ],
        "usage": _usage(answers),
    }
    if answers.sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if entry is None else _prompt_place(entry, tokenizer)
            for entry in answers.prompt_logprobs
        ]
    response = {"status_code": 200, "request_id": f"req-{name}", "body": body}
    return {
        "id": f"batch_req_{name}",
        "custom_id": row.custom_id,
        "response": response,
        "error": None,
    }


def error_row(line: int, custom_id: str | None, error: RowError) -> Json:
    """The output line of a row that cannot be answered."""
    return {
        "id": f"batch_req_{_name(f'error on line {line}')}",
        "custom_id": custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "line": line,
        },
    }


def _name(text: str) -> str:
    """An id that is the same in every run of a job."""
    return blake2b(text.encode(), digest_size=12).hexdigest()


def _usage(answers: Answers) -> Json:
    prompt_tokens = answers.prompt_tokens
    completion_tokens = sum(len(answer.token_ids) for answer in answers.answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.cached_tokens},
    }


def _choice(kind: Kind, index: int, answers: Answers, tokenizer: Tokenizer) -> Json:
    answer = answers.answers[index]
    has_logprobs = answers.sampling.logprobs is not None
    logprobs: Json | None = None
    choice: Json = {"index": index}
    if kind is Kind.CHAT:
        choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        if has_logprobs:
            logprobs = {"content": [_chat_place(entry, tokenizer) for entry in answer.logprobs]}
            logprobs["refusal"] = None
    else:
        choice["text"] = answer.text
        if has_logprobs:
            logprobs = _completion_logprobs(answer.logprobs, answer.text, tokenizer)
    choice["logprobs"] = logprobs
    choice["finish_reason"] = answer.finish_reason.value if answer.finish_reason else None
    choice["stop_reason"] = answer.stop_reason  # as vLLM: the stop string or token id
    return choice


# --- logprobs ------------------------------------------------------------------------------------


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token for people; one that is not whole characters as bytes:\\x.., as OpenAI does."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {
        "token": token_text(token_id, tokenizer),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _chat_place(entry: TokenLogprobs, tokenizer: Tokenizer) -> Json:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in pairs]
    return _chat_token(entry.token_id, entry.logprob, tokenizer) | {"top_logprobs": top}


def _completion_logprobs(entries: Sequence[TokenLogprobs], text: str, tokenizer: Tokenizer) -> Json:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for entry in entries:
        offsets.append(min(end, len(text)))
        end += len(decoder.decode(tokenizer.token_bytes(entry.token_id)))
    tops = []
    for entry in entries:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = {token_text(token_id, tokenizer): max(p, LEAST_LOGPROB) for token_id, p in pairs}
        top.setdefault(token_text(entry.token_id, tokenizer), max(entry.logprob, LEAST_LOGPROB))
        tops.append(top)
    return {
        "tokens": [token_text(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _prompt_place(entry: TokenLogprobs, tokenizer: Tokenizer) -> Json:
    """One place of a prompt in vLLM's form: token id -> its logprob, rank and text."""
    places = {entry.token_id: (entry.logprob, entry.rank)}
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(pairs, start=1):
        places.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST_LOGPROB),
            "rank": rank,
            "decoded_token": token_text(token_id, tokenizer),
        }
        for token_id, (logprob, rank) in places.items()
    }
