"""When a job's next request is handed to the engine."""

from mainstem.batch.supply import LOOK_AHEAD, Supply

STEP_TOKENS = 4096


def fill(supply: Supply, num_left: int, num_waiting: int, new_tokens: int) -> int:
    """How many requests are submitted before a step."""
    supply.begin_step()
    num_new = 0
    while supply.has_room(num_waiting + num_new) and num_waiting + num_new < num_left:
        supply.note(new_tokens)
        num_new += 1
    return num_new


def test_the_queue_holds_tokens_for_one_step_at_first_and_for_two_later() -> None:
    supply = Supply(STEP_TOKENS)
    assert fill(supply, 10_000, 0, new_tokens=40) == 103
    assert fill(supply, 9_900, 3, new_tokens=40) == 202  # 3 + 202 prompts of 40 tokens
    assert fill(supply, 9_900, 205, new_tokens=40) == 0


def test_a_few_requests_are_queued_however_long_they_are() -> None:
    supply = Supply(STEP_TOKENS)
    assert fill(supply, 500, 0, new_tokens=10_000) == 1
    assert fill(supply, 500, 1, new_tokens=10_000) == LOOK_AHEAD - 1


def test_every_answer_to_a_prompt_counts_as_queued() -> None:
    supply = Supply(STEP_TOKENS)
    supply.begin_step()
    supply.note(4095, num_answers=4)
    assert not supply.has_room(num_waiting=4)  # 4095 tokens, and 1 for each other answer
