"""Any order of asking, waiting, failing, damaging, clearing and restarting: the answers are right.

FakeRunner's answers depend on every token that its pages hold, so a page from the wrong slot, a
half-loaded page or damaged bytes change an answer.
"""

import shutil
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mainstem.core.request import FinishReason
from tests.builders import VOCAB, Collector, a_request, until_idle
from tests.fakes import fake_answer
from tests.kv.faulty import FaultyFiles
from tests.kv.tiered import a_tiered_engine

PAGE = 4
PLACES = st.integers(0, 100)


class TieredMachine(RuleBasedStateMachine):
    """Conversations over few pages, few slots, few records and a disk that fails."""

    @initialize(
        num_slots=st.integers(2, 24),
        num_records=st.integers(1, 30),
        can_overlap=st.booleans(),
        policy=st.sampled_from(["lookahead", "lru", "fifo"]),
        preload=st.sampled_from(["auto", "all", "0", "1"]),
        has_disk=st.booleans(),
        chunk_tokens=st.sampled_from([5, 64]),
        num_states=st.sampled_from([0, 0, 1, 2, 3, 8]),
        num_rows=st.sampled_from([0, 2, 5, 9]),
        window=st.sampled_from([None, 1, 3, 6, 14]),
        spare_parts=st.integers(0, 8),
    )
    def open(self, has_disk: bool, window: int | None, spare_parts: int, **kwargs: object) -> None:
        FaultyFiles.reset()
        self.folder = Path(mkdtemp(prefix="tiers-"))
        self.has_disk = has_disk
        if kwargs["num_states"]:  # windows have parts of their own only without recurrent layers
            window = None
        if window is not None:
            kwargs |= {"window": window, "num_parts": -(-(window - 1) // PAGE) + 3 + spare_parts}
        self.kwargs = kwargs
        self.waiting: dict[str, tuple[list[int], int]] = {}
        self.past: list[list[int]] = [[1, 2, 3], [4] * 9]
        self.start()

    def start(self) -> None:
        self.collector = Collector()
        self.tiered = a_tiered_engine(
            num_pages=16,
            page_size=PAGE,
            disk_dir=self.folder / "store" if self.has_disk else None,
            files=FaultyFiles,
            **self.kwargs,  # type: ignore[arg-type]
        )

    # what is drawn must not depend on how soon the disk's threads are done

    @rule(
        place=PLACES,
        more=st.lists(st.integers(0, 3), max_size=14),
        max_tokens=st.integers(1, 6),
        patience=st.integers(0, 3),
    )
    def ask(self, place: int, more: list[int], max_tokens: int, patience: int) -> None:
        """A new turn of an earlier conversation, or a branch of it."""
        history = self.past[place % len(self.past)]
        prompt = [*history, *more][: 64 - 6] or [0]
        self.tiered.copier.patience = patience
        request = a_request(prompt, max_tokens)
        self.tiered.engine.submit(request)
        self.waiting[str(request.request_id)] = (prompt, max_tokens)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.collector.add(self.tiered.engine.step())
        self.compare()

    @rule(place=PLACES)
    def abort(self, place: int) -> None:
        if self.waiting:
            name = sorted(self.waiting)[place % len(self.waiting)]
            self.tiered.engine.abort(name)  # type: ignore[arg-type]
            del self.waiting[name]

    @rule(
        reads=st.lists(st.sampled_from(FaultyFiles.READ_FAULTS), max_size=3),
        writes=st.lists(st.sampled_from(FaultyFiles.WRITE_FAULTS), max_size=3),
    )
    def fail(self, reads: list[str], writes: list[str]) -> None:
        FaultyFiles.reads.extend(fault for fault in reads if fault != "slow")
        FaultyFiles.writes.extend(fault for fault in writes if fault != "slow")

    @rule(
        saves=st.lists(st.sampled_from([None, "early", "late"]), max_size=3),
        loads=st.lists(st.sampled_from([None, "early"]), max_size=3),
    )
    def fail_copies(self, saves: list[str | None], loads: list[str | None]) -> None:
        """Loads have no late faults: a load that fails while it runs also fails the step that waits
        for it."""
        self.tiered.copier.save_faults.extend(saves)
        self.tiered.copier.load_faults.extend(loads)

    @rule(byte=st.integers(0, 10_000))
    def damage(self, byte: int) -> None:
        """Bytes change on the disk while the store is open."""
        for path in (self.folder / "store").glob("*.pages"):
            size = path.stat().st_size
            if size:
                with path.open("r+b") as file:
                    file.seek(byte * 4096 % size)
                    file.write(b"\xff" * 16)

    @rule()
    def clear(self) -> None:
        self.tiered.engine.clear_cache()

    @rule()
    def drain(self) -> None:
        """Run until all requests and copies end."""
        for outputs in until_idle(self.tiered.engine):
            self.collector.add(outputs)
        self.compare()
        assert not self.waiting, "a request was forgotten"
        self.tiered.store.flush()

    @rule()
    def restart(self) -> None:
        self.drain()
        self.tiered.engine.close()
        self.start()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "tiered"):
            self.tiered.engine.check()

    def compare(self) -> None:
        for name in [name for name in self.waiting if (name, 0) in self.collector.reasons]:
            prompt, max_tokens = self.waiting.pop(name)
            got = self.collector.tokens[name, 0]
            assert self.collector.reasons[name, 0] is FinishReason.LENGTH
            assert got == fake_answer(prompt, max_tokens, VOCAB)
            self.past = [*self.past[-6:], [*prompt, *got]]

    def teardown(self) -> None:
        if hasattr(self, "tiered"):
            self.tiered.engine.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestTiers = TieredMachine.TestCase
TestTiers.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class LongMachine(TieredMachine):
    """The same test over 10,000 operations."""


TestTiersLong = pytest.mark.slow(LongMachine.TestCase)
TestTiersLong.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
