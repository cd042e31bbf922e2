"""Measures what trainers need, on random weights: an update of all weights from host memory beside
a plain copy of the same tensors, sleep and wake, and many sampled answers of each prompt beside the
card's limit.

With --separate, the same number of prompts that share nothing is answered, too.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.ids import RequestId
from mainstem.core.request import Delivery, Request, SamplingParams
from mainstem.core.weights import TensorUpdate
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.spec import ModelSpec
from mainstem_bench.checkpoint import tensor_shapes
from mainstem_bench.limit import job_floor
from mainstem_bench.machine import Machine
from mainstem_bench.offline import model_cost
from mainstem_bench.report import load_average, show
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OfflineJob

KV_TOKENS = 600_000
TINY_KV_TOKENS = 20_000
VALUE = 0.01  # of all weights: what they are does not change the time


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench rollouts", description=__doc__)
    made.add_argument("--model-shape", choices=list(SHAPES), default="llama31-8b")
    flag = partial(add_flag, made)
    flag("--prompts", positive_count, "number of prompts", 64)
    flag("--answers", positive_count, "answers of each", 16)
    flag("--prompt-tokens", positive_count, "tokens of a prompt", 400)
    flag("--output", positive_count, "tokens of an answer", 512)
    made.add_argument("--separate", action="store_true", help="also as prompts that share nothing")
    made.add_argument("--pageable", action="store_true", help="do not pin the tensors")
    made.add_argument("--json", action="store_true", help="one line")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    kv_tokens = TINY_KV_TOKENS if args.model_shape == "tiny" else KV_TOKENS
    result = measure(args, random_config(args, args.model_shape, kv_tokens))
    show("rollouts", result, args.json)
    return 0


def measure(args: argparse.Namespace, config: EngineConfig) -> dict[str, object]:
    load, machine = load_average(), Machine.of(config)
    shape = SHAPES[args.model_shape]
    engine = build_random_engine(shape, config)
    job = OfflineJob(
        "rollouts", args.model_shape, config.cache.kv_tokens or KV_TOKENS, args.prompts,
        args.answers, args.prompt_tokens, 0, args.output,
    )  # fmt: skip
    answer(engine, replace(job, output=min(job.output, 16)), 1)  # compiles what has no graph
    result: dict[str, object] = {"model_shape": args.model_shape}
    result |= rollout_speed(engine, job, shape, config, machine)
    if args.separate:
        separate = replace(job, groups=job.groups * job.degree, degree=1)
        seconds = answer(engine, separate, 2)
        result["separate_seconds"] = round(seconds, 3)
    result |= update_speed(engine, shape, args.pageable)
    engine.check()
    engine.close()
    return result | measured_on(config, load)


# --- many answers ---------------------------------------------------------------------------------


def rollout_speed(
    engine: Engine, job: OfflineJob, shape: ModelSpec, config: EngineConfig, machine: Machine
) -> dict[str, object]:
    seconds = answer(engine, job, 0)
    num_tokens = job.groups * job.degree * job.output
    result: dict[str, object] = {
        "prompts": job.groups,
        "answers": job.degree,
        "prompt_tokens": job.prefix,
        "output": job.output,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds, 1),
    }
    if machine.card is not None:
        cost = model_cost(shape, config, machine.has_gpu)
        limit_s = job_floor(machine.card, cost, job, job.kv_tokens).total_s
        result["share_of_limit"] = round(limit_s / seconds, 4)
    return result


def answer(engine: Engine, job: OfflineJob, seed: int) -> float:
    """Sample all answers at temperature 1; returns the seconds. Forgets all pages first."""
    engine.clear_cache()
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(n=job.degree, max_tokens=job.output, ignore_eos=True, seed=seed)
    began_s = perf_counter()
    for number in range(job.groups):
        ids = rng.integers(10, 97, job.prefix).astype(np.int32)
        request_id = RequestId(f"{seed}-{number}")
        engine.submit(Request(request_id, ids, sampling, delivery=Delivery.AT_END))
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = perf_counter() - began_s
    assert num_tokens == job.groups * job.degree * job.output, "an answer is short"
    return seconds


# --- weights --------------------------------------------------------------------------------------


def tensors_for(shape: ModelSpec, dtype: torch.dtype, is_pinned: bool) -> dict[str, Tensor]:
    """Tensors in host memory for every weight of a shape."""
    return {
        name: torch.full(size, VALUE, dtype=dtype, pin_memory=is_pinned)
        for name, size in tensor_shapes(shape).items()
    }


def update_speed(engine: Engine, shape: ModelSpec, is_pageable: bool) -> dict[str, object]:
    has_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if has_gpu else torch.float32
    tensors = tensors_for(shape, dtype, has_gpu and not is_pageable)
    copy_s = min(plain_copy_s(tensors) for _ in range(2))
    update_s = min(_seconds(engine, lambda: _update(engine, tensors)) for _ in range(2))
    before = _used_bytes()
    sleep_s = _seconds(engine, lambda: engine.sleep(2))
    asleep = _used_bytes()
    wake_s = _seconds(engine, engine.wake)
    again_s = _seconds(engine, lambda: _update(engine, tensors))
    result: dict[str, object] = {
        "weights_gb": round(sum(each.nbytes for each in tensors.values()) / 1e9, 3),
        "is_pinned": has_gpu and not is_pageable,
        "copy_s": round(copy_s, 3),
        "update_s": round(update_s, 3),
        "update_over_copy": round(update_s / copy_s, 3),
        "sleep2_s": round(sleep_s, 3),
        "wake_s": round(wake_s, 3),
        "update_after_wake_s": round(again_s, 3),
    }
    sleep1_s = _seconds(engine, lambda: engine.sleep(1))
    result |= {"sleep1_s": round(sleep1_s, 3), "wake1_s": round(_seconds(engine, engine.wake), 3)}
    if has_gpu:
        result["used_gb"] = round(before / 1e9, 2)
        result["asleep_gb"] = round(asleep / 1e9, 2)
        result["freed_share"] = round(1 - asleep / before, 4)
    return result


def _update(engine: Engine, tensors: dict[str, Tensor]) -> "Future[str]":
    return engine.update_weights(TensorUpdate(tensors.items()))


def _seconds(engine: Engine, begin: Callable[[], "Future[str]"]) -> float:
    began_s = perf_counter()
    change = begin()
    while not change.done():
        engine.step()
    change.result()
    return perf_counter() - began_s


def plain_copy_s(tensors: dict[str, Tensor]) -> float:
    """Seconds to copy the tensors to memory that is allocated already, on the GPU if there is
    one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = max(each.numel() for each in tensors.values())
    room = torch.empty(largest, dtype=next(iter(tensors.values())).dtype, device=device)
    _synchronize()
    began_s = perf_counter()
    for each in tensors.values():
        room[: each.numel()].copy_(each.view(-1))
    _synchronize()
    return perf_counter() - began_s


def _used_bytes() -> int:
    """Device memory in use by all processes."""
    if not torch.cuda.is_available():
        return 0
    _synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
