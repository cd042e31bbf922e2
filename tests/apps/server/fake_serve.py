"""`mainstem serve` over FakeRunner, as a program; its status is 3 if a page was lost.

python -m tests.apps.server.fake_serve [flags of mainstem serve]
"""

import sys

from mainstem.apps.server.serve import main
from tests.apps.fake_batch import FakeEngines


def serve(argv: list[str]) -> int:
    engines = FakeEngines(num_pages=8192, max_model_len=400)
    status = main(argv, engines)
    assert engines.engine is not None
    try:
        engines.engine.engine.check()
        assert not engines.engine.has_work, "something is still open"
    except AssertionError as error:
        print(f"not whole: {error}", file=sys.stderr)
        return 3
    return status


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
