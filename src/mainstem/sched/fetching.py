"""Load what lower tiers have, or compute it again? And when may a prompt start on it?"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mainstem.core.config import Fetch, StoreConfig
from mainstem.kv.policy import HOST
from mainstem.kv.stored import Stored
from mainstem.kv.tiers import READ_LIMIT_S, LowerTiers
from mainstem.kv.transfer import Link

BUSY_S = 0.03  # a link is busy if its queued work outlasts the next step by this much
LEARNING = 0.3  # weight of the latest step in the running means
SURPRISE = 2.0  # a step longer than twice its expectation is an outlier
# a step is assumed to take at least this part of its expected time: if the next step started before
# its loads were done, all sequences would wait
CAUTION = 0.8
MIN_LIMIT_S = 0.1  # reads of stored pages are never limited to less
# a prompt waits for a shared tier's answer at most this part of the time that computing it takes
ANSWER_SHARE = 0.05
ALWAYS_PATIENCE_S = 1.0  # the longest such wait if stored pages are always loaded
# waiting sequences that count as delayed, at most: the others may load instead of compute, or the
# reverse
HELD_UP = 4.0


class StepTimes:
    """How long a step takes: a fixed time for its decodes, and a time for each prompt token.

    Begins with the card's figures. Steps with few prompt tokens then update the fixed time, steps
    with many the time of a token.
    """

    def __init__(self, token_s: float, floor_s: float = 0.0) -> None:
        self.token_s = token_s
        self.floor_s = floor_s
        self.interval_s = 0.0  # between the ends of the latest two steps

    def expect_s(self, prompt_tokens: int) -> float:
        """Expected seconds of a step with `prompt_tokens` tokens of prompts."""
        return self.floor_s + prompt_tokens * self.token_s

    def observe(self, prompt_tokens: int, device_s: float) -> None:
        """A step that waited for no load took `device_s`."""
        seen_s = min(device_s, SURPRISE * self.expect_s(prompt_tokens))
        prompts_s = prompt_tokens * self.token_s
        if prompts_s < self.floor_s or not prompt_tokens:
            self.floor_s += LEARNING * (max(seen_s - prompts_s, 0.0) - self.floor_s)
        else:
            token_s = max(seen_s - self.floor_s, 0.0) / prompt_tokens
            self.token_s += LEARNING * (token_s - self.token_s)


@dataclass(frozen=True, slots=True)
class Fetching:
    """Chooses how to get a history: over the links from lower tiers, or by computing it again.

    Links and device each have a queue, and a sequence delays those after it (head-of-line
    blocking). With many histories wanted at once from a tier about as fast as the device, some are
    loaded and some computed, in parallel. From a much faster tier all are loaded: loaded sequences
    need the device too, for their new tokens, and one computed history would delay all of them.
    """

    config: StoreConfig
    tiers: LowerTiers
    page_size: int
    steps: StepTimes

    def is_worth_it(self, stored: Stored, tokens_ahead: int, num_waiting: int) -> bool:
        """Whether loading ends before computing would; the device has `tokens_ahead` other tokens
        to compute first. The delay of the `num_waiting` sequences counts as well."""
        if not stored.num_pages:
            return False
        if self.config.fetch is not Fetch.AUTO:
            return self.config.fetch is Fetch.ALWAYS
        token_s = self.steps.token_s
        compute_s = stored.num_pages * self.page_size * token_s
        passes = list(self._passes(stored))
        slowest_s = max(pass_s for _, pass_s in passes)
        num_held_up = min(num_waiting, HELD_UP, compute_s / slowest_s)
        # pages from lower tiers pass two links: the slower one decides, the other adds its own part
        queue_s = max(link.expect_s(0) + num_held_up * pass_s for link, pass_s in passes)
        load_s = queue_s + sum(pass_s for _, pass_s in passes)
        return load_s < tokens_ahead * token_s + (1 + num_held_up) * compute_s

    def patience_s(self, num_tokens: int) -> float:
        """Seconds that a prompt with `num_tokens` to compute may wait for the answer of a tier
        that other processes fill: a small part of what computing takes."""
        if self.config.fetch is Fetch.ALWAYS:
            return ALWAYS_PATIENCE_S
        return ANSWER_SHARE * num_tokens * self.steps.token_s

    def limit_s(self, stored: Stored) -> float:
        """Seconds after which a load is cancelled, if the tier can do that: computing the pages
        would have taken no longer."""
        if self.config.fetch is Fetch.ALWAYS:
            return READ_LIMIT_S
        return max(MIN_LIMIT_S, stored.num_pages * self.page_size * self.steps.token_s)

    @property
    def may_ask(self) -> bool:
        """Whether anything would be loaded at all."""
        return self.config.fetch is not Fetch.NEVER

    def is_open(self, stored: Stored) -> bool:
        """Whether a load that is not worth it now may be later, when a link is free."""
        return stored.num_pages > 0 and self.config.fetch is not Fetch.NEVER

    def is_busy(self, stored: Stored) -> bool:
        """Whether the links have enough work until the next step. If so, no load is started now: a
        later load can go to a more urgent sequence, and does not delay this step."""
        if stored.num_below and self.tiers.is_crowded(stored.num_below):
            return True
        enough_s = BUSY_S + self.steps.interval_s
        return any(link.expect_s(0) > enough_s for link, _ in self._passes(stored))

    def start_layers(self, stored: Stored, new_tokens: int) -> int:
        """Layers that must be loaded before a prompt of `new_tokens` starts on a history.

        Layer k is loaded when k + 1 layers' worth of the load is done, and needed when k layers of
        the prompt are computed; the last layer decides. This is AttentionStore's read buffer, S_buf
        = B (T_load L_hist - T_pref L_new) (3.2.1), in layers.
        """
        num_layers = self.tiers.num_layers
        if self.config.preload == "all":
            return num_layers
        if self.config.preload != "auto":
            return min(int(self.config.preload), num_layers)
        load_s = self.tiers.links[HOST].pass_s(stored.num_pages * self.tiers.page_bytes)
        prompt_s = self.steps.expect_s(new_tokens)
        if load_s <= prompt_s:
            return 1
        return math.ceil(num_layers - (num_layers - 1) * prompt_s / load_s)

    def lead_s(self, prompt_tokens: int, ran_s: float) -> float:
        """Seconds that a step with `prompt_tokens`, which has run for `ran_s`, will still take. The
        next step begins no earlier, and may rely on loads that end by then."""
        if self.config.preload != "auto":
            return 0.0
        return max(0.0, CAUTION * self.steps.expect_s(prompt_tokens) - ran_s)

    def _passes(self, stored: Stored) -> Iterator[tuple[Link, float]]:
        """The links that stored pages must pass, and the seconds on each."""
        host, *below = self.tiers.links
        yield host, host.pass_s(stored.num_pages * self.tiers.page_bytes)
        for link, num_pages in zip(below, stored.below, strict=False):
            if num_pages:
                yield link, link.pass_s(num_pages * self.tiers.page_bytes)
