"""Adds text to the engine: takes requests, returns pieces of answers, and ends answers at stop
strings."""

from dataclasses import dataclass, replace

from mainstem.core.ids import RequestId
from mainstem.core.request import (
    Delivery,
    FinishReason,
    Output,
    Request,
    TokenLogprobs,
)
from mainstem.core.step import Int32s
from mainstem.engine.engine import Engine
from mainstem.text.answer_stream import TextStream
from mainstem.text.grammar import Grammars
from mainstem.text.tokenizer import Tokenizer


@dataclass(slots=True)  # not frozen: one is made per token, and frozen ones take 3x as long
class TextOutput:
    """News of one answer: text that is certain, and the tokens that came with it."""

    request_id: RequestId
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or token that ended it
    num_cached_tokens: int
    num_dropped_tokens: int = 0  # prompt tokens that did not fit into the context window
    fault: str | None = None  # the error that ended the answer (FinishReason.ERROR)
    is_form_fault: bool = False  # whether the parser of its form failed, and not a step


class AnswerReader:
    """Turns the engine's outputs for one request into text, and ends answers at stop strings.

    The engine may have continued after a stop string; tokens after it are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        sampling = request.sampling
        context = request.prompt_ids[-64:].tolist()
        self._stop_token_ids = sampling.stop_token_ids
        shown_ids, opening = request.rendering.shown_ids, request.rendering.opening
        self._streams = {
            index: TextStream(tokenizer, sampling, context, shown_ids)
            for index in range(sampling.n)
        }
        self._openings = dict.fromkeys(self._streams, opening) if opening else {}

    @property
    def is_finished(self) -> bool:
        """Whether every answer has come to its end."""
        return not self._streams

    def read(self, output: Output) -> TextOutput | None:
        """Return the news of an answer; None if a stop string has ended it already. If the text
        ends before the engine knows (`finish_reason` is set in the result but not in `output`), the
        caller must stop the request in the engine.
        """
        stream = self._streams.get(output.index)
        if stream is None:
            return None
        text = self._openings.pop(output.index, "")
        token_ids, logprobs = output.token_ids, output.logprobs
        for place, token_id in enumerate(token_ids):
            text += stream.push(token_id)
            if stream.stop is not None:
                token_ids, logprobs = token_ids[: place + 1], logprobs[: place + 1]
                break
        reason = output.finish_reason
        if reason is not None and stream.stop is None:
            text += stream.finish()
        stop: str | int | None = stream.stop
        if stop is not None:
            reason = FinishReason.STOP
        elif reason is FinishReason.STOP and output.token_ids:
            last = output.token_ids[-1]  # reported only if it is one of the caller's stop tokens
            stop = last if last in self._stop_token_ids else None
        if reason is not None:
            del self._streams[output.index]
        return TextOutput(
            request_id=output.request_id,
            index=output.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=output.num_cached_tokens,
            num_dropped_tokens=output.num_dropped_tokens,
            fault=output.fault if reason is FinishReason.ERROR else None,
            is_form_fault=output.is_form_fault and reason is FinishReason.ERROR,
        )


class TextEngine:
    """Joins an Engine with its model's tokenizer. One owner calls it, as with the Engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer)
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._open: dict[RequestId, AnswerReader] = {}

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def expect(self, shared_with_next: Int32s) -> int:
        """Announce prompts in the order they will be submitted: how many leading tokens each
        shares with the next. Returns the first `plan_place`."""
        return self.engine.expect(shared_with_next)

    def submit(self, request: Request) -> None:
        """Queue a prompt; raises InvalidRequest if it can never run.

        The model's end tokens are filled in. The form that `request.sampling` names is compiled,
        unless the request has it compiled already.
        """
        sampling, grammar, delivery = request.sampling, request.grammar, request.delivery
        if grammar is None and sampling.grammar is not None:
            grammar = self.grammars.compile(sampling.grammar)
        if sampling.stop_strings:
            delivery = Delivery.EACH_STEP  # each token may complete a stop string
        request = replace(request, eos_ids=self._eos_ids, grammar=grammar, delivery=delivery)
        self.engine.submit(request)
        self._open[request.request_id] = AnswerReader(self.tokenizer, request)

    def abort(self, request_id: str) -> None:
        """Stop a request; its last news comes with the next step."""
        self.engine.abort(RequestId(request_id))

    def step(self) -> list[TextOutput]:
        """Advance the engine by one step."""
        news = [self._read(output) for output in self.engine.step()]
        return [output for output in news if output is not None]

    def _read(self, output: Output) -> TextOutput | None:
        reader = self._open.get(output.request_id)
        news = None if reader is None else reader.read(output)
        if reader is None or news is None:
            return None  # a stop string ended the answer before the engine knew
        if news.finish_reason is not None and output.finish_reason is None:
            self.engine.stop(output.request_id, output.index)
        if reader.is_finished:
            del self._open[output.request_id]
        return news
