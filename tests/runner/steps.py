"""Steps built by hand, for tests of the runner alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mainstem.core.request import SamplingParams
from mainstem.core.step import (
    InFlight,
    Int32s,
    Runner,
    Spans,
    StartedSequence,
    Step,
    StepId,
    StepResult,
)
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.pages import DevicePages
from mainstem_bench.kernels.samples import a_sample_batch, some_keys


def pages_of(runner: CpuRunner) -> DevicePages:
    """The pages of a runner that does not round them."""
    assert isinstance(runner.pages, DevicePages)
    return runner.pages


def spoil_pages(runner: CpuRunner) -> None:
    """Fill all pages with NaN: the contents of uninitialised memory must not matter."""
    pages = pages_of(runner)
    for layer in range(pages.num_layers):
        pages.keys(layer).fill_(float("nan"))
        pages.values(layer).fill_(float("nan"))


@dataclass
class Seq:
    """A sequence: its pages in order, how many tokens are in them, how many pages it shares."""

    slot: int
    token_ids: list[int]
    pages: list[int]
    num_done: int = 0
    num_shared_pages: int = 0
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))


@dataclass(frozen=True)
class Work:
    """Run `num_tokens` more tokens of a sequence; sample after the last one."""

    seq: Seq
    num_tokens: int
    has_sample: bool = True


def a_step(
    works: Sequence[Work],
    page_size: int,
    vocab: int,
    *,
    started: Sequence[StartedSequence] = (),
    carry: bool = False,
    prompt_logprobs: int | None = None,
) -> Step:
    """The Step of these works. Sequences that have the same first pages and are marked as sharing
    them get one span over them."""
    starts = np.cumsum([0, *(work.num_tokens for work in works)])
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    targets: list[int] = []
    shared: dict[tuple[int, ...], list[int]] = {}
    spans: list[tuple[list[int], list[int], int, bool]] = []
    for index, work in enumerate(works):
        seq, first = work.seq, work.seq.num_done
        last = first + work.num_tokens
        rows = list(range(starts[index], starts[index + 1]))
        token_ids += seq.token_ids[first:last]
        targets += [*seq.token_ids, 0][first + 1 : last + 1]
        positions += range(first, last)
        slots += [seq.pages[p // page_size] * page_size + p % page_size for p in range(first, last)]
        num_shared = seq.num_shared_pages if seq.num_shared_pages * page_size <= first else 0
        if num_shared:
            shared.setdefault(tuple(seq.pages[:num_shared]), []).extend(rows)
        own = seq.pages[num_shared : -(-last // page_size)]
        spans.append((rows, own, last - num_shared * page_size, True))
    spans += [(rows, list(pages), len(pages) * page_size, False) for pages, rows in shared.items()]
    sampled = [index for index, work in enumerate(works) if work.has_sample]
    logprob_rows = range(len(token_ids)) if prompt_logprobs is not None else range(0)
    rows_of = np.array([starts[index + 1] - 1 for index in sampled], np.int32)
    return Step(
        step_id=StepId(0),
        seq_slots=np.array([work.seq.slot for work in works], np.int32),
        seq_starts=starts.astype(np.int32),
        token_ids=np.array(token_ids, np.int32),
        carry_to=rows_of if carry else np.empty(0, np.int32),
        carry_from=np.arange(len(sampled), dtype=np.int32) if carry else np.empty(0, np.int32),
        positions=np.array(positions, np.int32),
        write_slots=np.array(slots, np.int64),
        spans=make_spans(spans),
        sample_rows=rows_of,
        sample_slots=np.array([works[index].seq.slot for index in sampled], np.int32),
        sampling=a_sample_batch(
            [works[index].seq.sampling for index in sampled],
            vocab,
            some_keys(len(sampled)),
        ),
        prompt_logprob_rows=np.array(logprob_rows, np.int32),
        prompt_logprob_targets=np.array(targets, np.int32)[: len(logprob_rows)],
        num_prompt_logprobs=np.full(len(logprob_rows), prompt_logprobs or 0, np.int32),
        started=tuple(started),
    )


def make_spans(spans: Sequence[tuple[list[int], list[int], int, bool]]) -> Spans:
    """(query rows, pages, key tokens, causal) per span."""
    return Spans(
        query_starts=np.cumsum([0, *(len(s[0]) for s in spans)]).astype(np.int32),
        query_rows=np.array([row for s in spans for row in s[0]], np.int32),
        page_starts=np.cumsum([0, *(len(s[1]) for s in spans)]).astype(np.int32),
        page_ids=np.array([page for s in spans for page in s[1]], np.int32),
        key_tokens=np.array([s[2] for s in spans], np.int32),
        is_causal=np.array([s[3] for s in spans], np.bool_),
        key_positions=np.array(_depths(spans), np.int32),
    )


def _depths(spans: Sequence[tuple[list[int], list[int], int, bool]]) -> list[int]:
    """The position of each span's first key: shared runs come first, a causal span is a sequence's
    last."""
    depth_of: dict[int, int] = {}
    depths = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i][3]):
        rows, _, keys, _ = spans[index]
        depths[index] = depth_of.get(rows[0], 0) if rows else 0
        depth_of.update(dict.fromkeys(rows, depths[index] + keys))
    return depths


def positions_of(spans: Spans, num_tokens: int) -> Int32s:
    """Positions of the packed tokens: a token's own key is the last that it sees."""
    queries = np.diff(spans.query_starts)
    last = (spans.key_positions + spans.key_tokens - 1).repeat(queries)
    later = spans.query_starts[1:].repeat(queries) - 1 - np.arange(len(last))
    last -= np.where(spans.is_causal.repeat(queries), later, 0).astype(np.int32)
    positions = np.zeros(num_tokens, np.int32)
    np.maximum.at(positions, spans.query_rows, last)
    return positions


def run(runner: Runner, step: Step, works: Sequence[Work]) -> StepResult:
    """Run a step, count its tokens as done and append what was sampled."""
    result = runner.launch(step).wait()
    for work in works:
        work.seq.num_done += work.num_tokens
    sampled = [work.seq for work in works if work.has_sample]
    for seq, token_id in zip(sampled, result.token_ids.tolist(), strict=True):
        seq.token_ids.append(token_id)
    return result


def record_steps(runner: Runner, steps: list[Step]) -> None:
    """Append every step that the runner launches."""
    launch = runner.launch

    def launch_and_record(step: Step) -> InFlight:
        steps.append(step)
        return launch(step)

    runner.launch = launch_and_record  # type: ignore[method-assign]


def num_with_rows(steps: Sequence[Step]) -> int:
    """Prompts that began with rows (sched/rows.py)."""
    count = 0
    for step in steps:
        assert step.states is not None
        if step.states.rows is not None:
            count += int((step.states.rows[step.num_decodes :] >= 0).sum())
    return count


def num_folds(steps: Sequence[Step]) -> int:
    """How often a sequence with rows writes a state."""
    count = 0
    for step in steps:
        use = step.states
        assert use is not None
        if use.rows is not None:
            count += int((use.writes[use.seq_segments[1:] - 1][use.rows >= 0] >= 0).sum())
    return count
