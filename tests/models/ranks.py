"""Ranks as threads of one process, which meet at every collective.

One rank runs at a time, until it has to wait for the others: Triton's interpreter cannot run in two
threads at once.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar

import torch
from torch import Tensor

from mainstem.models.shard import Shard

T = TypeVar("T")
_WAIT_S = 60.0  # if a rank does not come within this time, it has made another call


class _Meeting:
    """Every rank puts a tensor here and takes the tensors of all."""

    def __init__(self, of: int) -> None:
        self.all_there, self.all_read = Barrier(of), Barrier(of)
        self.parts: list[Tensor] = [torch.empty(0)] * of
        self.turn = Lock()
        self.are_apart = False  # ranks made different calls; stays if the engine tries again

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self._wait(self.all_there)
        found = list(self.parts)
        self._wait(self.all_read)
        if len({part.shape for part in found}) > 1:
            self.are_apart = True
            raise AssertionError(f"ranks bring {[list(part.shape) for part in found]}")
        return found

    def _wait(self, barrier: Barrier) -> None:
        self.turn.release()
        try:
            barrier.wait(_WAIT_S)
        except BrokenBarrierError:
            self.are_apart = True
            raise
        finally:
            self.turn.acquire()

    def abandon(self) -> None:
        self.all_there.abort()
        self.all_read.abort()


class Thread:
    """The Collectives of one thread; counts its sums."""

    is_capturable = False

    def __init__(self, shard: Shard, meeting: _Meeting) -> None:
        self.shard = shard
        self.num_sums = 0
        self._meeting = meeting

    def sum_(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "NCCL would refuse it"
        self.num_sums += 1
        parts = self._meeting.exchange(self.shard.rank, x)
        return x.copy_(torch.stack(parts).sum(dim=0))

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.shard.rank, x), dim=1)


def run_ranks(of: int, work: Callable[[Thread], T]) -> list[T]:
    """The results of each rank's `work`; raises the first error of any rank."""
    meeting = _Meeting(of)

    def run(rank: int) -> T:
        try:
            with meeting.turn:
                return work(Thread(Shard(rank, of), meeting))
        except BaseException:
            meeting.abandon()  # otherwise the others would wait
            raise

    with ThreadPoolExecutor(of) as pool:
        futures = [pool.submit(run, rank) for rank in range(of)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, BrokenBarrierError)):
        raise error
    assert not meeting.are_apart, "ranks made different calls"
    return [future.result() for future in futures]
