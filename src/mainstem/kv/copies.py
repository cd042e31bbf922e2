"""Copies between the device and the tiers below it that are in progress: pages and states."""

from time import sleep

from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.kv.loading import PageLoader
from mainstem.kv.saving import PageSaver
from mainstem.kv.stack import TierStack
from mainstem.kv.stored_states import StoredStates

POLL_S = 0.0005


class TierCopies:
    """Collects copies that have ended, and starts those that are ready."""

    def __init__(
        self, stack: TierStack, saver: PageSaver, loader: PageLoader, states: StoredStates | None
    ) -> None:
        self._stack, self._saver, self._loader, self._states = stack, saver, loader, states

    @property
    def num_copies(self) -> int:
        """Saves and loads in progress."""
        of_states = 0 if self._states is None else self._states.num_loads
        return self._loader.num_loads + self._saver.num_saves + of_states

    def poll(self, lead_s: float) -> list[PageKey]:
        """See KVStore.poll."""
        self._check(lead_s)
        news = self._loader.take_news()
        return news if self._states is None else news + self._states.take_news()

    def _check(self, lead_s: float = 0.0) -> None:
        if self._stack.tiers:
            self._stack.poll()
            self._saver.poll()
            self._loader.poll(lead_s)
            if self._states is not None:
                self._states.poll()
            self._saver.back_up()
            self._stack.do_chores()
            self._saver.resume()
            if self._states is not None:
                self._states.resume()

    def finish_saves(self) -> None:
        """Return when all saves that were started are done."""
        while self._saver.num_saving:
            self._saver.finish_copies()
            self._check()  # it may start postponed saves

    def flush(self) -> None:
        """Return when all pending saves are done or refused."""
        while True:  # each round starts or ends saves
            self._saver.flush()
            with held_interrupts():
                self._check()  # the next `poll` returns what ended
            if not self._saver.is_busy:
                if self._states is not None:
                    self._states.drop_postponed()
                return

    def settle(self) -> None:
        """Return when no copy is in progress. Nobody waits for what was loaded."""
        self.flush()
        while self.num_copies:
            self.poll(0.0)
            sleep(POLL_S)
        self._loader.take_news()

    def close(self) -> None:
        """See KVStore.close."""
        self._stack.end_soon()
        self.flush()
        self._loader.close()
        if self._states is not None:
            self._states.close()
        self._saver.flush()
        self._stack.close()
