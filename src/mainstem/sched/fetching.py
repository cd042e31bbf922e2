"""Decides whether to load pages from lower tiers or to compute them again, and when a prompt may
start on pages that are being loaded."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mainstem.core.config import Fetch, StoreConfig
from mainstem.core.ids import PageKey
from mainstem.kv.loading import PageLoader
from mainstem.kv.places import HOST, StoredCounts
from mainstem.kv.stack import READ_LIMIT_S
from mainstem.kv.transfer import TierLink
from mainstem.sched.step_times import StepTimes

# a link is busy if its queued work outlasts the next step by this much
BUSY_S = 0.03
# likewise that from host memory, and the step in flight: when it ends, more loads can begin. This
# link has no latency, and each load that is begun delays the step being made
HOST_BUSY_S = 0.01
# a step is assumed to take at least this part of its expected time: if the next step started before
# its loads were done, all sequences would wait
CAUTION = 0.8
MIN_LIMIT_S = 0.1  # the shortest time limit for reads of stored pages
# a prompt waits for a shared tier's answer at most this part of the time that computing it takes
ANSWER_SHARE = 0.05
ALWAYS_PATIENCE_S = 1.0  # the longest wait for an answer if stored pages are always loaded
# at most this many waiting sequences count as delayed. The others can avoid the delay: they compute
# if the links are busy, and load if the device is busy
HELD_UP = 4.0


@dataclass(slots=True, eq=False)
class StoredHistory:
    """A part of a Sequence: what lower tiers do for it. Made when it is first looked up."""

    asked: PageKey | None  # the key of a shared tier's answer while it is awaited
    is_loaded: bool = False  # pages were loaded for it
    num_loaded_pages: int = 0  # pages loaded for it before its turn
    # its pages on the device when its last load began; -1: no load since it began to wait
    num_pages_then: int = -1
    # it computes its prompt up to here, the end of pages that no tier has; then it starts again, to
    # load what follows
    gap_end: int | None = None
    num_gap_tokens: int = 0  # tokens that it computed in such gaps
    # prompt tokens to compute; None: what is loaded is not decided yet
    num_to_compute: int | None = None

    def wait_again(self) -> None:
        """The sequence was preempted: what is loaded must be decided again."""
        self.num_pages_then, self.num_to_compute = -1, None


@dataclass(frozen=True, slots=True)
class Fetching:
    """Chooses how to get a history: over the links from lower tiers, or by computing it again.

    Links and device each have a queue, and a sequence delays those after it (head-of-line
    blocking). If many histories are wanted at once, and the tier is about as fast as the device,
    some are loaded and some computed, in parallel. If the tier is much faster, all are loaded:
    loaded sequences need the device too, for their new tokens, and one computed history would delay
    all of them.
    """

    config: StoreConfig
    loader: PageLoader
    page_size: int
    steps: StepTimes

    def is_worth_it(self, stored: StoredCounts, tokens_ahead: int, num_waiting: int) -> bool:
        """Whether loading would end before computing. The device has `tokens_ahead` other tokens to
        compute first. The delay of the `num_waiting` sequences counts as well."""
        if not stored.num_pages:
            return False
        if self.config.fetch is not Fetch.AUTO:
            return self.config.fetch is Fetch.ALWAYS
        token_s = self.steps.token_s
        compute_s = stored.num_tokens(self.page_size) * token_s
        passes = list(self._passes(stored))
        slowest_s = max(pass_s for _, pass_s in passes)
        num_held_up = min(num_waiting, HELD_UP, compute_s / slowest_s)
        # pages from lower tiers pass two links: the slower link decides, the other adds its own
        # part
        queue_s = max(link.expect_s(0) + num_held_up * pass_s for link, pass_s in passes)
        load_s = queue_s + sum(pass_s for _, pass_s in passes)
        return load_s < tokens_ahead * token_s + (1 + num_held_up) * compute_s

    def patience_s(self, num_tokens: int) -> float:
        """Return the seconds that a prompt with `num_tokens` to compute may wait for the answer of
        a shared tier: a small part of the time that computing takes."""
        if self.config.fetch is Fetch.ALWAYS:
            return ALWAYS_PATIENCE_S
        return ANSWER_SHARE * num_tokens * self.steps.token_s

    def limit_s(self, stored: StoredCounts) -> float:
        """Return the seconds after which a load is cancelled, if the tier can do that: the time
        that computing the pages would take, but at least MIN_LIMIT_S."""
        if self.config.fetch is Fetch.ALWAYS:
            return READ_LIMIT_S
        return max(MIN_LIMIT_S, stored.num_tokens(self.page_size) * self.steps.token_s)

    @property
    def may_ask(self) -> bool:
        """Whether anything would be loaded at all."""
        return self.config.fetch is not Fetch.NEVER

    def is_open(self, stored: StoredCounts) -> bool:
        """Whether a load that is not worth it now may be worth it later, when a link is free."""
        return stored.num_pages > 0 and self.may_ask

    def is_busy(self, stored: StoredCounts, left_s: float) -> bool:
        """Whether a link has enough work until the next step, or slots are short. If so, no load is
        started now: a later load can serve a more urgent sequence, and does not delay the step
        being made. The step in flight takes `left_s` more."""
        if stored.num_below and self.loader.is_crowded(stored.num_below):
            return True
        host, enough_s = self.loader.links[HOST], self.steps.interval_s + BUSY_S
        return any(
            link.expect_s(0) > (left_s + HOST_BUSY_S if link is host else enough_s)
            for link, _ in self._passes(stored)
        )

    def start_layers(self, stored: StoredCounts, new_tokens: int) -> int:
        """Return how many layers must be loaded before a prompt of `new_tokens` starts on a
        history.

        Layer k is loaded when k + 1 layers' worth of the load is done, and needed when k layers of
        the prompt are computed; the last layer decides. This is AttentionStore's read buffer, S_buf
        = B (T_load L_hist - T_pref L_new) (3.2.1), in layers.
        """
        num_layers = self.loader.num_layers
        if self.config.preload == "all":
            return num_layers
        if self.config.preload != "auto":
            return min(int(self.config.preload), num_layers)
        load_s = self.loader.links[HOST].pass_s(stored.num_pages * self.loader.page_bytes)
        prompt_s = self.steps.expect_s(new_tokens)
        if load_s <= prompt_s:
            return 1
        return math.ceil(num_layers - (num_layers - 1) * prompt_s / load_s)

    def left_s(self, prompt_tokens: int, ran_s: float) -> float:
        """Return the least time that a step with `prompt_tokens`, which has run for `ran_s`, will
        still take."""
        return max(0.0, CAUTION * self.steps.expect_s(prompt_tokens) - ran_s)

    def lead_s(self, left_s: float) -> float:
        """Return the time after which a step begins that is made now, if the step in flight takes
        `left_s` more: it may rely on loads that end by then. 0 unless `preload` is "auto"."""
        return left_s if self.config.preload == "auto" else 0.0

    def _passes(self, stored: StoredCounts) -> Iterator[tuple[TierLink, float]]:
        """Return the links that stored pages must pass, and the seconds on each link."""
        host, *below = self.loader.links
        yield host, host.pass_s(stored.num_pages * self.loader.page_bytes)
        for link, num_pages in zip(below, stored.below, strict=False):
            if num_pages:
                yield link, link.pass_s(num_pages * self.loader.page_bytes)
