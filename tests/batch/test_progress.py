"""The progress that a job or a plan shows."""

import io
from array import array

import pytest

from mainstem.batch import bar
from mainstem.batch.bar import PhaseLine
from mainstem.batch.rows import Row
from mainstem.batch.windows import Window
from mainstem.batch.work import JobWork
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.core.request import SamplingParams
from mainstem.wire.calls import Call, CallKind

OUTPUT = 64


def a_window(lengths: list[int], progress: float | None = 1.0, num_skipped: int = 0) -> Window:
    call = Call(CallKind.COMPLETION, SamplingParams(max_tokens=OUTPUT))
    rows = [Row(line, f"row {line}", call) for line in range(len(lengths))]
    prompts = Prompts.from_lists([[0] * length for length in lengths])
    return Window(rows, prompts, [], num_skipped, len(lengths) + num_skipped, progress)


def test_the_time_left_is_near_the_truth_from_the_start() -> None:
    """Ten batches of 64 rows, long ones first. In the first eighth of the time no row finishes. An
    estimate by finished rows would begin with 640 times the time that the first row took."""
    lengths = [4000] * 320 + [100] * 320
    counters = Counters()
    work = JobWork(counters)
    work.add_window(a_window(lengths))
    now_s, seen = 0.0, []
    for begin in range(0, 640, 64):
        batch = lengths[begin : begin + 64]
        counters.prompt_tokens += sum(batch)
        now_s += sum(batch) / 100_000
        for step in range(OUTPUT):
            seen.append((now_s, work.tokens))
            if step:
                counters.decoded_tokens += 64
            now_s += 0.02
        counters.sequences_finished += 64
        counters.generated_tokens += 64 * OUTPUT
        for place, length in enumerate(batch):
            work.finish(length, 1)
            if place == 0:
                seen.append((now_s, work.tokens))
    assert work.tokens == work.tokens_read == work.total_tokens == sum(lengths)
    total_s = now_s
    estimates = [at_s * sum(lengths) / tokens for at_s, tokens in seen]
    assert max(estimates) < 2 * total_s
    assert min(estimates) > total_s / 3
    done = [tokens for _, tokens in seen]
    assert all(done[place] <= 1.05 * done[place + 1] for place in range(len(done) - 1))


def test_rows_of_earlier_runs_and_copied_answers_count_as_done() -> None:
    work = JobWork(Counters())
    work.add_window(a_window([10, 10, 30], progress=0.5, num_skipped=7))
    assert (work.rows_done, work.total_rows, work.total_tokens) == (7, 20, 100)
    work.finish(10, 1, is_copy=True)
    assert (work.rows_done, work.tokens) == (8, 10)
    work.add_window(a_window([50], progress=None))
    assert work.total_tokens is None


# --- one line about phases -----------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_progress_at_once_and_is_cleaned_up() -> None:
    shown = Terminal()
    line = PhaseLine("mainstem plan", True, shown)
    line.show("reading 5 rows")
    line.begin("planning")
    assert "reading 5 rows" in shown.getvalue()
    assert "planning" in shown.getvalue()
    assert "\n" not in shown.getvalue()
    line.close()
    assert shown.getvalue().endswith("\r\x1b[K")


def test_a_log_gets_lines_only_about_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    times = array("d", [0.0])
    monkeypatch.setattr(bar, "monotonic", lambda: times[0])
    shown = io.StringIO()
    line = PhaseLine("mainstem plan", True, shown)
    for now in (0.5, 1.9, 2.5, 3.0, 5.0, 13.0):
        times[0] = now
        line.show(f"reading at {now}")
    line.begin("planning")
    line.close()
    assert shown.getvalue().splitlines() == [
        "mainstem plan: reading at 2.5 [2 s]",
        "mainstem plan: reading at 13.0 [13 s]",
        "mainstem plan: planning [13 s]",
    ]


def test_a_disabled_line_prints_nothing() -> None:
    shown = Terminal()
    line = PhaseLine("mainstem plan", False, shown)
    line.show("reading")
    line.begin("planning")
    line.close()
    assert shown.getvalue() == ""
