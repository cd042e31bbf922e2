"""Stores batches of OpenAI's and Anthropic's API, one JSON file each. A file is replaced atomically
when its batch changes."""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from secrets import token_hex
from time import time
from typing import TypedDict, Unpack

from mainstem.core.files import write_whole
from mainstem.server.kept.file_store import remove_fresh
from mainstem.wire.messages.parsing import MESSAGES_URL

WINDOW = "24h"  # the only supported completion window
WINDOW_S = 24 * 3600


class BatchStatus(Enum):
    """validating -> in_progress -> finalizing -> completed, expired, failed or cancelled; a batch
    is cancelling until its rows have stopped."""

    VALIDATING = "validating"  # waiting for its turn
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


ENDED = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.CANCELLED, BatchStatus.EXPIRED, BatchStatus.FAILED}
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of one owner; `times` are seconds since 1970, by OpenAI's names."""

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: BatchStatus
    times: dict[str, int]
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    fault: str | None = None  # why it failed
    output_ttl_s: int | None = None  # when its files expire, counted from its end

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def is_of_messages(self) -> bool:
        """Whether it belongs to Anthropic's API."""
        return self.endpoint == MESSAGES_URL

    @property
    def ended_s(self) -> int | None:
        return self.times[f"{self.status.value}_at"] if self.is_ended else None

    @property
    def answer_names(self) -> tuple[str, str]:
        """The names of its files: answers, and errors."""
        return f"{self.batch_id} output", f"{self.batch_id} errors"

    def moved(self, status: BatchStatus) -> "Batch":
        """The batch in another state, which it enters now."""
        return replace(self, status=status, times=self.times | {f"{status.value}_at": int(time())})

    def to_json(self) -> dict[str, object]:
        names = [f"{status.value}_at" for status in BatchStatus if status.value != "validating"]
        error = {"object": "list", "data": [{"code": "failed", "message": self.fault}]}
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if self.fault is None else error,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.times["created_at"],
            "expires_at": self.times["expires_at"],
            **{name: self.times.get(name) for name in names},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


class Given(TypedDict, total=False):
    """What a client may say about a batch, by the names of Batch."""

    metadata: dict[str, str] | None
    output_ttl_s: int | None
    total: int


@dataclass(slots=True)
class BatchStore:
    """All batches, in memory and on disk. The event loop owns it and writes the files itself, since
    they are small."""

    folder: Path
    _batches: dict[str, Batch] = field(default_factory=dict)  # in the order they were made

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_fresh(self.folder)
        found = [_read(path) for path in self.folder.glob("*/*batch_*.json")]
        for batch in sorted(found, key=lambda batch: (batch.times["created_at"], batch.batch_id)):
            self._batches[batch.batch_id] = batch

    def create(
        self, owner: str, endpoint: str, input_file_id: str, **given: Unpack[Given]
    ) -> Batch:
        """Save a new batch, which waits for its turn."""
        now = int(time())
        times = {"created_at": now, "expires_at": now + WINDOW_S}
        prefix = "msgbatch" if endpoint == MESSAGES_URL else "batch"
        batch_id, validating = f"{prefix}_{token_hex(12)}", BatchStatus.VALIDATING
        batch = Batch(batch_id, owner, endpoint, input_file_id, validating, times, **given)
        (self.folder / owner).mkdir(mode=0o700, exist_ok=True)
        self.put(batch)
        return batch

    def put(self, batch: Batch) -> None:
        """Save a batch."""
        record = asdict(batch) | {"status": batch.status.value}
        write_whole(self._path(batch, ".json"), json.dumps(record).encode())
        self._batches[batch.batch_id] = batch

    def note(self, batch: Batch) -> None:
        """Keep a change in memory only. This is enough for counts: after a kill they are computed
        from the answers on disk."""
        self._batches[batch.batch_id] = batch

    def find(self, owner: str, batch_id: str) -> Batch | None:
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.owner == owner else None

    def listed(self, owner: str) -> list[Batch]:
        """The owner's batches of both APIs, latest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner][::-1]

    def opened(self) -> list[Batch]:
        """Batches that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.is_ended]

    def ended_before(self, before_s: float) -> list[Batch]:
        ends = [(batch, batch.ended_s) for batch in self._batches.values()]
        return [batch for batch, ended_s in ends if ended_s is not None and ended_s < before_s]

    def remove(self, batch: Batch) -> None:
        """Forget a batch that has ended; its files of input, answers and errors stay."""
        assert batch.is_ended
        self.work_path(batch).unlink(missing_ok=True)
        self._path(batch, ".json").unlink(missing_ok=True)
        self._batches.pop(batch.batch_id, None)

    def work_bytes(self, owner: str) -> int:
        """Bytes that the open batches of an owner have on disk so far."""
        paths = [self.work_path(batch) for batch in self.opened() if batch.owner == owner]
        return sum(path.stat().st_size for path in paths if path.exists())

    def work_path(self, batch: Batch) -> Path:
        """Where answers are appended while the batch runs."""
        return self._path(batch, ".work.jsonl")

    def _path(self, batch: Batch, suffix: str) -> Path:
        return self.folder / batch.owner / f"{batch.batch_id}{suffix}"


def _read(path: Path) -> Batch:
    record = json.loads(path.read_bytes())
    return Batch(**record | {"status": BatchStatus(record["status"])})
