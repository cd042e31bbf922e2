"""The soak test passes on a correct engine, and fails if an answer is lost or ends twice."""

import json

import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.request import Output
from mainstem.engine.engine import Engine
from mainstem_bench import soak
from mainstem_bench.soak import Crowd, RandomRequests, main
from tests.builders import VOCAB, an_engine


class Careless:
    """An engine that delivers the last output of one answer `repeats` times; 0 drops it."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        self._engine = engine
        self._repeats = repeats

    def step(self) -> list[Output]:
        outputs = self._engine.step()
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended and self._repeats != 1:
            place = outputs.index(ended[0])
            outputs[place : place + 1] = [ended[0]] * self._repeats
            self._repeats = 1
        return outputs

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "OUTPUT_TOKENS", (200, 8))
    monkeypatch.setattr(soak, "TURN_REQUESTS", 24)


def a_crowd(repeats: int, can_overlap: bool = True) -> Crowd:
    config = SchedConfig(chunk_tokens=64)
    engine = an_engine(num_pages=128, page_size=4, config=config, can_overlap=can_overlap)
    careless = Careless(engine, repeats)
    return Crowd(careless, RandomRequests(VOCAB, seed=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("can_overlap", [True, False])
def test_every_answer_ends_once(can_overlap: bool) -> None:
    crowd = a_crowd(repeats=1, can_overlap=can_overlap)
    crowd.run(40)
    assert crowd.ends.total() == crowd.num_answers >= 40


def test_a_lost_answer_is_noticed() -> None:
    with pytest.raises(AssertionError, match="never ended"):
        a_crowd(repeats=0).run(12)


def test_an_answer_that_ends_twice_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not open"):
        a_crowd(repeats=2).run(12)


def test_requests_are_seeded() -> None:
    first, second = (RandomRequests(VOCAB, seed=3) for _ in range(2))
    for _ in range(5):
        a, b = first.next(), second.next()
        assert a.prompt_ids.tolist() == b.prompt_ids.tolist()
        assert (a.sampling, a.priority) == (b.sampling, b.priority)


def test_a_real_runner_survives_aborts_and_preemptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "40", "--kv-tokens", "512", "--page-size", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert sum(result["ends"].values()) == result["answers"] >= 40
    assert result["ends"]["abort"] > 0
    assert result["preemptions"] > 0


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="--requests"):
        main(["--requests", "2"])


def test_a_soak_that_preempts_nothing_fails() -> None:
    with pytest.raises(ConfigError, match="nothing was preempted"):
        main(["--requests", "4", "--model-shape", "tiny", "--device", "cpu"])
