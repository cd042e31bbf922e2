"""The papers' items on real weights: verdicts, labels, and which model is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mainstem.core.errors import ConfigError
from mainstem.models.families import read_spec
from mainstem_bench.paper import command, quality
from mainstem_bench.paper.item import Line, Outcome, Settings
from mainstem_bench.paper.quality import QWEN, SMOLLM2, RealModel, find_model
from mainstem_bench.paper.registry import ITEMS
from mainstem_bench.paper.results import read_lines
from tests.models.checkpoints import make_checkpoint

ON_GPU = ["relay-answers-1.5b", "store-tab1-1.5b", "store-tab2-1.5b"]


def answers(model: RealModel, **of_reads: Any) -> list[Line]:
    """Lines of few-shot questions; `of_reads` changes the line of 3 examples with shared reads,
    the only one whose reads were shared."""
    equal = {
        "model": model.label,
        "accuracy": 50.0,
        "is_at_chance": False,
        "same_choices": 100.0,
        "same_tokens": 100.0,
        "logprob_difference": 0.02,
        "reads_saved": 0.0,
    }
    return [
        {
            **equal,
            "shots": shots,
            "share": share,
            **({"reads_saved": 60.5, **of_reads} if (shots, share) == (3, "reads") else {}),
        }
        for shots in (1, 3, 5)
        for share in ("none", "storage", "reads")
    ]


@pytest.mark.parametrize(
    ("model", "changed", "outcome"),
    [
        (SMOLLM2, {}, Outcome.REPRODUCED),
        (SMOLLM2, {"same_choices": 99.0}, Outcome.NOT),
        (QWEN, {"same_choices": 98.0, "accuracy": 51.0}, Outcome.REPRODUCED),
        (QWEN, {"same_choices": 97.67}, Outcome.NOT),
        (QWEN, {"reads_saved": 0.0}, Outcome.NOT),
        (QWEN, {"same_choices": 98.0, "accuracy": 48.67}, Outcome.NOT),
    ],
)
def test_how_equal_choices_must_be_depends_on_the_device(
    model: RealModel, changed: Line, outcome: Outcome
) -> None:
    assert quality.judge_answers(answers(model, **changed)).outcome is outcome


def test_a_verdict_does_not_hide_a_difference() -> None:
    told = quality.judge_answers(answers(QWEN, accuracy=50.33, same_choices=99.67)).reason
    assert "50 %, 50.33 %, 50 % with shared reads" in told
    assert "50 %, 50 %, 50 % without sharing" in told
    assert "99.67 % of questions get the same choice" in told
    assert "differ by 0.02 at most" in told
    assert "With shared reads, 0 %, 60.5 %, 0 % of the keys were not read again" in told


def test_a_model_at_chance_is_called_so() -> None:
    lines = answers(QWEN, is_at_chance=True)
    assert "With 3 examples the model only guesses" in quality.judge_answers(lines).reason


@pytest.mark.parametrize(
    ("kv", "naive", "outcome", "words"),
    [
        (10.04, 30.0, Outcome.REPRODUCED, "naive fails"),
        (9.96, 30.0, Outcome.REPRODUCED, "naive fails"),
        (10.4, 30.0, Outcome.PARTLY, "naive fails"),
        (9.4, 30.0, Outcome.NOT, "naive fails"),
        (10.6, 30.0, Outcome.NOT, "naive fails"),
        (10.4, 15.0, Outcome.NOT, "naive does not fail"),
    ],
)
def test_perplexity_is_judged_by_moved_keys_and_by_wrong_positions(
    kv: float, naive: float, outcome: Outcome, words: str
) -> None:
    found = {"whole": 9.0, "recompute": 10.0, "kv": kv, "important": 10.0, "naive": naive}
    verdict = quality.judge_perplexity(
        [{"way": way, "perplexity": value, "agreement": 0.9} for way, value in found.items()]
    )
    assert verdict.outcome is outcome
    assert words in verdict.reason


def asked(way: str, document: str, difference: float, margin: float) -> Line:
    return {
        "way": way,
        "document": document,
        "accuracy": 50.0 + difference,
        "questions": 900,
        "right_difference": difference,
        "right_margin": margin,
    }


@pytest.mark.parametrize(
    ("kv", "margin", "naive", "outcome"),
    [
        (0.5, 2.0, -20.0, Outcome.REPRODUCED),
        (-3.0, 2.0, -20.0, Outcome.NOT),
        (0.5, 6.9, -20.0, Outcome.PARTLY),  # too few questions to exclude a difference
        (0.5, 2.0, None, Outcome.PARTLY),  # half of the claim was not measured
        (0.5, 2.0, -1.0, Outcome.NOT),
    ],
)
def test_questions_are_judged_by_moved_keys_and_by_wrong_positions(
    kv: float, margin: float, naive: float | None, outcome: Outcome
) -> None:
    found = {"recompute": 0.0, "kv": kv, "important": 0.0}
    found |= {} if naive is None else {"naive": naive}
    lines = [
        asked(way, place, difference, margin)
        for way, difference in found.items()
        for place in ("last", "first")
    ]
    assert quality.judge_questions(lines).outcome is outcome


def test_items_on_a_gpu_name_a_hub_id_and_the_others_no_model() -> None:
    assert [item.name for item in ITEMS.values() if item.model is not None] == ON_GPU
    assert {ITEMS[name].model for name in ON_GPU} == {QWEN.name}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["store-tab1"], "--model has no effect on store-tab1; only on relay-answers-1.5b"),
        (["store-tab1-1.5b", "relay-fig7"], "no effect on relay-fig7"),
        (["store-tab1-1.5b", "--quick"], "no effect with --quick"),
        (["store-tab1-1.5b", "--draw"], "no effect with --draw"),
    ],
)
def test_a_model_that_would_not_be_used_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        command.main([*flags, "--model", "some/model"])


@pytest.mark.torch
def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its lines would be labelled as the wanted model's."""
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"folder of Qwen2\.5-Coder-1\.5B, which has 28 layers"):
        find_model(QWEN, Settings(model=str(tmp_path)))
    make_checkpoint("llama", tmp_path, num_hidden_layers=28)
    with pytest.raises(ConfigError, match="28 layers of 1536; the model there has 28 of"):
        find_model(QWEN, Settings(model=str(tmp_path)))
    small = replace(QWEN, hidden_size=read_spec(tmp_path).hidden_size)
    assert find_model(small, Settings(model=str(tmp_path))).folder == tmp_path.resolve()


@pytest.mark.torch
def test_a_quick_run_of_a_gpu_item_uses_the_embedded_model_and_its_label() -> None:
    run = ITEMS["store-tab1-1.5b"].run
    assert run is not None
    lines = list(run(Settings(is_quick=True)))
    assert [line["way"] for line in lines] == ["whole", "kv"]
    assert {line["model"] for line in lines} == {"smollm2"}


@pytest.mark.parametrize("name", ON_GPU)
def test_lines_of_both_models_can_be_drawn(name: str, tmp_path: Path) -> None:
    """Stored lines of the small model stand in for those of the larger one."""
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "paper"
    small = ITEMS[name.removesuffix("-1.5b")]
    lines = [{**line, "model": QWEN.label} for line in read_lines(stored, small)]
    command.draw(ITEMS[name], lines, tmp_path / "plot.svg")
    assert QWEN.label in (tmp_path / "plot.svg").read_text()
    assert command.judged(ITEMS[name], lines).outcome in (Outcome.REPRODUCED, Outcome.PARTLY)
