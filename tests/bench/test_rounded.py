"""Numbers agree if they may have been equal before they were rounded."""

import pytest

from tests.bench.rounded import printed


@pytest.mark.parametrize("seconds", [0.0001, 0.0457, 4.321, 300.0])
def test_a_time_and_a_rate_agree_at_any_speed(seconds: float) -> None:
    time, rate = printed(round(seconds, 3), 3), printed(round(6 / seconds, 3), 3)
    assert (time * rate).may_be(6)
    assert (rate * 2).may_be(printed(round(12 / seconds, 1), 1))
    assert (time + time).may_be(2 * seconds)


def test_other_numbers_do_not_agree() -> None:
    time, rate = printed(0.25, 3), printed(24.0, 3)
    assert (time * rate).may_be(6)
    assert not (time * rate).may_be(6.1)
    assert not (time * rate).may_be(5.9)
    assert not time.may_be(printed(0.252, 3))
