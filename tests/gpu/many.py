"""Runs `make test-gpu` in several processes: most of its time goes into compiling kernels on the
host, one after the other.

    python -m tests.gpu.many [-n PROCESSES] [pytest's arguments]

Each process collects all tests and runs those that it claims first. pytest-xdist would do, but
machines with a GPU often have nothing but pytest.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest

CLAIMS = "MAINSTEM_TEST_CLAIMS"  # the folder in which tests are claimed
PLUGIN = "tests.gpu.many"
PROCESSES = 12
EMPTY = 5  # pytest's status if it ran no test: the others claimed them all


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that this process claims. The next one is claimed before a test runs, since
    pytest wants to know it: it keeps the fixtures that both need."""
    if CLAIMS not in os.environ or session.config.option.collectonly:
        return None
    mine = (item for number, item in enumerate(session.items) if _claim(number))
    item = next(mine, None)
    while item is not None and not (session.shouldfail or session.shouldstop):
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    return True


def _claim(number: int) -> bool:
    try:
        os.close(os.open(Path(os.environ[CLAIMS], str(number)), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leave the counts of this process for the one that started it."""
    if CLAIMS in os.environ:
        stats = terminalreporter.stats
        counts = {
            "passed": len(stats.get("passed", ())),
            "failed": len(stats.get("failed", ())) + len(stats.get("error", ())),
            # every process reports the files that are skipped as a whole
            "skipped": sum(isinstance(r, pytest.TestReport) for r in stats.get("skipped", ())),
        }
        path = Path(os.environ[CLAIMS], f"counts-{os.getpid()}.json")
        path.write_text(json.dumps(counts))


def main(argv: list[str]) -> int:
    made = argparse.ArgumentParser("python -m tests.gpu.many", description=__doc__)
    made.add_argument("-n", type=int, default=min(PROCESSES, os.cpu_count() or 1), metavar="N")
    args, rest = made.parse_known_args(argv)
    begin = monotonic()
    with TemporaryDirectory(prefix="mainstem-claims-") as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", PLUGIN, *rest]
        command += [] if any(not arg.startswith("-") for arg in rest) else ["tests/gpu"]
        env = os.environ | {CLAIMS: folder}
        logs = [Path(folder, f"log-{index}") for index in range(args.n)]
        running = []
        for log in logs:
            with log.open("w") as out:
                running.append(
                    subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
                )
        statuses = [process.wait() for process in running]
        for log, status in zip(logs, statuses, strict=True):
            if status not in (0, EMPTY):
                print(log.read_text())
        total: Counter[str] = Counter()
        for path in Path(folder).glob("counts-*.json"):
            total.update(json.loads(path.read_text()))
    num_bad = sum(status not in (0, EMPTY) for status in statuses)
    seconds = round(monotonic() - begin)
    print(
        f"{args.n} processes, {seconds} s\n"
        f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"
    )
    return 1 if num_bad or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
