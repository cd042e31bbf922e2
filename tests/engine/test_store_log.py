"""Problems of the store are logged, but not repeatedly."""

import logging

import pytest

from mainstem.core.events import EventBus, PagesLost, SavesSkipped, StoreOpened
from mainstem.engine import store_log
from mainstem.engine.store_log import StoreLog


def test_problems_are_logged_at_once_and_then_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        ("pages are not stored: 3 (disk, disk full)", facts | {"pages": 3}),
        (
            "stored pages are lost: 1 (disk, checksum)",
            {"tier": "disk", "reason": "checksum", "pages": 1},
        ),
        ("pages are not stored: 9 (disk, disk full)", facts | {"pages": 9}),
    ]


def test_a_store_that_lost_pages_is_a_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("mainstem"), "propagate", False)  # not to pytest
    bus = EventBus()
    bus.publish(StoreOpened("/sound", 7))
    bus.publish(StoreOpened("/bad", 1234, "index damaged", {"index": 5000}))
    bus.publish(StoreOpened("/worse", 0, "index damaged"))
    StoreLog(bus)  # subscribes later, and gets the event
    assert capsys.readouterr().err.splitlines() == [
        "the KV store in /bad has lost 5,000 pages: index damaged. 1,234 are left; "
        "what is lost is computed again",
        "the KV store in /worse may have lost pages: index damaged. 0 are left; "
        "what is lost is computed again",
    ]
