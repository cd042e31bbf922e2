"""LLM: the engine for scripts, with the names vLLM users know."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import RLock

import numpy as np
from tqdm import tqdm

from mainstem.checkpoints.hub import resolve_model
from mainstem.checkpoints.progress import StageBar
from mainstem.core.config import EngineConfig, Share, with_arguments
from mainstem.core.errors import AnswerFailed, ConfigError, InvalidRequest
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.core.request import (
    ChooseKept,
    Delivery,
    Overflow,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from mainstem.engine.build import build_engine
from mainstem.plan.order import shared_with_next
from mainstem.plan.planner import plan_prompts
from mainstem.text.prompts import (
    Message,
    ScriptPrompt,
    listed_conversations,
    listed_params,
    listed_prompts,
)
from mainstem.text.sessions import SessionLimits, Sessions, continued_ids, spoken_text
from mainstem.text.text_engine import TextEngine, TextOutput
from mainstem.text.tokenizer import GENERATION_FILE, Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer, when logprobs were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_dropped_tokens: int = 0  # of a prompt that was longer than the context window

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A model loaded once, answering batches of prompts.

        llm = LLM("smollm2")
        for answer in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(answer.outputs[0].text)

    Prompts that begin alike share what they have in common: it is computed once, stored once and
    read once per step. Calls from several threads wait for each other; prompts of one call do not.
    """

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
        share: str = "reads",
        span_levels: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        chat_template: str | Path | None = None,
        deterministic: bool = False,
        ignore_config_fields: str | Sequence[str] | None = None,
        seed: int = 0,
        truncation_ratio: float = 0.5,
        sink_tokens: int | None = None,
        choose_kept: ChooseKept | None = None,
        host_gb: float | None = None,
        disk_dir: str | Path | None = None,
        disk_gb: float = 20.0,
        store_ttl: float | None = None,
        store_policy: str = "lookahead",
        store_fetch: str = "auto",
        preload: str = "auto",
    ) -> None:
        """Settings mean what the flags of the same names mean (docs/settings.md); `choose_kept`
        names pages that a truncation should spare (docs/design/truncation.md)."""
        given = dict(locals())  # all arguments, which are settings but for these
        del given["self"], given["choose_kept"]
        config = with_arguments(EngineConfig(), given, "LLM")
        self._connect(config, choose_kept)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        """An LLM from a whole EngineConfig, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._connect(config)
        return llm

    def _connect(self, config: EngineConfig, choose_kept: ChooseKept | None = None) -> None:
        with StageBar() as bar:
            folder = resolve_model(config.model.model, bar)
        tokenizer = Tokenizer.load(folder, config.model.chat_template)
        bus = EventBus()
        self.counters = Counters().attach(bus)
        engine = build_engine(folder, config, bus, choose_kept=choose_kept)
        self.text_engine = TextEngine(engine, tokenizer)
        self._request_ids = count()
        self._lock = RLock()  # held while answers are made; a signal handler may close the LLM
        self._is_called = self._is_closed = False
        self._sessions = Sessions(SessionLimits())
        self._shares = config.sched.share is not Share.NONE

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_engine.tokenizer

    def generate(
        self,
        prompts: ScriptPrompt | Sequence[ScriptPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sessions: Sequence[str] | None = None,
        overflow: Overflow | str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, given as text, token ids, {"prompt": text} or {"prompt_token_ids": ids};
        results in the order of the prompts.

        Without `sampling_params`, `get_default_sampling_params` has its say. `sessions` names the
        conversation each prompt continues. `overflow` says what becomes of a
        prompt longer than the context window: "kv" (the default in sessions), "recompute" or
        "error". Raises InvalidRequest before anything runs if one of them cannot be answered, and
        AnswerFailed after everything ran if steps failed over one again and again.
        """
        listed = listed_prompts(prompts)
        texts = [prompt for prompt in listed if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in listed]
        shown = [prompt if isinstance(prompt, str) else None for prompt in listed]
        params = self._params(sampling_params, len(listed))
        window = _window_rules(sessions, overflow, len(listed))
        with self._call():
            return self._run(shown, ids, params, window, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sessions: Sequence[str] | None = None,
        overflow: Overflow | str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; `sessions` and
        `overflow` as in `generate`. A turn of a session extends the ids of the turns before it."""
        conversations = listed_conversations(messages)
        texts = [self.tokenizer.render_chat(conversation) for conversation in conversations]
        params = self._params(sampling_params, len(texts))
        window = _window_rules(sessions, overflow, len(texts))
        turns = list(zip(window.sessions, texts, strict=True))
        with self._call():
            ids = [self.encode_turn(session, text) for session, text in turns]
            results = self._run(texts, ids, params, window, use_tqdm)
            for (session, text), result in zip(turns, results, strict=True):
                self.keep_turn(session, text, result.prompt_token_ids, result.outputs[0].token_ids)
        return results

    def encode_turn(self, session: str | None, text: str) -> list[int]:
        """Ids of a conversation: where it goes on from what `session` has said, those ids and the
        new ones. Encoding an answer again could give others, whose pages are not cached."""
        known = None if session is None else self._sessions.find("", session)
        ids = continued_ids(known, text, self.tokenizer)
        return self.tokenizer.encode_plain(text) if ids is None else ids

    def keep_turn(
        self, session: str | None, text: str, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Remember a turn that has ended, for `encode_turn` of the next."""
        if session is not None:
            said = spoken_text(text, output_ids, self.tokenizer)
            token_ids = np.array([*prompt_ids, *output_ids], np.int32)
            self._sessions.keep("", session, token_ids, said)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: as the model's generation_config.json advises."""
        try:
            return SamplingParams(**self.tokenizer.sampling_defaults)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(f"{GENERATION_FILE}: {error}; SamplingParams do without it") from None

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        return listed_params(self.get_default_sampling_params() if given is None else given, number)

    def close(self) -> None:
        """Stop whatever runs: a call on another thread ends after its step, with an error. The
        memory goes with the last reference to the LLM."""
        if self.text_engine.engine.is_forked:
            return  # its threads, and who holds the lock, are in the other process
        self._is_closed = True
        with self._lock, guarded_interrupts():
            self.text_engine.engine.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call at a time; one from within another (by a callback) would take its answers.
        Ctrl-C waits for a change of the engine's books. In a forked child it raises ForkedProcess:
        the lock may be held by a thread that is not there."""
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequest("LLM", "is closed")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[str | None],
        ids: Sequence[list[int]],
        params: Sequence[SamplingParams],
        window: "_WindowRules",
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        for prompt, prompt_ids, sampling in zip(prompts, ids, params, strict=True):
            request_id = f"{next(self._request_ids)}"
            results[request_id] = _empty_result(request_id, prompt, prompt_ids, sampling)
        request_ids = list(results)
        try:
            for index, place in self._order(ids):
                session = window.sessions[index]
                request = Request(
                    RequestId(request_ids[index]),
                    np.asarray(ids[index]),
                    params[index],
                    delivery=Delivery.AT_END,
                    plan_place=place,
                    session=None if session is None else SessionId(session),
                    overflow=window.overflow,
                )
                self.text_engine.submit(request)
            self._drain(results, use_tqdm)
        except BaseException:
            for request_id in results:  # an error or Ctrl-C leaves nothing running
                self.text_engine.abort(request_id)
            while self.text_engine.has_work:
                self.text_engine.step()
            raise
        return list(results.values())

    def _order(self, ids: Sequence[list[int]]) -> list[tuple[int, int | None]]:
        """Prompts in the order to run, with their places in it: what shares a prefix together."""
        if not self._shares or len(ids) < 2:
            return [(index, None) for index in range(len(ids))]
        plan = plan_prompts(Prompts.from_lists(ids))
        first = self.text_engine.expect(shared_with_next(plan))
        return [(index, first + place) for place, index in enumerate(plan.members.tolist())]

    def _drain(self, results: Mapping[str, RequestOutput], use_tqdm: bool) -> None:
        counters = self.counters
        num_prompt = sum(
            len(result.prompt_token_ids) * len(result.outputs) for result in results.values()
        )
        prefilled = counters.computed_tokens + counters.cached_tokens
        decoded = counters.decoded_tokens
        faults: dict[str, str] = {}
        with tqdm(
            total=len(results), unit="req", disable=not use_tqdm, miniters=0, dynamic_ncols=True
        ) as bar:
            while self.text_engine.has_work:
                num_finished = 0
                for output in self.text_engine.step():
                    result = results.get(output.request_id)
                    if result is None:
                        continue  # the last word of a call that was interrupted
                    add_output(result, output)
                    if output.fault is not None:
                        faults[output.request_id] = output.fault
                    num_finished += result.finished
                self._check_open()
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
        for request_id, fault in faults.items():
            place, total = list(results).index(request_id), len(results)
            raise AnswerFailed(
                f"{len(faults)} of {total} prompts could not be answered; number {place}: {fault}",
                list(results.values()),
            )


def add_output(result: RequestOutput, output: TextOutput) -> None:
    """Put news of an answer where it belongs."""
    answer = result.outputs[output.index]
    answer.text += output.text
    answer.token_ids += output.token_ids
    if answer.logprobs is not None:
        answer.logprobs += output.logprobs
    if output.prompt_logprobs is not None:
        result.prompt_logprobs = list(output.prompt_logprobs)
    if output.index == 0:
        result.num_cached_tokens = output.num_cached_tokens
        result.num_dropped_tokens = output.num_dropped_tokens
    if output.finish_reason is not None:
        answer.finish_reason = output.finish_reason.value
        answer.stop_reason = output.stop_reason


def _empty_result(
    request_id: str, prompt: str | None, prompt_ids: list[int], sampling: SamplingParams
) -> RequestOutput:
    wants_logprobs = sampling.logprobs is not None
    answers = [
        CompletionOutput(index, logprobs=[] if wants_logprobs else None)
        for index in range(sampling.n)
    ]
    return RequestOutput(request_id, prompt, prompt_ids, answers)


@dataclass(frozen=True, slots=True)
class _WindowRules:
    """What becomes of prompts that are longer than the context window."""

    sessions: Sequence[str | None]
    overflow: Overflow | None


def _window_rules(
    sessions: Sequence[str] | None, overflow: Overflow | str | None, number: int
) -> _WindowRules:
    if sessions is not None and len(sessions) != number:
        raise InvalidRequest("sessions", f"{len(sessions)} given for {number} prompts")
    if isinstance(overflow, str):
        known = [policy.value for policy in Overflow]
        if overflow not in known:
            raise InvalidRequest("overflow", f"must be one of {known}, got {overflow!r}")
        overflow = Overflow(overflow)
    return _WindowRules([None] * number if sessions is None else sessions, overflow)
