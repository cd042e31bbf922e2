"""Collectives between processes, over gloo."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from mainstem.models.collectives import ALONE, ProcessGroup, smallest

pytestmark = pytest.mark.torch

RANKS = 3
CPU = torch.device("cpu")


def _rank(rank: int, folder: str) -> None:
    """Writes the results of its calls."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    plain, ordered = ProcessGroup(), ProcessGroup(is_deterministic=True)
    x = _part(rank)
    found = {
        "sum": plain.sum_(x.clone()),
        "again": plain.sum_(x.clone()),
        "ordered": ordered.sum_(x.clone()),
        "ordered row": ordered.sum_(x[1:2].clone()),
        "gathered": plain.gather(x),
        "smallest": torch.tensor(smallest(10 + rank, plain, CPU)),
    }
    assert (plain.shard.rank, plain.shard.of) == (rank, RANKS)
    assert not plain.is_capturable
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _part(rank: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))


@pytest.mark.slow  # 3 processes import torch; tests/runner/ranks has quick tests with 2
def test_ranks_agree_to_the_bit(tmp_path: Path) -> None:
    spawn(_rank, (str(tmp_path),), RANKS)  # type: ignore[no-untyped-call]
    parts = [_part(rank) for rank in range(RANKS)]
    first, *others = [torch.load(tmp_path / str(rank)) for rank in range(RANKS)]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    torch.testing.assert_close(first["sum"], sum(parts))
    assert torch.equal(first["sum"], first["again"])
    assert torch.equal(first["ordered"], parts[0] + parts[1] + parts[2])
    assert torch.equal(first["ordered row"], first["ordered"][1:2])
    assert torch.equal(first["gathered"], torch.cat(parts, dim=1))
    assert int(first["smallest"]) == 10


def test_collectives_of_a_single_rank_return_their_input() -> None:
    x = _part(0)
    assert ALONE.sum_(x) is x
    assert ALONE.gather(x) is x
    assert smallest(7, ALONE, CPU) == 7
