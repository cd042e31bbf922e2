"""Log messages about the store: a full disk, lost pages.

Lines go to the logger `mainstem.store`: on standard error, unless the process has configured
logging.
"""

import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic

from mainstem.core.events import EventBus, PagesLost, SavesSkipped, StoreOpened

QUIET_S = 60.0  # between two messages about the same problem

log = logging.getLogger("mainstem.store")


class StoreLog:
    """Logs each kind of problem when it first occurs, then at most once a minute.

    Answers stay right: what is not stored is computed again.
    """

    def __init__(self, bus: EventBus, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._pages: Counter[tuple[str, str, str]] = Counter()  # not logged yet
        self._told_s: dict[tuple[str, str, str], float] = {}
        bus.subscribe(SavesSkipped, self._skipped)
        bus.subscribe(PagesLost, self._lost)
        bus.subscribe(StoreOpened, self._opened)

    def _opened(self, event: StoreOpened) -> None:
        if event.found is not None:
            facts = {
                "folder": event.folder,
                "reason": event.found,
                "pages": event.num_pages,
                "lost": dict(event.lost),
            }
            log.warning(event.words, extra={"facts": facts})

    def _skipped(self, event: SavesSkipped) -> None:
        if event.tier != "host":  # saves to host memory are skipped if it is busy: no problem
            self._note("pages are not stored", event)

    def _lost(self, event: PagesLost) -> None:
        self._note("stored pages are lost", event)

    def _note(self, words: str, event: SavesSkipped | PagesLost) -> None:
        kind = (words, event.tier, event.reason)
        self._pages[kind] += event.num_pages
        now_s = self._clock()
        if now_s - self._told_s.get(kind, -QUIET_S) < QUIET_S:
            return
        self._told_s[kind] = now_s
        facts = {"tier": event.tier, "reason": event.reason, "pages": self._pages.pop(kind)}
        told = f"{words}: {facts['pages']:,} ({event.tier}, {event.reason})"
        log.warning(told, extra={"facts": facts})
