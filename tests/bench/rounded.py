"""Results of benches are printed rounded; these compare what they may have been before that.

Whether a job took a millisecond or a minute, the printed numbers agree within their own rounding
and within nothing else.
"""

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Rounded:
    """The values from `low` to `high`, none of them below 0."""

    low: float
    high: float

    def __mul__(self, other: Union["Rounded", float]) -> "Rounded":
        other = _of(other)
        return Rounded(self.low * other.low, self.high * other.high)

    def __add__(self, other: "Rounded") -> "Rounded":
        return Rounded(self.low + other.low, self.high + other.high)

    def may_be(self, other: Union["Rounded", float]) -> bool:
        """Whether some value is in both; floats may be off by a billionth."""
        other = _of(other)
        least, most = max(self.low, other.low), min(self.high, other.high)
        return least <= most * (1 + 1e-9)


def _of(value: Rounded | float) -> Rounded:
    return value if isinstance(value, Rounded) else Rounded(value, value)


def printed(value: object, digits: int) -> Rounded:
    """What a number may have been that was rounded to `digits` digits after the point."""
    assert isinstance(value, int | float)
    half = 0.5 * 10.0**-digits
    return Rounded(max(0.0, value - half), value + half)
