"""Measures how many contexts are scored per second, each with all its choices, on random weights.
For comparison, one token is generated after each choice.

A context is computed once for all its choices; all tokens of a choice except the last are computed.
Planning and submitting are timed; building the engine and warming it up are not.
"""

import argparse
from dataclasses import dataclass, replace

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.plan import Prompts
from mainstem.core.request import Scoring
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem_bench.feed import JobRun, run_job
from mainstem_bench.machine import Machine
from mainstem_bench.offline import WARM_SEED, WARM_SEQS, exact, warm_up
from mainstem_bench.report import load_average, show
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OfflineJob

KV_TOKENS = 262_144
WARM_CONTEXTS = 16
CHECKED_CONTEXTS = 3
TOLERANCE = 1e-3  # largest error of a logprob, in fp32


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Contexts of equal length, each with choices of equal length."""

    num_contexts: int
    context_tokens: int
    num_choices: int
    choice_tokens: int

    def prompts(self, vocab: int, seed: int = 0) -> np.ndarray:
        """Return [contexts * choices, tokens]: a context and a whole choice in each row."""
        rng = np.random.default_rng(seed)
        contexts = rng.integers(0, vocab, (self.num_contexts, self.context_tokens))
        shape = (self.num_contexts * self.num_choices, self.choice_tokens)
        choices = rng.integers(0, vocab, shape)
        return np.hstack((contexts.repeat(self.num_choices, axis=0), choices)).astype(np.int32)


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench score", description=__doc__)
    made.add_argument("--model-shape", choices=list(SHAPES), default="llama31-8b")
    for flag, default in (
        ("--contexts", 1000), ("--context-tokens", 1210), ("--choices", 8), ("--choice-tokens", 4)
    ):  # fmt: skip
        add_flag(made, flag, positive_count, "", default)
    made.add_argument("--json", action="store_true", help="one line")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    job = ScoreJob(args.contexts, args.context_tokens, args.choices, args.choice_tokens)
    config = random_config(args, args.model_shape, KV_TOKENS)
    show("score", measure(job, args.model_shape, config), args.json)
    return 0


def measure(job: ScoreJob, model_shape: str, config: EngineConfig) -> dict[str, object]:
    """Return one result: scoring, then generating, on the same engine with an empty cache each
    time."""
    load, machine, shape = load_average(), Machine.of(config), SHAPES[model_shape]
    if model_shape == "tiny":
        check_scores(job, config)
    engine = build_random_engine(shape, config)
    warm = OfflineJob(
        "warm-up", model_shape, config.cache.kv_tokens or KV_TOKENS, WARM_CONTEXTS,
        job.num_choices, job.context_tokens, job.choice_tokens, 1,
    )  # fmt: skip
    warm_up(engine, warm, shape.vocab_size, WARM_SEQS if machine.has_gpu else 16)
    few = replace(job, num_contexts=min(WARM_CONTEXTS, job.num_contexts))
    score(engine, few, few.prompts(shape.vocab_size, WARM_SEED))
    prompts = job.prompts(shape.vocab_size)
    engine.clear_cache()
    scored = _speed(job, score(engine, job, prompts))  # now: the next run changes the counters
    engine.clear_cache()
    whole = Prompts.from_lists(list(prompts))
    generated = _speed(job, run_job(engine, whole, 1, is_planned=True))
    engine.check()
    engine.close()
    return {
        "model_shape": model_shape,
        "contexts": job.num_contexts,
        "context_tokens": job.context_tokens,
        "choices": job.num_choices,
        "choice_tokens": job.choice_tokens,
        **scored,
        **{f"generate_{name}": value for name, value in generated.items()},
        "peak_gb": round(machine.peak_bytes() / 1e9, 2),
        **measured_on(config, load),
    }


def score(engine: Engine, job: ScoreJob, prompts: np.ndarray) -> JobRun:
    """Score every choice; all its tokens except the last are computed."""
    scorings = [Scoring(job.context_tokens, (int(row[-1]),)) for row in prompts]
    heads = Prompts.from_lists(list(prompts[:, :-1]))
    run = run_job(engine, heads, 1, is_planned=True, scorings=scorings)
    short = [index for index, each in run.logprobs.items() if len(each) != job.choice_tokens]
    assert len(run.logprobs) == len(prompts), "a score is missing"
    assert not short, "a score is short"
    return run


def _speed(job: ScoreJob, run: JobRun) -> dict[str, object]:
    counters, steps = run.counters, run.steps
    return {
        "contexts_per_s": round(job.num_contexts / run.seconds, 3),
        "choices_per_s": round(job.num_contexts * job.num_choices / run.seconds, 2),
        "seconds": round(run.seconds, 3),
        "computed_tokens": counters.computed_tokens,
        "computed_per_context": round(counters.computed_tokens / job.num_contexts, 2),
        "gpu_busy": round(steps.busy, 4),
        "host_ms_per_step": round(1e3 * (steps.host_s + run.submit_s) / steps.num_steps, 3),
        "device_ms_per_step": round(1e3 * steps.device_s / steps.num_steps, 3),
        "steps": steps.num_steps,
        "plan_s": round(run.plan_s, 3),
        "submit_s": round(run.submit_s, 3),
    }


def check_scores(job: ScoreJob, config: EngineConfig) -> None:
    """Raise AssertionError unless choices over a shared context have the same logprobs as choices
    that are scored alone."""
    few = replace(job, num_contexts=min(CHECKED_CONTEXTS, job.num_contexts))
    shape = SHAPES[config.model.model]
    prompts = few.prompts(shape.vocab_size)
    engine = build_random_engine(shape, exact(config))
    shared = score(engine, few, prompts).logprobs
    for index, row in enumerate(prompts):
        engine.clear_cache()
        whole = Prompts.from_lists([row[:-1]])
        asked = [Scoring(1, (int(row[-1]),))]
        (alone,) = run_job(engine, whole, 1, is_planned=False, scorings=asked).logprobs.values()
        for one, other in zip(shared[index], alone[-few.choice_tokens :], strict=True):
            assert one is not None
            assert other is not None
            assert abs(one.logprob - other.logprob) < TOLERANCE, "sharing changed a score"
    engine.close()
