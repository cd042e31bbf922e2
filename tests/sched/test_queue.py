"""Which waiting sequence is next."""

from collections.abc import Iterable

from mainstem.sched.queue import OVERTAKEN, WaitingQueue
from mainstem.sched.sequence import SeqState, Sequence
from tests.builders import a_request


def a_sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(a_request([1, 2, 3, 4, 5, 6, 7, 8], priority=priority), 0, 0, arrival, 8, None)


def a_queue(
    sequences: Iterable[Sequence], overtaking: Iterable[Sequence] = (), num_to_compute: int = 2
) -> WaitingQueue:
    """A queue in which some have only a few of their 8 tokens to compute."""
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
    for sequence in overtaking:
        queue.move_up(sequence, num_to_compute)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    found = []
    while queue.head() is not None:
        found.append(queue.pop().arrival)
    return found


def test_within_a_priority_sequences_run_in_order_of_arrival() -> None:
    sequences = [a_sequence(5), a_sequence(2), a_sequence(7, priority=-1), a_sequence(3)]
    assert order(a_queue(sequences)) == [7, 2, 3, 5]


def test_a_sequence_with_few_tokens_to_compute_overtakes_others() -> None:
    sequences = [a_sequence(arrival) for arrival in range(20)]
    queue = a_queue(sequences, [sequences[arrival] for arrival in (13, 4, 17)])
    assert queue.first(3) == [sequences[4], sequences[13], sequences[17]]
    rest = [arrival for arrival in range(20) if arrival not in (4, 13, 17)]
    assert order(queue) == [4, 13, 17, *rest]


def test_no_sequence_is_overtaken_for_ever() -> None:
    light = [a_sequence(arrival) for arrival in range(1, 3 * OVERTAKEN)]
    queue = a_queue([a_sequence(0), *light], light)
    assert order(queue).index(0) == OVERTAKEN - 1


def test_no_prompt_in_progress_is_overtaken_for_ever() -> None:
    started, urgent = a_sequence(0), a_sequence(500, priority=-1)
    light = [a_sequence(arrival) for arrival in range(1, 2 * OVERTAKEN)]
    queue = a_queue([*light, urgent], light)
    first = [each.arrival for each in light if queue.starts_before(each, started)]
    assert first == list(range(1, OVERTAKEN))
    assert queue.starts_before(urgent, started)
    assert not queue.starts_before(light[0], urgent)


def test_more_urgent_sequences_are_not_overtaken() -> None:
    urgent, light = a_sequence(1, priority=0), a_sequence(0, priority=1)
    assert order(a_queue([light, urgent], [light])) == [1, 0]


def test_a_sequence_that_still_computes_much_does_not_overtake() -> None:
    first, late = a_sequence(0), a_sequence(1)
    assert order(a_queue([first, late], [late], num_to_compute=3)) == [0, 1]


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
