"""kill -9 while an engine saves: the next engine finds the committed pages and answers right."""

import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from mainstem.core.events import EventBus, PagesLost, StoreOpened
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.tiered import a_tiered_engine

ROOT = Path(__file__).resolve().parents[2]
CHAT = [list(range(start, start + 40)) for start in range(0, 40, 2)]

ENDLESS = """
import sys
from pathlib import Path
from tests.builders import a_request, run_all
from tests.kv.test_kill import CHAT
from tests.kv.tiered import a_tiered_engine
tiered = a_tiered_engine(num_pages=32, num_slots=48, disk_dir=Path(sys.argv[1]), num_records=90)
while True:
    for number, chat in enumerate(CHAT):
        run_all(tiered.engine, [a_request(chat, 4)])
        if number == 1:
            tiered.store.flush()
            print("saving", flush=True)
"""


@pytest.mark.parametrize("delay_ms", [0, 17, 61])
def test_an_engine_killed_while_it_saves_leaves_an_undamaged_store(
    tmp_path: Path, delay_ms: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saving\n"
        sleep(delay_ms / 1000)
        process.send_signal(signal.SIGKILL)
    bus = EventBus()
    lost: list[PagesLost] = []
    opened: list[StoreOpened] = []
    bus.subscribe(PagesLost, lost.append)
    bus.subscribe(StoreOpened, opened.append)
    tiered = a_tiered_engine(num_slots=48, disk_dir=tmp_path, num_records=90, bus=bus)
    assert opened[0].found is None
    assert opened[0].num_pages >= 1, "the first conversation was on disk by then"
    for chat in CHAT:
        request = a_request(chat, 4)
        got = run_all(tiered.engine, [request])
        assert got.tokens[str(request.request_id), 0] == fake_answer(chat, 4, VOCAB)
    assert lost == []
    tiered.engine.close()
