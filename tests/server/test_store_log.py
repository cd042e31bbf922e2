"""Trouble of the store is told, and not again and again."""

import pytest

from mainstem.core.events import EventBus, PagesLost, SavesSkipped
from mainstem.server import store_log
from mainstem.server.store_log import StoreLog


def test_trouble_is_told_at_once_and_then_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, object]] = []

    def warning(words: str, extra: dict[str, object]) -> None:
        told.append((words, extra["facts"]))

    monkeypatch.setattr(store_log.log, "warning", warning)
    bus, now_s = EventBus(), 0.0
    StoreLog(bus, lambda: now_s)
    full = SavesSkipped(3, "disk", "disk full")
    for now_s in (0.0, 1.0, 59.0):  # noqa: B007  # the clock
        bus.publish(full)
    bus.publish(SavesSkipped(9, "host", "write buffer full"))
    bus.publish(PagesLost(1, "disk", "checksum"))
    now_s = 60.0
    bus.publish(full)
    facts = {"tier": "disk", "reason": "disk full"}
    assert told == [
        ("pages are not stored", facts | {"pages": 3}),
        ("stored pages are lost", {"tier": "disk", "reason": "checksum", "pages": 1}),
        ("pages are not stored", facts | {"pages": 9}),
    ]
