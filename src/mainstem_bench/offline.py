"""Measures requests per second of a whole job on random weights, and compares with the limit of the
card.

The workloads are the same as in the measurements of rivals: equal prompts, lengths and KV memory.
Planning and submitting are timed; building the engine and warming it up are not.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import DType, EngineConfig, Quantize, Share
from mainstem.core.errors import ConfigError
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.quantized.packing import PackedKind
from mainstem.models.spec import ModelSpec
from mainstem_bench.arrivals import run_arrivals
from mainstem_bench.feed import JobRun, Order, run_job, submit_all
from mainstem_bench.grouped_rate import grouped_flops_per_s
from mainstem_bench.limit import ModelCost, job_floor
from mainstem_bench.machine import Machine
from mainstem_bench.packed import add_weights_flag, shape_with
from mainstem_bench.profile import ProfileWindow
from mainstem_bench.report import load_average, show
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OFFLINE_JOBS, OfflineJob, shared, shuffled

FP8_FLOPS_PER_S = 1297e12  # GEMM on an H200, sustained
WARM_SEED = 99  # prompts of the warm-up differ from the job's
WARM_TOKENS = 50_000  # tokens computed in mixed steps
WARM_SEQS = 512  # sequences that decode at once
CHECKED_TOKENS = 8


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench offline", description=__doc__)
    made.add_argument("--workload", choices=list(OFFLINE_JOBS), default="b2000-sd16")
    made.add_argument("--model-shape", choices=list(SHAPES), help="(the workload's own)")
    add_weights_flag(made)
    flag = partial(add_flag, made)
    flag("--groups", positive_count, "number (the workload's own)")
    made.add_argument("--requests", type=positive_count, metavar="N", help="only the first N")
    flag("--output", positive_count, "tokens per answer (the workload's own)")
    made.add_argument("--order", choices=["shuffled", "sorted"], default="shuffled")
    made.add_argument("--no-plan", action="store_true", help="run prompts in the order given")
    made.add_argument(
        "--arrivals", type=float, metavar="RATE",
        help="measure latencies: requests arrive one by one, at this rate per second (Poisson)",
    )  # fmt: skip
    made.add_argument(
        "--profile", type=Path, metavar="FILE.json",
        help="write a trace of some steps, and print where the device's time went; slower",
    )  # fmt: skip
    flag("--profile-steps", positive_count, "number", 20)
    made.add_argument("--json", action="store_true", help="one line")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    job = chosen_job(args)
    config = random_config(args, job.model_shape, job.kv_tokens)
    job = replace(job, kv_tokens=config.cache.kv_tokens or job.kv_tokens)
    show("offline", measure(args, job, config), args.json)
    return 0


def chosen_job(args: argparse.Namespace) -> OfflineJob:
    """Return the workload with the sizes that the flags give."""
    job = OFFLINE_JOBS[args.workload]
    if args.arrivals is not None and not args.arrivals > 0:
        raise ConfigError(f"--arrivals must be above 0, got {args.arrivals}")
    if args.profile is not None and not args.profile.parent.is_dir():
        raise ConfigError(f"--profile: the folder {args.profile.parent} does not exist")
    return replace(
        job,
        model_shape=args.model_shape or job.model_shape,
        groups=args.groups or job.groups,
        output=args.output or job.output,
        num_requests=args.requests,
    )


def measure(args: argparse.Namespace, job: OfflineJob, config: EngineConfig) -> dict[str, object]:
    """Return one result: the settings, the speed, and the speed as a share of the limit."""
    load, machine = load_average(), Machine.of(config)
    shape = shape_with(job.model_shape, args.weights)
    given = job.prompts(shape.vocab_size)
    if args.order == "shuffled":
        given = shuffled(given)
    prompts = Prompts.from_lists(given)
    if job.model_shape == "tiny":
        check_sharing(job, config)
    engine = build_random_engine(shape, config)
    # a CPU has nothing to compile for batch sizes
    warm_up(engine, job, shape.vocab_size, WARM_SEQS if machine.has_gpu else 16)
    window = None if args.profile is None else ProfileWindow(args.profile, args.profile_steps)
    about: dict[str, object] = {"workload": job.name, "model_shape": job.model_shape}
    if args.weights is not None:
        about["weights"] = args.weights
    if unread := shape.unread_kv_elements(job.most_tokens):
        about["kv_unread_in_windows"] = round(unread / shape.kv_elements_per_token, 3)
    if args.arrivals is not None:
        result = run_arrivals(engine, prompts, job.output, args.arrivals, window)
    else:
        total = len(prompts) * job.output
        run = run_job(
            engine,
            prompts,
            job.output,
            is_planned=not args.no_plan,
            after_step=window.watch(total) if window else lambda _: None,
        )
        result = _speed(run, job, prompts) | _against_limit(run, job, shape, config)
    if window is not None:
        window.close()
        print(window.report(), file=sys.stderr)
        result["profile"] = window.shares()
    engine.check()
    engine.close()
    return (
        about
        | result
        | {
            "peak_gb": round(machine.peak_bytes() / 1e9, 2),
            "order": args.order,
            "planned": not args.no_plan and args.arrivals is None,
        }
        | measured_on(config, load)
    )


def _speed(run: JobRun, job: OfflineJob, prompts: Prompts) -> dict[str, object]:
    counters, steps = run.counters, run.steps
    num_tokens = len(prompts.token_ids) + len(prompts) * job.output
    processed = counters.computed_tokens + counters.decoded_tokens
    return {
        "requests": len(prompts),
        "groups": len(job.group_sizes()),
        "seconds": round(run.seconds, 3),
        "requests_per_s": round(len(prompts) / run.seconds, 3),
        "tokens_per_s": round(num_tokens / run.seconds, 1),
        "us_per_token": round(1e6 * run.seconds / processed, 3),
        "saving_ratio": round(counters.saving_ratio, 4),
        "read_ratio": round(counters.read_ratio, 4),
        "gpu_busy": round(steps.busy, 4),
        "host_ms_per_step": round(1e3 * (steps.host_s + run.submit_s) / steps.num_steps, 3),
        "device_ms_per_step": round(1e3 * steps.device_s / steps.num_steps, 3),
        "steps": steps.num_steps,
        "largest_step_tokens": steps.largest_step_tokens,
        "plan_s": round(run.plan_s, 3),
        "submit_s": round(run.submit_s, 3),
        "preemptions": counters.preemptions,
        "evicted_pages": counters.evicted_pages,
        **_states(counters),
    }


def _states(counters: Counters) -> dict[str, object]:
    """What a model with recurrent layers read of its states."""
    names = ("states_read", "states_saved", "rows_folded")
    return {name: getattr(counters, name) for name in names} if counters.states_read else {}


def _against_limit(
    run: JobRun, job: OfflineJob, shape: ModelSpec, config: EngineConfig
) -> dict[str, object]:
    """Return the job's speed as a share of the card's limit. It is None if the card's rates are not
    measured, or if layers have windows."""
    machine = Machine.of(config)
    card = machine.card
    if card is None:
        return {"share_of_limit": None, "limit_requests_per_s": None}
    spec = shape.at_context(job.most_tokens)
    if any(kind.window is not None for kind in spec.attention_kinds):
        # the limit counts attention over whole contexts
        return {"share_of_limit": None, "limit_requests_per_s": None}
    grouped = grouped_flops_per_s(spec)
    model = model_cost(shape, config, machine.has_gpu, grouped)
    # without the sizes of steps, limits of other models are those of earlier results
    steps = run.steps.num_tokens if spec.recurrences else ()
    limit_s = job_floor(card, model, job, job.kv_tokens, steps).total_s
    return {
        "grouped_tflops": None if grouped is None else round(grouped / 1e12, 1),
        "share_of_limit": round(limit_s / run.seconds, 4),
        "limit_requests_per_s": round(len(run.answers) / limit_s, 2),
    }


def model_cost(
    shape: ModelSpec,
    config: EngineConfig,
    has_gpu: bool,
    expert_flops_per_s: float | None = None,
) -> ModelCost:
    """Return the costs of a shape for the limit. 4-bit weights are multiplied in 16 bits."""
    model, packed = config.model, shape.quantized
    is_fp8 = model.quantize is Quantize.FP8 or (
        packed is not None and packed.packing is not None and packed.packing.kind is PackedKind.FP8
    )
    is_fp32 = model.dtype is DType.FP32 or (model.dtype is DType.AUTO and not has_gpu)
    gemm_flops_per_s = FP8_FLOPS_PER_S if is_fp8 else None
    element_bytes = 4 if is_fp32 else 2
    return ModelCost.of(shape, element_bytes, gemm_flops_per_s, expert_flops_per_s)


def check_sharing(job: OfflineJob, config: EngineConfig) -> None:
    """Raise AssertionError unless prompts get the same answers planned and shared as without
    sharing."""
    few = replace(job, num_requests=8)
    prompts = Prompts.from_lists(shuffled(few.prompts(SHAPES[job.model_shape].vocab_size)))
    ways = ((config, True), (config.sharing(Share.NONE), False))
    check_same(prompts, CHECKED_TOKENS, ways, "sharing changed an answer")


def check_same(
    prompts: Prompts, output: int, ways: Iterable[tuple[EngineConfig, bool]], fault: str
) -> None:
    """Raise AssertionError unless prompts get the same answers in all ways: with each config,
    planned or not. Done in fp32: logits of random weights are close, and in 16 bits rounding would
    decide between them.
    """
    answers = []
    for config, is_planned in ways:
        engine = build_random_engine(SHAPES[config.model.model], exact(config))
        answers.append(run_job(engine, prompts, output, is_planned).answers)
        engine.close()
    assert all(each == answers[0] for each in answers), fault


def exact(config: EngineConfig) -> EngineConfig:
    """The config, in fp32."""
    return replace(config, model=replace(config.model, dtype=DType.FP32, quantize=Quantize.NONE))


def warm_up(engine: Engine, job: OfflineJob, vocab: int, most_seqs: int) -> None:
    """Run steps of every kind that the job will have, so that nothing is compiled or captured while
    it is timed.

    Runs mixed steps of the job's own shape, then decodes of batches that shrink from at most
    `most_seqs` sequences by 8, and at the end by 1.
    """
    sizes = job.group_sizes()
    own = round(job.own_tokens)
    degree = min(max(sizes), max(1, WARM_TOKENS // max(1, own)))
    groups = min(len(sizes), max(1, WARM_TOKENS // (job.prefix + degree * own)))
    mixed = replace(job, groups=groups, degree=degree, num_requests=None)
    prompts = mixed.prompts(vocab, WARM_SEED)
    Order.planned(Prompts.from_lists(prompts), np.full(len(prompts), 4))
    _answer(engine, prompts, [4] * len(prompts))
    num_seqs = min(most_seqs, max(1, job.kv_tokens // 256))
    short = shared(num_seqs, 1, 8, 0, WARM_SEED, min(vocab, 30_000))
    _answer(engine, short, [2 + i // 8 + max(0, i + 8 - num_seqs) for i in range(num_seqs)])
    engine.clear_cache()


def _answer(engine: Engine, prompts: list[list[int]], outputs: list[int]) -> None:
    submit_all(engine, "warm", prompts, outputs)
    while engine.has_work:
        engine.step()
