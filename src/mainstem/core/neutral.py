"""Fields and arguments that are accepted only where they change nothing, for clients and scripts
that were written for another engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OnlyAt:
    """A field that is accepted only with values that change nothing."""

    values: tuple[object, ...]
    instead: str  # what to do if another value is wanted

    def takes(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.values)
