"""The engine's process; its exit status is 3 if a page was lost or a request is still open.

Where the model's folder has a pipe named PIPE, an update that has exchanged the weights waits until
somebody has opened the pipe and closed it.
"""

import sys
from pathlib import Path
from unittest.mock import patch

from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.models.cpu.decoder import Decoder
from mainstem.runner.cpu import CpuRunner
from mainstem.server.link.engine_process import main, make_engine
from mainstem.server.link.protocol import BeginEngine
from mainstem.text.grammar import Grammars

PIPE = "hold-updates"


def run(argv: list[str]) -> int:
    engines: list[Engine] = []

    def make(begin: BeginEngine, bus: EventBus) -> tuple[Engine, Grammars]:
        made = make_engine(begin, bus)
        hold_updates(Path(begin.folder) / PIPE)
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


def hold_updates(pipe: Path) -> None:
    exchange = CpuRunner.exchange

    def held(runner: CpuRunner, decoder: Decoder | None) -> None:
        exchange(runner, decoder)
        if pipe.is_fifo():
            pipe.read_bytes()

    patch.object(CpuRunner, "exchange", held).start()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
