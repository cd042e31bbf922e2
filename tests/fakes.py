"""Stand-ins that make the engine's answers predictable without tensors."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from mainstem.core.request import TokenLogprobs
from mainstem.core.step import (
    Float32s,
    InFlight,
    Int32s,
    Int64s,
    PageWeighing,
    Step,
    StepResult,
)
from mainstem.kernels.attention.window import clip_spans


def fake_next_token(token_ids: list[int], vocab_size: int) -> int:
    """The next token of FakeRunner: a hash of all tokens before it."""
    digest = blake2b(np.array(token_ids, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def fake_answer(prompt_ids: list[int], length: int, vocab_size: int) -> list[int]:
    """FakeRunner's answer to a prompt that runs alone and never stops."""
    known = list(prompt_ids)
    for _ in range(length):
        known.append(fake_next_token(known, vocab_size))
    return known[len(prompt_ids) :]


def fake_logprob(token_ids: list[int], next_id: int, num_top: int) -> TokenLogprobs:
    """FakeRunner's logprob of a token after others: a hash of them all, exact as a 32-bit float."""
    logprob = -fake_next_token([*token_ids, next_id], 4096) / 64
    likeliest = fake_next_token(token_ids, 97)
    top = ((likeliest,), (-0.5,)) if num_top else ((), ())
    return TokenLogprobs(next_id, logprob, 1 if likeliest == next_id else 2, *top)


def fake_masses(token_ids: Int32s, num_queries: int, page_size: int) -> Float32s:
    """FakeRunner's attention to each page of tokens: a hash of the page times `num_queries`."""
    pages = [token_ids[at : at + page_size] for at in range(0, len(token_ids), page_size)]
    masses = [1 + fake_next_token(page.tolist(), 31) for page in pages]
    return np.array(masses, np.float32) * np.float32(num_queries)


def _allowed_by_row(step: Step, vocab_size: int) -> dict[int, Int32s]:
    """Ids that grammars allow, by sample row."""
    bits = np.unpackbits(step.sampling.masks, axis=1, bitorder="little")
    ids = [np.flatnonzero(row[:vocab_size]).astype(np.int32) for row in bits]
    return dict(zip(step.sampling.mask_rows.tolist(), ids, strict=True))


@dataclass
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result

    def has_ended(self) -> bool:
        return True


class FakeWindow:
    """The windowed parts of FakeRunner's pages, of layers that see `window` tokens: each row must
    see exactly the last ones, read through `Step.window_parts`."""

    def __init__(self, window: int, num_parts: int, page_size: int) -> None:
        self.window = window
        self.num_parts = num_parts
        self.page_size = page_size
        num_slots = (num_parts + 1) * page_size
        self.token_at = np.full(num_slots, -1, np.int64)
        self.position_at = np.full(num_slots, -1, np.int64)

    def run(self, step: Step, token_ids: Int32s, contexts: dict[int, list[int]]) -> None:
        assert step.window_parts is not None, "a step says nothing of windowed parts"
        self._part_of = step.window_parts.astype(np.int64)
        lent = self._part_of[self._part_of < self.num_parts]
        assert len(np.unique(lent)) == len(lent), "a windowed part belongs to two pages"
        written = self._slots(step.write_slots)
        self.token_at[written] = token_ids
        self.position_at[written] = step.positions
        self._move(step)
        source, target = self._slots(step.copy_from), self._slots(step.copy_to)
        self.token_at[target] = self.token_at[source]
        self.position_at[target] = self.position_at[source]
        for row, seen in self._seen(step, set(contexts)).items():
            context = contexts[row]
            first = max(0, len(context) - self.window)
            assert seen == dict(enumerate(context[first:], first)), "a window holds other tokens"

    def _slots(self, slots: Int64s) -> Int64s:
        """Where these token slots are; they must be in pages with a windowed part."""
        page, offset = np.divmod(slots, self.page_size)
        part = self._part_of[page]
        assert (part < self.num_parts).all(), "a page that is used has no windowed part"
        return np.asarray(part * self.page_size + offset)

    def _move(self, step: Step) -> None:
        offsets = np.arange(self.page_size)
        source = self._part_of[step.move_from][:, None] * self.page_size + offsets
        target = self._part_of[step.move_to][:, None] * self.page_size + offsets
        self.token_at[target] = self.token_at[source]
        self.position_at[target] = self.position_at[source] + step.move_by[:, None]
        self.position_at[-self.page_size :] = -1  # the place of pages without a windowed part

    def used(self, step: Step) -> Int64s:
        """The windowed parts that a step uses."""
        assert step.window_parts is not None
        spans = clip_spans(step.spans, step.positions, self.window, self.page_size)
        slots = np.concatenate([step.write_slots, step.copy_from, step.copy_to])
        moved = np.concatenate([step.move_from, step.move_to])
        parts = step.window_parts[np.concatenate([spans.page_ids, slots // self.page_size, moved])]
        return np.unique(parts[parts < self.num_parts]).astype(np.int64)

    def _seen(self, step: Step, rows: set[int]) -> dict[int, dict[int, int]]:
        """For each of these packed tokens: position -> token id, as the clipped spans show them."""
        spans = clip_spans(step.spans, step.positions, self.window, self.page_size)
        assert (self._part_of[spans.page_ids] < self.num_parts).all(), "a part is read and missing"
        seen: dict[int, dict[int, int]] = {row: {} for row in rows}
        firsts = spans.first_keys
        for i in range(len(spans)):
            begin, end = spans.query_starts[i : i + 2].tolist()
            queries = spans.query_rows[begin:end].tolist()
            if rows.isdisjoint(queries):
                continue
            pages = spans.page_ids[spans.page_starts[i] : spans.page_starts[i + 1]]
            places = self._part_of[pages][:, None] * self.page_size + np.arange(self.page_size)
            num_keys = int(spans.key_tokens[i])
            slots = places.ravel()[:num_keys]
            positions, tokens = self.position_at[slots], self.token_at[slots]
            for place, row in enumerate(queries):
                if row not in rows:
                    continue
                until = num_keys - len(queries) + place + 1 if spans.is_causal[i] else num_keys
                first = 0 if firsts is None else int(firsts[begin + place])
                keys = positions[first:until].tolist()
                assert seen[row].keys().isdisjoint(keys), "a key is seen twice"
                seen[row].update(zip(keys, tokens[first:until].tolist(), strict=True))
        return seen


class FakeRunner:
    """Keeps token ids where a model keeps K and V, and reads them back through the spans.

    A sample is a hash of the context the spans show, so a wrong page or a page written too early
    changes the answer. Missing and doubled keys fail an assertion: each row must see the positions
    0, 1, ... once.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        vocab_size: int = 97,
        can_overlap: bool = False,
        num_states: int = 0,
        window: int | None = None,
        num_parts: int = 0,
        row_slots_per_state: int = 0,
    ) -> None:
        """With a `window` it keeps token ids a second time, in `num_parts` windowed parts. A state
        slot holds a state, or rows of `row_slots_per_state` sequences."""
        self._can_overlap = can_overlap
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._token_at = np.full(num_pages * page_size, -1, np.int64)
        self._position_at = np.full(num_pages * page_size, -1, np.int64)
        self._previous: Int32s = np.empty(0, np.int32)
        self._window = None if window is None else FakeWindow(window, num_parts, page_size)
        self._tokens_in: list[list[int] | None] = [None] * num_states  # of each state
        self._rows_per_state = row_slots_per_state
        self._rows_in: dict[int, list[int]] = {}  # by row slot: its tokens
        self.steps: list[Step] = []
        self.at_launch: Callable[[Step], None] | None = None  # may raise
        # how long a step takes on the fake device; None: as long as FakeRunner needs
        self.seconds: Callable[[Step], float] | None = None

    @property
    def can_overlap(self) -> bool:
        return self._can_overlap

    def drain(self) -> None:
        """Does nothing: a launched step has already run."""

    def check(self) -> None:
        """Does nothing: FakeRunner cannot lose anything."""

    def launch(self, step: Step) -> InFlight:
        if self.at_launch is not None:
            self.at_launch(step)
        self.steps.append(step)
        token_ids = step.token_ids.copy()
        token_ids[step.carry_to] = self._previous[step.carry_from]
        assert len(np.unique(step.write_slots)) == len(step.write_slots), "two writes to one slot"
        self._token_at[step.write_slots] = token_ids
        self._position_at[step.write_slots] = step.positions
        self._move(step)
        assert not np.isin(step.copy_from, step.copy_to).any(), (
            "a slot is both copied to and copied from"
        )
        assert not np.isin(step.copy_to, step.write_slots).any(), (
            "a slot is both copied to and written"
        )
        self._token_at[step.copy_to] = self._token_at[step.copy_from]
        self._position_at[step.copy_to] = self._position_at[step.copy_from]
        contexts = self._contexts(step)
        if self._window is not None:
            self._window.run(step, token_ids, contexts)
        if self._tokens_in:
            self._run_states(step, token_ids, contexts)
        samples = []
        masks = _allowed_by_row(step, self._vocab_size)
        for index, row in enumerate(step.sample_rows.tolist()):
            token = fake_next_token(contexts[row], self._vocab_size)
            allowed = masks.get(index)
            samples.append(token if allowed is None else int(allowed[token % len(allowed)]))
        self._previous = np.array(samples, np.int32)
        logprobs = {
            row: TokenLogprobs(samples[row], -1.0, 1, (), ())
            for row in np.flatnonzero(step.sampling.wants_logprobs).tolist()
        }
        prompt = tuple(
            fake_logprob(contexts[row], token, num_top)
            for row, token, num_top in zip(
                step.prompt_logprob_rows.tolist(),
                step.prompt_logprob_targets.tolist(),
                step.num_prompt_logprobs.tolist(),
                strict=True,
            )
        )
        masses = tuple(self._masses(step, each) for each in step.weighings)
        device_s = None if self.seconds is None else self.seconds(step)
        return _Done(StepResult(self._previous, logprobs, prompt, device_s, masses))

    def close(self) -> None:
        self.steps.clear()

    def state(self, slot: int) -> list[int] | None:
        """The tokens in a state; None: it was never written as a whole."""
        return self._tokens_in[slot]

    def set_state(self, slot: int, tokens: list[int]) -> None:
        self._tokens_in[slot] = tokens
        first = slot * self._rows_per_state  # rows have the same memory
        for row_slot in range(first, first + self._rows_per_state):
            self._rows_in.pop(row_slot, None)

    def note_rows(self, slot: int, *, is_first: bool) -> None:
        """Rows are written to the memory of a state. `is_first`: a sequence's first ones."""
        self._tokens_in[slot] = None

    def _run_states(self, step: Step, token_ids: Int32s, contexts: dict[int, list[int]]) -> None:
        """A state is the list of all tokens before: it must be read at exactly its position. Rows
        are the tokens since a state that nobody writes while they are used."""
        use = step.states
        assert use is not None, "a step says nothing of states"
        written = use.writes[use.writes >= 0]
        assert len(np.unique(written)) == len(written), "two writes to one state"
        # what a step reads was written by earlier steps
        before = {read: self.state(read) for read in use.reads.tolist() if read >= 0}
        rows_before = dict(self._rows_in)
        if use.rows is not None:
            used = use.rows[use.rows >= 0]
            assert len(np.unique(used)) == len(used), "two sequences have one row slot"
            of_rows = used // self._rows_per_state
            assert not np.isin(of_rows, use.reads).any(), "rows are in a state that is read"
            assert not np.isin(of_rows, written).any(), "rows are in a state that is written"
        for seq, (first, end) in enumerate(itertools.pairwise(use.seq_segments.tolist())):
            read = int(use.reads[seq])
            others = np.delete(use.reads, seq)
            state = [] if read < 0 else before[read]
            assert state is not None, "a state is read that was never written"
            row = int(use.segment_starts[first])
            assert row == step.seq_starts[seq], "segments do not begin with the sequence"
            rows = self._add_rows(step, seq, token_ids, rows_before)
            if rows is not None:
                assert end == first + 1, "a sequence with rows has several segments"
                state = [*state, *rows]
            assert len(state) == step.positions[row], "a state is used at another position"
            for segment in range(first, end):
                start, stop = use.segment_starts[segment : segment + 2].tolist()
                assert start < stop, "a segment is empty"
                for row in range(start, stop):
                    state = [*state, int(token_ids[row])]
                    assert contexts.get(row, state) == state, "a state holds other tokens"
                if rows is not None and use.writes[segment] < 0:
                    continue
                assert use.writes[segment] not in others, "a state is written while another reads"
                self.set_state(int(use.writes[segment]), state)
            assert use.segment_starts[end] == step.seq_starts[seq + 1], "a token is in no segment"

    def _add_rows(
        self, step: Step, seq: int, token_ids: Int32s, before: dict[int, list[int]]
    ) -> list[int] | None:
        """Add the tokens of a sequence to its rows; returns the rows before them, or None."""
        use = step.states
        assert use is not None
        if use.rows is None or (slot := int(use.rows[seq])) < 0:
            return None
        assert use.counts is not None
        assert use.reads[seq] >= 0, "rows without a state before them"
        count, (start, stop) = int(use.counts[seq]), step.seq_starts[seq : seq + 2].tolist()
        assert count == 0 or seq < step.num_decodes, "a prompt's chunk after rows"
        rows = [] if count == 0 else before[slot][:count]
        assert len(rows) == count, "a row is read that was never written"
        self.note_rows(slot // self._rows_per_state, is_first=count == 0)
        self._rows_in[slot] = [*rows, *token_ids[start:stop].tolist()]
        return rows

    def _move(self, step: Step) -> None:
        """Move the pages that a truncation keeps: the same tokens get other positions."""
        assert not np.isin(step.move_from, step.move_to).any(), (
            "a page is both moved to and moved from"
        )
        assert len(np.unique(step.move_to)) == len(step.move_to), "two moves to one page"
        offsets = np.arange(self._page_size)
        source = (step.move_from.astype(np.int64)[:, None] * self._page_size + offsets).ravel()
        target = (step.move_to.astype(np.int64)[:, None] * self._page_size + offsets).ravel()
        assert not np.isin(target, step.write_slots).any(), "a slot is both moved to and written"
        assert not np.isin(source, step.copy_to).any(), "a slot is both moved from and copied to"
        assert (self._token_at[source] >= 0).all(), "a moved page was never filled"
        self._token_at[target] = self._token_at[source]
        self._position_at[target] = self._position_at[source] + np.repeat(
            step.move_by, self._page_size
        )

    def _masses(self, step: Step, weighing: PageWeighing) -> Float32s:
        """The pages must hold the tokens up to the last of the queries, in order."""
        last = weighing.first_row + weighing.num_rows - 1
        assert (
            len(np.unique(np.searchsorted(step.seq_starts, [weighing.first_row, last], "right")))
            == 1
        )
        end = int(step.positions[last]) + 1
        pages = weighing.page_ids.astype(np.int64)[:, None] * self._page_size
        slots = (pages + np.arange(self._page_size)).ravel()[:end]
        assert len(pages) == -(-end // self._page_size), "pages do not fit the tokens"
        assert (self._position_at[slots] == np.arange(end)).all(), "a page holds other positions"
        return fake_masses(self._token_at[slots], weighing.num_rows, self._page_size)

    def _contexts(self, step: Step) -> dict[int, list[int]]:
        """For each packed token whose output is wanted: the tokens up to it, as its spans show
        them."""
        known: dict[int, list[int]] = {}
        for row, context in self._seen(step).items():
            position = int(step.positions[row])
            assert sorted(context) == list(range(position + 1)), "keys are missing or in excess"
            known[row] = [context[place] for place in range(position + 1)]
        return known

    def _seen(self, step: Step) -> dict[int, dict[int, int]]:
        """For each packed token whose output is wanted: position -> token id."""
        wanted = set(step.hidden_rows()[0].tolist())
        if self._window is not None:
            wanted |= set(step.seq_starts[:-1].tolist())
        contexts: dict[int, dict[int, int]] = {row: {} for row in wanted}
        spans = step.spans
        for i in range(len(spans)):
            rows = spans.query_rows[spans.query_starts[i] : spans.query_starts[i + 1]].tolist()
            if wanted.isdisjoint(rows):
                continue
            pages = spans.page_ids[spans.page_starts[i] : spans.page_starts[i + 1]].astype(np.int64)
            slots = (pages[:, None] * self._page_size + np.arange(self._page_size)).ravel()
            num_keys = int(spans.key_tokens[i])
            assert len(slots) - self._page_size < num_keys <= len(slots), "pages do not fit keys"
            positions = self._position_at[slots[:num_keys]].tolist()
            tokens = self._token_at[slots[:num_keys]].tolist()
            for place, row in enumerate(rows):
                if row not in wanted:
                    continue
                visible = num_keys - len(rows) + place + 1 if spans.is_causal[i] else num_keys
                for position, token in zip(positions[:visible], tokens[:visible], strict=True):
                    assert position not in contexts[row], "a key is seen twice"
                    contexts[row][position] = token
        return contexts
