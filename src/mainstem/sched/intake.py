"""Makes the Sequences that answer a Request: checks it, cuts its prompt to the window, names pages,
and sets seeds."""

from collections.abc import Iterable
from itertools import count

import numpy as np

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.request import Overflow, Request
from mainstem.kv.keys import PageChain
from mainstem.kv.store import KVStore
from mainstem.sched.form import AnswerForm
from mainstem.sched.important import Weighing
from mainstem.sched.origins import Origins, TruncatedPrompt, truncated_chain
from mainstem.sched.prompt_logprobs import PromptLogprobs
from mainstem.sched.random import mix
from mainstem.sched.sequence import READER, Sequence
from mainstem.sched.truncation import Truncation, Truncator


class Intake:
    """Accepts requests; refuses those that can never run."""

    def __init__(
        self,
        config: SchedConfig,
        store: KVStore,
        vocab_size: int,
        window: int,
    ) -> None:
        """`window` is the limit for the tokens of prompt and answer together."""
        self._store = store
        self._vocab_size = vocab_size
        self._window = window
        self._truncator = Truncator(config, window, store.page_size)
        self._is_sharing = config.share is not Share.NONE
        self._seed = _mix(config.seed, -1)  # no answer has index -1
        self._arrivals = count()

    def accept(self, given: Request) -> tuple[list[Sequence], Truncation | None]:
        """Return one sequence per answer, not queued yet, and how the prompt was cut. If the cut
        must be found first, the sequence that finds it comes before the others. Raises
        InvalidRequest."""
        self._check_ids("prompt", [int(given.prompt_ids.max())])
        self._check_ids("stop_token_ids", given.sampling.stop_token_ids)
        self._check_ids("logit_bias", given.sampling.logit_bias or ())
        if given.scoring is not None:
            self._check_ids("scoring", given.scoring.next_ids)
        has_states = self._store.states is not None
        if has_states and given.overflow_policy is Overflow.IMPORTANT:
            raise InvalidRequest(
                "overflow",
                "important is not supported for a model with recurrent layers: tokens cannot be "
                "taken out of their states; recompute is",
            )
        request, truncation = self._truncator.fit(given)
        weighing = None if truncation is None else truncation.weighing
        reader = [] if weighing is None else [self._reader(weighing)]
        chain, truncated = None, None
        if weighing is None:
            chain, truncated = self._names(given, request, truncation)
        elif truncation is not None:
            truncated = TruncatedPrompt(truncation.num_dropped, weighing=weighing)
        room = self._window - len(request.prompt_ids)
        wanted = request.sampling.max_tokens
        answers = [
            Sequence(
                request,
                index,
                *self._arrive(request, index),
                room if wanted is None else min(wanted, room),
                chain,
                truncated,
                self._form(request),
            )
            for index in range(request.sampling.n)
        ]
        return [*reader, *answers], truncation

    def settle(self, weighing: Weighing, answers: Iterable[Sequence]) -> None:
        """After the pages were weighed, give the waiting `answers` their cut."""
        self._truncator.settle(weighing)
        request, truncation = self._truncator.fit(weighing.given)
        chain, truncated = self._names(weighing.given, request, truncation)
        for answer in answers:
            answer.request, answer.chain, answer.truncated = request, chain, truncated
            if answer.prompt_logprobs is not None:
                answer.prompt_logprobs = PromptLogprobs.of(request)

    def _reader(self, weighing: Weighing) -> Sequence:
        """The sequence that reads what is left of a conversation, to weigh its pages."""
        given, request, before = weighing.given, weighing.request(), weighing.before
        chain, origins = None, None
        if self._is_sharing and before.is_whole:
            chain = self._store.chain(request.prompt_ids, request.salt, request.public_tokens)
        elif self._is_sharing:
            whole = self._store.chain(given.prompt_ids, given.salt, given.public_tokens)
            chain = truncated_chain(whole, given, before, request.prompt_ids)
            left = Truncation(given.overflow_policy, before, weighing.earlier, 0)
            origins = Origins(whole, given, left)
        truncated = TruncatedPrompt(0, origins, weighing)
        return Sequence(request, READER, *self._arrive(request, READER), 1, chain, truncated)

    def _form(self, request: Request) -> AnswerForm | None:
        """Return the form of an answer. Raises InvalidRequest unless the model has a token that the
        form can begin with."""
        if request.grammar is None:
            return None
        form = AnswerForm(request.grammar.start(), self._vocab_size)
        fault = form.fault(np.empty(0, np.int32))
        if fault is not None:
            raise InvalidRequest("response_format", fault)
        return form

    def _arrive(self, request: Request, index: int) -> tuple[int, int]:
        """Return seed and arrival number of an answer. If the request has a seed, the answer's seed
        depends only on it and on `index`."""
        arrival, seed = next(self._arrivals), request.sampling.seed
        if seed is None:
            seed = _mix(self._seed, arrival)
        return _mix(seed, index) if index else seed, arrival

    def _names(
        self, given: Request, request: Request, truncation: Truncation | None
    ) -> tuple[PageChain | None, TruncatedPrompt | None]:
        """Return the names of a prompt's pages and, if it was truncated, where the kept pages may
        be found."""
        truncated = None if truncation is None else TruncatedPrompt(truncation.num_dropped)
        if not self._is_sharing:
            return None, truncated
        # tokens cannot be taken out of a state, so a model with states computes the rest again
        moves_kv = self._store.states is None
        if truncation is None or not (truncation.policy.moves_kv and moves_kv):
            chain = self._store.chain(request.prompt_ids, request.salt, request.public_tokens)
            return chain, truncated
        whole = self._store.chain(given.prompt_ids, given.salt, given.public_tokens)
        chain = truncated_chain(whole, given, truncation.cut)
        origins = Origins(whole, given, truncation)
        return chain, TruncatedPrompt(truncation.num_dropped, origins)

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidRequest(
                    field, f"token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )


def _mix(seed: int, index: int) -> int:
    return int(mix(np.array([seed], np.int64), np.array([index], np.int64))[0])
