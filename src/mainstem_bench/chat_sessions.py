"""Measures real conversations with a real model, which return turn by turn; see `mainstem bench
sessions`.

    first process     the first turns, sessions are idle in between; ends as the first --end says
    others            one turn each, from the disk alone; all but the last end as --end says

Every batch is sent to an engine with a store and then, in the same process, to one without, so that
the machine is in the same state for both. Times and tokens are compared.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.core.config import EngineConfig, StoreConfig
from mainstem.core.environment import SWITCH_S
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.conversations import Dialogue, from_file
from mainstem_bench.session_engine import Ids, ask_all
from mainstem_bench.settings import empty_folder

Todo = list[tuple[int, int, Ids]]  # (session, turn, prompt)
KILLED = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class ChatWork:
    """The conversations, and how their turns are asked."""

    files: tuple[str, ...]
    sessions: int
    turns: int  # of each conversation
    output: int  # tokens of an answer
    at_once: int
    ends: tuple[str, ...]  # close or kill: how the process ends before each of the last turns


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of one session."""

    session: int
    turn: int
    prompt: Ids
    answer: Ids
    first_s: float
    cached: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The turns of one process, and how the process ends."""

    turns: range
    end: str
    where: str  # "running", or "after" the end of the process before


@dataclass(frozen=True, slots=True)
class Told:
    """The results of one turn of all sessions, with a store and without."""

    turn: int
    pairs: list[tuple[Asked, Asked]]
    loaded: dict[str, int]  # pages loaded since the process began, by tier


def measure_chats(work: ChatWork, config: EngineConfig) -> Iterator[dict[str, object]]:
    """Yield one line per turn, as soon as it is measured: the time to the first token with a store
    and without. The last line is over all turns except the first."""
    later: list[tuple[Asked, Asked]] = []
    _choose(work)  # errors in the files are reported here, not by a child process
    with empty_folder(config.store.disk_dir) as folder:
        store = replace(config.store, disk_dir=folder)
        before: list[Asked] = []
        for stage in stages(work):
            for told in _in_process(work, stage, replace(config, store=store), before):
                before = [stored for stored, _ in told.pairs]
                later += told.pairs if told.turn > 1 else []
                about = {"turn": told.turn, "where": stage.where, "loaded_pages": told.loaded}
                yield about | _result(told.pairs)
    yield {"turn": "later", "where": "all"} | _result(later)


def stages(work: ChatWork) -> list[Stage]:
    """The processes, one after the other."""
    first_alone = work.turns - len(work.ends) + 1
    found = [Stage(range(1, first_alone), work.ends[0], "running")]
    nexts = (*work.ends[1:], "close")
    for turn, past, end in zip(range(first_alone, work.turns + 1), work.ends, nexts, strict=True):
        found.append(Stage(range(turn, turn + 1), end, f"after {past}"))
    return found


def _result(pairs: Sequence[tuple[Asked, Asked]]) -> dict[str, object]:
    stored_ms = 1e3 * np.array([with_store.first_s for with_store, _ in pairs])
    computed_ms = 1e3 * np.array([without.first_s for _, without in pairs])
    return {
        "part": "chats",
        "sessions": len({stored.session for stored, _ in pairs}),
        "requests": len(pairs),
        "prompt_tokens": round(float(np.mean([len(pair[0].prompt) for pair in pairs])), 1),
        "cached_tokens": round(float(np.mean([pair[0].cached for pair in pairs])), 1),
        "mean_ttft_ms": round(float(stored_ms.mean()), 1),
        "p95_ttft_ms": round(float(np.percentile(stored_ms, 95)), 1),
        "recomputed_mean_ttft_ms": round(float(computed_ms.mean()), 1),
        "ratio": round(float(stored_ms.mean() / computed_ms.mean()), 4),
        "same_answers": sum(a.answer == b.answer for a, b in pairs),
    }


def _in_process(
    work: ChatWork, stage: Stage, config: EngineConfig, before: list[Asked]
) -> Iterator[Told]:
    """Yield the turns of a stage as they are measured, in a process that is started for this
    stage."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_ask_stage, args=(work, stage, config, before, sender))
    child.start()
    sender.close()  # the child has its own copy: the pipe closes when the child ends
    num_told = 0
    try:
        while True:
            yield receiver.recv()
            num_told += 1
    except EOFError:
        child.join()
    expected = KILLED if stage.end == "kill" else 0
    if child.exitcode != expected or num_told != len(stage.turns):
        raise RuntimeError(
            f"a benchmark process ended with status {child.exitcode} after {num_told} results"
        )


def _ask_stage(
    work: ChatWork, stage: Stage, config: EngineConfig, before: list[Asked], sender: Connection
) -> None:
    """Ask the turns of a stage; runs in the child process."""
    sys.setswitchinterval(SWITCH_S)
    stored = Chats(work, config)
    plain = Chats(work, replace(config, store=StoreConfig()))
    for chats in (stored, plain):
        chats.warm_up()
    for turn in stage.turns:
        pairs: list[tuple[Asked, Asked]] = []
        for batch in stored.batches(turn, before):
            asked = stored.ask(batch)
            stored.engine.flush()  # so that no save runs while the other engine is timed
            plain.engine.clear_cache()
            pairs += zip(asked, plain.ask(batch), strict=True)
        before = [asked for asked, _ in pairs]
        loaded = stored.counters.loaded_pages | {"prefetched": stored.counters.prefetched_pages}
        sender.send(Told(turn, pairs, loaded))
    stored.engine.check()
    if stage.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    stored.engine.close()
    plain.engine.close()


class Chats:
    """An engine, and the conversations that it answers."""

    def __init__(self, work: ChatWork, config: EngineConfig) -> None:
        folder = resolve_model(config.model.model)
        self._tokenizer = Tokenizer.load(folder, config.model.chat_template)
        bus = EventBus()
        self.counters = Counters().attach(bus)
        self.engine: Engine = build_engine(folder, config, bus)
        self._work = work
        self._chats = _choose(work)
        self._num_asked = 0

    def batches(self, turn: int, before: Sequence[Asked]) -> Iterator[Todo]:
        """Yield, in batches, the questions of the sessions that have this turn; other sessions are
        idle."""
        past = {each.session: each for each in before}
        todo = []
        for session, chat in enumerate(self._chats):
            if len(chat.questions) >= turn:
                todo.append((session, turn, self._prompt(chat, turn, past.get(session))))
        for first in range(0, len(todo), self._work.at_once):
            yield todo[first : first + self._work.at_once]

    def warm_up(self) -> None:
        """Answer one prompt, so that the first steps of a process are not measured."""
        words = [{"role": "user", "content": "Tell me about the tides of the sea. " * 4}]
        self.ask([(0, 0, self._tokenizer.encode_chat(words))])

    def ask(self, todo: Todo) -> list[Asked]:
        """Ask all at once."""
        first, self._num_asked = self._num_asked, self._num_asked + len(todo)
        prompts = [prompt for _, _, prompt in todo]
        found = ask_all(self.engine, prompts, self._work.output, first)
        results = zip(todo, found.answers, found.first_s, found.cached, strict=True)
        return [
            Asked(session, turn, prompt, answer, first_s, cached)
            for (session, turn, prompt), answer, first_s, cached in results
        ]

    def _prompt(self, chat: Dialogue, turn: int, before: Asked | None) -> Ids:
        """Return the prompt: the ids of the conversation so far, and the next question in the
        model's format."""
        question = {"role": "user", "content": chat.questions[turn - 1]}
        if before is None:
            return self._tokenizer.encode_chat([*chat.opening, question])
        # the text that the template puts between an answer and the next answer
        mark = "mainstem-mark"
        said = {"role": "assistant", "content": mark}
        opening = [{"role": "user", "content": "x"}, said, question]
        rest = self._tokenizer.render_chat(opening).split(mark, 1)[1]
        return [*before.prompt, *before.answer, *self._tokenizer.encode_plain(rest)]


def _choose(work: ChatWork) -> list[Dialogue]:
    """Choose conversations from all files in turn, each with questions for every turn."""
    files = [
        [chat for chat in from_file(Path(file)) if len(chat.questions) >= work.turns]
        for file in work.files
    ]
    found = []
    for index in range(max(map(len, files))):
        found += [chats[index] for chats in files if index < len(chats)]
    if len(found) < work.sessions:
        raise ConfigError(
            f"--conversations: only {len(found)} have {work.turns} turns, {work.sessions} wanted"
        )
    chosen = found[: work.sessions]
    return [replace(chat, questions=chat.questions[: work.turns]) for chat in chosen]
