"""`mainstem bench fewshot`: answers on the embedded model."""

import pytest

from mainstem.core.config import EngineConfig, ModelConfig, Share
from mainstem.core.errors import ConfigError
from mainstem_bench.fewshot import main, measure, read_questions

pytestmark = pytest.mark.torch


def test_fewer_examples_before_do_not_change_what_is_computed() -> None:
    """One example is a prefix of three: pages left in the cache would save tokens."""
    config = EngineConfig(model=ModelConfig(model="smollm2", threads=1))
    questions = read_questions(None, (1, 3), 1)
    both, alone = (
        list(measure(config, questions, shots, [Share.STORAGE], num_going_on=1, num_tokens=2))
        for shots in ((1, 3), (3,))
    )
    assert [found.shots for found in both] == [1, 3]
    assert both[1].computed_tokens == alone[0].computed_tokens > both[0].computed_tokens
    assert both[1].answer_perplexity == alone[0].answer_perplexity


@pytest.mark.parametrize("tier", [["--host-gb", "1"], ["--disk-dir", "pages"]])
def test_lower_tiers_are_refused(tier: list[str]) -> None:
    with pytest.raises(ConfigError, match="only the device's cache is measured"):
        main(["--model", "smollm2", *tier])
