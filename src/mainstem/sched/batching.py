"""Builds the arrays of one Step from the work of each sequence in it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import (
    Int32s,
    Int64s,
    PageWeighing,
    Spans,
    StartedSequence,
    StateUse,
    Step,
    StepId,
)
from mainstem.sched.sharing import SharingTree
from mainstem.sched.spans import SpanBuilder
from mainstem.sched.table import SeqTable

NO_ROWS: Int32s = np.empty(0, np.int32)
NO_MOVES: Int32s = np.empty((3, 0), np.int32)
NO_LOADS: Int32s = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence that go into a step."""

    slot: SeqSlot
    num_before: int
    token_ids: Int32s


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copies the first tokens of page `source` to page `target`, for a new sequence that shares
    only these tokens of the page."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PageMove:
    """A page kept through a truncation: its keys are rotated by `distance` positions."""

    source: int
    target: int
    distance: int


@dataclass(slots=True)
class StepWork:
    """The work of a step that is being made: decodes by slot, prompt chunks within a budget, and
    the copies, moves and loads of sequences that start."""

    decodes: Int32s
    budget: int  # tokens left for prompts
    chunks: list[Chunk] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    moves: list[PageMove] = field(default_factory=list)
    loads: list[Int32s] = field(default_factory=list)

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.chunks)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.budget -= len(chunk.token_ids)

    def sources(self) -> Int32s:
        """Pages that copies and moves of this step read. A page is leased once for each use."""
        pages = [copy.source for copy in self.copies] + [move.source for move in self.moves]
        return np.array(pages, np.int32)

    def filled_pages(self) -> list[int]:
        """Pages that copies and moves of this step fill."""
        return [copy.target for copy in self.copies] + [move.target for move in self.moves]


def build_step(
    step_id: StepId,
    batch: StepWork,
    table: SeqTable,
    tree: SharingTree,
    spans: SpanBuilder,
    states: StateUse | None = None,
    window_parts: Int32s | None = None,
) -> Step:
    """Make the arrays of the step, and advance the table's counters."""
    decodes = batch.decodes
    slots, counts, token_ids = _packed(batch, table)
    seq_starts, at = starts_of(counts), slots.astype(np.intp)  # numpy's index type
    num_before = positions = table.computed.take(at)
    if batch.chunks:
        positions = np.repeat(num_before, counts) + ragged_arange(counts)
    made = spans.build(tree, slots, seq_starts, num_before, table.page_table)

    carrying = table.pending.take(at[: len(decodes)]).nonzero()[0]
    carry_from = table.sample_row.take(at[carrying])

    # a token is sampled after every decode, and after the last chunk of a prompt
    samples = table.total.take(at) == num_before + counts
    sample_slots = slots[samples]
    copy_from, copy_to = _copy_slots(batch.copies, spans.page_size)
    moves = _move_rows(batch.moves)
    prompt_rows = _prompt_logprob_rows(batch, table, seq_starts[len(decodes) :])
    step = Step(
        step_id=step_id,
        seq_slots=slots,
        seq_starts=seq_starts,
        token_ids=token_ids.astype(np.int32, copy=False),
        carry_to=carrying.astype(np.int32),
        carry_from=carry_from,
        positions=positions,
        write_slots=_write_slots(made, counts, positions, spans.page_size),
        spans=made,
        sample_rows=seq_starts[1:][samples] - np.int32(1),
        sample_slots=sample_slots,
        sampling=table.sample_batch(sample_slots),
        prompt_logprob_rows=prompt_rows[0],
        prompt_logprob_targets=prompt_rows[1],
        num_prompt_logprobs=prompt_rows[2],
        started=tuple(batch.started),
        num_decodes=len(decodes),
        copy_from=copy_from,
        copy_to=copy_to,
        move_from=moves[0],
        move_to=moves[1],
        move_by=moves[2],
        load_ids=np.unique(np.concatenate(batch.loads)) if batch.loads else NO_LOADS,
        weighings=tuple(_weighings(batch, table, seq_starts[len(decodes) :], spans.page_size)),
        states=states,
        window_parts=window_parts,
    )
    table.move_on(step_id, slots, counts, sample_slots)
    return step


def _packed(batch: StepWork, table: SeqTable) -> tuple[Int32s, Int32s, Int32s]:
    """Return slots, the number of tokens of each, and all token ids. Decodes come first."""
    slots, token_ids = batch.decodes, table.last_token.take(batch.decodes)
    counts = np.ones(len(slots), np.int32)
    if not batch.chunks:  # a shortcut: with few sequences, the device is ready before the host
        return slots, counts, token_ids
    chunk_slots = np.array([chunk.slot for chunk in batch.chunks], np.int32)
    chunk_lens = np.array([len(chunk.token_ids) for chunk in batch.chunks], np.int32)
    return (
        np.concatenate([slots, chunk_slots]),
        np.concatenate([counts, chunk_lens]),
        np.concatenate([token_ids, *(chunk.token_ids for chunk in batch.chunks)]),
    )


def _write_slots(spans: Spans, counts: Int32s, positions: Int32s, page_size: int) -> Int64s:
    """Return where K and V of each token go: into pages of its sequence's own span. The last spans
    are those, one for each sequence."""
    own = len(spans) - len(counts)
    page_index = positions // page_size
    page_at = spans.page_starts[own:-1] - spans.key_positions[own:] // page_size
    if len(positions) > len(counts):
        page_at = page_at.repeat(counts)
    pages = spans.page_ids.take(page_at + page_index).astype(np.int64)
    return pages * page_size + (positions - page_index * page_size)


def _copy_slots(copies: list[PageCopy], page_size: int) -> tuple[Int64s, Int64s]:
    """Return the token slots to copy from and to. If a source is itself filled by a copy of this
    step, the source of that copy is used."""
    if not copies:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    origin: dict[int, int] = {}
    for copy in copies:
        for offset in range(copy.num_tokens):
            source = copy.source * page_size + offset
            origin[copy.target * page_size + offset] = origin.get(source, source)
    return np.array(list(origin.values()), np.int64), np.array(list(origin), np.int64)


def _move_rows(moves: list[PageMove]) -> Int32s:
    """Return sources, targets and distances, [3, moves]."""
    if not moves:
        return NO_MOVES
    places = [(move.source, move.target, move.distance) for move in moves]
    return np.ascontiguousarray(np.array(places, np.int32).T)


def _weighings(
    batch: StepWork, table: SeqTable, chunk_starts: Int32s, page_size: int
) -> Iterator[PageWeighing]:
    """Return one record for each chunk with tokens whose attention is wanted, in the order of the
    chunks."""
    for chunk, start in zip(batch.chunks, chunk_starts.tolist(), strict=False):
        weighing = table.sequence(chunk.slot).weighing
        num_before, end = chunk.num_before, chunk.num_before + len(chunk.token_ids)
        if weighing is None or end <= weighing.num_reused:
            continue
        first = max(num_before, weighing.num_reused)
        pages = table.page_table[chunk.slot, : -(-end // page_size)].copy()
        yield PageWeighing(start + first - num_before, end - first, pages)


def _prompt_logprob_rows(
    batch: StepWork, table: SeqTable, chunk_starts: Int32s
) -> tuple[Int32s, Int32s, Int32s]:
    """Return rows, the tokens that follow them, and how many alternatives are wanted."""
    rows: list[Int32s] = [NO_ROWS]
    targets: list[Int32s] = [NO_ROWS]
    wanted: list[Int32s] = [NO_ROWS]
    for chunk, start in zip(batch.chunks, chunk_starts.tolist(), strict=False):
        collected = table.sequence(chunk.slot).prompt_logprobs
        if collected is None:
            continue
        begin = chunk.num_before
        places, following = collected.rows(begin, begin + len(chunk.token_ids))
        rows.append(places + np.int32(start - begin))
        targets.append(following)
        count = collected.request.sampling.prompt_logprobs or 0
        wanted.append(np.full(len(following), count, np.int32))
    return np.concatenate(rows), np.concatenate(targets), np.concatenate(wanted)
