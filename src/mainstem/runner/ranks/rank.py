"""A rank: a process that has one part of a model, and runs every Step on it.

    main thread      reads messages: launches steps, starts copies
    ended            waits for launched steps in order and reports them (where steps overlap)
    copies           reports how far copies are
    watch            ends the process as soon as the engine's process is gone, whatever it waits for

Any exception ends the process, after a report of it: the other ranks may wait for this one in the
middle of a step, so there is nothing to go on with.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from time import sleep
from traceback import format_exc

import torch
import torch.distributed as dist

from mainstem.core.config import SWITCH_S
from mainstem.core.errors import MainstemError, OutOfDeviceMemory
from mainstem.core.step import InFlight, Runner, Step
from mainstem.kv.transfer import PageCopier, Transfer
from mainstem.models.collectives import ProcessGroup
from mainstem.runner.gates import LAYERS_AT_ONCE
from mainstem.runner.load import choose_device, load_runner
from mainstem.runner.ranks.messages import (
    Begin,
    Close,
    Copied,
    Ended,
    Failed,
    Forget,
    FromRank,
    Line,
    Load,
    Loaded,
    Open,
    Opened,
    Save,
)
from mainstem.runner.slab import SlabPart
from mainstem.runner.transfer import attach_copier, pages_of

LOOK_S = 0.001  # between two looks at copies under way
PARENT_S = 1.0  # between two looks at whose child this is
MEET_LIMIT = timedelta(hours=1)  # for ranks whose disk is slow; a rank that ends is noticed at once


class Rank:
    """Does what the engine's process says until it says Close."""

    def __init__(self, runner: Runner, line: Line, part: SlabPart, device: torch.device) -> None:
        self._runner = runner
        self._line = line
        self._part = part
        self._device = device
        self._copier: PageCopier | None = None
        self._launched: SimpleQueue[InFlight] = SimpleQueue()
        self._copies: SimpleQueue[tuple[int, Transfer]] = SimpleQueue()
        self._num_ended = 0
        self._ended = Condition()
        if runner.can_overlap:
            self._on_thread("ended", self._report_steps)

    def run(self) -> None:
        """Raises what a step or a copy raises, and EOFError or OSError if nobody is there."""
        while True:
            message = self._line.receive()
            match message:
                case Step():
                    self._launch(message)
                case Save(number, pages, slots, after_steps):
                    self._await_steps(after_steps)
                    self._copies.put((number, self._open_copier.save(pages, slots)))
                case Load(number, load_id, slots, pages, after_steps):
                    self._await_steps(after_steps)
                    self._copies.put((number, self._open_copier.load(load_id, slots, pages)))
                case Forget(load_id):
                    self._open_copier.forget(load_id)
                case Open(host_bytes):
                    self._copier = attach_copier(self._runner, host_bytes, self._part)
                    self._on_thread("copies", self._report_copies)
                    self._line.send(Opened())
                case Close():
                    if self._copier is not None:
                        self._copier.close()
                    self._runner.close()
                    return
                case _:
                    raise AssertionError(f"a rank was sent {message}")

    @property
    def _open_copier(self) -> PageCopier:
        assert self._copier is not None, "a copy before Open"
        return self._copier

    # --- steps ----------------------------------------------------------------------------------

    def _launch(self, step: Step) -> None:
        handle = self._runner.launch(step)
        if self._runner.can_overlap:
            self._launched.put(handle)
        else:
            self._finish(handle)

    def _report_steps(self) -> None:
        while True:
            self._finish(self._launched.get())

    def _finish(self, handle: InFlight) -> None:
        result = handle.wait()
        with self._ended:
            self._num_ended += 1
            self._ended.notify_all()
        self._line.send(Ended(result if self._part.shard.rank == 0 else None))

    def _await_steps(self, count: int) -> None:
        """Rank 0 has ended so many; this one is at their last products, or further."""
        with self._ended:
            self._ended.wait_for(lambda: self._num_ended >= count)

    # --- copies ---------------------------------------------------------------------------------

    def _report_copies(self) -> None:
        num_layers = self._open_copier.num_layers
        under_way: dict[int, tuple[Transfer, int]] = {}  # and the layers that were reported
        while True:
            while not under_way or not self._copies.empty():
                number, transfer = self._copies.get()
                under_way[number] = transfer, 0
            for number, (transfer, told) in list(under_way.items()):
                done = transfer.num_layers_done()
                if done == num_layers:
                    del under_way[number]
                    self._line.send(Copied(number, done, transfer.seconds()))
                elif done >= told + LAYERS_AT_ONCE:
                    under_way[number] = transfer, done
                    self._line.send(Copied(number, done, 0.0))
            if under_way:
                sleep(LOOK_S)

    def _on_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device
            try:
                work()
            except BaseException as error:
                fail(self._line, error)

        Thread(target=run, name=name, daemon=True).start()


def load(begin: Begin) -> tuple[Runner, Loaded, torch.device]:
    """Meet the other ranks and load this one's part, on its device."""
    shard, config = begin.shard, begin.config
    device = choose_device(config.model)
    backend = "gloo"
    if device.type == "cuda" and not config.model.ranks_on_one_gpu:
        backend = "nccl"
        device = torch.device("cuda", shard.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{begin.meeting}",
        rank=shard.rank,
        world_size=shard.of,
        timeout=MEET_LIMIT,
        device_id=device if backend == "nccl" else None,
    )
    ranks = ProcessGroup(is_deterministic=config.model.deterministic)
    runner, facts = load_runner(begin.origin, config, ranks)
    pages = pages_of(runner)
    return runner, Loaded(facts, runner.can_overlap, pages.page_bytes, pages.num_layers), device


def fail(line: Line, error: BaseException) -> None:
    """Report an error and end the process, from any thread."""
    known = error if isinstance(error, MainstemError) else None
    if isinstance(error, torch.OutOfMemoryError):
        known = OutOfDeviceMemory(str(error))
    report: FromRank = Failed(known, f"{type(error).__name__}: {error}", format_exc())
    with suppress(OSError):  # nobody is there any more
        line.send(report)
    os._exit(1)


def watch(fd: int, parent: int) -> None:
    """End this process once its parent is gone; a fork of the parent may keep the socket open."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    while not poll.poll(PARENT_S * 1e3) and os.getppid() == parent:
        pass
    os._exit(1)


def main(argv: list[str]) -> None:
    """Never returns: threads of libraries would keep the process, and there is nothing to save."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the engine's process ends its ranks
        signal.signal(each, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    fd, parent = map(int, argv)
    line = Line(fd)
    Thread(target=partial(watch, fd, parent), name="watch", daemon=True).start()
    try:
        begin = line.receive()
        assert isinstance(begin, Begin)
        runner, loaded, device = load(begin)
        line.send(loaded)
        Rank(runner, line, SlabPart(begin.shard, begin.slab_fd), device).run()
    except (EOFError, ConnectionError):
        os._exit(1)  # the engine's process is gone
    except BaseException as error:
        fail(line, error)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
