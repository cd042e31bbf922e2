"""Pages of answers are saved as they fill: neither an abort nor kill -9 loses them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mainstem.core.config import Saving
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from tests.builders import VOCAB, Collector, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.tiered import Tiered, a_tiered_engine

if TYPE_CHECKING:
    from mainstem.llm import LLM

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(10))
ANSWER = 400  # tokens
SURE_STEPS = 125  # a page is on disk a second after it was filled; a step takes 8 ms or more
PAGE, MODEL_PAGE = 4, 16
TEXT = "Once upon a time there was a river, and near it lived a fisherman. He"


def steps(tiered: Tiered, num_tokens: int) -> list[int]:
    """Step until `num_tokens` tokens were answered; returns them."""
    got: list[int] = []
    while len(got) < num_tokens:
        for output in tiered.engine.step():
            got += output.token_ids
    return got


@pytest.mark.parametrize("can_overlap", [False, True])
def test_pages_of_an_answer_are_saved_as_they_fill(can_overlap: bool) -> None:
    counters = Counters().attach(bus := EventBus())
    tiered = a_tiered_engine(num_pages=32, bus=bus, can_overlap=can_overlap)
    tiered.engine.submit(a_request(PROMPT, 40))
    # K and V of 20 tokens are computed: 2 full pages of the prompt, 3 of the answer
    steps(tiered, 11)
    tiered.engine.flush()
    assert counters.saved_pages["host"] == 5
    steps(tiered, 29)
    run_all(tiered.engine, [])
    tiered.engine.close()
    assert counters.saved_pages["host"] == (len(PROMPT) + 40 - 1) // PAGE


def test_with_saving_at_the_end_prompts_are_still_saved_before() -> None:
    counters = Counters().attach(bus := EventBus())
    tiered = a_tiered_engine(num_pages=32, bus=bus, save=Saving.END)
    tiered.engine.submit(a_request(PROMPT, 40))
    steps(tiered, 39)
    tiered.engine.flush()
    assert counters.saved_pages["host"] == 2
    run_all(tiered.engine, [])
    tiered.engine.close()
    assert counters.saved_pages["host"] == (len(PROMPT) + 40 - 1) // PAGE


def test_saving_in_sync_saves_everything_at_the_end_and_waits() -> None:
    counters = Counters().attach(bus := EventBus())
    tiered = a_tiered_engine(num_pages=32, bus=bus, save=Saving.SYNC)
    tiered.copier.patience = 1000  # copies proceed only when waited for
    tiered.engine.submit(a_request(PROMPT, 8))
    steps(tiered, 7)
    tiered.engine.flush()
    assert counters.saved_pages["host"] == 0
    steps(tiered, 1)
    assert counters.saved_pages["host"] == (len(PROMPT) + 8 - 1) // PAGE
    assert not tiered.store.num_copies
    tiered.engine.close()


def test_an_aborted_answer_is_found_by_the_next_turn() -> None:
    tiered = a_tiered_engine(num_pages=32)
    tiered.engine.submit(a_request(PROMPT, 40, name="long"))
    got = steps(tiered, 21)
    tiered.engine.abort(RequestId("long"))
    run_all(tiered.engine, [])
    tiered.engine.flush()
    tiered.engine.clear_device()
    outputs = run_all(tiered.engine, [a_request([*PROMPT, *got], 1)]).outputs
    assert outputs[0].num_cached_tokens == (len(PROMPT) + len(got) - 1) // PAGE * PAGE
    tiered.engine.close()


def test_another_request_finds_full_pages_of_a_running_answer() -> None:
    tiered = a_tiered_engine(num_pages=32)
    tiered.engine.submit(a_request(PROMPT, 40))
    got = steps(tiered, 21)
    tiered.engine.submit(a_request([*PROMPT, *got[:15], 5], 1, name="other"))
    outputs = [o for o in run_all(tiered.engine, []).outputs if o.request_id == "other"]
    # 6 full pages; the 25th token is copied from a page that begins with it
    assert outputs[0].num_cached_tokens == len(PROMPT) + 15
    tiered.engine.close()


def test_an_answers_pages_get_their_names_after_an_equal_request_is_aborted() -> None:
    """The other request computes the answer's next page under the same name, one token a step. It
    is aborted before that page is full."""
    tiered = a_tiered_engine(num_pages=64, chunk_tokens=2)
    tiered.engine.submit(a_request(PROMPT, 60))
    steps(tiered, 1)
    twin = [*PROMPT, *fake_answer(PROMPT, 40, VOCAB)]
    tiered.engine.submit(a_request(twin, 1, name="twin", priority=1))
    steps(tiered, 3)
    tiered.engine.abort(RequestId("twin"))
    collector = Collector()
    while tiered.engine.has_work:
        collector.add(tiered.engine.step())
        tiered.engine.check()
    again = [*PROMPT, *fake_answer(PROMPT, 60, VOCAB)]
    outputs = run_all(tiered.engine, [a_request(again, 1)]).outputs
    assert outputs[0].num_cached_tokens == (len(again) - 1) // PAGE * PAGE
    tiered.engine.close()


TOLD = """
import sys
from pathlib import Path
from time import sleep
from tests.builders import a_request
from tests.kv.test_saving import ANSWER, PROMPT
from tests.kv.tiered import a_tiered_engine
tiered = a_tiered_engine(num_pages=200, num_slots=200, disk_dir=Path(sys.argv[1]), num_records=200)
tiered.engine.submit(a_request(PROMPT, ANSWER))
while True:
    for output in tiered.engine.step():
        print(*output.token_ids, flush=True)
    sleep(0.008)
"""

TOLD_BY_A_MODEL = """
import sys
from tests.kv.test_saving import ANSWER, TEXT, a_model, greedy
for piece in a_model(sys.argv[1]).stream(TEXT, greedy(ANSWER)):
    print(*piece.token_ids, flush=True)
"""


def a_model(disk_dir: str | None) -> "LLM":
    from mainstem.llm import LLM  # noqa: PLC0415  # torch only where it is needed

    return LLM("smollm2", kv_tokens=4096, disk_dir=disk_dir, threads=1, dtype="float32")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def told_until_killed(program: str, folder: Path, num_tokens: int) -> tuple[list[int], int]:
    """The tokens that a process printed before kill -9, and how many of them SURE_STEPS earlier.
    Steps count instead of seconds, in which the machine may have paused."""
    told: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        while len(told) < num_tokens:
            said = process.stdout.readline()
            assert said, "the process ended by itself"
            told += map(int, said.split())
        process.send_signal(signal.SIGKILL)
    return told, len(told) - SURE_STEPS


@pytest.mark.serial
def test_kill_9_within_an_answer_loses_only_its_last_second(tmp_path: Path) -> None:
    told, num_sure = told_until_killed(TOLD, tmp_path, 300)
    assert 50 < num_sure < len(told) < ANSWER
    assert told == fake_answer(PROMPT, len(told), VOCAB)
    tiered = a_tiered_engine(num_pages=200, num_slots=200, disk_dir=tmp_path, num_records=200)
    request = a_request([*PROMPT, *told], 20)
    got = run_all(tiered.engine, [request])
    # K and V of the last printed token were not computed
    assert got.outputs[0].num_cached_tokens >= (len(PROMPT) + num_sure - 1) // PAGE * PAGE
    expected = fake_answer(PROMPT, len(told) + 20, VOCAB)[len(told) :]
    assert got.tokens[str(request.request_id), 0] == expected
    tiered.engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_folder")
def test_kill_9_of_a_real_model_loses_only_its_last_second(tmp_path: Path) -> None:
    told, num_sure = told_until_killed(TOLD_BY_A_MODEL, tmp_path, 200)
    assert 50 < num_sure < len(told) < ANSWER
    with a_model(None) as computed, a_model(str(tmp_path)) as stored:
        prompt = [*computed.tokenizer.encode(TEXT), *told]
        expected = computed.generate([prompt], greedy(40))[0].outputs[0]
        found = stored.generate([prompt], greedy(40))[0]
    num_prompt = len(prompt) - len(told)
    assert found.num_cached_tokens is not None
    assert found.num_cached_tokens >= (num_prompt + num_sure - 1) // MODEL_PAGE * MODEL_PAGE
    assert found.outputs[0].token_ids == expected.token_ids
