"""LLM: the engine for scripts, with the names vLLM users know (docs/python.md)."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Lock, RLock
from typing import NoReturn, Self

import numpy as np
from tqdm import tqdm

from mainstem.checkpoints.fetch import fetch_model
from mainstem.checkpoints.progress import StageBar
from mainstem.core.config import EngineConfig, Share, with_arguments
from mainstem.core.errors import AnswerFailed, ConfigError, InvalidRequest
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.core.request import (
    Delivery,
    Grammar,
    Overflow,
    Request,
    SamplingParams,
    id_array,
)
from mainstem.core.step import Int32s
from mainstem.core.vllm_names import own_arguments
from mainstem.engine.build import build_engine
from mainstem.plan.order import shared_with_next
from mainstem.plan.planner import plan_prompts
from mainstem.text.control_tokens import without_marks
from mainstem.text.encoding import Chat, Prompt
from mainstem.text.prompts import (
    Context,
    Conversation,
    Message,
    OnError,
    Refusals,
    ScriptPrompt,
    is_conversation,
    listed_choices,
    listed_contexts,
    listed_conversations,
    listed_params,
    listed_prompts,
    listed_sessions,
    read_conversation,
    read_prompt,
)
from mainstem.text.results import (
    AnswerPiece,
    RequestOutput,
    add_piece,
    empty_result,
    piece_of,
)
from mainstem.text.scoring import (
    SCORE_SAMPLING,
    ContextScoring,
    ScoreOutput,
    encode_scoring,
)
from mainstem.text.sessions import SessionLimits, Sessions, said_before, spoken_chat
from mainstem.text.text_engine import TextEngine, TextOutput
from mainstem.text.tokenizer import GENERATION_FILE, Tokenizer


class LoadedModel:
    """A model with its engine and tokenizer: what LLM and AsyncLLM have in common."""

    def __init__(  # noqa: PLR0913  # the settings a script may name, all by keyword
        self,
        model: str | Path = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str = "none",
        page_size: int = 16,
        kv_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        chunk_tokens: int | None = None,
        max_seqs: int | None = None,
        share: str = "reads",
        span_levels: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        chat_template: str | Path | None = None,
        allow_special_tokens: bool = False,
        deterministic: bool = False,
        tensor_parallel: int = 1,
        ranks_on_one_gpu: bool = False,
        ignore_config_fields: str | Sequence[str] | None = None,
        seed: int = 0,
        truncation_ratio: float = 0.5,
        sink_tokens: int | None = None,
        host_gb: float | None = None,
        disk_dir: str | Path | None = None,
        disk_gb: float = 20.0,
        remote: str | None = None,
        remote_gb: float = 20.0,
        remote_ttl: float = 86400.0,
        remote_secrets: str | Path | None = None,
        store_ttl: float | None = None,
        store_policy: str = "lookahead",
        store_save: str = "decoding",
        store_fetch: str = "auto",
        preload: str = "auto",
        **others: object,
    ) -> None:
        """Settings have the same meaning as the flags of the same names (docs/settings.md).
        `others` are arguments of vLLM: accepted if they mean the same here, otherwise refused
        (core/vllm_names.py)."""
        given = dict(locals())  # all arguments; those removed below are not settings
        del given["self"], given["others"]
        config = with_arguments(EngineConfig(), own_arguments(given, others), "LLM")
        self._connect(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An LLM from a complete EngineConfig, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._connect(config)
        return llm

    def _connect(self, config: EngineConfig) -> None:
        with StageBar() as bar:
            folder, tokenizer = fetch_model(config.model, bar)
        bus = EventBus()
        self.counters = Counters().attach(bus)
        engine = build_engine(folder, config, bus)
        self.text_engine = TextEngine(engine, tokenizer)
        self._request_ids = count()
        self._is_closed = False
        self._sessions = Sessions(SessionLimits())
        self._sessions_lock = Lock()
        self._shares = config.sched.share is not Share.NONE

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds a model and an engine. "
            "Make one in each process that needs one, and send prompts and results between them"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template: `encode`, `decode`, `render_chat`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Default sampling parameters, from the model's generation_config.json."""
        try:
            return SamplingParams(**self.tokenizer.sampling_defaults)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(f"{GENERATION_FILE}: {error}; give SamplingParams instead") from None

    def encode_turn(self, session: str | None, text: str) -> list[int]:
        """Return the ids of a conversation whose text is from `Tokenizer.chat_text`. If it
        continues `session`, the session's ids are kept: encoding an answer again could give other
        ids, whose pages are not cached."""
        with self._sessions_lock:
            known = None if session is None else self._sessions.find("", session)
        before = said_before(known, text, self.tokenizer)
        if known is None or before is None:
            return self.tokenizer.encode_chat_text(text)
        rest = self.tokenizer.encode_chat_text(text[len(known.text) :])
        return [*before.tolist(), *rest]

    def keep_turn(
        self, session: str | None, text: str, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Remember a turn that has ended, for `encode_turn` of the next turn."""
        if session is not None:
            said = spoken_chat(text, output_ids, self.tokenizer)
            token_ids = np.array([*prompt_ids, *output_ids], np.int32)
            with self._sessions_lock:
                self._sessions.keep("", session, token_ids, said)

    def _check_open(self) -> None:
        self.text_engine.engine.check_process()
        if self._is_closed:
            raise InvalidRequest("LLM", "is closed")

    def _next_id(self) -> RequestId:
        return RequestId(f"{next(self._request_ids)}")

    def _compiled(self, sampling: SamplingParams) -> Grammar | None:
        """The form that answers must have, if any; raises InvalidRequest."""
        if sampling.grammar is None:
            return None
        try:
            return self.text_engine.grammars.compile(sampling.grammar)
        except InvalidRequest as error:
            raise InvalidRequest("structured_outputs", error.reason) from None

    def _turn(
        self,
        prompt: ScriptPrompt | Conversation,
        sampling_params: SamplingParams | None,
        session: str | None,
        overflow: Overflow | str | None,
        delivery: Delivery = Delivery.EACH_STEP,
    ) -> "Turn":
        """One prompt or conversation, ready to be submitted; raises InvalidRequest."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        (sampling,) = listed_params(sampling_params, 1)
        (session,) = listed_sessions(session, 1)
        text: str | None
        if is_conversation(prompt):
            text = self.tokenizer.chat_text(read_conversation(prompt))
            ids = self.encode_turn(session, text)
        else:
            given = read_prompt(prompt)
            if not isinstance(given, str) and any(isinstance(item, str) for item in given):
                raise InvalidRequest("prompt", "must be one prompt here; open a stream for each")
            text = given if isinstance(given, str) else None
            ids = self.tokenizer.encode(given) if isinstance(given, str) else given
        request = Request(
            self._next_id(),
            id_array(ids),
            sampling,
            grammar=self._compiled(sampling),
            delivery=delivery,
            session=None if session is None else SessionId(session),
            overflow=_overflow(overflow),
        )
        return Turn(request, text, session if is_conversation(prompt) else None, ids)

    def _scoring(
        self, context: str | list[int] | list[Message], choices: Sequence[str]
    ) -> ContextScoring:
        """A context and its choices as tokens; raises InvalidRequest."""
        prompt: Prompt
        if isinstance(context, str):
            prompt = context
        elif is_conversation(context):
            prompt = Chat([dict(message) for message in read_conversation(context)])
        else:
            ids = [each for each in context if not isinstance(each, Mapping)]
            prompt = array("i", id_array(ids).tolist())
        return encode_scoring(self.tokenizer, prompt, choices)

    def _score_requests(self, scoring: ContextScoring) -> list[Request]:
        return [
            Request(
                self._next_id(),
                id_array(ids),
                SCORE_SAMPLING,
                delivery=Delivery.AT_END,
                scoring=asked,
            )
            for ids, asked in scoring.prompts()
        ]

    def _keep(self, turn: "Turn", output_ids: list[int]) -> None:
        if turn.text is not None:
            self.keep_turn(turn.session, turn.text, turn.prompt_ids, output_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt that is ready to be submitted to the engine."""

    request: Request
    text: str | None  # with marks in a chat (text/control_tokens.py); None: given as ids
    session: str | None  # the session that keeps the turn after it has ended
    prompt_ids: list[int]


class LLM(LoadedModel):
    """A model loaded once, answering batches of prompts.

        llm = LLM("smollm2")
        for answer in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(answer.outputs[0].text)

    Prompts with a common prefix share it: it is computed once, stored once and read once per step.
    Calls from several threads wait for each other. The prompts of one call run together, and so do
    open streams.
    """

    def _connect(self, config: EngineConfig) -> None:
        super()._connect(config)
        # held while answers are made; an RLock, since a signal handler may close the LLM meanwhile
        self._lock = RLock()
        self._is_called = False
        self._streams: dict[str, deque[TextOutput]] = {}  # news not read yet, by request
        self._abandoned: deque[str] = deque()  # streams that are no longer read

    def generate(
        self,
        prompts: ScriptPrompt | Iterable[ScriptPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sessions: str | Iterable[str | None] | None = None,
        overflow: Overflow | str | None = None,
        errors: OnError | str = OnError.RAISE,
    ) -> list[RequestOutput]:
        """Answer prompts, given as text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        Results are in the order of the prompts.

        Without `sampling_params`, those of `get_default_sampling_params` are used. `sessions` names
        the conversation each prompt continues. `overflow` says what happens to a prompt longer than
        the context window: "kv" (the default in sessions), "important", "recompute" or "error".
        If a prompt cannot be answered, raises InvalidRequest, which names it, before anything runs.
        If steps failed repeatedly on a prompt, raises AnswerFailed after everything ran. With
        errors="return" it raises neither: such a prompt's result has an `error`.
        """
        listed, refusals = listed_prompts(prompts, errors)
        texts = [prompt for prompt in listed if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in listed]
        shown = [prompt if isinstance(prompt, str) else None for prompt in listed]
        params = self._params(sampling_params, len(listed))
        names, policy = listed_sessions(sessions, len(listed)), _overflow(overflow)
        with self._call():
            return self._run(_GivenPrompts(shown, ids, params, names, policy), refusals, use_tqdm)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sessions: str | Iterable[str | None] | None = None,
        overflow: Overflow | str | None = None,
        errors: OnError | str = OnError.RAISE,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; `sessions`,
        `overflow` and `errors` are as in `generate`. A turn of a session extends the ids of the
        turns before it."""
        conversations, refusals = listed_conversations(messages, errors)
        texts: list[str | None] = [None] * len(conversations)
        for index, conversation in enumerate(conversations):
            if conversation is not None:
                with refusals.at(index):
                    texts[index] = self.tokenizer.chat_text(conversation)
        params = self._params(sampling_params, len(texts))
        names, policy = listed_sessions(sessions, len(texts)), _overflow(overflow)
        turns = list(zip(names, texts, strict=True))
        with self._call():
            ids: list[list[int] | None] = [None] * len(texts)
            for index, (session, text) in enumerate(turns):
                if text is not None:
                    with refusals.at(index):
                        ids[index] = self.encode_turn(session, text)
            shown = [None if text is None else without_marks(text) for text in texts]
            results = self._run(
                _GivenPrompts(shown, ids, params, names, policy), refusals, use_tqdm
            )
            for (session, text), result in zip(turns, results, strict=True):
                if text is not None and result.error is None:
                    output_ids = result.outputs[0].token_ids
                    self.keep_turn(session, text, result.prompt_token_ids, output_ids)
        return results

    def score(
        self,
        contexts: Context | Iterable[Context],
        choices: Iterable[str] | Iterable[Iterable[str]],
        use_tqdm: bool = True,
        *,
        errors: OnError | str = OnError.RAISE,
    ) -> list[ScoreOutput]:
        """Return how likely each choice is to follow a context: text, token ids or messages.

        `choices` is a list of texts for all contexts, or one list per context. A context is
        computed once for all its choices, and only those tokens of a choice that its logprobs need
        are computed. `errors` is as in `generate`.
        """
        listed, refusals = listed_contexts(contexts, errors)
        scorings: dict[int, ContextScoring] = {}
        rows = zip(listed, listed_choices(choices, len(listed)), strict=True)
        for index, (context, texts) in enumerate(rows):
            if context is not None:
                with refusals.at(index):
                    scorings[index] = self._scoring(context, texts)
        with self._call():
            faults = self._run_scorings(scorings, refusals, use_tqdm)
        results = [ScoreOutput([]) for _ in listed]
        for index, scoring in scorings.items():
            error = refusals.reasons.get(index) or faults.get(index)
            failed = ScoreOutput(scoring.context_ids, error=error)
            results[index] = scoring.result() if error is None else failed
        for index, reason in refusals.reasons.items():
            results[index].error = reason
        if faults and refusals.on_error is OnError.RAISE:
            first = min(faults)
            counted = f"{len(faults)} of {len(listed)} contexts could not be scored"
            raise AnswerFailed(f"{counted}; number {first}: {faults[first]}", results)
        return results

    def stream(
        self,
        prompt: ScriptPrompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        session: str | None = None,
        overflow: Overflow | str | None = None,
    ) -> Iterator[AnswerPiece]:
        """Yield the answer to one prompt, or to a list of messages, piece by piece as it is made.

        The prompt is queued when the caller asks for the first piece, and steps run while the
        caller waits for a piece. Streams that are read in turn share these steps. The answer ends
        when the caller stops reading (`break`). Raises the same errors as `generate`.
        """
        with self._call():
            turn = self._turn(prompt, sampling_params, session, overflow)
        return self._pieces(turn)

    def _pieces(self, turn: Turn) -> Iterator[AnswerPiece]:
        request, news = turn.request, deque[TextOutput]()
        num_open, output_ids = request.sampling.n, list[int]()
        try:
            with self._call():
                self._streams[request.request_id] = news
                self.text_engine.submit(request)
            while num_open:
                while not news:
                    with self._call():
                        assert news or self.text_engine.has_work, "a stream was lost"
                        if not news:
                            self._step()
                output = news.popleft()
                if output.fault is not None:
                    raise AnswerFailed(f"the prompt could not be answered: {output.fault}")
                num_open -= output.finish_reason is not None
                if output.index == 0:
                    output_ids += output.token_ids
                if not num_open:
                    self._keep(turn, output_ids)
                yield piece_of(output, self.tokenizer)
        finally:
            self._leave(request.request_id)

    def _leave(self, request_id: str) -> None:
        """Note that a stream was read to its end, or was closed early. May be called at any time
        and on any thread, since Python closes unused generators. The work is done at once if no
        call is running, otherwise by the next step."""
        self._abandoned.append(request_id)
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not (self._is_called or self._is_closed):
                with guarded_interrupts():
                    self._settle()
        finally:
            self._lock.release()

    def _step(self) -> list[TextOutput]:
        """Advance the engine by one step. Streams get their outputs; the others are returned."""
        self._end_abandoned()
        outputs = self.text_engine.step()
        if not self._streams:
            return outputs
        rest: list[TextOutput] = []
        for output in outputs:
            self._streams.get(output.request_id, rest).append(output)
        return rest

    def _end_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._streams.pop(request_id, None)
            self.text_engine.abort(request_id)

    def _settle(self) -> None:
        """Run the engine until it is idle, unless streams are open."""
        self._end_abandoned()
        while self.text_engine.has_work and not self._streams:
            self._step()

    def _params(
        self, given: SamplingParams | Iterable[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        return listed_params(self.get_default_sampling_params() if given is None else given, number)

    def close(self) -> None:
        """Stop everything: a call on another thread ends after its step, with an error, and so do
        streams. The memory is freed with the last reference to the LLM."""
        if self.text_engine.engine.is_forked:
            return  # in a fork: the threads, and the holder of the lock, are in the parent process
        self._is_closed = True
        with self._lock, guarded_interrupts():
            self.text_engine.engine.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Allow one call at a time: a nested call (from a callback) would take the outer call's
        answers. Ctrl-C is raised only between changes of the engine's state. Raises ForkedProcess
        in a forked child, where the lock may be held by a thread that does not exist."""
        self.text_engine.engine.check_process()
        with self._lock, guarded_interrupts():
            if self._is_called:
                raise InvalidRequest("LLM", "cannot be called from within one of its calls")
            self._check_open()
            self._is_called = True
            try:
                yield
            finally:
                self._is_called = False

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, given: "_GivenPrompts", refusals: Refusals, use_tqdm: bool
    ) -> list[RequestOutput]:
        results: list[RequestOutput] = []
        arrays: dict[int, Int32s] = {}
        rows = zip(given.texts, given.ids, given.params, strict=True)
        for index, (text, ids, sampling) in enumerate(rows):
            results.append(empty_result(self._next_id(), text, ids or [], sampling))
            if ids is not None:
                with refusals.at(index):
                    arrays[index] = id_array(ids)
        running: dict[str, RequestOutput] = {}
        try:
            for index, place in self._order(arrays):
                result = running[results[index].request_id] = results[index]
                with refusals.at(index):
                    self._submit(given, index, result.request_id, arrays[index], place)
                if index in refusals.reasons:
                    del running[result.request_id]
            faults = self._drain(running, use_tqdm)
        except BaseException:
            for request_id in running:  # after an error or Ctrl-C nothing may run on
                self.text_engine.abort(request_id)
            self._settle()
            raise
        for index, reason in refusals.reasons.items():
            results[index].outputs, results[index].error = [], reason
        if faults and refusals.on_error is OnError.RAISE:
            first = next(index for index, each in enumerate(results) if each.request_id in faults)
            fault = faults[results[first].request_id]
            counted = f"{len(faults)} of {len(results)} prompts could not be answered"
            raise AnswerFailed(f"{counted}; number {first}: {fault}", results)
        for request_id, fault in faults.items():
            running[request_id].error = fault
        return results

    def _run_scorings(
        self, scorings: Mapping[int, ContextScoring], refusals: Refusals, use_tqdm: bool
    ) -> dict[int, str]:
        """Score all choices; returns the failures by context."""
        asked: list[tuple[int, int, Request]] = []  # (context, place among its prompts, request)
        for index, scoring in scorings.items():
            requests = enumerate(self._score_requests(scoring))
            asked += [(index, place, request) for place, request in requests]
        prompts = {row: request.prompt_ids for row, (_, _, request) in enumerate(asked)}
        running: dict[str, tuple[int, int]] = {}
        faults: dict[int, str] = {}
        try:
            for row, plan_place in self._order(prompts):
                index, place, request = asked[row]
                with refusals.at(index):
                    self.text_engine.submit(replace(request, plan_place=plan_place))
                    running[request.request_id] = index, place
            with tqdm(
                total=len(running), unit="prompt", disable=not use_tqdm, dynamic_ncols=True
            ) as bar:
                num_open = len(running)
                while self.text_engine.has_work and (num_open or not self._streams):
                    outputs = [each for each in self._step() if each.request_id in running]
                    for output in outputs:
                        index, place = running[output.request_id]
                        if output.fault is not None:
                            faults[index] = output.fault
                        elif output.prompt_logprobs is not None:
                            cached = output.num_cached_tokens
                            scorings[index].take(place, output.prompt_logprobs, cached)
                    self._check_open()
                    num_open -= len(outputs)
                    bar.update(len(outputs))
        except BaseException:
            for request_id in running:  # after an error or Ctrl-C nothing may run on
                self.text_engine.abort(request_id)
            self._settle()
            raise
        return faults

    def _submit(
        self, given: "_GivenPrompts", index: int, request_id: str, ids: Int32s, place: int | None
    ) -> None:
        session = given.sessions[index]
        request = Request(
            RequestId(request_id),
            ids,
            given.params[index],
            grammar=self._compiled(given.params[index]),
            delivery=Delivery.AT_END,
            plan_place=place,
            session=None if session is None else SessionId(session),
            overflow=given.overflow,
        )
        self.text_engine.submit(request)

    def _order(self, ids: Mapping[int, Int32s]) -> list[tuple[int, int | None]]:
        """Return the prompts in the order to run, with their plan places. Prompts with a common
        prefix are neighbours; without sharing, the order is the given one, without places."""
        if not self._shares or len(ids) < 2:
            return [(index, None) for index in ids]
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(row) for row in ids.values()], out=starts[1:])
        plan = plan_prompts(Prompts(np.concatenate([*ids.values()]), starts))
        first, indices = self.text_engine.expect(shared_with_next(plan)), [*ids]
        return [(indices[row], first + place) for place, row in enumerate(plan.members.tolist())]

    def _drain(self, results: Mapping[str, RequestOutput], use_tqdm: bool) -> dict[str, str]:
        """Run steps until everything is answered; returns the failures by request."""
        counters = self.counters
        num_prompt = sum(
            len(result.prompt_token_ids) * len(result.outputs) for result in results.values()
        )
        prefilled = counters.computed_tokens + counters.cached_tokens
        decoded = counters.decoded_tokens
        faults: dict[str, str] = {}
        num_open = len(results)
        with tqdm(
            total=len(results), unit="req", disable=not use_tqdm, miniters=0, dynamic_ncols=True
        ) as bar:
            while self.text_engine.has_work and (num_open or not self._streams):
                num_finished = 0
                for output in self._step():
                    result = results.get(output.request_id)
                    if result is None:
                        continue  # the last news of a call that was interrupted
                    add_piece(result, piece_of(output, self.tokenizer))
                    if output.fault is not None:
                        faults[output.request_id] = output.fault
                    num_finished += result.finished
                self._check_open()
                num_open -= num_finished
                done = min(
                    num_prompt, counters.computed_tokens + counters.cached_tokens - prefilled
                )
                rate = (counters.decoded_tokens - decoded) / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(
                    f"{done:,}/{num_prompt:,} prompt tok, {counters.saving_ratio:.0%} saved, "
                    f"{rate:.0f} tok/s out",
                    refresh=False,
                )
                bar.update(num_finished)
        return faults


@dataclass(frozen=True, slots=True)
class _GivenPrompts:
    """The prompts of a call, in the caller's order, and how to answer each."""

    texts: Sequence[str | None]  # None: given as ids, or refused
    ids: Sequence[list[int] | None]  # None: refused
    params: Sequence[SamplingParams]
    sessions: Sequence[str | None]
    overflow: Overflow | None


def _overflow(given: Overflow | str | None) -> Overflow | None:
    """What happens to prompts that are longer than the context window."""
    if not isinstance(given, str):
        return given
    known = [policy.value for policy in Overflow]
    if given not in known:
        raise InvalidRequest("overflow", f"must be one of {known}, got {given!r}")
    return Overflow(given)
