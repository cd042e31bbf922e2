"""Two servers, without and with keys, that many tests share."""

from collections.abc import Iterator

import pytest

from mainstem.text.encoding import App
from tests.server.running import Running, a_server

POLITE = App("polite", "You answer politely and never lose your patience with anybody. ")
PIRATE = App("pirate", "You are a pirate of the old school and talk like one all day. ")


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Running]:
    with a_server([POLITE, PIRATE]) as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server; after the test, no request may be open and no page held."""
    yield shared_server
    shared_server.settle()


@pytest.fixture(scope="package")
def shared_locked_server() -> Iterator[Running]:
    with a_server([POLITE], has_keys=True) as running:
        yield running


@pytest.fixture
def locked(shared_locked_server: Running) -> Iterator[Running]:
    """A server with keys; after the test, no request may be open and no page held."""
    yield shared_locked_server
    shared_locked_server.settle()
