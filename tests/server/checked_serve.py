"""`mainstem serve` as a program whose status is 3 if a page was lost.

python -m tests.server.checked_serve fake|mortal|real [flags of mainstem serve]

A mortal one kills itself in the middle of a line, when a batch has MORTAL_BYTES of answers.
"""

import sys

from mainstem.cli.batch import open_engine
from mainstem.cli.serve import main
from mainstem.core.config import EngineConfig
from mainstem.text.text_engine import TextEngine
from tests.batch.fake_batch import FakeEngines, kill_at

MORTAL_BYTES = 20_000


def serve(kind: str, argv: list[str]) -> int:
    engines = []
    if kind == "mortal":
        kill_at(MORTAL_BYTES)

    def make_engine(config: EngineConfig) -> TextEngine:
        fake = FakeEngines(num_pages=8192, max_model_len=400)
        engines.append(open_engine(config) if kind == "real" else fake(config))
        return engines[0]

    status = main(argv, make_engine)
    try:
        engines[0].engine.check()
        assert not engines[0].has_work, "something is still open"
    except AssertionError as error:
        print(f"not whole: {error}", file=sys.stderr)
        return 3
    return status


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], sys.argv[2:]))
