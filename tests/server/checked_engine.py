"""The engine's process; its exit status is 3 if a page was lost or a request is still open."""

import sys

from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.server.link.engine_process import main, make_engine
from mainstem.server.link.protocol import BeginEngine
from mainstem.text.grammar import Grammars

MODULE = "tests.server.checked_engine"


def run(argv: list[str]) -> int:
    engines: list[Engine] = []

    def make(begin: BeginEngine, bus: EventBus) -> tuple[Engine, Grammars]:
        made = make_engine(begin, bus)
        engines.append(made[0])
        return made

    status = main(argv, make)
    try:
        engines[0].check()
        assert not engines[0].has_work, "a request is still open"
    except AssertionError as error:
        print(f"not whole: {error}", file=sys.stderr)
        return 3
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
