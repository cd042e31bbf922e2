"""Ranks as processes: their answers equal those of one runner, and if one ends, all end."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Event, Thread
from time import monotonic, sleep

import psutil
import pytest

from mainstem.core.errors import ConfigError, EngineLost
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.runner.ranks.load import load_ranks
from mainstem.runner.ranks.runner import RankedRunner
from tests.builders import a_request, run_all
from tests.fakes import fake_answer
from tests.runner.ranks.fake_rank import MODULE, VOCAB, FakeOrigin, Fault, a_config

LIMIT_S = 60.0  # for the report that a rank ended, which comes much sooner
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, number] for number in range(6)]


@dataclass
class Ranked:
    """An engine and its ranks."""

    engine: Engine
    runner: RankedRunner

    @property
    def pids(self) -> list[int]:
        return self.runner.ranks.pids

    def lose(self, words: str) -> None:
        """Step until the engine is lost, within the limit. The error must contain `words`, and no
        rank may be left."""
        for number in range(4):
            self.engine.submit(a_request(PROMPTS[number], 40))
        with pytest.raises(EngineLost, match=words):
            step_until(self.engine, monotonic() + LIMIT_S)
        with pytest.raises(EngineLost, match=words):
            self.engine.step()
        assert not any(psutil.pid_exists(pid) for pid in self.pids)


def step_until(engine: Engine, end_s: float) -> None:
    """Step until `end_s`, whether there is work or not."""
    while monotonic() < end_s:
        engine.step()


@contextmanager
def ranked(origin: FakeOrigin, num_ranks: int = 2) -> Iterator[Ranked]:
    config = a_config(num_ranks)
    runner, facts = load_ranks(origin, config, MODULE)
    engine = join(runner, facts, config, EventBus())
    try:
        yield Ranked(engine, runner)
    finally:
        engine.close()
        assert not any(psutil.pid_exists(pid) for pid in runner.ranks.pids)


def is_over(pid: int) -> bool:
    """A process whose parent was killed may remain as a zombie if no other process adopts it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("can_overlap", [False, True])
def test_answers_are_those_of_one_runner(can_overlap: bool) -> None:
    with ranked(FakeOrigin(can_overlap), num_ranks=4) as ranks:
        got = run_all(ranks.engine, [a_request(prompt, 20, str(prompt)) for prompt in PROMPTS])
        for prompt in PROMPTS:
            assert got.tokens[str(prompt), 0] == fake_answer(prompt, 20, VOCAB)


def test_a_quick_rank_waits_for_a_slow_one_after_a_few_steps() -> None:
    """Rank 1 takes 20 ms per step, rank 0 almost no time."""
    with ranked(FakeOrigin(slow_rank=1)) as ranks:
        began_s = monotonic()
        run_all(ranks.engine, [a_request(PROMPTS[0], 30)])
        assert monotonic() - began_s > 27 * 0.02


def step_until_ctrl_c(engine: Engine, at_step: int) -> None:
    may_come = Event()

    def press() -> None:
        may_come.wait()
        os.kill(os.getpid(), signal.SIGINT)

    presser = Thread(target=press)
    presser.start()
    try:
        with guarded_interrupts():
            for step in count():
                if step == at_step:
                    may_come.set()
                engine.step()
    finally:
        presser.join()


@pytest.mark.parametrize("can_overlap", [False, True])
def test_an_engine_continues_after_ctrl_c(can_overlap: bool) -> None:
    """Ctrl-C comes from another thread, so at any point of a step: in the first one, or later."""
    with ranked(FakeOrigin(can_overlap, slow_rank=0)) as ranks:
        for number in range(8):
            ranks.engine.submit(a_request(PROMPTS[0], 60, f"long {number}"))
            with pytest.raises(KeyboardInterrupt):
                step_until_ctrl_c(ranks.engine, at_step=number // 2)
            ranks.engine.abort(RequestId(f"long {number}"))
            run_all(ranks.engine, [])
        got = run_all(ranks.engine, [a_request(PROMPTS[1], 20, "next")])
        assert got.tokens["next", 0] == fake_answer(PROMPTS[1], 20, VOCAB)


FAULTS = {
    "raises": (Fault(1, 3, "raise"), r"rank 1 of 2 failed: RuntimeError: connection closed"),
    "has no memory": (Fault(1, 3, "memory"), r"rank 1 of 2 is out of device memory: tried to"),
    "is killed": (Fault(0, 3, "die"), r"rank 0 of 2 \(process \d+\) was killed by SIGKILL"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_error_names_a_rank_that_ended_while_another_hangs(name: str) -> None:
    """This happens if ranks wait for each other in the middle of a layer."""
    fault, words = FAULTS[name]
    hanging = Fault(1 - fault.rank, 3, "hang")
    with ranked(FakeOrigin(can_overlap=name == "raises", faults=(fault, hanging))) as ranks:
        ranks.lose(words)


def test_the_error_names_the_rank_that_died_not_the_one_that_reported_it() -> None:
    faults = (Fault(0, 3, "raise"), Fault(1, 3, "die"))
    with ranked(FakeOrigin(faults=faults)) as ranks:
        ranks.lose(r"rank 1 of 2 \(process \d+\) was killed by SIGKILL")


def test_a_killed_rank_is_noticed_even_if_there_is_no_work() -> None:
    with ranked(FakeOrigin()) as ranks:
        run_all(ranks.engine, [a_request(PROMPTS[0], 4)])
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(EngineLost, match="rank 1 of 2"):
            step_until(ranks.engine, monotonic() + LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("config", ConfigError, "rank 1 of 2: kv_tokens=1 needs more"),
        ("raise", EngineLost, "rank 1 of 2 failed: RuntimeError"),
        ("die", EngineLost, "rank 1 of 2 .* SIGKILL"),
    ],
)
def test_the_error_names_a_rank_that_cannot_load(
    kind: str, error: type[Exception], words: str
) -> None:
    faults = (Fault(0, None, "hang"), Fault(1, None, kind))
    before = psutil.Process().children()
    with pytest.raises(error, match=words):
        load_ranks(FakeOrigin(faults=faults), a_config(2), MODULE)
    assert psutil.Process().children() == before


def test_ranks_of_a_garbage_collected_runner_end() -> None:
    runner, facts = load_ranks(FakeOrigin(), a_config(2), MODULE)
    assert (facts.num_params, facts.bytes_per_param) == (1001, 2.0), (
        "the largest count of all ranks"
    )
    pids = runner.ranks.pids
    del runner
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in pids)


PARENT = """
import sys
from tests.builders import a_request
from tests.runner.ranks.fake_rank import FakeOrigin, Fault
from tests.runner.ranks.test_group import ranked
with ranked(FakeOrigin(faults=(Fault(1, 3, "hang"),))) as ranks:
    print(*ranks.pids, flush=True)
    ranks.engine.submit(a_request([1, 2, 3], 40))
    while True:
        ranks.engine.step()
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them() -> None:
    """One of the ranks hangs in the middle of a step."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        sleep(0.2)
        assert len(pids) == 2
        assert not any(is_over(pid) for pid in pids)
        parent.kill()
        began_s = monotonic()
        while not all(is_over(pid) for pid in pids):
            assert monotonic() < began_s + LIMIT_S
            sleep(0.02)
