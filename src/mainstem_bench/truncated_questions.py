"""Asks questions about a document after a full window was cut (AttentionStore, Table 2)."""

import json
import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from mainstem.core.config import EngineConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus
from mainstem.core.files import read_plain_or_gzip, text_lines
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Runner
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.kept import KeptModel
from mainstem_bench.ways import OverflowWay, WatchedRunner, way_config

ANSWER_TOKENS = 16
SPARE_TOKENS = 8  # tokens of the window that stay free, so that any question makes it overflow
QUESTION_TOKENS = 48  # approximate length of a question and the template around it
READ = {"role": "assistant", "content": "I have read it. What do you want to know?"}
ARTICLES = {"a", "an", "the"}


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    questions: tuple[tuple[str, str], ...]  # (question, answer)


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Documents with questions, and other text to fill the window."""

    documents: tuple[Document, ...]
    filler_ids: Sequence[int]
    is_document_first: bool = False
    answer_tokens: int = ANSWER_TOKENS  # the most

    def told(self, document: Document, filler: str) -> str:
        """Return the beginning of a conversation."""
        texts = (document.text, filler) if self.is_document_first else (filler, document.text)
        return "\n\n".join(texts)


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of one way."""

    way: str
    questions: int
    accuracy: float  # percent of answers that contain the wanted words
    f1: float  # percent; compares the words of the answer with those of the wanted answer
    computed_tokens: int
    moved_pages: int
    seconds: float
    answers: tuple["ScoredAnswer", ...]


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """How good one answer is, in points."""

    document: int
    right: float  # 100 if the answer contains the wanted words
    f1: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean difference in points between two ways over the same questions. `margin` is half of
    the 95 % interval of the mean. It is computed over documents, since questions about one document
    are not independent.
    """

    mean: float
    margin: float


def read_documents(path: Path) -> list[Document]:
    """Read documents with questions. For a row of another form, raises InvalidRequest that names
    the line."""
    documents: list[Document] = []
    for number, row in enumerate(text_lines(read_plain_or_gzip(path)), start=1):
        try:
            found = json.loads(row)
            items = tuple((_bare(str(item["q"])), str(item["a"])) for item in found["items"])
            documents.append(Document(str(found["doc"]), items))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(str(path), f"line {number}: {error!r}") from error
    return documents


def _bare(question: str) -> str:
    """Return a question without the words of a completion prompt."""
    return question.strip().removeprefix("Question:").removesuffix("Answer:").strip()


def ask(model: KeptModel, config: EngineConfig, way: OverflowWay, questions: QuestionSet) -> Score:
    """Fill the window with a document and other text; then ask the questions."""
    config = way_config(config, way)
    window = config.sched.max_model_len
    assert window is not None
    bus = EventBus()
    counters = Counters().attach(bus)
    nothing = np.empty(0, np.int32)

    def watch(runner: Runner) -> Runner:
        return WatchedRunner(runner, nothing, 0, way.is_naive)

    tokenizer = Tokenizer.load(model.folder, config.model.chat_template)
    engine = TextEngine(model.build(config, bus, around=watch), tokenizer)
    greedy = SamplingParams(temperature=0.0, max_tokens=questions.answer_tokens)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    scores: list[ScoredAnswer] = []
    began_s = perf_counter()
    for number, document in enumerate(questions.documents):
        num_filler = window - SPARE_TOKENS - len(tokenizer.encode_chat([_user(document.text)]))
        if num_filler < window // 2 + QUESTION_TOKENS + questions.answer_tokens:
            continue  # the cut would drop a part of the document
        filler = tokenizer.decode(questions.filler_ids[:num_filler])
        told = _user(questions.told(document, filler))
        session = SessionId(f"document-{number}")
        _answers(engine, {session: tokenizer.encode_chat([told])}, one, session, way)
        prompts = {q: tokenizer.encode_chat([told, READ, _user(q)]) for q, _ in document.questions}
        answers = _answers(engine, prompts, greedy, session, way)
        scores += [_score(number, answers[q], wanted) for q, wanted in document.questions]
    seconds = perf_counter() - began_s
    engine.engine.check()
    engine.engine.close()
    if not scores:
        raise InvalidRequest("--questions", f"no document is short enough for a window of {window}")
    return Score(
        way=way.name,
        questions=len(scores),
        accuracy=sum(score.right for score in scores) / len(scores),
        f1=sum(score.f1 for score in scores) / len(scores),
        computed_tokens=counters.computed_tokens,
        moved_pages=counters.moved_pages,
        seconds=round(seconds, 1),
        answers=tuple(scores),
    )


def _user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


def _answers(
    engine: TextEngine,
    prompts: dict[str, list[int]],
    sampling: SamplingParams,
    session: SessionId,
    way: OverflowWay,
) -> dict[str, str]:
    for name, ids in prompts.items():
        engine.submit(
            Request(
                RequestId(name), np.asarray(ids), sampling, session=session, overflow=way.overflow
            )
        )
    answers = dict.fromkeys(prompts, "")
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.text
    return answers


def _score(document: int, answer: str, wanted: str) -> ScoredAnswer:
    """Return whether the answer contains the wanted words, and F1: the harmonic mean of precision
    and recall."""
    said, right = _words(answer), _words(wanted)
    common = sum((Counter(said) & Counter(right)).values())
    f1 = 2 * common / (len(said) + len(right)) if said or right else 0.0
    is_right = f" {' '.join(right)} " in f" {' '.join(said)} "
    return ScoredAnswer(document, 100.0 * is_right, 100.0 * f1)


def compare(some: Sequence[ScoredAnswer], others: Sequence[ScoredAnswer], field: str) -> Difference:
    """Compare `others` with `some`; both answer the same questions in the same order."""
    by_document: dict[int, list[float]] = {}
    for one, other in zip(some, others, strict=True):
        assert one.document == other.document, "answers to other questions"
        points = by_document.setdefault(one.document, [])
        points.append(getattr(other, field) - getattr(one, field))
    count = sum(map(len, by_document.values()))
    mean = sum(map(sum, by_document.values())) / count
    # the sandwich estimate, with documents as clusters
    spread = sum((sum(points) - len(points) * mean) ** 2 for points in by_document.values())
    return Difference(mean, 1.96 * math.sqrt(spread) / count)


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ARTICLES]
