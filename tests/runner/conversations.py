"""A conversation that outgrows its window, for models of one layer.

Keys and values of one layer depend on token and position alone, so moved pages equal recomputed
ones: each answer must equal that to a prompt of the kept tokens.
"""

import numpy as np

from mainstem.core.ids import RequestId, SessionId
from mainstem.core.request import Overflow, Request, SamplingParams
from mainstem.engine.engine import Engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def answer(engine: Engine, request: Request) -> tuple[int, ...]:
    engine.submit(request)
    tokens: tuple[int, ...] = ()
    while engine.has_work:
        for output in engine.step():
            assert output.fault is None
            tokens += output.token_ids
    return tokens


def check_conversation(
    engine: Engine, overflow: Overflow, vocab: int, turns: int, turn_tokens: int
) -> int:
    """Check the answer of each turn. Returns in how many turns pages were kept that a plain cut
    would have dropped."""
    rng = np.random.default_rng(7)
    said: list[int] = []
    num_chosen = 0
    for turn in range(turns):
        said += rng.integers(3, vocab, turn_tokens).tolist()
        request = Request(
            RequestId(f"turn-{turn}"),
            np.array(said, np.int32),
            GREEDY,
            session=SessionId("s"),
            overflow=overflow,
        )
        found = answer(engine, request)
        # the pages to keep have been chosen
        kept, truncation = engine._scheduler._intake._truncator.fit(request)
        alone = Request(RequestId(f"alone-{turn}"), kept.prompt_ids, GREEDY, salt=b"alone")
        assert found == answer(engine, alone)
        if truncation is not None:
            num_chosen += len(truncation.cut.head) > truncation.cut.sink_pages
        said += found
    engine.check()
    return num_chosen
