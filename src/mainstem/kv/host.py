"""HostTier: pages in slots of host memory, copied from the device and to it.

    take_place ---> save: device -> slot ---> `poll_saves`        load: slot -> device

A copy moves many pages at once, layer by layer, so that a step can start on the first layers while
the rest is loaded. After a copy fails, the tier waits until all copies have ended: then the pages
and slots of the failed copy can be reused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger

import numpy as np

from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv.transfer import LoadId, PageCopier, TierLink, Transfer

FIRST_RATE = 20e9  # bytes a second, until a copy has been measured

log = getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PageSave:
    """A copy from the device in progress."""

    keys: Sequence[PageKey]
    pages: Int32s
    transfer: Transfer


class HostTier:
    """Knows which page has which slot, and the copies that use the slots."""

    name = "host"

    def __init__(self, copier: PageCopier) -> None:
        self._copier = copier
        self._slots: dict[PageKey, int] = {}
        self._free = list(range(copier.num_slots - 1, -1, -1))
        self._saves: list[PageSave] = []
        self._filling: dict[PageKey, Transfer] = {}  # page key -> the save that fills its slot
        self.link = TierLink(FIRST_RATE)
        self.num_places = copier.num_slots
        self.num_layers = copier.num_layers
        self.page_bytes = copier.page_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_saves(self) -> int:
        return len(self._saves)

    @property
    def num_pages_saving(self) -> int:
        return sum(len(save.pages) for save in self._saves)

    def take_place(self, key: PageKey) -> bool:
        """Give a page a slot; False: none is free."""
        if not self._free:
            return False
        self._slots[key] = self._free.pop()
        return True

    def delete(self, key: PageKey) -> None:
        """Free a page's slot."""
        self._free.append(self._slots.pop(key))

    def view(self, key: PageKey) -> memoryview:
        """The bytes of a page's slot."""
        return self._copier.slot(self._slots[key])

    def filled(self, key: PageKey) -> Callable[[], None] | None:
        """Return a function that waits until a page's slot is filled; None if it is filled."""
        filling = self._filling.get(key)
        return None if filling is None else filling.wait

    def save(self, keys: Sequence[PageKey], pages: Int32s, parts: Int32s | None) -> bool:
        """Start copying device pages, whose windowed parts are at `parts`, to the slots of `keys`;
        False: it could not be started."""
        try:
            transfer = self._copier.save(pages, self._slots_of(keys), parts)
        except Exception as error:
            self._rest(error)
            return False
        self._saves.append(PageSave(keys, pages, transfer))
        self._filling.update(dict.fromkeys(keys, transfer))
        return True

    def poll_saves(self) -> Iterator[tuple[PageSave, bool]]:
        """Return the saves that ended, and whether each succeeded, in the order they were
        started."""
        while self._saves:
            save = self._saves[0]
            num_done = self.num_layers_done(save.transfer)
            if num_done is not None and num_done < self.num_layers:
                return
            self._saves.pop(0)
            for key in save.keys:
                if self._filling.get(key) is save.transfer:
                    del self._filling[key]
            yield save, num_done is not None

    def load(
        self, load_id: LoadId, keys: Sequence[PageKey], pages: Int32s, parts: Int32s | None
    ) -> Transfer | None:
        """Start copying the slots of `keys` to device pages, with their windowed parts to `parts`;
        None: it could not be started."""
        try:
            return self._copier.load(load_id, self._slots_of(keys), pages, parts)
        except Exception as error:
            self._rest(error)
            return None

    def forget(self, load_id: LoadId) -> None:
        """Forget a load that is done or cancelled."""
        self._copier.forget(load_id)

    def num_layers_done(self, transfer: Transfer) -> int | None:
        """The number of layers that are complete. None: the copy failed, and all copies have
        ended."""
        try:
            return transfer.num_layers_done()
        except Exception as error:
            self._rest(error)
            return None

    def flush(self) -> None:
        """Return when saves are done, or have failed."""
        for save in self._saves:
            with suppress(Exception):  # `poll_saves` reports the error
                save.transfer.wait()

    def close(self) -> None:
        """Finish the copies that were started."""
        self._copier.close()

    def check(self, keys: set[PageKey]) -> None:
        """Raise unless exactly the pages of `keys` have slots, each its own; the rest is free."""
        used, free = set(self._slots.values()), set(self._free)
        assert self._slots.keys() == keys, "other pages have slots than expected"
        assert len(used) == len(self._slots), "two pages in one slot"
        assert len(free) == len(self._free), "a slot is free twice"
        assert not used & free, "a slot is both free and used"
        assert len(used) + len(free) == self.num_places, "a slot was lost"

    def _slots_of(self, keys: Sequence[PageKey]) -> Int32s:
        slots = self._slots
        return np.array([slots[key] for key in keys], np.int32)

    def _rest(self, error: Exception) -> None:
        """After a copy failed, wait until all copies have ended: then its pages and slots are not
        used any more."""
        log.warning("a copy of pages failed", exc_info=error)
        with suppress(Exception):  # if the device is lost, the next step raises
            self._copier.drain()
