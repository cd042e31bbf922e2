"""Which waiting sequence is next."""

from collections.abc import Iterable

from mainstem.sched.fetching import StoredHistory
from mainstem.sched.queue import OVERTAKEN, WaitingQueue
from mainstem.sched.sequence import SeqState, Sequence
from tests.builders import a_request


def a_sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(a_request([1, 2, 3, 4, 5, 6, 7, 8], priority=priority), 0, 0, arrival, 8, None)


def load(sequence: Sequence, num_to_compute: int = 2) -> None:
    sequence.history = StoredHistory(None, is_loaded=True, num_to_compute=num_to_compute)


def a_queue(sequences: Iterable[Sequence]) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    found = []
    while queue.head() is not None:
        found.append(queue.pop().arrival)
    return found


def test_within_a_priority_sequences_run_in_order_of_arrival() -> None:
    sequences = [a_sequence(5), a_sequence(2), a_sequence(7, priority=-1), a_sequence(3)]
    assert order(a_queue(sequences)) == [7, 2, 3, 5]


def test_a_sequence_with_a_loaded_history_overtakes_those_that_compute() -> None:
    sequences = [a_sequence(arrival) for arrival in range(20)]
    queue = a_queue(sequences)
    for arrival in (13, 4, 17):
        load(sequences[arrival])
        queue.move_up(sequences[arrival])
    assert queue.first(3) == [sequences[4], sequences[13], sequences[17]]
    rest = [arrival for arrival in range(20) if arrival not in (4, 13, 17)]
    assert order(queue) == [4, 13, 17, *rest]


def test_no_sequence_is_overtaken_for_ever() -> None:
    loaded = [a_sequence(arrival) for arrival in range(1, 3 * OVERTAKEN)]
    for sequence in loaded:
        load(sequence)
    queue = a_queue([a_sequence(0), *loaded])
    assert order(queue).index(0) == OVERTAKEN - 1


def test_more_urgent_sequences_are_not_overtaken() -> None:
    urgent, loaded = a_sequence(1, priority=0), a_sequence(0, priority=1)
    load(loaded)
    assert order(a_queue([loaded, urgent])) == [1, 0]


def test_a_sequence_that_still_computes_much_does_not_overtake() -> None:
    first, loaded = a_sequence(0), a_sequence(1)
    load(loaded, num_to_compute=3)
    assert order(a_queue([first, loaded])) == [0, 1]
    assert loaded.history is not None
    loaded.history.wait_again()  # preempted in the meantime
    assert order(a_queue([first, loaded])) == [0, 1]


def test_aborted_sequences_do_not_hide_those_after_them() -> None:
    sequences = [a_sequence(arrival) for arrival in range(300)]
    queue = a_queue(sequences)
    for sequence in sequences[:64]:
        sequence.state = SeqState.DONE
        queue.forget(sequence)
    assert queue.first(64) == sequences[64:128]
    assert len(queue) == 236
    assert order(queue) == list(range(64, 300))


def test_a_few_aborted_sequences_are_left_out() -> None:
    sequences = [a_sequence(arrival) for arrival in range(300)]
    queue = a_queue(sequences)
    for sequence in sequences[:30]:
        sequence.state = SeqState.DONE
        queue.forget(sequence)
    assert queue.first(64) == sequences[30:64]
