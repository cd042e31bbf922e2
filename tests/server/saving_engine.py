"""The engine's process with FakeRunner and a disk that a test can stop: it writes nothing while
the file STUCK is in --disk-dir."""

import sys
from pathlib import Path
from time import sleep

from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.kv.bytes.segments import SegmentFiles
from mainstem.server.link.engine_process import main
from mainstem.server.link.protocol import BeginEngine
from mainstem.text.grammar import Grammars
from tests.fake_engines import a_tokenizer
from tests.kv.tiered import a_tiered_engine

MODULE = "tests.server.saving_engine"


STORE = "store"  # the folder of pages in --disk-dir
STUCK = "stuck"


class StoppableFiles(SegmentFiles):
    def __init__(self, folder: Path, page_bytes: int) -> None:
        super().__init__(folder, page_bytes)
        self._stuck = folder.parent / STUCK

    def write(self, record: int, buffer: memoryview) -> None:
        while self._stuck.exists():
            sleep(0.01)
        super().write(record, buffer)


def make(begin: BeginEngine, bus: EventBus) -> tuple[Engine, Grammars]:
    disk_dir = begin.config.store.disk_dir
    assert disk_dir is not None
    folder = Path(disk_dir) / STORE
    tiered = a_tiered_engine(num_pages=64, disk_dir=folder, files=StoppableFiles, bus=bus)
    return tiered.engine, Grammars(a_tokenizer())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], make))
