"""Sequences with rows, above tiers that store states."""

import numpy as np

from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from tests.builders import VOCAB, Collector, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.tiered import Tiered, a_tiered_engine
from tests.runner.steps import num_folds, num_with_rows

STEM = [5, 6, 7, 8, 9, 10, 11, 12]  # two pages


def with_one_reader(num_pages: int, num_states: int) -> tuple[Tiered, Collector]:
    """Sequence "a" has rows after the stem, and nobody else reads the stem's state any more."""
    tiered = a_tiered_engine(num_pages, num_states=num_states, num_rows=5)
    engine, collector = tiered.engine, Collector()
    run_all(engine, [a_request([*STEM, 1], 1, keep_tokens=len(STEM))])
    engine.submit(a_request([*STEM, 2], 6, name="sibling"))
    engine.submit(a_request([*STEM, 3], 6, name="a"))
    while num_with_rows(tiered.runner.steps) == 0:
        collector.add(engine.step())
    engine.abort(RequestId("sibling"))
    return tiered, collector


def test_a_fold_in_place_leaves_no_state_behind() -> None:
    """No slot is free when a fold at the end of a page is planned; before its step is made, a
    preemption frees one. The fold does not go there, or the base would pass for the state at the
    end of that page."""
    tiered, collector = with_one_reader(num_pages=16, num_states=6)
    engine, store = tiered.engine, tiered.store
    engine.submit(a_request([90, 91, 92, 93, 94], 40, name="other"))
    collector.add(engine.step())
    store.flush()
    store.take(store.num_takeable())
    assert store.states is not None
    while store.states.take() is not None:
        pass
    while ("a", 0) not in collector.reasons:
        collector.add(engine.step())
    assert num_folds(tiered.runner.steps) == 1
    answer = fake_answer([*STEM, 3], 6, VOCAB)
    assert collector.tokens["a", 0] == answer
    for slot in filter(store.states.is_kept, range(store.states.num_states)):
        kept = tiered.runner.state(slot)
        assert kept is not None
        place = store.states.find(store.chain(np.array(kept, np.int32), b""), len(kept))
        assert place == (len(kept), slot), "a state is kept at another position"


def test_slots_that_folds_need_do_not_become_second_slots() -> None:
    """A decode could have a second slot at the end of its first page. The last one is for the fold
    of "a", and its base may not be written: another sequence reads it."""
    bus, preempted = EventBus(), list[SequencePreempted]()
    bus.subscribe(SequencePreempted, preempted.append)
    tiered = a_tiered_engine(40, num_states=6, num_rows=9, bus=bus)
    engine, states = tiered.engine, tiered.store.states
    assert states is not None
    run_all(engine, [a_request([*STEM, 1], 1, keep_tokens=len(STEM))])
    engine.submit(a_request([90, 91, 92], 20, name="other"))
    engine.submit(a_request([*STEM, 2, 2, 2, 2, 2, 2], 8, name="a"))
    engine.submit(a_request([*STEM, 3], 8, name="sibling"))
    engine.step()
    tiered.store.flush()
    while states.has_room(2):
        states.take()
    while engine.has_work:
        engine.step()
    assert num_folds(tiered.runner.steps) == 1
    assert not preempted
