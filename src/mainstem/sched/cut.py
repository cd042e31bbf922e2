"""Which pages of a prompt a truncation keeps."""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from mainstem.core.step import Int32s


@dataclass(frozen=True, slots=True)
class PromptCut:
    """The pages of a prompt that are kept: some at its head, and all from `rest` on."""

    head: tuple[int, ...]  # page numbers in the prompt, in order: the sink, then the chosen ones
    sink_pages: int  # how many of `head` are the sink and keep their place
    rest: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is dropped."""
        return len(self.head) == self.rest

    def token_ids(self, prompt_ids: Int32s, page_size: int) -> Int32s:
        """The tokens that are kept."""
        pages = prompt_ids[: self.rest * page_size].reshape(-1, page_size)
        head = pages[list(self.head)].reshape(-1)
        return np.concatenate([head, prompt_ids[self.rest * page_size :]])

    def place_before(self, number: int) -> int:
        """Return where the kept page `number` was in the prompt."""
        if number < len(self.head):
            return self.head[number]
        return number - len(self.head) + self.rest

    def place_after(self, number: int) -> int | None:
        """Return where the prompt's page `number` is among the kept pages; None if it was
        dropped."""
        if number >= self.rest:
            return number - self.rest + len(self.head)
        place = bisect_left(self.head, number)
        return place if self.head[place : place + 1] == (number,) else None

    def without(self, numbers: Collection[int]) -> "PromptCut":
        """Return a cut that also drops the kept pages `numbers`. There must be at least one."""
        end = max(len(self.head), max(numbers) + 1)
        kept = (self.place_before(number) for number in range(end) if number not in numbers)
        return PromptCut(tuple(kept), self.sink_pages, self.place_before(end))

    def without_oldest(self, num_pages: int) -> "PromptCut":
        """Return a cut that also drops the first `num_pages` pages after the sink."""
        return self.without(range(self.sink_pages, self.sink_pages + num_pages))


WHOLE = PromptCut(head=(), sink_pages=0, rest=0)


def sink_only(sink_pages: int) -> PromptCut:
    """A cut that drops nothing, with a sink of this many pages."""
    return PromptCut(tuple(range(sink_pages)), sink_pages, sink_pages)
