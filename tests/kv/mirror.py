"""The cache as a reader of KV events sees it: a decoder written from the format's description."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import msgpack

from mainstem.core.events import EventBus, PageEvent, PagesCleared, PagesRemoved, PagesStored
from mainstem.server.link.kv_events import to_batch

TIERS = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}


@dataclass
class Mirror:
    """Pages by tier, rebuilt from events; checks that each event fits the pages so far."""

    page_size: int
    pages: dict[str, set[bytes]] = field(default_factory=lambda: {t: set() for t in TIERS.values()})
    tokens: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = field(default_factory=dict)
    untold: set[bytes] = field(default_factory=set)  # pages whose tokens were in no event

    def apply(self, payload: bytes) -> None:
        ts, events, rank = msgpack.decode(payload)
        assert isinstance(ts, float)
        assert isinstance(events, list)
        assert events
        assert rank == 0
        for event in events:
            self.apply_event(event)

    def apply_event(self, event: dict[str, Any]) -> None:
        match event.pop("type"):
            case "AllBlocksCleared":
                assert not event
                for pages in self.pages.values():
                    pages.clear()
            case "BlockRemoved":
                pages = self.pages[TIERS[event.pop("medium")]]
                for key in event.pop("block_hashes"):
                    pages.remove(key)
                assert not event
            case "BlockStored":
                self._store(event)
            case kind:
                raise AssertionError(f"no such event: {kind}")

    def _store(self, event: dict[str, Any]) -> None:
        pages = self.pages[TIERS[event.pop("medium")]]
        keys, size = event.pop("block_hashes"), event.pop("block_size")
        parent, token_ids = event.pop("parent_block_hash"), event.pop("token_ids")
        assert event == {"lora_id": None, "lora_name": None}
        assert len(token_ids) == len(keys) * size
        assert size == (self.page_size if token_ids else 0)
        assert keys
        if not token_ids:
            assert parent is None
            self.untold.update(keys)
        assert parent is None or parent in self.tokens or parent in self.untold
        for index, key in enumerate(keys):
            assert key not in pages, "a page is stored twice"
            pages.add(key)
            if token_ids:
                said = parent, tuple(token_ids[index * size : (index + 1) * size])
                assert self.tokens.setdefault(key, said) == said, "a page's tokens changed"
                parent = key

    def known(self, stored: Mapping[str, object]) -> dict[str, set[bytes]]:
        """The pages that the events so far leave in each tier of `stored`. Checks that they leave
        none in any other tier."""
        assert not any(pages for tier, pages in self.pages.items() if tier not in stored)
        return {tier: self.pages[tier] for tier in stored}


class Recorder:
    """Collects the events of a bus; `take` returns them encoded, and forgets them."""

    def __init__(self, bus: EventBus) -> None:
        self._events: list[PageEvent] = []
        bus.subscribe(PagesStored, self._events.append)
        bus.subscribe(PagesRemoved, self._events.append)
        bus.subscribe(PagesCleared, self._events.append)

    def take(self) -> bytes | None:
        events, self._events[:] = list(self._events), []
        return msgpack.encode(to_batch(1.5, events)) if events else None
