"""The prompt work of the step being made, and the budget that is left."""

from dataclasses import dataclass, field

from mainstem.core.step import Int32s, StartedSequence
from mainstem.sched.admission import Outlook
from mainstem.sched.batching import Chunk, PageCopy, PageMove

# once this many pages were looked up for sequences that a step parks, it starts no more sequences;
# the same limit ends its look-ahead
LOOK_UP_PAGES = 8192


@dataclass(slots=True)
class PromptWork:
    """Prompt chunks within a budget of tokens, and the copies, moves and loads of sequences that
    start."""

    budget: int  # tokens left
    chunks: list[Chunk] = field(default_factory=list)
    loads: list[Int32s] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    moves: list[PageMove] = field(default_factory=list)
    outlook: Outlook | None = None  # made when the first sequence wants to start
    num_parked_pages: int = 0  # pages looked up for sequences that were then parked
    num_pages_ahead: int = 0  # pages looked up for sequences whose turn has not come

    @property
    def has_room(self) -> bool:
        return self.budget > 0 and self.num_parked_pages < LOOK_UP_PAGES

    @property
    def may_look_ahead(self) -> bool:
        return self.num_pages_ahead < LOOK_UP_PAGES

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.budget -= len(chunk.token_ids)

    def sources(self) -> list[int]:
        """Pages that copies and moves of this step read. A page is leased once for each use."""
        return [copy.source for copy in self.copies] + [move.source for move in self.moves]

    @property
    def filled_pages(self) -> list[int]:
        """Pages that copies and moves of this step fill."""
        return [copy.target for copy in self.copies] + [move.target for move in self.moves]
