"""Conversations longer than the context window: what is kept of them, and where its KV is found.

    prompt   | sink |  dropped: k * step pages  |        rest        |
    kept     | sink |        rest        |  the answer  ...  window

The cut moves in steps of whole pages and depends on the prompt's length alone, so nothing has to be
remembered between turns: a later turn of the conversation is cut at the same place, until it has
outgrown the window by one more step, and finds the pages of the turn before.

Under `recompute` the kept tokens are a prompt like any other. Under `kv` their keys are rotated by
the distance they move (AttentionStore 3.4). Such pages still depend on tokens that are gone, so
their names include the session and what was dropped: no other request uses them.
"""

from dataclasses import dataclass, replace

import numpy as np

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.request import ChooseKept, Overflow, Request
from mainstem.core.step import Int32s


@dataclass(frozen=True, slots=True)
class TruncationRules:
    """What the settings say about truncation."""

    choose_kept: ChooseKept | None = None  # None: only the sink is kept


DEFAULT_RULES = TruncationRules()


CHOSEN_SHARE = 8  # at most 1/8 of the window's pages may be chosen


@dataclass(frozen=True, slots=True)
class Cut:
    """The pages of a prompt that are kept: some at its head, and all from `rest` on."""

    head: tuple[int, ...]  # page numbers in the prompt: the sink, then the chosen ones
    sink_pages: int  # how many of them keep their place
    rest: int

    def token_ids(self, prompt_ids: Int32s, page_size: int) -> Int32s:
        """The prompt without what is dropped."""
        pages = prompt_ids[: self.rest * page_size].reshape(-1, page_size)
        head = pages[list(self.head)].reshape(-1)
        return np.concatenate([head, prompt_ids[self.rest * page_size :]])

    def place_before(self, number: int) -> int:
        """Where in the prompt the kept page `number` was."""
        if number < len(self.head):
            return self.head[number]
        return number - len(self.head) + self.rest

    def place_after(self, number: int) -> int | None:
        """Where the prompt's page `number` is among the kept ones; None: dropped."""
        if number >= self.rest:
            return number - self.rest + len(self.head)
        return self.head.index(number) if number in self.head else None


WHOLE = Cut(head=(), sink_pages=0, rest=0)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt was cut, and how the prompts of earlier turns were."""

    policy: Overflow  # KV or RECOMPUTE
    cut: Cut
    cuts_before: tuple[Cut, ...]
    num_dropped: int


class Truncator:
    """Fits prompts into the window."""

    def __init__(
        self,
        config: SchedConfig,
        window: int,
        page_size: int,
        rules: TruncationRules,
    ) -> None:
        self._rules = rules
        self._window = window
        self._page_size = page_size
        self._ratio = config.truncation_ratio
        self._sink_tokens = page_size if config.sink_tokens is None else config.sink_tokens
        is_choosing = rules.choose_kept is not None
        self._max_chosen = window // page_size // CHOSEN_SHARE if is_choosing else 0

    def fit(self, request: Request) -> tuple[Request, Truncation | None]:
        """The request with its prompt cut to the window, and the cut (None: it fits uncut).
        InvalidRequest if its policy, or the pages it wants kept, do not allow a cut.

        Room is left for the answer, too: for max_tokens, but at most half of what a cut leaves
        besides the sink.
        """
        num_prompt, window = len(request.prompt_ids), self._window
        fixed = max(self._sink_tokens, request.keep_tokens)
        sink_pages = -(-fixed // self._page_size)
        free = window - (sink_pages + self._max_chosen) * self._page_size
        is_fixed = request.overflow_policy is Overflow.ERROR
        if is_fixed or free < 2 * self._page_size:  # it cannot be cut
            if num_prompt < window:
                return request, None
            raise _too_long(num_prompt, window, None if is_fixed else fixed)
        step = max(1, int(self._ratio * free) // self._page_size)
        room = max(1, int((1 - self._ratio) * free / 2))
        if request.sampling.max_tokens is not None:
            room = min(room, request.sampling.max_tokens)
        if num_prompt + room <= window:
            return request, None
        if request.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs", f"{num_prompt} tokens must be cut to the context of {window}"
            )
        excess = num_prompt + room + self._max_chosen * self._page_size - window
        num_steps = -(-excess // (step * self._page_size))
        cut = self._cut(request.prompt_ids, sink_pages, num_steps * step)
        kept_ids = cut.token_ids(request.prompt_ids, self._page_size)
        # pages of an earlier turn have moved by at most a window since
        first = max(1, num_steps - window // (step * self._page_size) - 1)
        before = (
            self._cut(request.prompt_ids, sink_pages, number * step)
            for number in range(first, num_steps)
        )
        public = min(request.public_tokens, sink_pages * self._page_size)
        kept = replace(request, prompt_ids=kept_ids, public_tokens=public)
        return kept, Truncation(
            request.overflow_policy, cut, tuple(before), num_prompt - len(kept_ids)
        )

    def _cut(self, prompt_ids: Int32s, sink_pages: int, dropped: int) -> Cut:
        rest = sink_pages + dropped
        chosen: list[int] = []
        choose_kept = self._rules.choose_kept
        if choose_kept is not None:
            pages = prompt_ids[: rest * self._page_size].reshape(-1, self._page_size)[sink_pages:]
            chosen = sorted({int(number) for number in choose_kept(pages, self._max_chosen)})
            if len(chosen) > self._max_chosen or not set(chosen) <= set(range(len(pages))):
                raise ConfigError(
                    f"choose_kept must name at most {self._max_chosen} of {len(pages)} pages, "
                    f"got {chosen}"
                )
        head = (*range(sink_pages), *(sink_pages + number for number in chosen))
        return Cut(head, sink_pages, rest)


def _too_long(num_prompt: int, window: int, num_fixed: int | None) -> InvalidRequest:
    """`num_fixed`: leading tokens that leave too little to cut; None: it may not be cut at all."""
    if num_fixed is None:
        return InvalidRequest(
            "prompt", f"{num_prompt} tokens leave no room for an answer in the context of {window}"
        )
    return InvalidRequest(
        "keep_tokens",
        f"a prompt of {num_prompt} tokens cannot be cut to the context of {window} "
        f"while its first {num_fixed} tokens are kept",
    )
