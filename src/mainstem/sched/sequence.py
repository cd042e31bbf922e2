"""Sequence: one answer to a Request. SeqTable has the counters that change in every step."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mainstem.core.ids import PageKey, SeqSlot
from mainstem.core.request import Request, TokenLogprobs, TokenMask
from mainstem.core.step import Int32s
from mainstem.kv.keys import PageChain, PageName
from mainstem.sched.important import Weighing
from mainstem.sched.origins import Origins

SUSPECT_FAULTS = 2  # one failure may have been chance
MAX_ARRIVALS = 1 << 40
READER = -1  # index of a sequence that weighs pages


class SeqState(Enum):
    """waiting -> running -> done; running -> waiting when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence, without the counters that SeqTable keeps while it runs."""

    request: Request
    index: int  # which of the request's n answers; READER: none
    seed: int
    arrival: int  # order of submission; ties in priority are broken by it
    max_output: int  # maximum number of tokens it may produce
    expected_output: int | None  # tokens it will probably produce; None: unknown
    chain: PageChain | None  # names of the prompt's pages; None: nothing is shared
    origins: Origins | None = None  # where pages kept through a truncation are
    num_dropped_tokens: int = 0  # prompt tokens that truncation dropped
    # it cannot start before this cut is chosen; how many tokens the cut keeps is known already
    awaited_cut: Weighing | None = None
    weighing: Weighing | None = None  # it reads only to find this cut
    has_fetched: bool = False  # pages were loaded for it from lower tiers
    num_loaded_pages: int = 0  # pages loaded for it before its turn
    # its pages on the device when its last load began; -1: no load since it began to wait
    num_pages_then: int = -1
    has_asked: bool = False  # shared tiers were asked for its pages
    asked: PageKey | None = None  # the key of the answer while it is awaited
    last_name: PageName | None = None  # of the answer's last named page; None: there is none
    state: SeqState = SeqState.WAITING
    slot: SeqSlot | None = None
    output_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # used while waiting
    num_cached_tokens: int | None = None  # None until first admitted
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # not delivered yet
    # prompt logprobs, in the first answer, if they are wanted and not delivered yet
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first_logprob: int = 1  # the first place in the prompt whose logprob is computed
    num_delivered: int = 0  # output tokens the caller has seen
    # while waiting: prompt tokens to compute; None: what is loaded is not decided yet
    num_to_compute: int | None = None
    mask: TokenMask | None = None  # set if a grammar restricts the answer
    has_form_fault: bool = False  # it ends because it cannot continue in its form
    num_faults: int = 0  # steps that failed with it since it last got a token
    is_at_fault: bool = False  # its request failed alone: it is not tried again

    def __post_init__(self) -> None:
        if self.request.grammar is not None:
            self.mask = self.request.grammar.start()
        self.reset_prompt_logprobs()

    def reset_prompt_logprobs(self) -> None:
        """Start collecting prompt logprobs again, unless they were delivered."""
        if self.num_delivered > 0 or self.index > 0:
            self.prompt_logprobs = None
        elif self.request.scoring is not None:
            self.prompt_logprobs, self.first_logprob = [], self.request.scoring.first
        elif self.request.sampling.prompt_logprobs is not None:
            self.begin_prompt_logprobs(())

    def begin_prompt_logprobs(self, known: Iterable[TokenLogprobs | None]) -> None:
        """Collect prompt logprobs; those of the first tokens are `known`."""
        found = list(known) or [None]  # the first token has no logprob
        self.prompt_logprobs, self.first_logprob = found, len(found)

    @property
    def is_collecting(self) -> bool:
        """Whether logprobs of every prompt token are wanted, and this sequence computes new
        ones."""
        if self.state is not SeqState.RUNNING or self.request.scoring is not None:
            return False
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.request.prompt_ids)

    @property
    def has_named_tail(self) -> bool:
        """Whether others may share the page after the prompt's last full page. That page must not
        grow, so it ends with the prompt."""
        return self.chain is not None and self.prompt_logprobs is not None and self.max_output == 1

    @property
    def is_suspect(self) -> bool:
        """Whether several steps failed with it: it is tried alone, to find the cause."""
        return self.num_faults >= SUSPECT_FAULTS

    @property
    def num_named_pages(self) -> int:
        """Pages of the prompt that others may share."""
        return 0 if self.chain is None else len(self.chain.keys)

    @property
    def queue_place(self) -> int:
        """Its unique place in the queue for the look-ahead of lower tiers, in the order of
        `urgency`."""
        return self.request.priority * MAX_ARRIVALS + self.arrival

    def num_reusable(self, num_known: int) -> int:
        """The number of leading tokens whose KV may come from a cache. The last token is always
        computed, for its logits, and so are tokens whose attention is wanted."""
        return num_known - 1 if self.weighing is None else self.weighing.num_reused

    def known_ids(self) -> Int32s:
        """Prompt and output so far, for a sequence that is not running."""
        if len(self.output_ids) == 0:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, self.output_ids])


def urgency(sequence: Sequence) -> tuple[int, int]:
    """The order in the queue: a lower value goes first."""
    return (sequence.request.priority, sequence.arrival)
