"""Logprobs of prompt tokens: those that are kept with pages, and those that a sequence computes.

Several sequences may want logprobs of the same pages. The first computes them; the others wait
until it is done, and then find them with the pages.
"""

from dataclasses import dataclass

import numpy as np

from mainstem.core.ids import PageKey
from mainstem.core.request import Request, TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.finder import Lookup, Match
from mainstem.kv.keys import PageChain
from mainstem.kv.page_logprobs import MAX_TOP
from mainstem.kv.store import KVStore


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """A part of a Sequence: the logprobs of its prompt, until they are delivered."""

    request: Request
    found: list[TokenLogprobs | None]  # of the first tokens; with a Scoring, of the wanted ones
    first: int  # the first place in the prompt whose logprob is computed
    is_dropped: bool = False  # delivered, or the sequence was preempted and begins again

    @classmethod
    def of(cls, request: Request) -> "PromptLogprobs | None":
        """What a request wants; None: nothing."""
        if request.scoring is not None:
            return cls(request, [], request.scoring.first)
        if request.sampling.prompt_logprobs is not None:
            return cls(request, [None], 1)  # the first token has no logprob
        return None

    @property
    def is_complete(self) -> bool:
        """Whether a logprob of every prompt token is there, for others to use."""
        is_kept = bool(self.request.sampling.prompt_logprobs)
        return is_kept and len(self.found) >= len(self.request.prompt_ids)

    def rows(self, begin: int, end: int) -> tuple[Int32s, Int32s]:
        """Of the prompt's tokens from `begin` to `end`, return the places whose logits are needed,
        and for each place the token that follows."""
        prompt_ids, scoring = self.request.prompt_ids, self.request.scoring
        first = max(begin + 1, self.first)
        following = prompt_ids[first : end + 1]
        places = np.arange(first - 1, first - 1 + len(following), dtype=np.int32)
        if scoring is not None and end == len(prompt_ids):
            next_ids = np.array(scoring.next_ids, np.int32)
            following = np.concatenate((following, next_ids))
            places = np.append(places, np.full(len(next_ids), end - 1, np.int32))
        return places, following


class Collectors:
    """The running sequences that compute logprobs which others may use."""

    def __init__(self) -> None:
        self._pages: dict[PromptLogprobs, set[PageKey]] = {}  # of the prompt of each

    def add(self, wanted: PromptLogprobs, chain: PageChain) -> None:
        """A sequence that wants these logprobs has started."""
        if wanted.request.sampling.prompt_logprobs and not wanted.is_complete:
            self._pages[wanted] = set(chain.keys)

    def remove_done(self) -> list[PromptLogprobs]:
        """Return those that are complete or dropped by now: nothing waits for them any longer."""
        done = [each for each in self._pages if each.is_complete or each.is_dropped]
        for each in done:
            del self._pages[each]
        return done

    def look_up(
        self, store: KVStore, wanted: PromptLogprobs, chain: PageChain
    ) -> tuple[Match, list[TokenLogprobs | None], PromptLogprobs | None]:
        """Find the cached pages whose logprobs are known as well. Returns the pages, their
        logprobs, and what is to be waited for, because it computes the next logprobs.

        The token before the first unknown logprob is always computed, for its logits.
        """
        request = wanted.request
        if request.scoring is not None:
            return store.lookup(chain, request.scoring.first - 1), [], None
        whole = store.lookup(chain, len(request.prompt_ids))
        if whole.outcome is Lookup.LOADING:
            return whole, [], None
        num_top = request.sampling.prompt_logprobs or 0
        logprobs = store.finder.known_logprobs(whole, num_top)
        place = len(logprobs) // chain.page_size  # of the page with the next logprob
        if num_top <= MAX_TOP and place < len(whole.pages):
            for other, pages in self._pages.items():
                if chain.keys[place] in pages and not (other.is_complete or other.is_dropped):
                    return whole, logprobs, other
        return store.lookup(chain, max(len(logprobs), 1) - 1), logprobs, None
