"""RankedCopier: copies pages to slots and back when every rank has a part of each page.

    slot   | rank 0: [layers][K or V][its kv_heads, page_size, head_dim] | rank 1: ... |

The slots are in memory that all processes share, so tiers that keep pages in files or on a server
see whole pages. A save is done when all ranks have copied their parts.
"""

from mainstem.core.step import Int32s
from mainstem.kv.transfer import LoadId
from mainstem.runner.ranks.group import Copy
from mainstem.runner.ranks.protocol import ForgetLoad, LoadPages, Open, SavePages
from mainstem.runner.ranks.runner import RankedRunner
from mainstem.runner.slab import count_slots, slot_bytes


class RankedCopier:
    """PageCopier over the pages of all ranks."""

    def __init__(self, runner: RankedRunner, host_bytes: int) -> None:
        self._ranks = runner.ranks
        self.num_layers = runner.num_layers
        self.page_bytes = runner.ranks.num_ranks * runner.page_bytes
        self.num_slots = count_slots(host_bytes, self.page_bytes)
        self._slot_bytes = slot_bytes(self.page_bytes)
        self._memory = runner.memory.resize(self.num_slots * self._slot_bytes)
        self._ranks.send(Open(host_bytes))
        self._ranks.wait_opened()

    def slot(self, slot: int) -> memoryview:
        first = slot * self._slot_bytes
        return self._memory[first : first + self.page_bytes]

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> Copy:
        return self._ranks.copy(
            lambda number, after_steps: SavePages(number, pages, slots, parts, after_steps),
            self.num_layers,
        )

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> Copy:
        return self._ranks.copy(
            lambda number, after_steps: LoadPages(
                number, load_id, slots, pages, parts, after_steps
            ),
            self.num_layers,
        )

    def forget(self, load_id: LoadId) -> None:
        self._ranks.send(ForgetLoad(load_id))

    def drain(self) -> None:
        self._ranks.wait_copies()

    def close(self) -> None:
        self.drain()
