"""Measures how well a model continues after its conversation was cut to the window (AttentionStore
4.3.7).

A text is fed as one long conversation, a few tokens per turn. Whenever it fills the window, half of
the window is dropped. For each of these ways, perplexity is measured over every token after the
first cut:

    whole       nothing is dropped; only if the model's context is long enough
    recompute   the oldest tokens are dropped, the others are computed again
    kv          the KV of the kept tokens is moved; the first page is kept as the sink
    important   like kv, but drops the pages that the last 64 tokens attend to least
    no sink     like kv, without the sink
    naive       like kv, but keys keep the rotation of their old positions

Agreement is the share of these tokens at which the likeliest token is the same as with nothing
dropped. `important` reads the last tokens before the cut. So in a turn with a cut it predicts some
tokens from more context than the other ways. `perplexity_later` leaves out such turns, for every
way.

With --questions FILE, a document comes at the end of a window that is filled with other text. The
cut drops the other text; then the questions are asked, and answers that contain the wanted words
are counted. Every way is compared with the first, question by question. With --document-first the
document comes before the other text: then only a way that chooses what to drop can keep the
document.
"""

import argparse
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import perf_counter

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.files import read_plain_or_gzip
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.metrics import Counters
from mainstem.core.request import Output, Request, SamplingParams
from mainstem.core.step import Runner
from mainstem.engine.engine import Engine
from mainstem.models.families import read_spec
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.kept import KeptModel
from mainstem_bench.report import show_all
from mainstem_bench.truncated_questions import QuestionSet, Score, ask, compare, read_documents
from mainstem_bench.ways import WAYS, OverflowWay, WatchedRunner, way_config

MIN_CUTS = 2  # a text that is cut less often says little


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one way on a text."""

    way: str
    perplexity: float
    perplexity_later: float | None  # None: every turn has a cut, or nothing was dropped
    agreement: float | None  # None: the text is longer than the model's context
    scored_tokens: int
    computed_tokens: int
    moved_pages: int
    dropped_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Whole:
    """The result of reading the text without a cut: the logprob of each token, and the likeliest
    token in its place. The first token has neither."""

    logprobs: list[float]
    likeliest: list[int]
    seconds: float

    def reading(self, window: int) -> Reading:
        """Return the result over the tokens that are scored with a window."""
        logprobs = self.logprobs[window + 1 :]
        return Reading(
            way="whole",
            perplexity=_perplexity(logprobs),
            perplexity_later=None,
            agreement=1.0,
            scored_tokens=len(logprobs),
            computed_tokens=len(self.logprobs),
            moved_pages=0,
            dropped_tokens=0,
            seconds=self.seconds,
        )


def read_whole(model: KeptModel, config: EngineConfig, text_ids: Sequence[int]) -> Whole | None:
    """Read the text without a cut; None: it is longer than the model's context."""
    num_tokens = len(text_ids) + 1
    if num_tokens > read_spec(model.folder).max_positions:
        return None
    sched = replace(config.sched, max_model_len=num_tokens)
    cache = replace(config.cache, kv_tokens=config.cache.kv_tokens or 2 * num_tokens)
    engine = model.build(replace(config, sched=sched, cache=cache))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    began_s = perf_counter()
    engine.submit(Request(RequestId("text"), np.array(text_ids, np.int32), sampling))
    found = [output.prompt_logprobs for output in _outputs(engine) if output.prompt_logprobs]
    engine.close()
    [(_, *records)] = found
    tokens = [record for record in records if record is not None]
    assert len(tokens) == len(text_ids) - 1, "a token was not scored"
    return Whole(
        [math.nan, *(record.logprob for record in tokens)],
        [-1, *(record.top_ids[0] for record in tokens)],
        round(perf_counter() - began_s, 1),
    )


def _outputs(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def read_on(
    model: KeptModel,
    config: EngineConfig,
    way: OverflowWay,
    text_ids: Sequence[int],
    turn_tokens: int,
    whole: Whole | None = None,
) -> Reading:
    """Feed the text as a conversation; every turn adds `turn_tokens`."""
    ids = np.array(text_ids, np.int32)
    config = way_config(config, way)
    window = config.sched.max_model_len
    assert window is not None
    if turn_tokens >= window:
        raise ConfigError(f"a turn of {turn_tokens} tokens does not fit a window of {window}")
    if len(ids) < (1 + MIN_CUTS * config.sched.truncation_ratio) * window:
        raise ConfigError(f"a text of {len(ids)} tokens is too short for a window of {window}")
    bus = EventBus()
    counters = Counters().attach(bus)
    watched: list[WatchedRunner] = []

    def watch(runner: Runner) -> Runner:
        watched.append(WatchedRunner(runner, ids, window + 1, way.is_naive))
        return watched[0]

    engine = model.build(config, bus, around=watch)
    page_size = config.cache.page_size
    sink = page_size if way.sink_tokens is None else way.sink_tokens
    watched[0].attach(bus, sink)
    began_s = perf_counter()
    # the first turn fills the window except for the size of one turn, so that the cut is between
    # turns
    ends = list(range(window - turn_tokens, len(ids), turn_tokens))
    at_cuts: set[int] = set()  # numbers of the tokens in turns with a new cut
    before = 0
    for turn, end in enumerate([*ends, len(ids)]):
        num_cuts = watched[0].num_cuts
        request = Request(
            request_id=RequestId(f"turn-{turn}"),
            prompt_ids=ids[:end],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            session=SessionId("text"),
            overflow=way.overflow,
        )
        engine.submit(request)
        _outputs(engine)
        if watched[0].num_cuts > num_cuts:
            at_cuts |= set(range(before + 1, end + 1))
        before = end
    seconds = perf_counter() - began_s
    engine.check()
    engine.close()
    logprobs = watched[0].logprobs
    assert sorted(logprobs) == list(range(window + 1, len(ids))), "a token was not scored"
    later = [logprobs[number] for number in logprobs.keys() - at_cuts]
    return Reading(
        way=way.name,
        perplexity=_perplexity(logprobs.values()),
        perplexity_later=_perplexity(later) if later else None,
        agreement=None if whole is None else _agreement(watched[0].likeliest, whole),
        scored_tokens=len(logprobs),
        computed_tokens=counters.computed_tokens,
        moved_pages=counters.moved_pages,
        dropped_tokens=counters.dropped_tokens,
        seconds=round(seconds, 1),
    )


def _perplexity(logprobs: Collection[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def _agreement(likeliest: dict[int, int], whole: Whole) -> float:
    same = sum(token == whole.likeliest[number] for number, token in likeliest.items())
    return same / len(likeliest)


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench truncation", description=__doc__)
    flag = partial(add_flag, made)
    flag("--text", Path, "what to read, also .gz (the demo's documents)")
    flag("--tokens", positive_count, "tokens to read", 3072)
    flag("--turn", positive_count, "tokens a turn", 64)
    made.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS), metavar="WAY")
    made.add_argument(
        "--questions",
        type=Path,
        action="append",
        metavar="FILE",
        help='questions: {"doc": text, "items": [{"q": question, "a": answer}]} a line,\n'
        "also .gz; any number of files",
    )
    flag("--documents", positive_count, "number to use", 40)
    made.add_argument(
        "--document-first",
        action="store_true",
        help="the document comes before the other text, so that the oldest tokens are its own",
    )
    made.add_argument("--json", action="store_true")
    add_engine_flags(made)
    made.set_defaults(max_model_len=512)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    config = engine_config(args)
    model = KeptModel(resolve_model(config.model.model))
    tokenizer = Tokenizer.load(model.folder)
    text_ids = tokenizer.encode(read_text(args.text))
    if args.questions is None:
        rows = _readings(model, config, args.ways, text_ids[: args.tokens], args.turn)
    else:
        found = [document for path in args.questions for document in read_documents(path)]
        questions = QuestionSet(tuple(found[: args.documents]), text_ids, args.document_first)
        rows = _scores(model, config, args.ways, questions)
    sources = args.questions or [args.text]
    names = " ".join(source.name if source else "demo" for source in sources)
    about = {"text": names, "window": config.sched.max_model_len}
    show_all("truncation", (row | about for row in rows), args.json)
    return 0


def _readings(
    model: KeptModel,
    config: EngineConfig,
    ways: Sequence[str],
    ids: Sequence[int],
    turn_tokens: int,
) -> Iterator[dict[str, object]]:
    whole = read_whole(model, config, ids)
    if whole is not None:
        assert config.sched.max_model_len is not None
        yield asdict(whole.reading(config.sched.max_model_len))
    for name in ways:
        yield asdict(read_on(model, config, WAYS[name], ids, turn_tokens, whole))


def _scores(
    model: KeptModel, config: EngineConfig, ways: Sequence[str], questions: QuestionSet
) -> Iterator[dict[str, object]]:
    first: Score | None = None  # the other ways are compared with it
    for name in ways:
        score = ask(model, config, WAYS[name], questions)
        first = first or score
        place = "first" if questions.is_document_first else "last"
        yield _question_result(score, first) | {"document": place}


def _question_result(score: Score, first: Score) -> dict[str, object]:
    """Return a result with the difference to the first way, in points, and half of its 95 %
    interval."""
    result = {name: value for name, value in asdict(score).items() if name != "answers"}
    if score is not first:
        result["against"] = first.way
        for field in ("right", "f1"):
            found = compare(first.answers, score.answers, field)
            result[f"{field}_difference"] = round(found.mean, 2)
            result[f"{field}_margin"] = round(found.margin, 2)
    return result


def read_text(path: Path | None) -> str:
    """Return the file's text; without a file, the documents of the demo, one after the other."""
    if path is None:
        rows = (files("mainstem") / "data" / "demo_docs.jsonl").read_text(encoding="utf-8")
        return "\n\n".join(json.loads(row)["doc"] for row in rows.splitlines())
    return read_plain_or_gzip(path)
