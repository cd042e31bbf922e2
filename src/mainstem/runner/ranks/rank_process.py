"""The program of a rank's process: it meets the other ranks and loads its part on its device.

python -m mainstem.runner.ranks.rank_process SOCKET PARENT
"""

import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mainstem.models.collectives import ProcessGroup
from mainstem.runner.load import choose_device, load_runner
from mainstem.runner.ranks.protocol import BeginRank, Loaded
from mainstem.runner.ranks.rank import RankPart, main
from mainstem.runner.slab import SlabPart
from mainstem.runner.transfer import attach_copier, pages_of

# how long ranks wait for each other. Long, since the disk of one may be slow; if a rank ends, the
# others are ended at once
MEET_LIMIT = timedelta(hours=1)


def load_part(begin: BeginRank) -> RankPart:
    """Meet the other ranks, and load this one's part."""
    shard, config = begin.shard, begin.config
    device = choose_device(config.model)
    backend = "gloo"
    if device.type == "cuda" and not config.model.ranks_on_one_gpu:
        backend = "nccl"
        device = torch.device("cuda", shard.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file:///proc/self/fd/{begin.meeting_fd}",
        rank=shard.rank,
        world_size=shard.of,
        timeout=MEET_LIMIT,
        device_id=device if backend == "nccl" else None,
    )
    ranks = ProcessGroup(is_deterministic=config.model.deterministic)
    runner, facts = load_runner(begin.origin, config, ranks)
    pages = pages_of(runner)

    def enter_thread() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a current device

    return RankPart(
        runner,
        Loaded(facts, runner.can_overlap, pages.page_bytes, pages.num_layers),
        partial(attach_copier, runner, part=SlabPart(shard, begin.slab_fd)),
        enter_thread,
    )


if __name__ == "__main__":
    main(sys.argv[1:], load_part)
