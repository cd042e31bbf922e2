"""`mainstem bench kv-answers`: where needles are, what is compared, and a small run."""

import json
from pathlib import Path
from random import Random

import pytest
import tokenizers

from mainstem.core.errors import ConfigError
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.kv_answers import _Asked, compare, main, make_needles, sign_test

pytestmark = pytest.mark.torch


def a_tokenizer() -> Tokenizer:
    """A word is a token; <s> begins a text."""
    model = tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "word": 2}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend)


def test_needles_are_spread_over_prompts_of_the_length() -> None:
    found = list(make_needles(a_tokenizer(), "word " * 100, 50, 5, Random(0)))
    fact, ask = 7, 6  # tokens of "The secret number of Oslo is 1234567." and the question
    room = 50 - 1 - fact - ask
    depths = []
    for needle in found:
        assert len(needle.prompt) == 50
        assert needle.prompt[0] == 1
        assert needle.prompt.count(2) == room
        assert len(needle.number) == 7
        depths.append(needle.prompt.index(0) - 1)
    assert depths == [0, room // 4, room // 2, room * 3 // 4, room]
    with pytest.raises(ConfigError, match="not enough for 200"):
        list(make_needles(a_tokenizer(), "word " * 100, 200, 1, Random(0)))


def test_answers_are_compared_in_pairs() -> None:
    one = _Asked("needle", 9, ["a", "b", "c", "d"], [True, True, True, False])
    other = _Asked("needle", 9, ["a", "x", "y", "d"], [True, False, False, False])
    found = compare(one, other)
    assert (found.right_16_bits, found.right_fp8, found.same) == (75, 25, 50)
    assert (found.only_16_bits, found.only_fp8) == (2, 0)


def test_the_sign_test_is_that_of_equal_chances() -> None:
    assert sign_test(0, 0) == sign_test(3, 3) == sign_test(1, 2) == 1
    assert sign_test(5, 0) == sign_test(0, 5) == 2 / 2**5
    assert sign_test(1, 7) == 2 * (1 + 8) / 2**8


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The sea was quiet that day, and nobody said a word. " * 30)
    flags = ["--model", "smollm2", "--threads", "1", "--kv-tokens", "2048", "--text", str(text)]
    flags += ["--questions", "2", "--shots", "1", "--lengths", "120", "--needles", "2", "--json"]
    assert main(flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["few-shot", "needle"]
    assert [line["count"] for line in lines] == [2, 2]
    assert lines[1]["right_16_bits"] == 100
