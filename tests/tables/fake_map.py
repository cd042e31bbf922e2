"""Runs `mainstem map` over FakeRunner. Tests of kills run it as a program.

python -m tests.tables.fake_map KILL_AT_BYTES TABLE -o OUT [flags]    (0: not killed)
"""

import sys

from mainstem.cli.map import main
from tests.batch.fake_batch import kill_at
from tests.fake_engines import FakeEngines, a_tokenizer


def run(argv: list[str]) -> int:
    """The program."""
    if int(argv[0]):
        kill_at(int(argv[0]))
    return main(argv[1:], FakeEngines(num_pages=128), lambda _: a_tokenizer())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
