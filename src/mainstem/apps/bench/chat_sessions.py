"""Real conversations of a real model that come back turn by turn; see `mainstem bench sessions`.

    first process     turns 1 .. n-1, each session away in between; ends as --end says
    this process      turn n, from the disk alone, then every turn once more without a store

The same prompts are asked with and without a store, so times and tokens can be compared.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from mainstem.apps.bench.conversations import Conversation, from_file
from mainstem.apps.hub import resolve_model
from mainstem.apps.text import Tokenizer
from mainstem.core.config import EngineConfig, StoreConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine

Ids = list[int]


@dataclass(frozen=True, slots=True)
class ChatWork:
    """Which conversations, and how they come back."""

    files: tuple[str, ...]
    sessions: int
    turns: int  # of each, at most
    output: int  # tokens of an answer
    at_once: int
    end: str  # close or kill: how the first process ends


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of one session."""

    session: int
    turn: int
    prompt: Ids
    answer: Ids
    first_s: float
    cached: int


def measure_chats(work: ChatWork, config: EngineConfig) -> Iterator[dict[str, object]]:
    """A line a turn: its time to the first token with a store and without."""
    with TemporaryDirectory(prefix="mainstem-chats-") as folder:
        disk_dir = config.store.disk_dir or folder
        stored = replace(config, store=replace(config.store, disk_dir=disk_dir))
        told = Path(folder) / "told.json"
        child = get_context("spawn").Process(target=_first_process, args=(work, stored, told))
        child.start()
        child.join()
        asked = [Asked(**row) for row in json.loads(told.read_text())]
        expected = -signal.SIGKILL if work.end == "kill" else 0
        if child.exitcode != expected:
            raise RuntimeError(f"the first process ended with {child.exitcode}")
        last, loaded = _last_turn(work, stored, asked)
    computed = _again(work, replace(config, store=StoreConfig()), [*asked, *last])
    for turn in range(1, work.turns + 1):
        pairs = [
            pair for pair in zip([*asked, *last], computed, strict=True) if pair[0].turn == turn
        ]
        if pairs:
            where = f"after {work.end}" if turn == work.turns else "running"
            yield _result(turn, where, pairs) | {"loaded_pages": dict(loaded)}


def _result(turn: int, where: str, pairs: Sequence[tuple[Asked, Asked]]) -> dict[str, object]:
    stored_ms = 1e3 * np.array([with_store.first_s for with_store, _ in pairs])
    computed_ms = 1e3 * np.array([without.first_s for _, without in pairs])
    return {
        "part": "chats",
        "turn": turn,
        "where": where,
        "sessions": len(pairs),
        "prompt_tokens": round(float(np.mean([len(pair[0].prompt) for pair in pairs])), 1),
        "cached_tokens": round(float(np.mean([pair[0].cached for pair in pairs])), 1),
        "mean_ttft_ms": round(float(stored_ms.mean()), 1),
        "p95_ttft_ms": round(float(np.percentile(stored_ms, 95)), 1),
        "recomputed_mean_ttft_ms": round(float(computed_ms.mean()), 1),
        "ratio": round(float(stored_ms.mean() / computed_ms.mean()), 4),
        "same_answers": sum(a.answer == b.answer for a, b in pairs),
    }


def _first_process(work: ChatWork, config: EngineConfig, told: Path) -> None:
    """Every turn but the last, with a store; on a process of its own."""
    chats = Chats(work, config)
    asked: list[Asked] = []
    for turn in range(1, work.turns):
        asked += chats.ask_turn(turn, asked)
    rows = [{name: getattr(each, name) for name in Asked.__slots__} for each in asked]
    told.write_text(json.dumps(rows))
    if work.end == "kill":
        chats.engine.flush()  # what is on its way to the disk; nothing is closed
        os.kill(os.getpid(), signal.SIGKILL)
    chats.engine.close()


def _last_turn(
    work: ChatWork, config: EngineConfig, asked: list[Asked]
) -> tuple[list[Asked], dict[str, int]]:
    chats = Chats(work, config)
    last = chats.ask_turn(work.turns, asked)
    chats.engine.check()
    loaded = dict(chats.counters.loaded_pages)
    loaded["prefetched"] = chats.counters.prefetched_pages
    chats.engine.close()
    return last, loaded


def _again(work: ChatWork, config: EngineConfig, asked: list[Asked]) -> list[Asked]:
    """The same prompts, in the same order and company, with nothing but the device to keep them."""
    chats = Chats(work, config)
    computed: list[Asked] = []
    for first in range(0, len(asked), work.at_once):
        batch = asked[first : first + work.at_once]
        chats.engine.clear_cache()
        computed += chats.ask([(each.session, each.turn, each.prompt) for each in batch])
    chats.engine.close()
    return computed


class Chats:
    """An engine and the conversations it is asked."""

    def __init__(self, work: ChatWork, config: EngineConfig) -> None:
        folder = resolve_model(config.model.model)
        bus = EventBus()
        self.counters = Counters().attach(bus)
        self.engine: Engine = build_engine(folder, config, bus)
        self._tokenizer = Tokenizer.load(folder)
        self._work = work
        self._chats = _choose(work)
        self._num_asked = 0

    def ask_turn(self, turn: int, asked: Sequence[Asked]) -> list[Asked]:
        """All sessions that have this turn, some at once; the others are away meanwhile."""
        before = {each.session: each for each in asked if each.turn == turn - 1}
        todo = []
        for session, chat in enumerate(self._chats):
            if len(chat.questions) >= turn:
                todo.append((session, turn, self._prompt(chat, turn, before.get(session))))
        found: list[Asked] = []
        for first in range(0, len(todo), self._work.at_once):
            found += self.ask(todo[first : first + self._work.at_once])
        return found

    def ask(self, todo: Sequence[tuple[int, int, Ids]]) -> list[Asked]:
        """All at once; first tokens are timed from before the first is submitted."""
        count = len(todo)
        sampling = SamplingParams(temperature=0.0, max_tokens=self._work.output, ignore_eos=True)
        answers: list[Ids] = [[] for _ in range(count)]
        first_s, cached = [0.0] * count, [0] * count
        first, self._num_asked = self._num_asked, self._num_asked + count
        began_s = perf_counter()
        for index, (_, _, prompt) in enumerate(todo):
            name = RequestId(str(first + index))
            self.engine.submit(Request(name, np.array(prompt, np.int32), sampling))
        while self.engine.has_work:
            for news in self.engine.step():
                index = int(news.request_id) - first
                if not answers[index]:
                    first_s[index] = perf_counter() - began_s
                    cached[index] = news.num_cached_tokens
                answers[index] += news.token_ids
        return [
            Asked(session, turn, prompt, answers[i], first_s[i], cached[i])
            for i, (session, turn, prompt) in enumerate(todo)
        ]

    def _prompt(self, chat: Conversation, turn: int, before: Asked | None) -> Ids:
        """What was said, ids as they were, and the next question in the model's own form."""
        question = {"role": "user", "content": chat.questions[turn - 1]}
        if before is None:
            return self._tokenizer.encode_chat([*chat.opening, question])
        # the text that the template puts between an answer and what the model is to say next
        mark = "mainstem-mark"
        said = {"role": "assistant", "content": mark}
        opening = [{"role": "user", "content": "x"}, said, question]
        rest = self._tokenizer.render_chat(opening).split(mark, 1)[1]
        return [*before.prompt, *before.answer, *self._tokenizer.encode_plain(rest)]


def _choose(work: ChatWork) -> list[Conversation]:
    """So many from all files in turn, with at least two questions each."""
    files = [
        [chat for chat in from_file(Path(file)) if len(chat.questions) > 1] for file in work.files
    ]
    found = []
    for index in range(max(map(len, files))):
        found += [chats[index] for chats in files if index < len(chats)]
    if len(found) < work.sessions:
        raise ConfigError(f"--conversations: {len(found)} with two turns, {work.sessions} wanted")
    chosen = found[: work.sessions]
    return [replace(chat, questions=chat.questions[: work.turns]) for chat in chosen]
