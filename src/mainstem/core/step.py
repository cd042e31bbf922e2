"""A Step: the work of one forward pass, as plain arrays.

The scheduler makes it and the runner runs it; neither sees the other. Fields are numpy arrays and
small records without references to either, so a Step can be sent to another process as it is.

    packed tokens   | seq a: 1 decode | seq b: 1 decode | seq c: 512 of a prompt   | ...
    seq_starts      0                 1                 2                          514
    sample_rows     ^ 0               ^ 1               (none: not its last chunk)
"""

from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.core.request import SamplingParams, TokenLogprobs

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

StepId = NewType("StepId", int)


def _no_slots() -> Int64s:
    return np.empty(0, np.int64)


def _no_rows() -> Int32s:
    return np.empty(0, np.int32)


def _no_masks() -> Bytes:
    return np.empty((0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Spans:
    """A step's attention: each span is (some query tokens) x (a run of pages they all see).

    Span i joins the tokens `query_rows[query_starts[i]:query_starts[i+1]]` (indices into the packed
    tokens) with the first `key_tokens[i]` slots of `page_ids[page_starts[i]:page_starts[i+1]]`.
    In a plain span every query sees every key. In a causal span the n queries are the last n tokens
    of its keys: query j sees the keys up to and including number `key_tokens - n + j`. A token's
    attention output is the log-sum-exp merge over all its spans; every token is in at least one.

    In layers with a window, a token sees only the last keys before it.
    `kernels/attention/window.py` makes the spans of such layers from those of the step;
    `first_keys` says where each query's keys begin.
    """

    query_starts: Int32s
    query_rows: Int32s
    page_starts: Int32s
    page_ids: Int32s
    key_tokens: Int32s
    is_causal: Bools
    # [spans] position of each span's first key, which is the same in all its sequences
    key_positions: Int32s
    # for each of query_rows, the first key of the span that this query sees; None: 0 for all
    first_keys: Int32s | None = None

    def __len__(self) -> int:
        return len(self.key_tokens)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """How to turn logits into tokens, one entry per sample row.

    `noise_keys` are hashes of (seed, output index). Such a key and a token's id give the noise that
    is added to the token's score, so that a sample depends on its request alone. For rows in
    `special_rows` the runner keeps what it needs (settings, token counts) by sequence slot, from
    the `started` records of this step or an earlier one.
    """

    temperature: Float32s
    top_p: Float32s
    top_k: Int32s  # vocab size if there is no limit
    min_p: Float32s
    noise_keys: Int64s
    num_logprobs: Int32s  # top tokens wanted, 0 where `wants_logprobs` is false
    wants_logprobs: Bools
    special_rows: Int32s  # rows whose logits need editing: penalties, bias, min_tokens
    # every temperature is 0, nothing needs editing, and no logprobs are wanted: argmax is enough
    is_greedy: bool
    mask_rows: Int32s = field(default_factory=_no_rows)  # rows in which a grammar restricts tokens
    # the allowed tokens: [mask_rows, ceil(vocab / 8)], token t is bit t % 8 of byte t // 8
    masks: Bytes = field(default_factory=_no_masks)


@dataclass(frozen=True, slots=True)
class StartedSequence:
    """A sequence that enters a slot and whose logits must be edited. Replaces the record of the
    slot's last sequence."""

    seq_slot: int
    sampling: SamplingParams
    prompt_ids: Int32s
    output_ids: Int32s  # not empty after a preemption
    stop_ids: tuple[int, ...]  # not allowed before min_tokens output tokens


@dataclass(frozen=True, slots=True)
class PageWeighing:
    """Asks how much attention some tokens of a step pay to each page of their sequence."""

    first_row: int  # packed tokens [first_row, first_row + num_rows), neighbours in one sequence
    num_rows: int
    page_ids: Int32s  # pages of the sequence, from its first token up to these rows


@dataclass(frozen=True, slots=True)
class StateUse:
    """The slots of recurrent layers' states that a step reads and writes.

    A sequence reads its state before its first token of the step. Its tokens are one or more
    segments; the state after each is written. No sequence writes a slot that another one uses.

    A sequence with rows has a row slot with what it keeps of each of its tokens since the state
    that it reads. Its tokens of the step are added to the rows, and it writes no state; or, if it
    writes one, the state is folded from the rows, and the rows are not used again. A prompt's chunk
    begins with no rows.
    """

    reads: Int32s  # [seqs] -1: zeros, before the first token
    segment_starts: Int32s  # [segments + 1] prefix sums over the packed tokens
    writes: Int32s  # [segments] -1: not written, by a sequence with rows
    seq_segments: Int32s  # [seqs + 1] prefix sums over the segments
    rows: Int32s | None = None  # [seqs] row slots (kv/rows.py), -1: none; None: none in this step
    counts: Int32s | None = None  # [seqs] tokens in the rows before this step; None like `rows`

    def count_reads(self, num_decodes: int) -> tuple[int, int, int]:
        """How many states the step reads, how many more it would read if every sequence read its
        own, and how many rows it folds. Only decodes that write no state read one together."""
        num_readers = int(np.count_nonzero(self.reads >= 0))
        if self.rows is None or self.counts is None:
            return num_readers, 0, 0
        has_rows = self.rows[:num_decodes] >= 0
        writes_none = self.writes[:num_decodes] < 0
        bases = self.reads[:num_decodes][has_rows & writes_none]
        num_saved = len(bases) - len(np.unique(bases))
        num_folded = int(self.counts[:num_decodes][has_rows & ~writes_none].sum())
        return num_readers - num_saved, num_saved, num_folded


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one forward pass."""

    step_id: StepId
    seq_slots: Int32s  # [seqs] the sequence of each run of packed tokens
    seq_starts: Int32s  # [seqs + 1] prefix sums over the packed tokens
    token_ids: Int32s  # [tokens]; undefined for tokens in `carry_to`
    carry_to: Int32s  # packed tokens whose id is a sample of the previous step
    carry_from: Int32s  # for each of `carry_to`: the sample row of the previous step
    positions: Int32s  # [tokens] rotary positions
    write_slots: Int64s  # [tokens] page_id * page_size + offset for the new K and V
    spans: Spans
    sample_rows: Int32s  # [rows] packed tokens after which a token is sampled
    sample_slots: Int32s  # [rows] the sequences they belong to
    sampling: SampleBatch
    prompt_logprob_rows: Int32s  # packed tokens whose successor's logprob is wanted; a token
    # with several successors occurs several times
    prompt_logprob_targets: Int32s  # the successors
    num_prompt_logprobs: Int32s  # top tokens wanted for each of these rows
    started: tuple[StartedSequence, ...]
    num_decodes: int = 0  # the leading sequences that are past their prompt, one token each
    # slots whose K and V are copied: the part of a page that a sequence shares with another one.
    # Done in each layer after the writes and before any read. No slot is both a source and a target
    copy_from: Int64s = field(default_factory=_no_slots)
    copy_to: Int64s = field(default_factory=_no_slots)
    # loads of pages that this step reads: each layer waits until the same layer of these pages is
    # loaded
    load_ids: Int32s = field(default_factory=_no_rows)
    # pages whose K is rotated by `move_by` positions and written, with V, to another page, after a
    # truncation. Done in each layer after the writes, before the copies and before any read. A page
    # may be the source of several moves, but no page is both source and target
    move_from: Int32s = field(default_factory=_no_rows)
    move_to: Int32s = field(default_factory=_no_rows)
    move_by: Int32s = field(default_factory=_no_rows)
    weighings: tuple[PageWeighing, ...] = ()
    states: StateUse | None = None  # None: the model has no recurrent layers
    # [num_pages] for each page the place of its windowed part: the layers with a window, of models
    # that have others, too. For pages without a windowed part this is the last place. Anything may
    # be written there, and nothing may depend on what is read there. None: the windowed part has
    # the page's own number
    window_parts: Int32s | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hidden_rows(self) -> tuple[Int32s, Int32s]:
        """Packed tokens whose last hidden state is needed, each once: first those after which a
        token is sampled, then those that only prompt logprobs need. Also returns the index of each
        prompt logprob row in this list."""
        samples = self.sample_rows
        if len(self.prompt_logprob_rows) == 0:
            return samples, self.prompt_logprob_rows
        wanted, places = np.unique(self.prompt_logprob_rows, return_inverse=True)
        is_sample = np.isin(wanted, samples, assume_unique=True)
        place_of = np.empty(len(wanted), np.int32)
        place_of[is_sample] = np.searchsorted(samples, wanted[is_sample])  # they are in order
        others = wanted[~is_sample]
        place_of[~is_sample] = np.arange(len(samples), len(samples) + len(others))
        return np.concatenate((samples, others)), place_of[places]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a Step produced; rows as in the Step."""

    token_ids: Int32s  # [sample rows]
    logprobs: dict[int, TokenLogprobs]  # by sample row, where wanted
    prompt_logprobs: tuple[TokenLogprobs, ...]  # by prompt_logprob row
    device_s: float | None = None  # how long the step ran on the device, if known
    # for each weighing and page: attention weights, summed over the page's keys, the rows, all
    # heads and all layers
    page_masses: tuple[Float32s, ...] = ()


class InFlight(Protocol):
    """A launched Step."""

    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Called exactly once, in launch order."""

    def has_ended(self) -> bool:
        """Whether `wait` returns at once."""


class Runner(Protocol):
    """Runs Steps in the order they are launched."""

    @property
    def can_overlap(self) -> bool:
        """Whether it helps to launch a step before waiting for the previous one."""

    def launch(self, step: Step) -> InFlight:
        """Start a step. In each layer K and V of all its tokens are written before any of its
        attention reads, so a step may read pages that it fills itself."""

    def drain(self) -> None:
        """Return when no launched step runs any more, whether it failed or not; never raises."""

    def check(self) -> None:
        """Raise EngineLost if nothing can be launched any more."""

    def close(self) -> None:
        """Free the device; nothing may be launched afterwards."""
