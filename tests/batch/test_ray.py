"""`mainstem batch --ray` and Ray Data: skipped with a reason if Ray is not installed."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import pytest

from mainstem.cli.batch import main
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.ray.data import Generate, plan
from mainstem.text.text_engine import TextEngine
from tests.batch.test_kill import ROOT
from tests.batch.test_workers import NUM_ROWS, answer, answers, rows, write
from tests.fake_engines import TEMPLATE, FakeEngines, a_tokenizer
from tests.needs import needs
from tests.waiting import until

needs_ray = needs("ray")
pytestmark = [
    # Ray leaves sockets and files open until the process ends
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(1800),  # on one busy core Ray takes minutes to start
]
ON_RAY = ["--ray", "--ray-workers", "2"]
ROWS_PER_KILL = 100
START_S = 1500.0  # limit for actors to start


class Pace:
    """How many rows may be answered so far; actors that are ahead wait before their next step."""

    def __init__(self, folder: Path, output: Path) -> None:
        self._file, self._output = folder / "pace", output
        self.allow(ROWS_PER_KILL)

    def allow(self, num_rows: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(num_rows))
        new.rename(self._file)

    def num_answered(self) -> int:
        return self._output.read_bytes().count(b"\n") if self._output.exists() else 0

    def wait(self) -> None:
        sleep(0.002)  # so that steps, and not the driver, limit the pace
        while self.num_answered() >= int(self._file.read_text()):
            sleep(0.01)

    def open_engine(self, config: EngineConfig) -> TextEngine:
        """The engine that actors use."""
        engines = FakeEngines(num_pages=512, max_model_len=800)
        engines.at_step = lambda _: self.wait()
        return engines(config)


def actor_pids() -> list[int]:
    """Ids of the child processes that run an EngineActor."""
    parents: dict[int, int] = {}
    actors: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            if b"EngineActor" in (folder / "cmdline").read_bytes():
                actors.append(int(folder.name))
        except OSError:
            continue  # the process has ended
    return [pid for pid in actors if is_below(pid, parents)]


def is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        pid = parents.get(pid, 0)
        if pid == os.getpid():
            return True
    return False


def test_without_ray_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(ConfigError, match=r"mainstem\[ray\]"):
        answer(source, tmp_path / "out.jsonl", *ON_RAY)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_ray_on_this_machine_listens_on_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Ray does that, it decides when it is imported."""

    class NoRay:
        def init(self, **_: object) -> None:
            raise ConnectionError(os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"))

    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    monkeypatch.setitem(sys.modules, "ray", NoRay())
    source = write(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(ConfigError, match=r"cannot connect to auto \(None\)"):
        answer(source, tmp_path / "out.jsonl", "--ray", "auto")
    with pytest.raises(ConfigError, match=r"cannot connect to local \(0\)"):
        answer(source, tmp_path / "out.jsonl", "--ray")


@needs_ray
def test_two_actors_answer_as_one_engine_does(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*rows(), {"prompt": "x" * 900}])
    alone, spread = tmp_path / "alone.jsonl", tmp_path / "spread.jsonl"
    assert answer(source, alone) == 1
    assert answer(source, spread, *ON_RAY) == 1, "one row is too long and must fail"
    assert answers(spread) == answers(alone)
    assert len(answers(spread)) == NUM_ROWS + 2


def check_actor_kills(tmp_path: Path, num_kills: int) -> None:
    """One of two actors is killed at a random row of each hundred. Actors do not begin the next
    hundred before, so that the job cannot end before all kills."""
    given = rows(ROWS_PER_KILL * (num_kills + 1))
    source, output = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    pace, moments = Pace(tmp_path, output), random.Random(num_kills)
    killed: list[int] = []

    def kill_one() -> bool:
        fresh = [pid for pid in actor_pids() if pid not in killed]
        if fresh:
            killed.append(moments.choice(fresh))
            os.kill(killed[-1], signal.SIGKILL)
        return bool(fresh)

    def kill_some() -> None:
        try:
            for kill in range(num_kills):
                point = int(ROWS_PER_KILL * (kill + moments.random()))
                until(lambda: pace.num_answered() > point, START_S)  # noqa: B023  # called here
                until(kill_one, START_S)
                pace.allow(ROWS_PER_KILL * (kill + 2))
        finally:
            pace.allow(len(given) + 1)

    killer = Thread(target=kill_some)
    killer.start()
    argv = [str(source), "-o", str(output), "--no-progress", "--window-mib", "64", *ON_RAY]
    status = main(argv, pace.open_engine, lambda _: a_tokenizer())
    killer.join()
    assert len(killed) == num_kills
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(found) == sorted(row["custom_id"] for row in given)
    assert status == 0
    alone = tmp_path / "alone.jsonl"
    assert answer(source, alone) == 0
    assert answers(output) == answers(alone)


@needs_ray
def test_two_kills_of_an_actor_lose_no_answer(tmp_path: Path) -> None:
    check_actor_kills(tmp_path, 2)


@needs_ray
@pytest.mark.slow
def test_ten_kills_of_an_actor_lose_no_answer(tmp_path: Path) -> None:
    check_actor_kills(tmp_path, 10)


def check_driver_kills(tmp_path: Path, num_kills: int) -> None:
    source, output, alone = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "alone.jsonl"))
    write(source, rows())
    assert answer(source, alone) == 0
    num_bytes = alone.stat().st_size
    points = sorted(random.Random(num_kills).sample(range(1, num_bytes * 9 // 10), num_kills))
    for point in [*points, 0]:
        module = [sys.executable, "-m", "tests.batch.fake_batch", str(point), str(source)]
        flags = ["-o", str(output), "--no-progress", "--resume", "--window-mib", "64", *ON_RAY]
        done = subprocess.run([*module, *flags], cwd=ROOT, check=False, stderr=subprocess.DEVNULL)
        assert done.returncode == (-signal.SIGKILL if point else 0)
    assert answers(output) == answers(alone)


@needs_ray
@pytest.mark.slow
def test_ten_kills_of_the_driver_lose_no_answer(tmp_path: Path) -> None:
    check_driver_kills(tmp_path, 10)


# --- Ray Data ------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Ray on this machine."""
    import ray  # noqa: PLC0415  # takes seconds

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


class _Sized(Generate):
    """Adds the size of its batch to each row."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        size = len(batch["prompt"])
        return super().__call__(batch) | {"size": np.full(size, size)}


PROMPTS = [f"document {n % 4}: " + "words " * 20 + f"question {n}?" for n in range(24)]
SAMPLING = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are bytes."""
    from tests.models.checkpoints import make_checkpoint  # noqa: PLC0415  # imports torch

    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("llama", folder, vocab_size=300)
    (folder / "tokenizer.json").write_text(a_tokenizer().to_json())
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.torch
def test_generate_adds_answers_to_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fake_llm import patch_loading  # noqa: PLC0415  # imports torch; actors import this file

    patch_loading(FakeEngines(), monkeypatch)
    generate = Generate("fake", sampling=SAMPLING | {"ignore_eos": True})
    chat = [{"role": "user", "content": "hello"}]
    prompts = np.empty(4, dtype=object)
    prompts[:] = ["some text", chat, [1, 2, 3], "y" * 600]
    batch = generate({"prompt": prompts, "n": np.arange(4)})
    assert [type(text) for text in batch["answer"]] == [str, str, str, type(None)]
    assert batch["output_tokens"].tolist()[:3] == [4, 4, 4]
    assert batch["prompt_tokens"].tolist()[2] == 3
    assert [error is None for error in batch["error"]] == [True, True, True, False]
    assert batch["n"].tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match="has no column 'prompt'"):
        generate({"text": prompts})


@needs_ray
@pytest.mark.torch
# a thread of Ray Data's own may be interrupted when its pool closes
@pytest.mark.filterwarnings("ignore:Exception in thread pool-")
def test_generate_and_plan_with_parquet_in_and_json_out(
    tmp_path: Path, tiny_model: str, cluster: Any
) -> None:
    import pyarrow as pa  # noqa: PLC0415  # comes with Ray
    import pyarrow.parquet as pq  # noqa: PLC0415

    pq.write_table(pa.table({"prompt": PROMPTS, "n": range(24)}), tmp_path / "in.parquet")
    found = plan(cluster.data.read_parquet(str(tmp_path / "in.parquet")), tiny_model, num_workers=2)
    pool = cluster.data.ActorPoolStrategy(size=2)
    settings: dict[str, Any] = {"model": tiny_model, "sampling": SAMPLING, "kv_tokens": 8192}
    answered = found.map_batches(
        _Sized, fn_constructor_kwargs=settings, batch_size=None, compute=pool
    )
    answered.write_json(str(tmp_path / "out"))
    lines = [line for path in (tmp_path / "out").glob("*.json") for line in path.open()]
    written = [json.loads(line) for line in lines]
    assert sorted(row["n"] for row in written) == list(range(24))
    assert {row["size"] for row in written} != {24}, "there must be several bundles"
    got = {row["n"]: row["answer"] for row in written}
    columns = Generate(**settings)({"prompt": PROMPTS})
    assert got == dict(enumerate(columns["answer"]))
    assert list(columns["error"]) == [None] * 24
