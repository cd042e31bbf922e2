"""The engine's process with FakeRunner, whose answers tests can compute; steps take 5 ms."""

import sys
from time import sleep

from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.server.link.engine_process import main
from mainstem.server.link.protocol import BeginEngine
from mainstem.text.grammar import Grammars
from tests.fake_engines import FakeEngines

MODULE = "tests.server.fake_engine"
STEP_S = 0.005


def make(begin: BeginEngine, bus: EventBus) -> tuple[Engine, Grammars]:
    engines = FakeEngines(num_pages=8192, max_model_len=4000)
    engines.at_step = lambda _: sleep(STEP_S)
    text_engine = engines(begin.config, bus)
    return text_engine.engine, text_engine.grammars


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], make))
