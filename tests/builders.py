"""Short functions that build what tests need."""

from collections.abc import Iterator, Sequence
from itertools import count
from time import monotonic

import numpy as np

from mainstem.core.config import SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.request import Delivery, FinishReason, Output, Overflow, Request, SamplingParams
from mainstem.engine.engine import Engine
from mainstem.kv.parts import WindowParts
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from tests.fakes import FakeRunner

VOCAB = 97
_ids = count()


def a_request(  # noqa: PLR0917
    prompt: Sequence[int],
    max_tokens: int = 8,
    name: str | None = None,
    sampling: SamplingParams | None = None,
    delivery: Delivery = Delivery.EACH_STEP,
    salt: bytes = b"",
    priority: int = 0,
    eos_ids: tuple[int, ...] = (),
    expected_tokens: int | None = None,
    plan_place: int | None = None,
    session: str | None = None,
    overflow: Overflow | None = None,
    keep_tokens: int = 0,
) -> Request:
    return Request(
        request_id=RequestId(name or f"request-{next(_ids)}"),
        prompt_ids=np.array(prompt, np.int32),
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=max_tokens),
        delivery=delivery,
        salt=salt,
        priority=priority,
        eos_ids=eos_ids,
        expected_tokens=expected_tokens,
        plan_place=plan_place,
        session=None if session is None else SessionId(session),
        overflow=overflow,
        keep_tokens=keep_tokens,
    )


def an_engine(
    num_pages: int = 64,
    page_size: int = 4,
    config: SchedConfig | None = None,
    can_overlap: bool = False,
    max_model_len: int = 10_000,
    *,
    bus: EventBus | None = None,
    runner: FakeRunner | None = None,
    num_states: int = 0,
    window: int | None = None,
    num_parts: int = 0,
    num_rows: int = 0,
    rows_per_state: int = 2,
) -> Engine:
    """An engine over FakeRunner. With a `window`, pages have `num_parts` windowed parts. With
    `num_rows`, a state slot has room for `rows_per_state` sequences' rows of as many tokens."""
    bus = bus or EventBus()
    parts = None if window is None else WindowParts(num_pages, num_parts, window, page_size)
    per_state = rows_per_state if num_rows else 0
    store = KVStore(
        num_pages,
        page_size,
        b"fake",
        bus,
        num_states=num_states,
        rows_per_slot=num_rows,
        row_slots_per_state=per_state,
        parts=parts,
    )
    scheduler = Scheduler(config or SchedConfig(), store, VOCAB, max_model_len, bus)
    runner = runner or FakeRunner(
        num_pages, page_size, VOCAB, can_overlap, num_states, window, num_parts, per_state
    )
    return Engine(scheduler, runner, bus)


class Collector:
    """Gathers outputs by request and index."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.outputs: list[Output] = []

    def add(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = (str(output.request_id), output.index)
            assert key not in self.reasons, "an output came after the last one"
            self.outputs.append(output)
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason


def run_all(engine: Engine, requests: Sequence[Request], max_steps: int | None = None) -> Collector:
    """Submit everything, step until idle, check after each step."""
    collector = Collector()
    for request in requests:
        engine.submit(request)
    for outputs in until_idle(engine, max_steps):
        collector.add(outputs)
        engine.check()
    engine.check()
    return collector


def until_idle(engine: Engine, max_steps: int | None = None) -> Iterator[list[Output]]:
    """Step until the engine is idle; fails after `max_steps`. An engine that waits for a disk or a
    server rests in many short steps: without `max_steps` it has a minute, too."""
    end_s = monotonic() + (0 if max_steps is not None else 60)
    num_steps = 0
    while engine.has_work:
        is_stuck = num_steps >= (max_steps or 10_000) and monotonic() >= end_s
        assert not is_stuck, "the engine still has work"
        yield engine.step()
        num_steps += 1


# An answer in the form BEYOND fails midway: its optional properties are too many for the parser.
_MANY = {f"property {number}": {"type": "boolean"} for number in range(700)}
_LATER = {"type": "object", "properties": _MANY, "additionalProperties": False}
BEYOND = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": _LATER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
