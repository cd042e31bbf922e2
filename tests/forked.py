"""Runs a program in a process of its own that need not import anything."""

import multiprocessing
import os
import sys
from collections.abc import Callable

PRELOADED = ["tests.batch.fake_batch", "tests.tables.fake_map"]


def run_forked(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The exit status of a program, negative if a signal ended it. What it says on standard error
    is dropped.

    Its process is forked from one that has imported what such programs need, and does nothing else:
    to start Python again takes seconds each time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_run, args=(program, arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(program: Callable[[list[str]], int], arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(program(arguments))
