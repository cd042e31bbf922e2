"""Adds text to the engine: takes requests, returns pieces of answers, and ends answers at stop
strings."""

from dataclasses import replace

from mainstem.core.ids import RequestId
from mainstem.core.request import Delivery, FinishReason, Output, Request
from mainstem.engine.engine import Engine
from mainstem.text.answer_stream import TextStream
from mainstem.text.boundaries import MessageStarts
from mainstem.text.grammar import Grammars
from mainstem.text.tokenizer import Tokenizer


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

    def read(self, output: Output) -> bool:
        """Add the text to news of an answer; False if a stop string has ended the answer already.
        If the text ends before the engine knows (this sets `finish_reason`), the caller must stop
        the answer in the engine.
        """
        stream = self._streams.get(output.index)
        if stream is None:
            return False
        text = self._openings.pop(output.index, "")
        for place, token_id in enumerate(output.token_ids):
            text += stream.push(token_id)
            if stream.stop is not None:
                output.token_ids = output.token_ids[: place + 1]
                output.logprobs = output.logprobs[: place + 1]
                break
        if output.finish_reason is not None and stream.stop is None:
            text += stream.finish()
        if stream.stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stream.stop
            output.fault = None
        elif output.finish_reason is FinishReason.STOP and output.token_ids:
            last = output.token_ids[-1]  # reported only if it is one of the caller's stop tokens
            output.stop_reason = last if last in self._stop_token_ids else None
        if output.finish_reason is not None:
            del self._streams[output.index]
        output.text = text
        return True


class TextEngine:
    """Joins an Engine with its model's tokenizer. One owner calls it, as with the Engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer)
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._message_starts = MessageStarts(tokenizer)
        self._open: dict[RequestId, AnswerReader] = {}

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

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
        request = self._message_starts.mark(
            replace(request, eos_ids=self._eos_ids, grammar=grammar, delivery=delivery)
        )
        self.engine.submit(request)
        self._open[request.request_id] = AnswerReader(self.tokenizer, request)

    def abort(self, request_id: str) -> None:
        """Stop a request; its last news comes with the next step."""
        self.engine.abort(RequestId(request_id))

    def step(self) -> list[Output]:
        """Advance the engine by one step; returns outputs with their text."""
        return [output for output in self.engine.step() if self._read(output)]

    def _read(self, output: Output) -> bool:
        reader, has_ended = self._open.get(output.request_id), output.finish_reason is not None
        if reader is None or not reader.read(output):
            return False  # a stop string ended the answer before the engine knew
        if output.finish_reason is not None and not has_ended:
            self.engine.stop(output.request_id, output.index)
        if reader.is_finished:
            del self._open[output.request_id]
        return True
