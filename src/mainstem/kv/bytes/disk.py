"""DiskTier: pages in a folder, written and read by separate threads.

    engine thread        writer thread                        reader threads
    write(job) ------->  wait for the copies, write some
                         in parallel, fsync, commit --.
    delete(key) ------>  delete rows                   |
    read(jobs) --------------------------------------- | --->  read, compare checksums
    poll() <-------------------------------------------+-------------'

Only `flush` and `close` block. The writer does its jobs in the order given, so a row is deleted
before its record is reused.
"""

import errno
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, perf_counter, sleep, time
from zlib import crc32

from mainstem.core.errors import StoreError
from mainstem.core.events import StoreOpened
from mainstem.core.ids import PageKey
from mainstem.kv.bytes.folder import StoreFolder
from mainstem.kv.bytes.ledger import Ledger
from mainstem.kv.bytes.page_index import FILE, MODEL, PageIndex, PageRow, remove_index
from mainstem.kv.bytes.segments import SegmentFiles
from mainstem.kv.tier import FoundPage, Read, ReadJob, WriteJob, Written
from mainstem.kv.transfer import SharedLink

FIRST_RATE = 3e9  # bytes a second, until a read has been measured
NUM_READERS = 16  # many: threads also compute checksums and wait for Python's lock
READ_RUN = 8  # pages per read call: disks read 16 MB at a higher rate than 2 MB
NUM_WRITERS = 8  # pages of a batch that are written in parallel
INDEX_ROOM = 1 << 20  # bytes; enough to open and change an index
LITTLE_ROOM = 64 << 10  # bytes; with less free space, an I/O error means a full disk
MAX_BATCH = 64  # pages written between two commits
READS_FIRST_S = 0.5  # a batch of writes waits at most this long for reads
FEW_WRITES = 4 * MAX_BATCH  # if this many orders are queued, writes do not wait for reads
FULL_PAUSE_S = 30.0  # after the disk was full, files do not grow for this long
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # an index with these errors is replaced


@dataclass(frozen=True, slots=True)
class _RecordWrite:
    job: WriteJob
    record: int


@dataclass(frozen=True, slots=True)
class _RecordRead:
    key: PageKey
    record: int
    crc32: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class _Committed:
    key: PageKey
    crc32: int


@dataclass(frozen=True, slots=True)
class _Delete:
    key: PageKey


@dataclass(frozen=True, slots=True)
class _Touch:
    used_at: dict[PageKey, float]


_Order = _RecordWrite | _Delete | _Touch | Event | None  # Event: set it; None: stop


class DiskTier:
    """One thread owns the tier and makes all calls; the drawing above shows all threads."""

    name = "disk"
    is_shared = False
    is_open = can_write = True

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        max_bytes: int,
        identity: str,
        make_files: Callable[[Path, int], SegmentFiles] = SegmentFiles,
        *,
        model: str | None = None,
        ledger: Path | None = None,
    ) -> None:
        """Open the store of one model in `folder`, which is created if it does not exist.

        `model` is a name to show to people. `ledger` is a file that remembers the number of pages:
        if there are far fewer now, pages were lost. Raises StoreError if the store is in use, has
        another format or cannot be opened. A store with a damaged or missing index is opened empty.
        `found` then says what is wrong, and `lost` counts the pages that the ledger remembers.
        """
        self.folder = folder
        self.found: str | None = None
        self.lost: Counter[str] = Counter()  # by reason
        self._lock = StoreFolder(folder)
        self._files = make_files(folder, page_bytes)
        self.num_records = max_bytes // self._files.record_bytes
        self._about = {"identity": identity, "page_bytes": str(page_bytes)}
        if model is not None:
            self._about[MODEL] = model
        self._ledger = Ledger(ledger)
        try:
            if self.num_records < 1:
                raise StoreError(f"{max_bytes} bytes are too few for a page of {page_bytes} bytes")
            self._index, self._rows = self._open_index()
        except BaseException:
            self._lock.close()
            raise
        self._num_rows = len(self._rows)  # rows of the index, for the writer thread
        self._ledger.open(folder)
        self._ledger.note(self._num_rows)
        self._records = {row.key: row.record for row in self._rows}
        self._crc32s = {row.record: row.crc32 for row in self._rows}
        self.link = SharedLink(FIRST_RATE, NUM_READERS * READ_RUN * page_bytes)
        self._free: list[int] = []  # heap, so that files fill in order
        self._next_record = 0  # every record from here on was never used
        self._skip_used()
        self._full_until_s = 0.0
        self.num_writes_pending = 0  # whose outcome `poll` has not returned
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._reads: SimpleQueue[list[_RecordRead] | None] = SimpleQueue()  # []: read `_again`
        self._again: SimpleQueue[_RecordRead] = SimpleQueue()  # pages of failed runs: read first
        self._done: SimpleQueue[_Committed | Written | Read] = SimpleQueue()
        self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="kv-write")
        self._threads = [Thread(target=self._write_all, name="kv-writer", daemon=True)]
        self._is_reading = [False] * NUM_READERS
        for number in range(NUM_READERS):
            self._threads.append(
                Thread(target=self._read_all, args=(number,), name="kv-reader", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    # --- the owner's calls ----------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        """The number of pages that may be stored. It is less than the number of records, since an
        evicted page keeps its record until no copy uses the page."""
        return max(1, self.num_records - 1 - self.num_records // 64)

    def recover(self) -> Sequence[FoundPage]:
        """The pages of the index, least recently used first; called once."""
        rows, self._rows = self._rows, []
        return [FoundPage(row.key, row.token_ids, row.used_at) for row in rows]

    def opened(self, num_pages: int) -> StoreOpened:
        """The event that the store was opened with `num_pages`."""
        return StoreOpened(str(self.folder), num_pages, self.found, dict(+self.lost))

    def take_place(self, key: PageKey) -> bool:
        """Take a record for a page; False: there is no room."""
        if self._free:
            self._records[key] = heappop(self._free)
            return True
        if self._next_record >= self.num_records or monotonic() < self._full_until_s:
            return False
        self._records[key] = self._next_record
        self._next_record += 1
        return True

    def write(self, job: WriteJob) -> None:
        """Write a page; its buffer must not change until `poll` returns the outcome."""
        self.num_writes_pending += 1
        self._orders.put(_RecordWrite(job, self._records[job.key]))

    def read(self, jobs: Sequence[ReadJob], limit_s: float = float("inf")) -> None:
        """Read pages into their buffers, which belong to the tier until `poll` returns the outcome.

        Neighbours on the disk are read in one call. A read that has begun cannot be cancelled."""
        run: list[_RecordRead] = []
        for job in jobs:
            record = self._records[job.key]
            if run and (
                len(run) == READ_RUN or not self._files.are_neighbours(run[-1].record, record)
            ):
                self._reads.put(run)
                run = []
            run.append(_RecordRead(job.key, record, self._crc32s[record], job.buffer))
        if run:
            self._reads.put(run)

    def delete(self, key: PageKey) -> None:
        """Forget a page; its record may be taken again at once."""
        self._orders.put(_Delete(key))
        self._give_back(key)

    def ask(self, keys: Sequence[PageKey]) -> None:
        """Do nothing: only a shared tier, which other processes fill, must be asked."""

    def touch(self, used_at: dict[PageKey, float]) -> None:
        """Record when pages were last used (seconds since 1970), for the next start."""
        self._orders.put(_Touch(used_at))

    def end_soon(self) -> None:
        """Do nothing: everything given to `write` is written, however long it takes."""

    def poll(self) -> Iterator[Written | Read]:
        """Return what was done since the last call."""
        while True:
            try:
                done = self._done.get_nowait()
            except Empty:
                return
            if isinstance(done, Read):
                yield done
                continue
            self.num_writes_pending -= 1
            if isinstance(done, _Committed):
                self._crc32s[self._records[done.key]] = done.crc32
                yield Written(done.key)
                continue
            self._give_back(done.key)
            if done.problem == "disk full":
                self._full_until_s = monotonic() + FULL_PAUSE_S
            yield done

    def _give_back(self, key: PageKey) -> None:
        heappush(self._free, self._records.pop(key))

    def flush(self) -> None:
        """Return when everything given to `write` and `delete` so far is done."""
        done = Event()
        self._orders.put(done)
        done.wait()

    def close(self) -> None:
        """Finish all writes and deletes, stop the threads and unlock the folder."""
        self._orders.put(None)
        for _ in self._threads[1:]:
            self._reads.put(None)
        for thread in self._threads:
            thread.join()
        self._writers.shutdown()
        self._files.close()
        self._index.close()
        self._ledger.close()
        self._lock.close()

    # --- opening --------------------------------------------------------------------------------

    def _open_index(self) -> tuple[PageIndex, list[PageRow]]:
        """Return the index and its pages. Pages beyond the size limit are deleted (the limit may
        have been larger before)."""
        try:
            index, rows = self._sound_index()
            self._note_fewer(len(rows))
            self._files.cut(self.num_records)
            kept = [row for row in rows if row.record < self.num_records]
            cut_off = self._files.find_cut_off(row.record for row in kept)
            kept = [row for row in kept if row.record not in cut_off]
            if len(kept) < len(rows):
                records = {row.record for row in kept}
                index.delete([row.key for row in rows if row.record not in records])
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the pages in {self.folder} cannot be opened: {error}") from error
        self.lost.update(cut_off.values())
        if cut_off and self.found is None:
            self.found = "segment files are missing or truncated"
        return index, kept

    def _note_fewer(self, num_rows: int) -> None:
        """Compare the number of pages with the number that the ledger has. Up to MAX_BATCH fewer
        are no loss: a killed process may have deleted pages after it last wrote the ledger."""
        before = self._ledger.read() or 0
        if self.found is not None and num_rows == 0:
            self.lost["index"] = before
        elif num_rows == 0 and before:
            self.found = f"it is empty, and held {before:,} pages when it was last used"
            self.lost["emptied"] = before
        elif num_rows < before - MAX_BATCH:
            self.found = self.found or f"its index held {before:,} pages when it was last used"
            self.lost["index"] = before - num_rows

    def _sound_index(self) -> tuple[PageIndex, list[PageRow]]:
        """Return the index and its rows. A damaged index is replaced by an empty one; other errors,
        such as a full disk or a locked file, do not mean damage."""
        had_index = (self.folder / FILE).is_file()
        try:
            index, rows = self._read_index()
        except sqlite3.Error as error:
            if _code(error) not in DAMAGE:
                raise
            remove_index(self.folder)
            self.found = f"index damaged ({error})"
            index, rows = PageIndex(self.folder, self._about), []
        if not rows and (count := self._files.remove_all()) and not had_index:
            self.found = f"no index for {count} segment files, which were removed"
        return index, rows

    def _read_index(self) -> tuple[PageIndex, list[PageRow]]:
        """Read the index. SQLite needs disk space even for reading: on a full disk, pages are
        deleted to make room."""
        try:
            index = PageIndex(self.folder, self._about)
        except sqlite3.Error as error:
            if not self._is_full(error):
                raise
            self._files.shorten(INDEX_ROOM)
            self.found = "disk full: the last pages were deleted to make room"
            index = PageIndex(self.folder, self._about)
        try:
            return index, index.rows()
        except sqlite3.Error:
            index.close()  # now, since closing it later would remove the journals of a new index
            raise

    def _is_full(self, error: sqlite3.Error) -> bool:
        """Whether an error means that the disk is full. If little space is left, an I/O error does:
        SQLite reports an I/O error if the disk has no room for its shared memory."""
        if _code(error) == sqlite3.SQLITE_IOERR:
            disk = os.statvfs(self.folder)
            return disk.f_bavail * disk.f_frsize < LITTLE_ROOM
        return _code(error) == sqlite3.SQLITE_FULL

    def _skip_used(self) -> None:
        used = {row.record for row in self._rows}
        self._next_record = max(used, default=-1) + 1
        for record in range(self._next_record):
            if record not in used:
                heappush(self._free, record)

    # --- threads --------------------------------------------------------------------------------

    def _write_all(self) -> None:
        order: _Order = _Touch({})
        while order is not None:
            order = self._orders.get()
            if isinstance(order, _RecordWrite):
                self._let_reads_pass()
                writes = [order]
                while len(writes) < MAX_BATCH and isinstance(
                    order := self._next_order(), _RecordWrite
                ):
                    writes.append(order)
                self._write_batch(writes)
                if isinstance(order, _RecordWrite):
                    continue
            if isinstance(order, _Delete):
                self._in_index(partial(self._delete, [order.key]))
            elif isinstance(order, _Touch):
                self._in_index(partial(self._index.touch, order.used_at))
            elif isinstance(order, Event):
                order.set()

    def _next_order(self) -> _Order:
        """The next order; if none is queued, an order without effect."""
        try:
            return self._orders.get_nowait()
        except Empty:
            return _Touch({})

    def _in_index(self, change: Callable[[], None]) -> None:
        """Change the index, and ignore errors: a stale row does no harm, since its checksum will
        not match."""
        with suppress(sqlite3.Error):
            change()

    def _delete(self, keys: Sequence[PageKey]) -> None:
        self._num_rows -= self._index.delete(keys)
        self._ledger.note(self._num_rows)

    def _write_batch(self, writes: list[_RecordWrite]) -> None:
        """Write records first, then fsync, then write their rows: a row never points at an
        incomplete page."""
        rows = [row for row in self._writers.map(self._write_page, writes) if row is not None]
        with self._reporting([row.key for row in rows]):
            self._files.sync([row.record for row in rows])
            self._num_rows += self._index.insert(rows)
            self._ledger.note(self._num_rows)
            for row in rows:
                self._done.put(_Committed(row.key, row.crc32))

    def _let_reads_pass(self) -> None:
        """Wait until reads are done: requests wait for reads, and a disk that reads and writes at
        once is slow."""
        until_s = monotonic() + READS_FIRST_S
        while (
            (any(self._is_reading) or not self._reads.empty())
            and self._orders.qsize() < FEW_WRITES
            and monotonic() < until_s
        ):
            sleep(0.005)

    def _write_page(self, write: _RecordWrite) -> PageRow | None:
        """Write a page and return its row; None if the write failed, which was reported."""
        row: PageRow | None = None
        job = write.job
        with self._reporting([job.key]):
            if job.after is not None:
                job.after()
            self._files.write(write.record, job.buffer)
            row = PageRow(job.key, write.record, job.token_ids, crc32(job.buffer), time())
        return row

    @contextmanager
    def _reporting(self, keys: list[PageKey]) -> Iterator[None]:
        """Report an error as the outcome of these pages; the thread continues."""
        try:
            yield
        except Exception as error:  # a copy from the device may raise any error
            for key in keys:
                self._done.put(Written(key, _words(error)))

    def _read_all(self, number: int) -> None:
        while (jobs := self._reads.get()) is not None:
            self._is_reading[number] = True
            self._read_again()
            if jobs:
                self._read_run(jobs)
            self._is_reading[number] = False

    def _read_run(self, jobs: list[_RecordRead]) -> None:
        began_s = perf_counter()
        problem = None
        try:
            self._files.read(jobs[0].record, *(job.buffer for job in jobs))
        except Exception as error:  # any error must be reported: a request waits for the pages
            if len(jobs) > 1:  # most of the pages may be readable
                self._read_alone(jobs)
                return
            problem = _words(error)
        found = [problem or _compare(job) for job in jobs]
        ended_s = perf_counter()
        for job, problem in zip(jobs, found, strict=True):
            self._done.put(Read(job.key, len(job.buffer), began_s, ended_s, problem))

    def _read_alone(self, jobs: list[_RecordRead]) -> None:
        """Read each page on any free thread: a bad sector may take long to fail."""
        for job in jobs:
            self._again.put(job)
            self._reads.put([])
        self._read_again()  # the other threads may have stopped

    def _read_again(self) -> None:
        with suppress(Empty):
            while True:
                self._read_run([self._again.get_nowait()])


def _compare(job: _RecordRead) -> str | None:
    return None if crc32(job.buffer) == job.crc32 else "checksum"


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None if the error does not come from SQLite."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _words(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        return "disk full" if _code(error) == sqlite3.SQLITE_FULL else f"index: {error}"
    if isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk full"
    return f"{errno.errorcode.get(error.errno or 0, 'error')}"
