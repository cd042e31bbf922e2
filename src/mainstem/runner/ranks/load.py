"""Makes a runner from weights, in this process or on ranks."""

import hashlib
import logging
from contextlib import ExitStack, closing
from dataclasses import replace

import torch

from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.step import Runner
from mainstem.core.weights import ModelWeights
from mainstem.models.shard import Shard, part_of
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.load import choose_device, load_runner
from mainstem.runner.origin import Origin, for_rank
from mainstem.runner.ranks.group import RankGroup
from mainstem.runner.ranks.process import MODULE, RankProcess, end_all
from mainstem.runner.ranks.protocol import BeginRank, Loaded
from mainstem.runner.ranks.runner import RankedRunner
from mainstem.runner.ranks.shared_memory import SharedMemory

log = logging.getLogger("mainstem.engine")


def load_model(origin: Origin, config: EngineConfig) -> tuple[Runner, RunnerFacts]:
    """Load weights and allocate pages: in this process, or, if `tensor_parallel` is above 1, each
    part in its own process."""
    if config.model.tensor_parallel == 1:
        return load_runner(origin, config)
    return load_ranks(origin, config)


def weights_of(runner: Runner) -> ModelWeights | None:
    """What changes the weights of a runner that `load_model` made."""
    return getattr(runner, "weights", None)


def load_ranks(
    origin: Origin, config: EngineConfig, module: str = MODULE
) -> tuple[RankedRunner, RunnerFacts]:
    """Start the ranks and wait until each has its part. Raises ConfigError for settings that the
    machine or the model does not support, EngineLost if a rank ends."""
    num_ranks = config.model.tensor_parallel
    _check_devices(config)
    # raises a ConfigError that names the possible numbers of ranks
    part_of(origin.spec, Shard(0, num_ranks))
    with ExitStack() as opened:
        memory = opened.enter_context(closing(SharedMemory()))
        meeting = opened.enter_context(closing(SharedMemory()))
        part, part_config = for_rank(origin), _per_rank(config)
        begins = [
            BeginRank(Shard(rank, num_ranks), part, part_config, meeting.fd, memory.fd)
            for rank in range(num_ranks)
        ]
        processes: list[RankProcess] = []
        try:
            for begin in begins:
                processes.append(RankProcess.start(begin, module))
        except BaseException:
            end_all(processes, 0.0)
            raise
        ranks = RankGroup(processes)
        try:
            loaded = ranks.wait_loaded()
            facts = _facts(origin, loaded)
        except BaseException:
            ranks.kill()
            raise
        log.info("loaded on %d ranks, processes %s", num_ranks, ranks.pids)
        return RankedRunner(ranks, loaded[0], memory, opened.pop_all()), facts


def _check_devices(config: EngineConfig) -> None:
    """Refuse more ranks than there are cards."""
    model = config.model
    num_ranks = model.tensor_parallel
    if choose_device(model).type == "cpu":
        if model.ranks_on_one_gpu:
            raise ConfigError("ranks_on_one_gpu needs a GPU, and none is in use")
        return
    if model.ranks_on_one_gpu:
        if config.cache.kv_tokens is None:
            raise ConfigError("ranks_on_one_gpu: set kv_tokens, since the ranks share the memory")
        return
    num_cards = torch.cuda.device_count()
    if num_cards < num_ranks:
        raise ConfigError(
            f"tensor_parallel={num_ranks} needs {num_ranks} GPUs, torch sees {num_cards}; "
            "ranks_on_one_gpu puts all on one, to check answers"
        )


def _per_rank(config: EngineConfig) -> EngineConfig:
    """Return the config for one rank. On a CPU the ranks share its cores."""
    model = config.model
    threads = model.threads
    if choose_device(model).type == "cpu":
        threads = max(1, (threads or torch.get_num_threads()) // model.tensor_parallel)
    return replace(config, model=replace(model, threads=threads))


def _facts(origin: Origin, loaded: list[Loaded]) -> RunnerFacts:
    """Return the facts about all ranks together. Ranks agree, except for the size of their parts
    (the largest counts) and perhaps for their cards. This process, not a rank, computes the hash of
    the weights, which is part of the identity."""
    num_params = max(each.facts.num_params for each in loaded)
    num_idle_params = max(each.facts.num_idle_params for each in loaded)
    bytes_per_param = max(each.facts.bytes_per_param for each in loaded)
    identity = hashlib.sha256(origin.digest() + loaded[0].facts.identity).digest()
    alike = [
        replace(
            each,
            facts=replace(
                each.facts,
                identity=identity,
                num_params=num_params,
                num_idle_params=num_idle_params,
                bytes_per_param=bytes_per_param,
                device_name=loaded[0].facts.device_name,
            ),
        )
        for each in loaded
    ]
    assert all(each == alike[0] for each in alike), f"ranks have loaded different models: {alike}"
    return alike[0].facts
