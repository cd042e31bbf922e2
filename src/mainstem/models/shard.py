"""Which part of a model a rank has, under tensor parallelism."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `of` parts; the default is the whole model."""

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ValueError(f"rank {self.rank} of {self.of}")
