"""LLM: the engine for scripts, with the names vLLM users know (docs/python.md)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

from tqdm import tqdm

from mainstem.core.config import EngineConfig, Share
from mainstem.core.errors import AnswerFailed, InvalidRequest
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.request import Overflow, Request, SamplingParams
from mainstem.core.weights import Tag, UpdateMode
from mainstem.llm.bar import PromptBar
from mainstem.llm.calls import GivenPrompts, PromptCall, ScoringCall
from mainstem.llm.loaded import (
    LoadedModel,
    ReadyPrompt,
    Weights,
    overflow_policy,
    read_tags,
    read_update,
)
from mainstem.llm.rollouts import OpenGroup, RolloutGroup, RolloutPart
from mainstem.llm.steps import SharedSteps
from mainstem.text.control_tokens import without_marks
from mainstem.text.engine_thread import BeginChange
from mainstem.text.prompts import (
    Context,
    Conversation,
    OnError,
    Refusals,
    ScriptPrompt,
    listed_choices,
    listed_contexts,
    listed_conversations,
    listed_params,
    listed_prompts,
    listed_sessions,
)
from mainstem.text.results import AnswerPiece, RequestOutput, piece_of
from mainstem.text.scoring import ContextScoring, ScoreOutput
from mainstem.text.text_engine import TextEngine


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
        shares = config.sched.share is not Share.NONE
        self._steps = SharedSteps(self.text_engine, shares)

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
        names, policy = listed_sessions(sessions, len(listed)), overflow_policy(overflow)
        with self._call():
            return self._run(GivenPrompts(shown, ids, params, names, policy), refusals, use_tqdm)

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
        names, policy = listed_sessions(sessions, len(texts)), overflow_policy(overflow)
        turns = list(zip(names, texts, strict=True))
        with self._call():
            ids: list[list[int] | None] = [None] * len(texts)
            for index, (session, text) in enumerate(turns):
                if text is not None:
                    with refusals.at(index):
                        ids[index] = self.encode_turn(session, text)
            shown = [None if text is None else without_marks(text) for text in texts]
            results = self._run(GivenPrompts(shown, ids, params, names, policy), refusals, use_tqdm)
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

    def rollouts(
        self,
        prompts: Iterable[ScriptPrompt | RolloutGroup],
        n: int = 8,
        sampling_params: SamplingParams | None = None,
        *,
        budget: int | None = None,
    ) -> Iterator[RolloutGroup]:
        """Sample `n` answers of each prompt; yields each group when it is whole.

            for group in llm.rollouts(prompts, 8, SamplingParams(max_tokens=64)):
                rewards = [reward(answer.text) for answer in group.answers]

        A prompt is computed once for all its answers. Answers have logprobs as arrays. With a
        `budget`, an answer gets at most that number of tokens in this call: groups with longer
        answers are yielded unfinished, and a later call takes them in place of prompts. It
        continues from the pages of K and V that are cached; if the weights have changed, all tokens
        are computed again. Steps run while the caller waits for a group: see AsyncLLM.rollouts for
        steps that run meanwhile, too.
        """
        with self._call():
            groups = self._rollout_parts(prompts, n, sampling_params, budget)
        return self._groups(groups)

    def _groups(self, groups: list[list[tuple[Request, RolloutPart]]]) -> Iterator[RolloutGroup]:
        ids = [request.request_id for parts in groups for request, _ in parts]
        try:
            with self._call():
                waiting = [
                    OpenGroup([(part, self._steps.open_stream(request)) for request, part in parts])
                    for parts in groups
                ]
            while waiting:
                with self._call():
                    self._steps.step()
                whole = [opened for opened in waiting if opened.read(self.tokenizer)]
                waiting = [opened for opened in waiting if opened not in whole]
                for opened in whole:
                    yield opened.group
        finally:
            for request_id in ids:
                self._leave(request_id)

    def update_weights(
        self, weights: Weights, *, mode: UpdateMode | str = UpdateMode.FINISH
    ) -> str:
        """Bring other weights of the same model into force; returns the name of their version.

            llm.update_weights("checkpoints/step-20")          # a folder
            llm.update_weights(model.state_dict().items())     # an iterator of (name, tensor)

        `weights` are all tensors of a checkpoint, or some: the others stay. Tensors must not change
        before the call returns. No K and V of the old weights is used for the new ones. `mode` says
        what happens to open streams: "finish" answers them first, "abort" ends them, "continue"
        goes on with the new weights and the old K and V. If the call raises, the old weights are in
        force, whole (after WeightsLost: none are, until they are updated).
        """
        update, how = read_update(weights, mode)
        return self._change(lambda engine: engine.update_weights(update, how))

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: that of cached K and V, and of the weights, which level
        1 keeps in host memory and level 2 drops. Open streams are read to their end first."""
        self._change(lambda engine: engine.sleep(level))

    def wake_up(self, tags: Iterable[Tag | str] | None = None) -> None:
        """Undo `sleep`: all of it, or only "weights" or only "kv_cache". Weights that level 2
        dropped are read from their folder again; if they came from an iterator, prompts are refused
        until `update_weights` has brought all of them."""
        wanted = read_tags(tags)
        self._change(lambda engine: engine.wake(wanted))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page, on all tiers. For callers of vLLM's method: after
        `update_weights` no page of old weights can be found anyway."""
        with self._call():
            self.text_engine.engine.clear_cache()
        return True

    @property
    def is_sleeping(self) -> bool:
        return self.text_engine.engine.is_asleep

    def _change(self, begin: BeginChange) -> str:
        with self._call():
            change = begin(self.text_engine.engine)
            while not change.done():
                outputs = self._steps.step()
                assert not outputs, "only streams run during a change"
                self._check_open()
            return change.result()

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

    def _pieces(self, turn: ReadyPrompt) -> Iterator[AnswerPiece]:
        request, output_ids = turn.request, list[int]()
        num_open = request.sampling.n
        try:
            with self._call():
                news = self._steps.open_stream(request)
            while num_open:
                while not news:
                    with self._call():
                        assert news or self.text_engine.has_work, "a stream was lost"
                        if not news:
                            self._steps.step()
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
        self._steps.leave_stream(request_id)
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not (self._is_called or self._is_closed):
                with guarded_interrupts():
                    self._steps.settle()
        finally:
            self._lock.release()

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
    def lent_engine(self) -> Iterator[TextEngine]:
        """Lend the engine to a job that submits and steps by itself. Other calls wait until it is
        given back, with nothing running; raises InvalidRequest while streams are open."""
        with self._call():
            if not self._steps.is_idle:
                raise InvalidRequest("LLM", "has open streams; read them to their end first")
            try:
                yield self.text_engine
            finally:
                if not self._is_closed:
                    self._steps.settle()  # requests that were aborted end with a step

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

    def _run(self, given: GivenPrompts, refusals: Refusals, use_tqdm: bool) -> list[RequestOutput]:
        with _bar("req", use_tqdm) as bar:
            call = PromptCall(self, given, refusals, PromptBar(self.counters, bar))
            self._steps.run(call.prompts, call.submit, call.hear, call.progress)
        return call.results()

    def _run_scorings(
        self, scorings: Mapping[int, ContextScoring], refusals: Refusals, use_tqdm: bool
    ) -> dict[int, str]:
        """Score all choices; returns the failures by context."""
        call = ScoringCall(self, scorings, refusals)
        with _bar("prompt", use_tqdm) as bar:
            self._steps.run(call.prompts, call.submit, call.hear, bar)
        return call.faults


def _bar(unit: str, is_shown: bool) -> "tqdm[Any]":
    return tqdm(total=0, unit=unit, disable=not is_shown, miniters=0, dynamic_ncols=True)
