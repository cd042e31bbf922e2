"""Fixtures that several test packages use, and the order in which pytest's workers get tests."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import pytest

from mainstem.checkpoints.hub import resolve_model

gc.disable()  # until all tests are collected: nothing that they import is garbage

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

if os.environ.get("MAINSTEM_TEST_ONEDNN") == "off":  # as if the CPU were older; see docs/testing.md
    import torch

    torch._C._set_mkldnn_enabled(False)

# a shell that starts `make test &` lets it ignore Ctrl-C, which tests send to themselves
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # not on every machine with a GPU
    from hypothesis import settings

    settings.register_profile(
        "any machine", deadline=None
    )  # an example may take long on a busy one
    settings.load_profile("any machine")

# Ray listens on 127.0.0.1 only, and its token is not written to the user's home
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = token_hex(32)
# by default Ray gives its workers so low a priority that on a busy core they wait for everybody
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # the name that Ray reads

LONGEST_FIRST = (
    "kernels/test_aot.py",
    "kernels/test_interpreter.py",
    "runner/test_interpreter.py",
    "metamorphic/test_real_model.py",
    "bench/test_perplexity.py",
    "test_llm.py",
)


SLOW_TO_COLLECT = ("test_fuzz_long.py",)  # all of their tests are slow ones


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that only a run with slow tests needs; None means no opinion."""
    is_short = "not slow" in config.getoption("markexpr")
    return True if is_short and collection_path.name in SLOW_TO_COLLECT else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take half a minute or more run first, so that no worker ends with one of them."""
    tests = Path(__file__).parent
    place = {tests / name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """The garbage collector begins, and does not look at the imported modules again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At its end, Python frees everything; a library complains of what it does not."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded model as a Hugging Face folder; fetched and converted once per user cache.

    Workers that begin together do not both convert it: there is a lock.
    """
    return resolve_model("smollm2")


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """A test's changes to logging end with the test."""
    loggers = [logging.getLogger(name) for name in ("mainstem", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
