"""May this sequence start now? Pages and tokens decide; requests are not counted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """Keeps room for the running sequences to grow, so that starting one does not preempt another.

    Each running sequence fills a page every `page_size` steps; one spare page for each is enough
    for them all to go on for that long.
    """

    spare_pages_per_running: int = 1

    def may_start(self, new_pages: int, available: int, num_running: int) -> bool:
        """`new_pages` are those its tokens need beyond what it shares."""
        if num_running == 0:
            return new_pages <= available
        return new_pages + num_running * self.spare_pages_per_running < available
