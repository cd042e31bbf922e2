"""Shows where the device's time goes: a trace of some steps, and shares by kind of kernel.

The trace is torch.profiler's (open it in chrome://tracing or Perfetto). Kinds are found by kernel
names; a name that matches none is `other`, and the table lists the largest kernels by name.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mainstem.core.errors import ConfigError
from mainstem.core.metrics import Counters
from mainstem.core.tables import table

BEGIN_AT = 0.3  # recording begins after this share of the job's output tokens
LARGEST = 12  # kernels listed by name

# the first pattern that matches decides
KINDS = {
    "recurrent": r"_(delta_(decode|solve|pass)|sibling|convolve|scan|gated_norm)\w*_kernel",
    "copies": r"memcpy|memset|copy|aten::clone",
    "attention": r"span|units_kernel|attention|attn|flash|merge",
    "sampling": r"argmax|sample|sampling|topk|top_k|sort|softmax|multinomial|cumsum"
    r"|_(survey|collect|finish|tops)_kernel",
    "gemm": r"gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|scaled_mm|splitk|aten::(add|b|)mm\b"
    r"|linear|mkldnn|dot_product",
    "norm and elementwise": r"norm|rope|rota|append|silu|elementwise|quantize|embedding|gather"
    r"|index|aten::(add|mul|sub|div|neg|pow|mean|rsqrt|cat|stack)|triton_|reduce|fill|where",
}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op",)


@dataclass(frozen=True, slots=True)
class TracedWork:
    """A piece of work in a trace."""

    name: str
    lane: tuple[object, object]  # process and stream, or thread
    begin_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.begin_us + self.duration_us


def kind_of(name: str) -> str:
    """Return the kind of a kernel, or of an operator on a CPU."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def read_trace(path: Path) -> list[TracedWork]:
    """Return the device's work in a trace; the operators of the CPU if no other device was used."""
    events = json.loads(path.read_text())["traceEvents"]
    for categories in (DEVICE_CATEGORIES, HOST_CATEGORIES):
        found = [
            TracedWork(
                event["name"], (event["pid"], event["tid"]), event["ts"], event.get("dur", 0.0)
            )
            for event in events
            if event.get("ph") == "X" and event.get("cat") in categories
        ]
        if found:
            return sorted(found, key=lambda work: (work.begin_us, -work.duration_us))
    return []


def self_us(works: Iterable[TracedWork]) -> list[tuple[str, float]]:
    """Return each piece's own time, without the pieces inside it, and without the time in which a
    kernel that was launched early waits for an earlier kernel to end. Pieces are in order of their
    start; an enclosing piece comes before those inside it.
    """
    spent: list[tuple[str, float]] = []
    open_works: dict[object, list[tuple[int, TracedWork]]] = defaultdict(list)
    for work in works:
        stack = open_works[work.lane]
        while stack and stack[-1][1].end_us <= work.begin_us:
            stack.pop()
        own_us = work.duration_us
        if stack and stack[-1][1].end_us < work.end_us:
            own_us = work.end_us - stack[-1][1].end_us
        elif stack:
            index = stack[-1][0]
            name, outer_us = spent[index]
            spent[index] = (name, outer_us - own_us)
        stack.append((len(spent), work))
        spent.append((work.name, own_us))
    return spent


def busy_us(works: Iterable[TracedWork]) -> float:
    """Return the time in which anything ran, on any stream."""
    total_us, reached_us = 0.0, float("-inf")
    for work in works:
        total_us += max(0.0, work.end_us - max(work.begin_us, reached_us))
        reached_us = max(reached_us, work.end_us)
    return total_us


def shares_of(works: list[TracedWork]) -> dict[str, float]:
    """Return shares of the time from the first piece to the last; `idle` is the time when nothing
    ran. Work on several streams at once counts for each stream, so shares may add up to more than
    1.
    """
    if not works:
        return {"idle": 1.0}
    wall_us = max(work.end_us for work in works) - works[0].begin_us
    by_kind: dict[str, float] = defaultdict(float)
    for name, own_us in self_us(works):
        by_kind[kind_of(name)] += own_us
    by_kind["idle"] = wall_us - busy_us(works)
    return {kind: round(spent_us / wall_us, 4) for kind, spent_us in _largest_first(by_kind)}


def _largest_first(spent_us: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(spent_us.items(), key=lambda item: -item[1])


class ProfileWindow:
    """Records `num_steps` steps from the middle of a job into a file."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self._path = path
        self._num_steps = num_steps
        self._steps_seen = 0
        self._is_recording = False
        self._profile: profile | None = None
        self._works: list[TracedWork] | None = None

    def watch(self, total_output: int) -> Callable[[Counters], None]:
        """Return a function to call after each step of a job that generates `total_output`
        tokens."""

        def after_step(counters: Counters) -> None:
            if self._is_recording:
                self._steps_seen += 1
                if self._steps_seen == self._num_steps:
                    self._stop()
            elif self._profile is None and counters.decoded_tokens >= BEGIN_AT * total_output:
                self._start()

        return after_step

    def close(self) -> None:
        """Write the file; raise ConfigError if the job was too short for the recording to begin."""
        if self._is_recording:
            self._stop()
        if self._profile is None:
            raise ConfigError("--profile: the job was too short")
        self._profile.export_chrome_trace(str(self._path))

    def shares(self) -> dict[str, float]:
        """Return shares of the window's time, by kind of kernel."""
        return shares_of(self._trace())

    def report(self) -> str:
        """Return two tables: kinds of kernels, and the largest kernels by name."""
        works = self._trace()
        kinds = [[kind, f"{share:.1%}"] for kind, share in shares_of(works).items()]
        spent: dict[str, float] = defaultdict(float)
        for name, own_us in self_us(works):
            spent[name] += own_us
        calls = Counter(work.name for work in works)
        total_us = max(sum(spent.values()), 1e-9)
        largest = [
            [name[:90], kind_of(name), str(calls[name]), f"{own_us / 1e3:.2f}",
             f"{own_us / total_us:.1%}"]
            for name, own_us in _largest_first(spent)[:LARGEST]
        ]  # fmt: skip
        return (
            table([f"{self._steps_seen} steps", "of the time"], kinds)
            + "\n\n"
            + table(["kernel", "kind", "calls", "ms", "of the work"], largest)
        )

    def _trace(self) -> list[TracedWork]:
        assert self._profile is not None
        assert not self._is_recording
        if self._works is None:
            self._works = read_trace(self._path)
        return self._works

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._is_recording = True

    def _stop(self) -> None:
        assert self._profile is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._is_recording = False
