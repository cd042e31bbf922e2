"""What one call of an LLM has asked, and the answers so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mainstem.core.errors import AnswerFailed
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.request import Delivery, Output, Overflow, Request, SamplingParams, id_array
from mainstem.core.step import Int32s
from mainstem.llm.bar import PromptBar
from mainstem.llm.loaded import LoadedModel
from mainstem.text.prompts import OnError, Refusals
from mainstem.text.results import RequestOutput, add_piece, empty_result, piece_of
from mainstem.text.scoring import ContextScoring


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """The prompts of a call, in the caller's order, and how to answer each."""

    texts: Sequence[str | None]  # None: given as ids, or refused
    ids: Sequence[list[int] | None]  # None: refused
    params: Sequence[SamplingParams]
    sessions: Sequence[str | None]
    overflow: Overflow | None


class PromptCall:
    """The prompts of `generate` or `chat`, and their answers."""

    def __init__(
        self, llm: LoadedModel, given: GivenPrompts, refusals: Refusals, progress: PromptBar
    ) -> None:
        self._llm, self._given, self._refusals = llm, given, refusals
        self.progress = progress
        self.prompts: dict[RequestId, Int32s] = {}  # those that were not refused
        self._results: dict[str, RequestOutput] = {}
        self._indices: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        rows = zip(given.texts, given.ids, given.params, strict=True)
        for index, (text, ids, sampling) in enumerate(rows):
            request_id = llm._next_id()
            self._results[request_id] = empty_result(request_id, text, ids or [], sampling)
            self._indices[request_id] = index
            if ids is not None:
                with refusals.at(index):
                    self.prompts[request_id] = id_array(ids)

    def submit(self, request_id: RequestId, place: int | None) -> bool:
        """Queue a prompt; returns whether it was accepted."""
        index, given = self._indices[request_id], self._given
        with self._refusals.at(index):
            session = given.sessions[index]
            self._llm.text_engine.submit(
                Request(
                    request_id,
                    self.prompts[request_id],
                    given.params[index],
                    grammar=self._llm._compiled(given.params[index]),
                    delivery=Delivery.AT_END,
                    plan_place=place,
                    session=None if session is None else SessionId(session),
                    overflow=given.overflow,
                )
            )
            self.progress.add(self._results[request_id])
            return True
        return False

    def hear(self, outputs: list[Output]) -> int:
        """Take in a step's outputs; returns how many prompts have ended."""
        self._llm._check_open()
        num_ended = 0
        for output in outputs:
            result = self._results[output.request_id]
            add_piece(result, piece_of(output, self._llm.tokenizer))
            if output.fault is not None:
                self._faults[output.request_id] = output.fault
            num_ended += result.finished
        return num_ended

    def results(self) -> list[RequestOutput]:
        """The answers in the caller's order. Raises AnswerFailed, unless errors are returned."""
        listed, faults = [*self._results.values()], self._faults
        for index, reason in self._refusals.reasons.items():
            listed[index].outputs, listed[index].error = [], reason
        if faults and self._refusals.on_error is OnError.RAISE:
            first, fault = min((self._indices[name], fault) for name, fault in faults.items())
            counted = f"{len(faults)} of {len(listed)} prompts could not be answered"
            raise AnswerFailed(f"{counted}; number {first}: {fault}", listed)
        for name, fault in faults.items():
            self._results[name].error = fault
        return listed


class ScoringCall:
    """The contexts of `score`, and what is known of their choices."""

    def __init__(
        self, llm: LoadedModel, scorings: Mapping[int, ContextScoring], refusals: Refusals
    ) -> None:
        self._llm, self._scorings, self._refusals = llm, scorings, refusals
        # context, place in it, request
        self._asked: dict[RequestId, tuple[int, int, Request]] = {}
        self.faults: dict[int, str] = {}  # by context
        for index, scoring in scorings.items():
            for place, request in enumerate(llm._score_requests(scoring)):
                self._asked[request.request_id] = index, place, request
        self.prompts = {name: asked.prompt_ids for name, (_, _, asked) in self._asked.items()}

    def submit(self, request_id: RequestId, plan_place: int | None) -> bool:
        """Queue a choice; returns whether it was accepted."""
        index, _, request = self._asked[request_id]
        with self._refusals.at(index):
            self._llm.text_engine.submit(replace(request, plan_place=plan_place))
            return True
        return False

    def hear(self, outputs: list[Output]) -> int:
        """Take in a step's outputs; returns how many choices have ended."""
        self._llm._check_open()
        for output in outputs:
            index, place, _ = self._asked[output.request_id]
            if output.fault is not None:
                self.faults[index] = output.fault
            else:
                self._scorings[index].take(place, output)
        return len(outputs)
