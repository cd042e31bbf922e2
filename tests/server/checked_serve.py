"""`mainstem serve` as a program; exit status 3: a page was lost or a request is still open.

python -m tests.server.checked_serve fake|slow|mortal|split|saving|real [flags of mainstem serve]

`fake` runs a fake engine on a thread, `slow` the same with steps of 20 ms, `split` a fake engine in
a separate process, `saving` one with a disk, `real` a real engine in a separate process. `mortal`
is like `fake`, and kills itself in the middle of a line when a batch has MORTAL_BYTES of answers.
"""

import sys
from functools import partial
from time import sleep

from mainstem.cli.serve import Parts, main, open_model
from mainstem.core.config import EngineConfig
from mainstem.server.link.engine_client import Launched
from mainstem.server.link.engine_process import EngineProcess
from mainstem.server.link.kv_events import KvEventsConfig
from mainstem.server.link.protocol import BeginEngine
from mainstem.text.text_engine import TextEngine
from tests.batch.fake_batch import kill_at
from tests.fake_engines import FakeEngines, a_tokenizer
from tests.server import fake_engine, saving_engine
from tests.server.thread_engine import opener

CHECKED_ENGINE = "tests.server.checked_engine"  # not imported: the server itself needs no torch
MORTAL_BYTES = 20_000
NOT_WHOLE = 3
SLOW_STEP_S = 0.02


def serve_fake(argv: list[str], step_s: float = 0.0) -> int:
    engines: list[TextEngine] = []

    def make(config: EngineConfig) -> TextEngine:
        fakes = FakeEngines(num_pages=8192, max_model_len=400)
        fakes.at_step = lambda _: sleep(step_s)
        engines.append(fakes(config))
        return engines[0]

    status = main(argv, opener(make))
    try:
        engines[0].engine.check()
        assert not engines[0].has_work, "a request is still open"
    except AssertionError as error:
        print(f"not whole: {error}", file=sys.stderr)
        return NOT_WHOLE
    return status


def serve_split(argv: list[str], module: str = fake_engine.MODULE) -> int:
    def open_(config: EngineConfig, log_level: str, kv_events: KvEventsConfig | None) -> Parts:
        begin = BeginEngine(config, "", log_level, kv_events)
        return a_tokenizer(), lambda: EngineProcess.start(begin, module)

    return main(argv, open_)


def serve_real(argv: list[str]) -> int:
    launched: list[EngineProcess] = []

    def open_(config: EngineConfig, log_level: str, kv_events: KvEventsConfig | None) -> Parts:
        tokenizer, launch = open_model(config, log_level, kv_events)
        assert isinstance(launch, partial)
        (begin,) = launch.args
        assert isinstance(begin, BeginEngine)

        def launch_checked() -> Launched:
            launched.append(EngineProcess.start(begin, CHECKED_ENGINE))
            return launched[-1]

        return tokenizer, launch_checked

    status = main(argv, open_)
    is_whole = all(each.process.returncode != NOT_WHOLE for each in launched)
    return status if is_whole else NOT_WHOLE


if __name__ == "__main__":
    if sys.argv[1] == "mortal":
        kill_at(MORTAL_BYTES)
    if sys.argv[1] == "slow":
        sys.exit(serve_fake(sys.argv[2:], SLOW_STEP_S))
    if sys.argv[1] == "saving":
        sys.exit(serve_split(sys.argv[2:], saving_engine.MODULE))
    serve = {"real": serve_real, "split": serve_split}.get(sys.argv[1], serve_fake)
    sys.exit(serve(sys.argv[2:]))
