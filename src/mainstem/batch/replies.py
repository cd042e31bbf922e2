"""Answers as OpenAI writes them: the rows of a batch output."""

from dataclasses import dataclass, field
from hashlib import blake2b

from mainstem.batch.rows import Kind, Row, RowError
from mainstem.core.request import FinishReason, SamplingParams, TokenLogprobs
from mainstem.text.text_engine import TextOutput
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.logprobs import Offsets, chat_logprobs, completion_logprobs, prompt_logprobs

Json = dict[str, object]


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
    dropped_tokens: int = 0  # of a prompt that was longer than the context window

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
            self.dropped_tokens = output.num_dropped_tokens


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
        body["prompt_logprobs"] = prompt_logprobs(answers.prompt_logprobs, tokenizer)
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
            logprobs = chat_logprobs(answer.logprobs, tokenizer)
    else:
        choice["text"] = answer.text
        if has_logprobs:
            offsets = Offsets(tokenizer, answers.sampling.skip_special_tokens)
            places = [(entry.token_id, entry) for entry in answer.logprobs]
            logprobs = completion_logprobs(places, offsets, len(answer.text), tokenizer)
    choice["logprobs"] = logprobs
    choice["finish_reason"] = answer.finish_reason.value if answer.finish_reason else None
    choice["stop_reason"] = answer.stop_reason  # as vLLM: the stop string or token id
    return choice
