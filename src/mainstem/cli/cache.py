"""`mainstem cache`: shows, verifies and deletes the saved pages in a folder.

    mainstem cache stats DIR      models, pages, bytes, ages; works while an engine runs
    mainstem cache verify DIR     read every page and compare checksums; exit status 1 if one is bad
    mainstem cache clear DIR      delete all pages

DIR is the folder of `--disk-dir`; each model has its own folder in it.
"""

import argparse
import json
import mmap
import sqlite3
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time
from zlib import crc32

from mainstem.cli.parser import Parser
from mainstem.core.errors import StoreError
from mainstem.core.tables import gigabytes, table
from mainstem.kv.bytes.folder import StoreFolder
from mainstem.kv.bytes.ledger import ledger_of
from mainstem.kv.bytes.page_index import FILE, MODEL, PageIndex, read_about, remove_index
from mainstem.kv.bytes.segments import SegmentFiles


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What is in the folder of one model."""

    folder: str
    model: str | None  # the model's name when the store was last used; None: unknown
    identity: str  # hash of its weights, their form and the layout of pages
    pages: int
    page_tokens: int
    page_bytes: int
    disk_bytes: int
    oldest_use_s: float | None  # seconds ago
    newest_use_s: float | None


@dataclass(frozen=True, slots=True)
class FolderVerdict:
    """The result of reading every page of one folder."""

    folder: str
    pages: int
    bad: dict[str, int]  # reason -> pages


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem cache", description=__doc__)
    made.add_argument("action", choices=["stats", "verify", "clear"])
    made.add_argument("folder", type=Path, metavar="DIR")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    stores = find_stores(args.folder)
    if args.action == "stats":
        _print([asdict(stats(store)) for store in stores], args.json)
        return 0
    if args.action == "clear":
        _print(
            [{"folder": str(store), "removed_bytes": clear(store)} for store in stores], args.json
        )
        return 0
    verdicts = [verify(store) for store in stores]
    _print([asdict(verdict) for verdict in verdicts], args.json)
    return 1 if any(verdict.bad for verdict in verdicts) else 0


def find_stores(folder: Path) -> list[Path]:
    """Return the models' folders in `folder`, or `folder` itself if it is one. Raises StoreError if
    there is none."""
    if (folder / FILE).is_file():
        return [folder]
    stores = sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    if not stores:
        raise StoreError(f"{folder} holds no saved pages")
    return stores


def stats(store: Path) -> StoreStats:
    """Counts of a store; read-only, so it works while the store is in use."""
    database = sqlite3.connect(f"file:{store / FILE}?mode=ro", uri=True, timeout=30.0)
    try:
        about = dict(database.execute("SELECT name, value FROM about"))
        row = database.execute(
            "SELECT count(*), min(used_at), max(used_at), max(length(token_ids)) FROM pages"
        ).fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"the index in {store} cannot be read: {error}") from error
    finally:
        database.close()
    count, oldest, newest, token_bytes = row
    now = time()
    return StoreStats(
        folder=str(store),
        model=about.get(MODEL),
        identity=about.get("identity", ""),
        pages=count,
        page_tokens=(token_bytes or 0) // 4,
        page_bytes=int(about.get("page_bytes", 0)),
        disk_bytes=sum(path.stat().st_blocks * 512 for path in store.glob("*.pages")),
        oldest_use_s=None if oldest is None else round(now - oldest, 1),
        newest_use_s=None if newest is None else round(now - newest, 1),
    )


def verify(store: Path) -> FolderVerdict:
    """Read every page; raises StoreError if another process uses the store."""
    lock = StoreFolder(store)
    try:
        index = PageIndex(store, read_about(store))
        rows = index.rows()
        index.close()
        page_bytes = int(read_about(store)["page_bytes"])
        files = SegmentFiles(store, page_bytes)
        buffer = memoryview(mmap.mmap(-1, files.record_bytes))[:page_bytes]
        bad: Counter[str] = Counter()
        for row in rows:
            try:
                files.read(row.record, buffer)
                if crc32(buffer) != row.crc32:
                    bad["checksum"] += 1
            except EOFError:
                bad["truncated"] += 1
            except FileNotFoundError:
                bad["missing"] += 1
            except OSError:
                bad["unreadable"] += 1
        files.close()
        return FolderVerdict(str(store), len(rows), dict(bad))
    except sqlite3.Error as error:
        raise StoreError(f"the index in {store} cannot be read: {error}") from error
    finally:
        lock.close()


def clear(store: Path) -> int:
    """Delete a store's pages; returns the bytes that were freed."""
    lock = StoreFolder(store)
    try:
        freed = sum(path.stat().st_blocks * 512 for path in store.iterdir())
        remove_index(store)
        for path in store.glob("*.pages"):
            path.unlink(missing_ok=True)
        # so that the missing pages are not reported as lost
        ledger_of(store).unlink(missing_ok=True)
        return freed
    finally:
        lock.close()


def _print(results: list[dict[str, object]], is_json: bool) -> None:
    if is_json:
        for result in results:
            print(json.dumps(result))
        return
    names = list(results[0])
    rows = [[_cell(name, result[name]) for name in names] for result in results]
    print(table(names, rows))


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return gigabytes(value) if value >= 10_000_000 else f"{value:,}"
    if name == "identity":
        return str(value)[:16]
    if isinstance(value, dict):
        return ", ".join(f"{reason} {count}" for reason, count in value.items()) or "none"
    return "" if value is None else str(value)
