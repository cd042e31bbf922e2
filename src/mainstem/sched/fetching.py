"""Load what lower tiers have, or compute it again? And when may a prompt start on it?"""

import math
from dataclasses import dataclass

from mainstem.core.config import Fetch, StoreConfig
from mainstem.kv.tiers import LowerTiers, Stored


@dataclass(frozen=True, slots=True)
class Fetching:
    """Compares the ways to a history: the links to lower tiers, and the device itself.

    Both have a queue. With many histories wanted at once some are loaded and some computed, side by
    side, each by the way that gets it there first.
    """

    config: StoreConfig
    tiers: LowerTiers
    page_size: int
    token_s: float  # computing one prompt token

    def is_worth_it(self, stored: Stored, tokens_ahead: int) -> bool:
        """Whether loading is done before computing would be, behind `tokens_ahead` others."""
        if self.config.fetch is not Fetch.AUTO:
            return self.config.fetch is Fetch.ALWAYS
        compute_s = (tokens_ahead + stored.num_pages * self.page_size) * self.token_s
        return self._load_s(stored) < compute_s

    def start_layers(self, stored: Stored, new_tokens: int) -> int:
        """Layers that must be there before a prompt of `new_tokens` starts on a history.

        Layer k is there after k + 1 parts of the load and wanted after k parts of the prompt; the
        last layer decides. This is AttentionStore's read buffer, S_buf = B (T_load L_hist -
        T_pref L_new) (3.2.1), in layers.
        """
        num_layers = self.tiers.num_layers
        if self.config.preload == "all":
            return num_layers
        if self.config.preload != "auto":
            return min(int(self.config.preload), num_layers)
        load_s = self.tiers.host_link.pass_s(stored.num_pages * self.tiers.page_bytes)
        prompt_s = new_tokens * self.token_s
        if load_s <= prompt_s:
            return 1
        return math.ceil(num_layers - (num_layers - 1) * prompt_s / load_s)

    def _load_s(self, stored: Stored) -> float:
        page_bytes = self.tiers.page_bytes
        host_s = self.tiers.host_link.expect_s(stored.num_pages * page_bytes)
        if not stored.num_on_disk:
            return host_s
        return host_s + self.tiers.disk_link.expect_s(stored.num_on_disk * page_bytes)
