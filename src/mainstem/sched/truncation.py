"""Cuts conversations that are longer than the context window (sched/origins.py finds the KV of what
is kept).

    prompt   | sink |  dropped: k * step pages  |        rest        |
    kept     | sink |        rest        |  the answer  ...  window

The cut moves in steps of whole pages and depends only on the request, so nothing has to be
remembered between turns. A later turn is cut at the same place and finds the pages of the turn
before, until the conversation exceeds the window by one more step.

Under `recompute` the kept tokens are a prompt like any other. Under `kv` their keys are rotated by
the distance they move (AttentionStore 3.4). Such pages still depend on dropped tokens, so their
names include the session and what was dropped: no other session uses them. Under `important` the
dropped pages are chosen by attention, not by age, and the choice is remembered
(sched/important.py).
"""

from dataclasses import dataclass, replace

from mainstem.core.config import SchedConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.request import Overflow, Request
from mainstem.sched.cut import PromptCut, sink_only
from mainstem.sched.important import Choices, Weighing, cut_names, weigh


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt was cut, and how the prompts of earlier turns may have been cut."""

    policy: Overflow  # KV, IMPORTANT or RECOMPUTE
    cut: PromptCut
    cuts_before: tuple[PromptCut, ...]
    num_dropped: int
    # how to find the cut; until it is found, only the length of `cut` is right
    weighing: Weighing | None = None


class Truncator:
    """Fits prompts into the window."""

    def __init__(self, config: SchedConfig, window: int, page_size: int) -> None:
        self._window = window
        self._page_size = page_size
        self._ratio = config.truncation_ratio
        self._sink_tokens = page_size if config.sink_tokens is None else config.sink_tokens
        self._choices = Choices()

    def fit(self, request: Request) -> tuple[Request, Truncation | None]:
        """Return the request with its prompt cut to the window, and the cut (None if no cut is
        needed). Raises InvalidRequest if a cut is needed and the request does not allow it: by its
        policy, the tokens it wants to keep, or prompt logprobs. If pages must be weighed first,
        pass the Weighing to `settle` after that, and call `fit` again.

        The cut also leaves room for the answer: max_tokens, but at most (1 - truncation_ratio) / 2
        of the window without the sink.
        """
        num_prompt, window = len(request.prompt_ids), self._window
        fixed = max(self._sink_tokens, request.keep_tokens)
        sink_pages = -(-fixed // self._page_size)
        free = window - sink_pages * self._page_size
        is_fixed = request.overflow_policy is Overflow.ERROR
        if is_fixed or free < 2 * self._page_size:  # the prompt cannot be cut
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
                "prompt_logprobs",
                f"the prompt of {num_prompt} tokens must be cut to the context of {window}, and "
                "logprobs are given only for whole prompts",
            )
        excess = num_prompt + room - window
        num_steps = -(-excess // (step * self._page_size))
        if request.overflow_policy is Overflow.IMPORTANT:
            cuts, weighing = self._chosen_cuts(request, sink_pages, step, num_steps)
        else:
            cuts, weighing = self._plain_cuts(sink_pages, step, num_steps), None
        cut = cuts[-1]
        kept_ids = cut.token_ids(request.prompt_ids, self._page_size)
        # a page moves by at most one window in all, so cuts before these do not matter
        num_before = window // (step * self._page_size) + 1
        before = cuts[:-1][-num_before:]
        public = min(request.public_tokens, sink_pages * self._page_size)
        kept = replace(request, prompt_ids=kept_ids, public_tokens=public)
        return kept, Truncation(
            request.overflow_policy, cut, before, num_prompt - len(kept_ids), weighing
        )

    def settle(self, weighing: Weighing) -> None:
        """After the pages were weighed, choose and remember the choice. If another turn has made
        the choice in the meantime, its choice is used."""
        num_pages = len(weighing.given.prompt_ids) // self._page_size
        if self._choices.chosen(weighing.name, num_pages) is None:
            self._choices.keep(weighing.name, weighing.choose())

    def _plain_cuts(self, sink_pages: int, step: int, num_steps: int) -> tuple[PromptCut, ...]:
        """Return the cuts that earlier turns may have had, and last the cut of this prompt."""
        first = max(1, num_steps - self._window // (step * self._page_size) - 1)
        whole, numbers = sink_only(sink_pages), range(first, num_steps + 1)
        return tuple(replace(whole, rest=sink_pages + each * step) for each in numbers)

    def _chosen_cuts(
        self, request: Request, sink_pages: int, step: int, num_steps: int
    ) -> tuple[tuple[PromptCut, ...], Weighing | None]:
        """Return the chosen cut after each step and, if the last one was not chosen yet, how to
        choose it. If an earlier choice was forgotten, its cut drops the oldest pages."""
        num_pages = len(request.prompt_ids) // self._page_size
        cuts: tuple[PromptCut, ...] = (sink_only(sink_pages),)
        weighing: Weighing | None = None
        names = cut_names(request, sink_pages, step, self._page_size)
        for number, name in zip(range(num_steps), names, strict=False):
            cut = self._choices.chosen(name, num_pages)
            if cut is None:
                cut = cuts[-1].without_oldest(step)
                if number == num_steps - 1:
                    weighing = weigh(name, request, cuts, step, self._window, self._page_size)
                    if weighing is None:
                        self._choices.keep(name, cut)  # later turns must not choose again
            cuts = (*cuts, cut)
        return cuts[1:], weighing


def _too_long(num_prompt: int, window: int, num_fixed: int | None) -> InvalidRequest:
    """Return the error for a prompt that cannot be cut. `num_fixed` leading tokens must be kept,
    and leave too little room; None: no cut is allowed at all."""
    if num_fixed is None:
        return InvalidRequest(
            "prompt", f"{num_prompt} tokens leave no room for an answer in the context of {window}"
        )
    return InvalidRequest(
        "keep_tokens",
        f"a prompt of {num_prompt} tokens cannot be cut to the context of {window} "
        f"while its first {num_fixed} tokens are kept",
    )
