"""Conversations for load tests: read from a file, or generated with shared prefixes."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from mainstem.core.errors import ConfigError
from mainstem.core.files import UNREADABLE, read_plain_or_gzip, text_lines

Message = dict[str, str]

# common short words: each is one token in the usual vocabularies, so words are about as many as
# tokens
WORDS = """
    about after again all also and any are back because been before being between both but
    came can come could day did down each end even every few find first for from gave get
    give good great had hand has have head help here high him his home house how into its just
    keep kind know land large last left life light line little long look made make man many may
    men might more most much must name near need never new next night not now number off often
    old once one only open other our out over own part people place plant point right river
    said same saw say school sea second see seem set she should show side small some soon
    sound still stop such take tell than that the their them then there these they thing think
    this those thought three through time together too took tree turn two under until use very
    want was water way well went were what when where which while white who why will with word
    work world would write year you young your
""".split()  # noqa: SIM905  # a list of 200 strings is harder to read


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The text before the first question, and the questions; the server's answers come between
    them."""

    opening: tuple[Message, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DialogueShape:
    """Generated conversations: `groups` system prompts, each shared by many conversations."""

    prefix_words: int
    own_words: int
    groups: int = 1
    turns: int = 1


def made_up(shape: DialogueShape, seed: int) -> Iterator[Dialogue]:
    """Yield generated conversations without end; equal arguments give equal conversations."""
    rng = random.Random(seed)
    prefixes = [" ".join(rng.choices(WORDS, k=shape.prefix_words)) for _ in range(shape.groups)]
    for prefix in cycle(prefixes):
        opening: tuple[Message, ...] = ()
        if prefix:
            opening = ({"role": "system", "content": prefix},)
        questions = [" ".join(rng.choices(WORDS, k=shape.own_words)) for _ in range(shape.turns)]
        yield Dialogue(opening, tuple(questions))


def from_file(path: Path) -> list[Dialogue]:
    """Read a file, gzipped or not, with one conversation per line, as JSON in any of these shapes:

    {"prompt": "..."}                                    one question
    {"system": "...", "turns": ["...", "..."]}           several; `system` may be left out
    {"messages": [{"role": ..., "content": ...}, ...]}   ends with a user's message: sent as it is;
                                                         ends with an answer: asked turn by turn
    {"body": {"messages": [...]}}                        a line of a batch file
    {"conversations": [{"from": "human", "value": ...}, ...]}   ShareGPT, asked turn by turn

    Turn by turn, recorded answers are replaced by the server's own. Raises ConfigError with the
    line number if a line has none of these shapes.
    """
    try:
        lines = text_lines(read_plain_or_gzip(path))
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_conversation(_fields(json.loads(line))))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error!r}") from None
    if not found:
        raise ConfigError(f"{path} is empty")
    return found


def _conversation(row: dict[str, object]) -> Dialogue:
    if "prompt" in row:
        return Dialogue((), (_text(row["prompt"]),))
    if "turns" in row:
        opening = ({"role": "system", "content": _text(row["system"])},) if "system" in row else ()
        return Dialogue(opening, tuple(_text(turn) for turn in _some(row["turns"])))
    if "conversations" in row:
        said = [_fields(each) for each in _some(row["conversations"])]
        asked = [_text(each["value"]) for each in said if each["from"] in ("human", "user")]
        return Dialogue((), tuple(_text(turn) for turn in _some(asked)))
    if "body" in row:
        row = _fields(row["body"])
    return _from_messages([_fields(each) for each in _some(row["messages"])])


def _from_messages(messages: list[dict[str, object]]) -> Dialogue:
    if messages[-1]["role"] == "user":
        plain = [{"role": _text(m["role"]), "content": _text(m["content"])} for m in messages]
        return Dialogue(tuple(plain[:-1]), (plain[-1]["content"],))
    system = [_text(m["content"]) for m in messages if m["role"] == "system"]
    asked = [_text(m["content"]) for m in messages if m["role"] == "user"]
    opening = tuple({"role": "system", "content": text} for text in system)
    return Dialogue(opening, tuple(_text(turn) for turn in _some(asked)))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text was expected: {value!r}")
    return value


def _some(value: object) -> list[object]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"a list that is not empty was expected: {value!r}")
    return value


def _fields(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected: {value!r}")
    return value
