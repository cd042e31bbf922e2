"""Sequence: one answer to a Request. SeqTable has the counters that change in every step.

What only some sequences need is a part: a record in the file of the feature, None while unused.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.request import Request, TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.keys import PageChain
from mainstem.sched.fetching import StoredHistory
from mainstem.sched.form import AnswerForm
from mainstem.sched.important import Weighing
from mainstem.sched.origins import TruncatedPrompt
from mainstem.sched.prompt_logprobs import PromptLogprobs

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
    chain: PageChain | None  # names of the prompt's pages; None: nothing is shared
    truncated: TruncatedPrompt | None = None
    form: AnswerForm | None = None
    prompt_logprobs: PromptLogprobs | None = None  # only the first answer has them
    history: StoredHistory | None = None
    is_light: bool = False  # it overtakes others, since few of its tokens are left to compute
    state: SeqState = SeqState.WAITING
    slot: SeqSlot | None = None
    output_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # used while waiting
    num_cached_tokens: int | None = None  # None until first admitted
    num_delivered: int = 0  # output tokens the caller has seen
    earlier_weights: tuple[str, ...] = ()  # versions before the present one that it has run with
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # not delivered yet

    def __post_init__(self) -> None:
        if self.index == 0:
            self.prompt_logprobs = PromptLogprobs.of(self.request)

    def save(self, output_ids: Int32s) -> None:
        """Keep the tokens so far, because the sequence loses its slot. Prompt logprobs that were
        not delivered are collected again."""
        self.output_ids = output_ids
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.is_dropped = True
            self.prompt_logprobs = None
            if self.num_delivered == 0:
                self.prompt_logprobs = PromptLogprobs.of(self.request)

    @property
    def has_named_tail(self) -> bool:
        """Whether others may share the page after the prompt's last full page. That page must not
        grow, so it ends with the prompt."""
        return self.chain is not None and self.prompt_logprobs is not None and self.max_output == 1

    @property
    def weighing(self) -> Weighing | None:
        """What a reader weighs; None: it is an answer."""
        is_reader = self.index == READER
        return self.truncated.weighing if is_reader and self.truncated is not None else None

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
