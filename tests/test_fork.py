"""An LLM in a forked child raises an error at once; without the check it would hang."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PARENT = """
import asyncio, os, sys, threading
from pathlib import Path
import pytest
from tests.fake_engines import FakeEngines
from tests.builders import a_request, run_all
from tests.fake_llm import a_fake_async_llm, a_fake_llm
from tests.kv.tiered import a_tiered_engine

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(0)
        print("returned", flush=True)
        os._exit(0)
    os.waitpid(child, 0)

with pytest.MonkeyPatch.context() as patch:
    llm = a_fake_llm(FakeEngines(), patch)
    async_llm = a_fake_async_llm(FakeEngines(), patch)
llm.generate("before", use_tqdm=False)
held = llm._lock  # as if another thread were in a call
threading.Thread(target=held.acquire).start()
in_child(lambda: llm.generate("x", use_tqdm=False))
in_child(lambda: llm.chat([{"role": "user", "content": "x"}], use_tqdm=False))
in_child(llm.close)
in_child(lambda: asyncio.run(async_llm.generate("x")))
in_child(lambda: asyncio.run(async_llm.close()))
asyncio.run(async_llm.close())
tiered = a_tiered_engine(disk_dir=Path(sys.argv[1]))
run_all(tiered.engine, [a_request([1, 2, 3], 2)])
in_child(lambda: tiered.engine.submit(a_request([1], 1)))
in_child(tiered.engine.step)
in_child(tiered.engine.flush)
in_child(tiered.engine.close)
run_all(tiered.engine, [a_request([1, 2, 3], 2)])
tiered.engine.close()
print("the parent goes on", flush=True)
"""


def test_a_call_in_a_fork_raises_instead_of_hanging(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path)],  # Python warns of forks
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    errors = [line for line in told if line.startswith("ForkedProcess: ")]
    assert len(errors) == 6
    assert all('multiprocessing.get_context("spawn")' in line for line in errors)
    assert told.count("returned") == 3, "closing in a child must return"
    assert told[-1] == "the parent goes on"
