"""The program of a rank over FakeRunner."""

import sys

from mainstem.runner.ranks.rank import main
from tests.runner.ranks.fake_rank import load_part

if __name__ == "__main__":
    main(sys.argv[1:], load_part)
