"""Runs whole jobs on random weights: one engine per setting, with the model loaded once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import numpy as np
import torch

from mainstem.core.config import Share
from mainstem.core.plan import Int64s, Prompts
from mainstem.engine.engine import Engine
from mainstem.plan.cost import H200, Card
from mainstem_bench.feed import run_job
from mainstem_bench.limit import ModelCost, job_floor
from mainstem_bench.offline import warm_up
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Line, Settings
from mainstem_bench.workloads import OfflineJob, shuffled

SYSTEMS = {  # the paper's names for what is shared
    Share.NONE: "vLLM",
    Share.STORAGE: "vLLM-PS",
    Share.READS: "vLLM-RA",
}
WARM_SEQS = 256
RIVAL_VOCAB = 30_000  # ids of their prompts are below this
VOCAB = 500  # ids of random prompts are below this: every shape's vocabulary has at least this size


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts and how long each answer is."""

    prompts: Prompts
    answers: Int64s

    @property
    def digest(self) -> str:
        """Equal for equal prompts and answers."""
        found = blake2b(digest_size=8)
        for values in (self.prompts.num_tokens, self.prompts.token_ids, self.answers):
            found.update(np.ascontiguousarray(values, np.int64).tobytes())
        return found.hexdigest()

    @classmethod
    def of(cls, prompts: list[list[int]], answers: Int64s) -> "Job":
        return cls(Prompts.from_lists(prompts), answers)

    @classmethod
    def of_rivals(cls, job: OfflineJob) -> "Job":
        """Return what rivals ran: the same prompts, shuffled in the same way."""
        prompts = shuffled(job.prompts(RIVAL_VOCAB))
        return cls.of(prompts, np.full(len(prompts), job.output))

    @classmethod
    def after_prefixes(
        cls, prefixes: Sequence[int], owns: Sequence[int], answers: Int64s, groups: Sequence[int]
    ) -> "Job":
        """Make prompts. Prompt i has the prefix of group `groups[i]`, which has `prefixes[group]`
        random tokens, and then `owns[i]` tokens of its own."""
        rng = Random(0)
        heads = [[rng.randrange(10, VOCAB) for _ in range(tokens)] for tokens in prefixes]
        prompts = [
            heads[group] + [rng.randrange(10, VOCAB) for _ in range(own)]
            for group, own in zip(groups, owns, strict=True)
        ]
        return cls.of(prompts, answers)


@contextmanager
def engine_of(
    settings: Settings, size: Size, share: Share, max_seqs: int | None = None
) -> Iterator[Engine]:
    """Return an engine with an empty cache; on a GPU, steps of every kind were run before."""
    with settings.engines.engine(size, share, max_seqs) as engine:
        if settings.engines.is_new(share) and torch.cuda.is_available():
            about = OfflineJob("warm", size.shape, size.kv_tokens, 2, 64, 256, 64, 16)
            warm_up(engine, about, size.spec.vocab_size, WARM_SEQS)
        yield engine


def run(
    settings: Settings,
    size: Size,
    job: Job,
    share: Share = Share.READS,
    *,
    is_planned: bool = False,
    repeats: int = 1,
) -> Line:
    """Measure the speed of a job. `requests_per_s` is the median of all runs, `spread` the lowest
    and the highest; the other numbers are those of the last run."""
    runs, repeats = [], 1 if settings.is_quick else repeats
    for _ in range(repeats):
        with engine_of(settings, size, share) as engine:
            runs.append(run_job(engine, job.prompts, job.answers, is_planned))
    rates = sorted(len(job.prompts) / each.seconds for each in runs)
    last = runs[-1]
    num_tokens = len(job.prompts.token_ids) + int(job.answers.sum())
    return {
        "model_shape": size.shape,
        "weights": size.weights,
        "kv_tokens": size.kv_tokens,
        "share": share.value,
        "planned": is_planned,
        "requests": len(job.prompts),
        "prompts": job.digest,
        "requests_per_s": round(float(np.median(rates)), 3),
        "spread": [round(rates[0], 3), round(rates[-1], 3)] if repeats > 1 else None,
        "num_runs": repeats,
        "seconds": round(last.seconds, 3),
        "tokens_per_s": round(num_tokens / last.seconds, 1),
        "answer_tokens_per_s": round(int(job.answers.sum()) / last.seconds, 1),
        "saving_ratio": round(last.counters.saving_ratio, 4),
        "read_ratio": round(last.counters.read_ratio, 4),
        "gpu_busy": round(last.steps.busy, 4),
        "steps": last.steps.num_steps,
        "plan_s": round(last.plan_s, 3),
        "preemptions": last.counters.preemptions,
    }


def limit_per_s(
    size: Size,
    groups: int,
    degree: int,
    lengths: tuple[float, float, float],
    card: Card = H200,
) -> float:
    """Return the maximum requests per second that a card could answer, for mean prefix, own and
    answer tokens."""
    prefix, own, answer = (round(tokens) for tokens in lengths)
    job = OfflineJob("limit", size.shape, size.kv_tokens, groups, degree, prefix, own, answer)
    cost = ModelCost.of(size.spec, element_bytes=2)
    return groups * degree / job_floor(card, cost, job, size.kv_tokens).total_s
