"""The disk store as files: which pages survive which fault."""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Event
from time import monotonic, sleep

import pytest

from mainstem.core.errors import StoreError
from mainstem.core.ids import PageKey
from mainstem.kv.bytes import disk
from mainstem.kv.bytes.disk import NUM_READERS, READ_RUN, DiskTier
from mainstem.kv.bytes.page_index import FILE, MODEL, PageIndex, PageRow, read_about
from mainstem.kv.bytes.segments import SegmentFiles
from mainstem.kv.tier import Read, ReadJob, WriteJob, Written

PAGE = 8192
ROOM = 16 * PAGE


def open_tier(folder: Path, room: int = ROOM, identity: str = "model") -> DiskTier:
    return DiskTier(folder, PAGE, room, identity)


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def contents(number: int) -> memoryview:
    """A page with its number as content, at an address that O_DIRECT accepts."""
    import mmap  # noqa: PLC0415  # page-aligned memory

    buffer = mmap.mmap(-1, PAGE)
    buffer[:] = number.to_bytes(4, "little") * (PAGE // 4)
    return memoryview(buffer)


def write(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.take_place(key(number))
        tier.write(WriteJob(key(number), b"tokens", contents(number)))
    tier.flush()
    done = list(tier.poll())
    assert [item.problem for item in done if isinstance(item, Written)] == [None] * len(numbers)


def read_all(tier: DiskTier) -> dict[int, str | None]:
    """Read every page in the index; returns their problems (None: read). Checks their bytes."""
    buffers = {page.key: contents(0) for page in tier.recover()}
    tier.read([ReadJob(key, buffers[key]) for key in sorted(buffers)])
    found: dict[int, str | None] = {}
    while len(found) < len(buffers):
        for done in tier.poll():
            assert isinstance(done, Read)
            number = int.from_bytes(done.key, "little")
            found[number] = done.problem
            if done.problem is None:
                assert buffers[done.key] == contents(number), "a page has other bytes"
        sleep(0.001)
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with pages 1 to 5, closed."""
    tier = open_tier(tmp_path)
    write(tier, 1, 2, 3, 4, 5)
    tier.close()
    return tmp_path


def test_pages_survive_a_restart(stored: Path) -> None:
    tier = open_tier(stored)
    assert read_all(tier) == dict.fromkeys(range(1, 6))
    assert tier.found is None
    tier.close()


def test_the_folder_is_private(stored: Path) -> None:
    assert stored.stat().st_mode & 0o777 == 0o700
    assert all(not path.stat().st_mode & 0o077 for path in stored.glob("*.pages"))


def test_a_second_process_gets_the_id_of_the_one_that_has_the_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    code = (
        "import sys; from pathlib import Path; from mainstem.kv.bytes.disk import DiskTier\n"
        f"DiskTier(Path({str(tmp_path)!r}), {PAGE}, {ROOM}, 'model')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode != 0
    told = done.stderr.decode()
    assert str(tmp_path) in told
    assert f"process {os.getpid()}" in told
    tier.close()
    open_tier(tmp_path).close()


def test_a_flipped_bit_is_found(stored: Path) -> None:
    path = stored / "0000.pages"
    raw = bytearray(path.read_bytes())
    raw[2 * PAGE + 100] ^= 4
    path.write_bytes(raw)
    tier = open_tier(stored)
    assert read_all(tier) == {1: None, 2: None, 3: "checksum", 4: None, 5: None}
    tier.close()


def test_a_truncated_segment_loses_its_end_only(stored: Path) -> None:
    os.truncate(stored / "0000.pages", 3 * PAGE + 100)
    tier = open_tier(stored)
    assert read_all(tier) == {1: None, 2: None, 3: None}
    assert tier.found == "segment files are missing or truncated"
    assert tier.lost == {"truncated": 2}
    tier.close()
    tier = open_tier(stored)
    assert tier.found is None, "the loss is reported once"
    tier.close()


def test_a_segment_that_is_truncated_in_use_loses_its_end_only(stored: Path) -> None:
    tier = open_tier(stored)
    os.truncate(stored / "0000.pages", 3 * PAGE + 100)
    assert read_all(tier) == {1: None, 2: None, 3: None, 4: "truncated", 5: "truncated"}
    tier.close()


def test_a_segment_removed_in_use_is_reported(stored: Path) -> None:
    tier = open_tier(stored)
    (stored / "0000.pages").unlink()
    assert set(read_all(tier).values()) == {"missing"}
    tier.close()


def test_a_missing_segment_is_reported_and_created_again(stored: Path) -> None:
    (stored / "0000.pages").unlink()
    tier = open_tier(stored)
    assert tier.recover() == []
    assert tier.found == "segment files are missing or truncated"
    assert tier.lost == {"missing": 5}
    write(tier, 7, 8)
    tier.close()
    tier = open_tier(stored)
    assert read_all(tier) == {7: None, 8: None}
    tier.close()


def test_without_its_index_the_store_starts_empty_and_says_so(stored: Path) -> None:
    (stored / FILE).unlink()
    tier = open_tier(stored)
    assert tier.recover() == []
    assert tier.found is not None
    assert "no index" in tier.found
    write(tier, 1)
    tier.close()


def test_a_damaged_index_is_replaced_and_reported(stored: Path) -> None:
    (stored / FILE).write_bytes(b"not a database" * 1000)
    tier = open_tier(stored)
    assert tier.recover() == []
    assert tier.found is not None
    assert "index damaged" in tier.found
    write(tier, 1)
    tier.close()


@pytest.fixture
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that records the number of pages."""
    return tmp_path_factory.mktemp("notes") / "count"


def open_counted(folder: Path, ledger: Path, room: int = ROOM) -> DiskTier:
    return DiskTier(folder, PAGE, room, "model", ledger=ledger)


@pytest.fixture
def counted(tmp_path: Path, ledger: Path) -> Path:
    """Like `stored`, with a ledger."""
    tier = open_counted(tmp_path, ledger)
    write(tier, 1, 2, 3, 4, 5)
    tier.close()
    return tmp_path


def damage(folder: Path, kind: str) -> None:
    match kind:
        case "emptied":
            shutil.rmtree(folder)
        case "index gone":
            (folder / FILE).unlink()
        case "index damaged":
            (folder / FILE).write_bytes(b"not a database" * 1000)
        case "rows gone":
            database = sqlite3.connect(folder / FILE)
            with database:
                database.execute("DELETE FROM pages")
            database.close()


@pytest.mark.parametrize(
    ("kind", "words", "lost"),
    [
        ("emptied", "it is empty, and held 5 pages when it was last used", {"emptied": 5}),
        ("rows gone", "it is empty, and held 5 pages when it was last used", {"emptied": 5}),
        ("index gone", "no index for 1 segment files", {"index": 5}),
        ("index damaged", "index damaged", {"index": 5}),
        ("nothing", None, {}),
    ],
)
def test_a_store_that_lost_pages_reports_it_once(
    kind: str, words: str | None, lost: dict[str, int], counted: Path, ledger: Path
) -> None:
    damage(counted, kind)
    tier = open_counted(counted, ledger)
    assert tier.lost == lost
    assert tier.found is None if words is None else words in str(tier.found)
    tier.close()
    tier = open_counted(counted, ledger)
    assert tier.found is None
    assert not tier.lost
    tier.close()


def test_the_ledger_counts_writes_and_deletions(tmp_path: Path, ledger: Path) -> None:
    tier = open_counted(tmp_path, ledger)
    write(tier, *range(8))
    for number in (1, 2):
        tier.delete(key(number))
    tier.flush()
    assert int(ledger.read_text().split()[0]) == 6
    for number in (0, *range(3, 8)):
        tier.delete(key(number))
    tier.close()
    tier = open_counted(tmp_path, ledger)
    assert tier.found is None, "pages that were deleted are not lost"
    tier.close()


def test_the_ledger_counts_a_page_once_whose_row_was_not_deleted(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PageIndex, keys: object) -> int:
        raise sqlite3.OperationalError("database is locked")

    tier = open_counted(tmp_path, ledger)
    write(tier, *range(5))
    with monkeypatch.context() as patch:
        patch.setattr(PageIndex, "delete", fail)
        for number in range(5):
            tier.delete(key(number))
        tier.flush()
    write(tier, *range(5))
    assert int(ledger.read_text().split()[0]) == 5
    tier.close()
    tier = open_counted(tmp_path, ledger)
    assert not tier.lost
    tier.close()


def test_an_index_restored_from_an_earlier_day_is_reported(
    counted: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MAX_BATCH", 2)  # a kill may leave up to this many pages uncounted
    database = sqlite3.connect(counted / FILE)
    with database:
        database.execute("DELETE FROM pages WHERE record >= 2")
    database.close()
    tier = open_counted(counted, ledger)
    assert tier.found == "its index held 5 pages when it was last used"
    assert tier.lost == {"index": 3}
    assert read_all(tier) == {1: None, 2: None}
    tier.close()


@pytest.mark.parametrize("text", ["", "pages", "     x     "])
def test_with_a_damaged_ledger_no_loss_is_reported(text: str, counted: Path, ledger: Path) -> None:
    ledger.write_text(text)
    shutil.rmtree(counted)
    tier = open_counted(counted, ledger)
    assert tier.found is None
    tier.close()


def test_a_ledger_that_cannot_be_written_does_not_stop_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = open_counted(tmp_path / "store", tmp_path / "file" / "count")
    write(tier, 1)
    tier.close()


def test_a_smaller_bound_is_not_reported_as_loss(counted: Path, ledger: Path) -> None:
    tier = open_counted(counted, ledger, room=3 * PAGE)
    assert (tier.found, tier.lost) == (None, {})
    tier.close()


def test_the_store_is_named_after_its_model_and_the_name_may_change(stored: Path) -> None:
    assert MODEL not in read_about(stored), "like a store of an older version"
    for name in ("smollm2", "/models/smollm2"):
        tier = DiskTier(stored, PAGE, ROOM, "model", model=name)
        assert len(tier.recover()) == 5
        tier.close()
        assert read_about(stored)[MODEL] == name
    open_tier(stored).close()
    assert read_about(stored)[MODEL] == name, "opening it without a name keeps the name"


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_NOMEM]
)
def test_a_temporary_error_of_the_index_costs_no_page(
    code: int, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PageIndex) -> list[PageRow]:
        raise sqlite_error(code)

    with monkeypatch.context() as patch:
        patch.setattr(PageIndex, "rows", refuse)
        with pytest.raises(StoreError, match=str(stored)):
            open_tier(stored)
    tier = open_tier(stored)
    assert tier.found is None
    assert read_all(tier) == dict.fromkeys(range(1, 6))
    tier.close()


def test_a_journal_that_cannot_be_opened_costs_no_page(stored: Path) -> None:
    journal = stored / f"{FILE}-wal"
    journal.mkdir()  # SQLite: unable to open database file
    with pytest.raises(StoreError, match="unable to open"):
        open_tier(stored)
    journal.rmdir()
    tier = open_tier(stored)
    assert read_all(tier) == dict.fromkeys(range(1, 6))
    tier.close()


@pytest.mark.parametrize(
    ("name", "value"), [("format", "99"), ("identity", "another model"), ("page_bytes", "1")]
)
def test_a_store_of_another_model_or_format_is_refused(stored: Path, name: str, value: str) -> None:
    database = sqlite3.connect(stored / FILE)
    with database:
        database.execute("UPDATE about SET value = ? WHERE name = ?", (value, name))
    database.close()
    with pytest.raises(StoreError, match=f"{name} {value}"):
        open_tier(stored)


def test_a_smaller_bound_drops_pages_beyond_it(stored: Path) -> None:
    tier = open_tier(stored, room=3 * PAGE)
    assert read_all(tier) == {1: None, 2: None, 3: None}
    assert not tier.take_place(key(6))
    tier.close()


@pytest.mark.parametrize("num_records", [1, 2, 3, 4, 5, 6])
def test_a_smaller_bound_frees_the_disk(
    num_records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainstem.kv.bytes.segments.SEGMENT_BYTES", 2 * PAGE)
    tier = open_tier(tmp_path)
    write(tier, 1, 2, 3, 4, 5)
    tier.close()
    tier = open_tier(tmp_path, room=num_records * PAGE)
    num_kept = min(num_records, 5)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.pages")) == num_kept * PAGE
    assert read_all(tier) == dict.fromkeys(range(1, num_kept + 1))
    tier.close()


def test_the_threads_outlive_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a device may raise any error."""
    tier = open_tier(tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("illegal memory access")

    assert tier.take_place(key(1))
    tier.write(WriteJob(key(1), b"tokens", contents(1), fail))
    tier.flush()
    assert list(tier.poll()) == [Written(key(1), "RuntimeError: illegal memory access")]
    write(tier, 2)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "read", fail)
        for _ in range(2 * NUM_READERS):
            tier.read([ReadJob(key(2), contents(0))])
        done: list[Read | Written] = []
        while len(done) < 2 * NUM_READERS:
            done += tier.poll()
            sleep(0.001)
    assert {item.problem for item in done} == {"RuntimeError: illegal memory access"}
    tier.close()
    tier = open_tier(tmp_path)
    assert read_all(tier) == {2: None}
    tier.close()


def test_adjacent_pages_are_read_in_one_call_and_fail_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    write(tier, *range(12))
    tier.close()
    runs: list[tuple[int, int]] = []
    read = SegmentFiles.read

    def counting(files: SegmentFiles, record: int, *into: memoryview) -> None:
        runs.append((record, len(into)))
        read(files, record, *into)

    monkeypatch.setattr(SegmentFiles, "read", counting)
    tier = open_tier(tmp_path)
    assert read_all(tier) == dict.fromkeys(range(12))
    assert sorted(runs) == [(0, READ_RUN), (READ_RUN, 12 - READ_RUN)]
    tier.close()
    runs.clear()
    tier = open_tier(tmp_path)
    os.truncate(tmp_path / "0000.pages", 10 * PAGE + 100)
    assert read_all(tier) == {n: "truncated" if n >= 10 else None for n in range(12)}
    assert len(runs) == 2 + 12 - READ_RUN
    tier.close()


def fail_runs(monkeypatch: pytest.MonkeyPatch, read_one: Callable[[int], None]) -> None:
    """A read of several records fails; a read of one record calls `read_one`."""

    def read(files: SegmentFiles, record: int, *into: memoryview) -> None:
        if len(into) > 1:
            raise OSError(errno.EIO, "input/output error")
        read_one(record)

    monkeypatch.setattr(SegmentFiles, "read", read)


def a_run(first: int = 0) -> list[ReadJob]:
    return [ReadJob(key(n), contents(n)) for n in range(first, first + READ_RUN)]


def test_pages_of_a_run_that_fails_are_read_again_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parallel, because a page on a bad sector takes long to fail."""
    all_there = Barrier(READ_RUN)

    def meet(record: int) -> None:
        all_there.wait(timeout=60.0)
        if record == 3:
            raise OSError(errno.EIO, "input/output error")

    fail_runs(monkeypatch, meet)
    tier = open_tier(tmp_path)
    write(tier, *range(READ_RUN))
    tier.read(a_run())
    found: dict[PageKey, str | None] = {}
    while len(found) < READ_RUN:
        found.update({done.key: done.problem for done in tier.poll()})
        sleep(0.001)
    assert found == {key(n): "EIO" if n == 3 else None for n in range(READ_RUN)}
    tier.close()


def test_pages_read_again_go_before_queued_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = Event()
    order: list[int] = []

    def note(record: int) -> None:
        may_read.wait()
        order.append(record)

    fail_runs(monkeypatch, note)
    monkeypatch.setattr(disk, "NUM_READERS", 1)
    tier = open_tier(tmp_path)
    write(tier, *range(READ_RUN + 2))
    tier.read([ReadJob(key(READ_RUN), contents(0))])
    tier.read(a_run())
    tier.read([ReadJob(key(READ_RUN + 1), contents(0))])
    may_read.set()
    tier.close()
    assert order == [READ_RUN, *range(READ_RUN), READ_RUN + 1]


def test_closing_finishes_pages_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_runs(monkeypatch, lambda record: None)
    tier = open_tier(tmp_path, room=40 * READ_RUN * PAGE)
    write(tier, *range(40 * READ_RUN))
    for first in range(0, 40 * READ_RUN, READ_RUN):
        tier.read(a_run(first))
    tier.close()
    told = [done.key for done in tier.poll()]
    assert sorted(told) == sorted(key(n) for n in range(40 * READ_RUN))


@pytest.mark.parametrize("num_reads", [1, NUM_READERS + 1], ids=["under way", "in line"])
def test_few_writes_wait_for_reads_but_not_for_ever(
    num_reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = Event()
    monkeypatch.setattr(SegmentFiles, "read", lambda *_: may_read.wait())
    monkeypatch.setattr(disk, "READS_FIRST_S", 0.3)
    tier = open_tier(tmp_path)
    write(tier, 0)
    for _ in range(num_reads):
        tier.read([ReadJob(key(0), contents(0))])
    began_s = monotonic()
    write(tier, 1)
    assert monotonic() - began_s >= 0.3
    monkeypatch.setattr(disk, "FEW_WRITES", 0)
    monkeypatch.setattr(disk, "READS_FIRST_S", 600.0)
    began_s = monotonic()
    write(tier, 2)
    assert monotonic() - began_s < 300.0, "many writes do not wait for reads"
    may_read.set()
    tier.close()


def test_records_are_used_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, room=2 * PAGE)
    write(tier, 1, 2)
    assert not tier.take_place(key(3))
    tier.delete(key(1))
    write(tier, 3)
    tier.close()
    tier = open_tier(tmp_path, room=2 * PAGE)
    assert read_all(tier) == {2: None, 3: None}
    assert sum(path.stat().st_size for path in tmp_path.glob("*.pages")) == 2 * PAGE
    tier.close()


WRITER = """
import mmap, sys
from pathlib import Path
from mainstem.core.ids import PageKey
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.tier import WriteJob
PAGE = {page}
tier = DiskTier(Path(sys.argv[1]), PAGE, {room}, "model")
live = sorted(int.from_bytes(page.key, "little") for page in tier.recover())
number = 1 + max(live, default=0)
while True:
    for _ in range(5):
        key = PageKey(number.to_bytes(32, "little"))
        if not tier.take_place(key):  # full: the oldest goes
            tier.delete(PageKey(live.pop(0).to_bytes(32, "little")))
            assert tier.take_place(key)
        buffer = mmap.mmap(-1, PAGE)
        buffer[:] = number.to_bytes(4, "little") * (PAGE // 4)
        live.append(number)
        tier.write(WriteJob(key, b"tokens", memoryview(buffer)))
        number += 1
    tier.flush()
    assert all(done.problem is None for done in tier.poll())
    print(number - 1, flush=True)
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 11, 29, 53])
def test_kill_9_keeps_committed_pages(tmp_path: Path, delay_ms: int) -> None:
    """At any moment, all pages that were flushed and not replaced are readable and right."""
    code = WRITER.format(page=PAGE, room=ROOM)
    for _ in range(2):  # the second run begins where the first was killed
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            flushed = int(process.stdout.readline())
            sleep(delay_ms / 1000)
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().split()
        flushed = max([flushed, *map(int, told)])
        tier = open_tier(tmp_path)
        assert tier.found is None
        found = read_all(tier)
        assert all(problem is None for problem in found.values())
        # there are 16 records, and at most 5 flushed pages were being replaced by the next batch
        assert set(range(max(1, flushed - 10), flushed + 1)) <= found.keys()
        tier.close()


def test_a_full_disk_is_reported_and_files_do_not_grow_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert tier.take_place(key(1))
    tier.write(WriteJob(key(1), b"tokens", contents(1)))
    tier.flush()
    assert list(tier.poll()) == [Written(key(1), "disk full")]
    assert tier.take_place(key(1)), "the record can be used again"
    assert not tier.take_place(key(2))
    monkeypatch.undo()
    tier.delete(key(1))
    write(tier, 2)
    tier.close()
    tier = open_tier(tmp_path)
    assert read_all(tier) == {2: None}
    tier.close()


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"result code {code}")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE])
def test_if_the_disk_is_too_full_for_the_index_the_last_pages_are_dropped(
    code: int, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Path] = []

    class FullOnce(PageIndex):
        def __init__(self, folder: Path, about: dict[str, str]) -> None:
            if not refused:
                refused.append(folder)
                raise sqlite_error(code)
            super().__init__(folder, about)

    monkeypatch.setattr("mainstem.kv.bytes.disk.PageIndex", FullOnce)
    # any disk counts as nearly full
    monkeypatch.setattr("mainstem.kv.bytes.disk.LITTLE_ROOM", 1 << 60)
    monkeypatch.setattr("mainstem.kv.bytes.disk.INDEX_ROOM", PAGE + 1)
    tier = open_tier(stored)
    assert tier.found is not None
    assert "disk full" in tier.found
    assert tier.lost == {"truncated": 2}
    assert read_all(tier) == {1: None, 2: None, 3: None}
    tier.close()


def test_a_store_does_not_change_the_thread_switch_interval(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    tier = open_tier(tmp_path)
    assert sys.getswitchinterval() == before
    tier.close()
    assert sys.getswitchinterval() == before
