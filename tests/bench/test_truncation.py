"""`mainstem bench truncation`: its scores equal those of another implementation."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mainstem.core.config import EngineConfig, ModelConfig, SchedConfig, StoreConfig
from mainstem.core.errors import ConfigError, InvalidRequest, ModelNotFound
from mainstem.core.request import Overflow
from mainstem.sched.truncation import Truncator
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.chat_sessions import Chats, ChatWork
from mainstem_bench.kept import KeptModel
from mainstem_bench.truncated_questions import (
    Document,
    QuestionSet,
    ScoredAnswer,
    ask,
    compare,
    read_documents,
)
from mainstem_bench.truncation import main, read_on
from mainstem_bench.ways import WAYS
from tests.builders import a_request
from tests.models.checkpoints import VOCAB, make_checkpoint

pytestmark = pytest.mark.torch

WINDOW, TURN, PAGE = 64, 16, 16
CONFIG = EngineConfig(model=ModelConfig(threads=1), sched=SchedConfig(max_model_len=WINDOW))


@pytest.fixture(scope="module")
def short(smollm2_folder: Path) -> KeptModel:
    """For a window of 64 tokens; loaded once."""
    return KeptModel(smollm2_folder)


@pytest.fixture(scope="module")
def longer(smollm2_folder: Path) -> KeptModel:
    """For a window of 256 tokens; loaded once."""
    return KeptModel(smollm2_folder)


@pytest.fixture(scope="module")
def text_ids(smollm2_folder: Path) -> list[int]:
    path = Path(__file__).parents[1] / "data" / "wikitext2_head.txt"
    return Tokenizer.load(smollm2_folder).encode(path.read_text(encoding="utf-8")[:1500])[:136]


def perplexity_by_transformers(folder: Path, ids: list[int]) -> float:
    """The same turns, each as one forward pass over the kept tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    truncator = Truncator(CONFIG.sched, WINDOW, PAGE)
    logprobs: dict[int, float] = {}
    for end in [*range(WINDOW - TURN, len(ids), TURN), len(ids)]:
        request = a_request(list(range(end)), max_tokens=1, overflow=Overflow.RECOMPUTE)
        numbers = truncator.fit(request)[0].prompt_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[ids[n] for n in numbers]])).logits[0]
        scores = torch.log_softmax(logits, dim=-1)
        for row, number in enumerate(numbers):
            if WINDOW < number + 1 < len(ids):
                logprobs.setdefault(number + 1, float(scores[row, ids[number + 1]]))
    return math.exp(-float(np.mean(list(logprobs.values()))))


def test_recompute_scores_as_transformers_does(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 160)]
    reading = read_on(KeptModel(tmp_path), CONFIG, WAYS["recompute"], ids, TURN)
    assert reading.scored_tokens == len(ids) - WINDOW - 1
    assert reading.perplexity == pytest.approx(perplexity_by_transformers(tmp_path, ids), rel=1e-3)


def test_pages_in_host_memory_change_no_score(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 160)]
    with_host = replace(CONFIG, store=StoreConfig(host_gb=0.01))
    plain, stored = (
        read_on(KeptModel(tmp_path), c, WAYS["kv"], ids, TURN) for c in (CONFIG, with_host)
    )
    assert stored.perplexity == pytest.approx(plain.perplexity, rel=1e-6)


def test_a_model_of_one_layer_cannot_tell_moved_from_recomputed_keys(tmp_path: Path) -> None:
    """Its K and V depend on token and position alone. So `kv`, which rotates keys to their new
    positions, is exact; `naive`, which does not, is wrong."""
    make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 160)]
    recompute, kv, no_sink, naive = (
        read_on(KeptModel(tmp_path), CONFIG, WAYS[name], ids, TURN)
        for name in ("recompute", "kv", "no sink", "naive")
    )
    assert kv.perplexity == pytest.approx(recompute.perplexity, rel=1e-4)
    assert abs(naive.perplexity / recompute.perplexity - 1) > 1e-2
    assert abs(no_sink.perplexity / recompute.perplexity - 1) > 1e-2
    assert kv.computed_tokens == len(ids) < recompute.computed_tokens
    assert kv.moved_pages == naive.moved_pages > 0


def test_moved_keys_predict_better_than_misplaced_ones(
    short: KeptModel, text_ids: list[int]
) -> None:
    kv, naive = (read_on(short, CONFIG, WAYS[name], text_ids, TURN) for name in ("kv", "naive"))
    assert kv.perplexity < naive.perplexity


def test_a_text_too_short_for_many_cuts_is_refused(short: KeptModel, text_ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="too short"):
        read_on(short, CONFIG, WAYS["kv"], text_ids[:100], TURN)


@pytest.mark.parametrize("way", ["kv", pytest.param("important", marks=pytest.mark.slow)])
def test_questions_are_asked_after_the_cut(
    way: str, longer: KeptModel, text_ids: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    question = "\n\nQuestion: What is the name of the cat?\nAnswer:"
    items = [{"q": question, "a": "Tom"}, {"q": question.replace("cat", "dog"), "a": "the Rex"}]
    row = {"doc": "The cat is called Tom. The dog is called Rex.", "items": items}
    path.write_text(json.dumps(row) + "\n")
    config = EngineConfig(model=ModelConfig(threads=1), sched=SchedConfig(max_model_len=256))
    filler = [*text_ids, *text_ids]
    documents = tuple(read_documents(path))
    assert documents[0].questions[0] == ("What is the name of the cat?", "Tom")
    questions = QuestionSet(documents, filler)
    score = ask(longer, config, WAYS[way], questions)
    assert score.questions == 2
    assert score.moved_pages > 0
    assert score.accuracy == 100.0


def test_answers_have_at_most_the_tokens_that_were_asked_for(
    longer: KeptModel, text_ids: list[int]
) -> None:
    """A longer answer needs a longer part of the window."""
    document = Document("The cat is called Tom.", (("What is the name of the cat?", "Tom"),))
    config = EngineConfig(model=ModelConfig(threads=1), sched=SchedConfig(max_model_len=256))
    filler = [*text_ids, *text_ids]
    cut, whole = (
        ask(longer, config, WAYS["kv"], QuestionSet((document,), filler, answer_tokens=count))
        for count in (1, 9)
    )
    assert (cut.accuracy, whole.accuracy) == (0.0, 100.0)  # "The name of the cat is Tom."
    with pytest.raises(InvalidRequest, match="no document is short enough"):
        ask(longer, config, WAYS["kv"], QuestionSet((document,), filler, answer_tokens=100))


def test_methods_are_compared_question_by_question() -> None:
    some = [ScoredAnswer(n // 2, 100.0 * (n % 2), 50.0) for n in range(40)]
    same = compare(some, some, "right")
    assert (same.mean, same.margin) == (0.0, 0.0)
    # the same difference for every question
    better = [ScoredAnswer(a.document, a.right, 60.0) for a in some]
    found = compare(some, better, "f1")
    assert found.mean == pytest.approx(10.0)
    assert found.margin == pytest.approx(0.0)


def test_the_margin_equals_that_of_a_bootstrap_over_documents() -> None:
    """Documents are drawn, not questions: questions about one document are not independent."""
    rng = np.random.default_rng(0)
    points = [(n, float(rng.normal(rng.normal(0, 8), 20))) for n in range(150) for _ in range(5)]
    zeros = [ScoredAnswer(n, 0.0, 0.0) for n, _ in points]
    found = compare(zeros, [ScoredAnswer(n, 0.0, f1) for n, f1 in points], "f1")
    sums = np.array([f1 for _, f1 in points]).reshape(150, 5).sum(axis=1)
    means = [sums[rng.integers(0, 150, 150)].sum() / len(points) for _ in range(2000)]
    assert found.margin == pytest.approx(1.96 * float(np.std(means)), rel=0.08)


def test_the_error_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"doc": "x", "items": []}\n{"doc": "x"}\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        read_documents(path)


def test_the_command_prints_a_line_for_each_method(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(smollm2_folder), "--threads", "1", "--max-model-len", "64"]
    assert (
        main([*flags, "--turn", "16", "--tokens", "140", "--ways", "kv", "no sink", "--json"]) == 0
    )
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["whole", "kv", "no sink"]
    assert rows[0]["agreement"] == 1.0
    assert all(0.2 < row["agreement"] < 1.0 for row in rows[1:])
    assert all(row["perplexity"] > 1 for row in rows)


def test_a_missing_chat_template_is_an_error(smollm2_folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(threads=1, chat_template=str(tmp_path / "none.jinja"))
    config = EngineConfig(model=model, sched=SchedConfig(max_model_len=256))
    with pytest.raises(ModelNotFound, match=r"none\.jinja"):
        ask(KeptModel(smollm2_folder), config, WAYS["kv"], QuestionSet((), []))
    with pytest.raises(ModelNotFound, match=r"none\.jinja"):
        Chats(ChatWork((), 1, 1, 1, 1, ()), config)
