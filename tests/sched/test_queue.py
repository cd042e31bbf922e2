"""Which waiting sequence is next."""

from collections.abc import Iterable

from mainstem.sched.queue import OVERTAKEN, WaitingQueue
from mainstem.sched.sequence import Sequence
from tests.builders import a_request


def a_sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(
        a_request([1, 2, 3, 4, 5, 6, 7, 8], priority=priority), 0, 0, arrival, 8, None, None
    )


def load(sequence: Sequence, num_to_compute: int = 2) -> None:
    sequence.has_fetched, sequence.num_to_compute = True, num_to_compute


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


def test_who_came_first_goes_first_within_a_priority() -> None:
    sequences = [a_sequence(5), a_sequence(2), a_sequence(7, priority=-1), a_sequence(3)]
    assert order(a_queue(sequences)) == [7, 2, 3, 5]


def test_whose_history_is_loaded_overtakes_those_that_compute() -> None:
    sequences = [a_sequence(arrival) for arrival in range(20)]
    queue = a_queue(sequences)
    for arrival in (13, 4, 17):
        load(sequences[arrival])
        queue.move_up(sequences[arrival])
    assert queue.first(3) == [sequences[4], sequences[13], sequences[17]]
    rest = [arrival for arrival in range(20) if arrival not in (4, 13, 17)]
    assert order(queue) == [4, 13, 17, *rest]


def test_nobody_is_overtaken_for_ever() -> None:
    loaded = [a_sequence(arrival) for arrival in range(1, 3 * OVERTAKEN)]
    for sequence in loaded:
        load(sequence)
    queue = a_queue([a_sequence(0), *loaded])
    assert order(queue).index(0) == OVERTAKEN - 1


def test_the_more_urgent_are_not_overtaken() -> None:
    urgent, loaded = a_sequence(1, priority=0), a_sequence(0, priority=1)
    load(loaded)
    assert order(a_queue([loaded, urgent])) == [1, 0]


def test_a_sequence_that_still_computes_much_does_not_overtake() -> None:
    first, loaded = a_sequence(0), a_sequence(1)
    load(loaded, num_to_compute=3)
    assert order(a_queue([first, loaded])) == [0, 1]
    loaded.num_to_compute = None  # preempted since
    assert order(a_queue([first, loaded])) == [0, 1]
