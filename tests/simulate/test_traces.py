"""Traces are read unchanged; an error names the line."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem_simulate.arrivals import load_think_times
from mainstem_simulate.trace_records import Outgrown, ReadOptions, Trace, TraceFormat
from mainstem_simulate.traces import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"


def read(tmp_path: Path, text: str, options: ReadOptions | None = None) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, options)


def mooncake(timestamp: float, input_length: int, hash_ids: list[int], **more: object) -> str:
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": 7}
    return json.dumps({**row, "hash_ids": hash_ids, **more}) + "\n"


def test_mooncake_keeps_whole_pages_in_order_of_arrival(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake(2000, 1030, [1, 2, 3]) + mooncake(1000, 1024, [1, 2]))
    assert (trace.format, trace.page_tokens) == (TraceFormat.MOONCAKE, 512)
    assert [r.arrival_s for r in trace.requests] == [1.0, 2.0]
    assert [list(r.keys) for r in trace.requests] == [[1, 2], [1, 2]]


def test_a_prompt_that_continues_another_belongs_to_its_session(tmp_path: Path) -> None:
    lines = [
        mooncake(0, 512 * 4, [0, 1, 2, 3]),
        mooncake(1, 512 * 2, [0, 9]),
        mooncake(2, 512 * 6, [0, 1, 2, 3, 4, 5]),
    ]
    sessions = [request.session for request in read(tmp_path, "".join(lines)).requests]
    assert sessions == [0, 1, 0]


def test_qwen_sessions_follow_the_parent(tmp_path: Path) -> None:
    lines = [
        mooncake(0.5, 33, [1, 2, 3], chat_id=10, parent_chat_id=-1, turn=1),
        mooncake(1.5, 16, [8], chat_id=11, parent_chat_id=-1, turn=1),
        mooncake(2.5, 64, [1, 2, 4, 5], chat_id=12, parent_chat_id=10, turn=2),
    ]
    trace = read(tmp_path, "".join(lines))
    assert (trace.format, trace.page_tokens) == (TraceFormat.QWEN, 16)
    assert [r.session for r in trace.requests] == [0, 1, 0]
    assert [r.arrival_s for r in trace.requests] == [0.5, 1.5, 2.5]
    assert list(trace.requests[0].keys) == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "timestamp_ms,input_length,output_length\n0.0,374,44\n1500.0,300,4\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,300,4\n",
    ],
)
def test_azure_traces_share_nothing(tmp_path: Path, text: str) -> None:
    trace = read(tmp_path, text)
    assert trace.format is TraceFormat.AZURE
    assert not trace.can_share
    first, second = trace.requests
    assert (first.input_tokens, first.output_tokens) == (374, 44)
    assert second.arrival_s - first.arrival_s == pytest.approx(1.5)
    assert not set(first.keys) & set(second.keys)


def test_turns_of_a_session_extend_one_chain(tmp_path: Path) -> None:
    text = '{"sid": 0, "turns": [[100, 200], [50, 10]]}\n{"sid": 1, "turns": [[300, 1]]}\n'
    trace = read(tmp_path, text, ReadOptions(page_tokens=100))
    first, second = (r for r in trace.requests if r.session == 0)
    other = next(r for r in trace.requests if r.session == 1)
    assert (first.input_tokens, second.input_tokens) == (100, 350)
    assert list(first.kept) == list(second.keys) == [0, 1, 2]
    assert second.previous == trace.requests.index(first)
    assert second.arrival_s >= first.arrival_s + second.think_s
    assert not set(other.kept) & set(second.kept)


def test_session_starts_are_poisson_and_repeatable() -> None:
    path = DATA / "sessions_sample.jsonl.gz"
    starts = [r.arrival_s for r in read_trace(path).requests if r.previous is None]
    gaps = [after - before for before, after in pairwise(starts)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.25)  # 149 draws: 3 sigma
    assert read_trace(path) == read_trace(path)
    assert read_trace(path) != read_trace(path, ReadOptions(seed=1))
    slower = read_trace(path, ReadOptions(rate=0.5))
    assert max(r.arrival_s for r in slower.requests if r.previous is None) == pytest.approx(
        2 * max(starts)
    )


def test_a_session_ends_when_the_context_is_full(tmp_path: Path) -> None:
    text = '{"turns": [[10, 10], [10, 10], [1, 1]]}\n'
    trace = read(tmp_path, text, ReadOptions(context_tokens=30))
    assert [r.input_tokens for r in trace.requests] == [10]


def test_a_rate_scales_recorded_arrivals(tmp_path: Path) -> None:
    text = "".join(mooncake(1000 * i, 512, [i]) for i in range(11))
    trace = read(tmp_path, text, ReadOptions(rate=4))
    assert trace.requests[-1].arrival_s == pytest.approx(10 / 4)


def test_the_format_of_a_trace_is_found_from_its_content() -> None:
    assert read_trace(DATA / "mooncake_sample.jsonl.gz").format is TraceFormat.MOONCAKE
    assert read_trace(DATA / "sessions_sample.jsonl.gz").format is TraceFormat.SESSIONS
    assert read_trace(DATA / "weka_sample.jsonl.gz").format is TraceFormat.WEKA
    assert read_trace(DATA / "chitchat_sample.jsonl.gz").format is TraceFormat.CHITCHAT
    assert read_trace(DATA / "servegen_sample.csv.gz", LENGTHS).format is TraceFormat.SERVEGEN


GOOD = mooncake(0, 512, [1])


# --- ids that do not fit the page size ------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 128, 256, 300, 1024])
def test_ids_of_another_page_size_are_refused_with_the_size_that_fits(
    tmp_path: Path, page_tokens: int
) -> None:
    """Ids of 256 tokens that were read as ids of 512 once gave a hit rate of 0.499 instead of
    0.25."""
    sizes = [100 * page_tokens // 3, 7 * page_tokens + 1, 41 * page_tokens]
    lines = [mooncake(0, 100, [7])] if page_tokens >= 100 else []
    for size in sizes:
        lines.append(mooncake(1, size, list(range(-(-size // page_tokens)))))
    with pytest.raises(InvalidRequest, match=rf"trace:\d: .*--page-tokens {page_tokens}$"):
        read(tmp_path, "".join(lines))
    trace = read(tmp_path, "".join(lines), ReadOptions(page_tokens=page_tokens))
    assert len(trace.requests[-1].keys) == 41


def test_the_error_names_the_first_request_that_does_not_fit(tmp_path: Path) -> None:
    lines = [GOOD, mooncake(1, 1024, [1, 2, 3, 4]), mooncake(2, 2048, [9] * 8)]
    with pytest.raises(
        InvalidRequest, match=r"trace:2: hash_ids has 4 ids, but its tokens make at"
    ):
        read(tmp_path, "".join(lines))


def test_ids_that_fit_no_page_size_are_refused_without_advice(tmp_path: Path) -> None:
    lines = [mooncake(1, 1024, [1, 2, 3, 4]), mooncake(2, 1024, [9] * 8)]
    with pytest.raises(InvalidRequest, match=r"trace:1: .* no page size fits every request"):
        read(tmp_path, "".join(lines))


def test_a_partial_page_may_have_an_id_or_none(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake(0, 1030, [1, 2, 3]) + mooncake(1, 1030, [1, 2]))
    assert [list(r.keys) for r in trace.requests] == [[1, 2], [1, 2]]


# --- WEKA, ServeGen, ChitChat ---------------------------------------------------------------------

SERVEGEN = "client,t_s,rate_rps,cv,pattern,p1,p2\n"
LENGTHS = ReadOptions(prompt_tokens=1000, answer_tokens=200)


def weka(requests: list[tuple[float, str, int, list[list[int]]]], **more: object) -> str:
    rows = [
        {"t": t, "agent": agent, "input_length": length, "output_length": 5, "think_s": 2.0,
         "hash_runs": runs}
        for t, agent, length, runs in requests
    ]  # fmt: skip
    return json.dumps({"session": "s", "block_size": 64, "requests": rows, **more}) + "\n"


def test_weka_ids_are_local_to_a_session_and_agents_run_independently(tmp_path: Path) -> None:
    requests = [
        (0.0, "main", 130, [[1, 2]]),
        (9.0, "agent_1", 64, [[50, 1]]),
        (10.0, "main", 200, [[1, 1], [7, 2]]),
    ]
    trace = read(tmp_path, weka(requests) + weka(requests))
    assert trace.page_tokens == 64
    first = [r for r in trace.requests if r.session == 0]
    assert [len(r.keys) for r in first] == [2, 1, 3]
    assert first[2].keys[0] == first[0].keys[0] != first[2].keys[1]
    assert [r.arrival_s - first[0].arrival_s for r in first] == pytest.approx([0, 9, 10])
    assert first[1].previous is None
    assert trace.requests[first[2].previous or 0] is first[0]
    keys = [{key for r in trace.requests if r.session == s for key in r.keys} for s in (0, 1)]
    assert not keys[0] & keys[1]


def test_the_weka_sample_has_three_sessions_with_an_id_per_page() -> None:
    trace = read_trace(DATA / "weka_sample.jsonl.gz")
    assert (len(trace.requests), len({r.session for r in trace.requests})) == (29, 3)
    assert all(len(r.keys) == r.input_tokens // 64 for r in trace.requests)


def test_weka_ids_that_do_not_fit_the_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"trace:1: block_size is 32.*--page-tokens 32"):
        read(tmp_path, weka([(0.0, "main", 64, [[1, 2]])], block_size=32))
    with pytest.raises(InvalidRequest, match=r"trace:1: hash_runs has 9 ids"):
        read(tmp_path, weka([(0.0, "main", 128, [[1, 9]])]))
    with pytest.raises(InvalidRequest, match=r"trace:1: hash_runs must be"):
        read(tmp_path, weka([(0.0, "main", 128, [[1]])]))


def test_chitchat_turns_are_prompts_and_answers_at_their_own_times(tmp_path: Path) -> None:
    text = '{"turns": [[0, 4, 100], [10, 12, 30], [20, 22, 7], [30, 40, 5], [50, 50, 9]]}\n'
    first, second = read(tmp_path, text, ReadOptions(page_tokens=10)).requests
    assert (first.input_tokens, first.output_tokens) == (100, 30)
    assert (second.input_tokens, second.output_tokens) == (137, 5)
    assert second.think_s == 10  # from the end of the answer to the end of the next prompt
    assert second.arrival_s - first.arrival_s == 18
    assert list(second.keys) == [*first.kept]


def test_servegen_draws_as_many_requests_as_the_rates_say(tmp_path: Path) -> None:
    """Gaps are scaled to their window, so each window has its exact count up to rounding."""
    rows = ["0,1200,0.5,2.0,Gamma,0.25,9.0", "1,1200,0.1,1.5,Weibull,0.5,3", "0,1800,1,1,Gamma,1,1"]
    text = SERVEGEN + "\n".join(rows)
    trace = read(tmp_path, text, LENGTHS)
    windows = [
        sum(begin <= r.arrival_s < begin + 600 for r in trace.requests) for begin in (0, 600)
    ]
    assert windows == [360, 600]
    assert {r.session for r in trace.requests} == {0, 1}
    assert {(r.input_tokens, r.output_tokens) for r in trace.requests} == {(1000, 200)}
    assert not trace.can_share
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace.requests))
    slow = read(tmp_path, text, ReadOptions(prompt_tokens=9, answer_tokens=9, rate=0.08))
    assert len(slow.requests) == pytest.approx(96, abs=2)


def test_servegen_needs_lengths_and_a_limit(tmp_path: Path) -> None:
    text = SERVEGEN + "0,0,9000,1,Gamma,1,1\n"
    with pytest.raises(InvalidRequest, match=r"^--prompt-tokens: .* set --prompt-tokens N and"):
        read(tmp_path, text)
    with pytest.raises(InvalidRequest, match=r"--limit: these rates make 5,400,000 requests"):
        read(tmp_path, text, LENGTHS)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (mooncake(1, 1024, [1]), "fill 2 pages"),
        (mooncake(1, 512, ["a"]), "hash_ids"),  # type: ignore[list-item]
        (mooncake(1, -5, [1]), "input_length"),
        (mooncake(-1, 512, [1]), "timestamp"),
        (mooncake(float("nan"), 512, [1]), "timestamp"),
        ('{"timestamp": 1}', "input_length"),
    ],
)
def test_the_error_names_a_bad_line(tmp_path: Path, bad: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"trace:3: .*{reason}"):
        read(tmp_path, f"{GOOD}\n{bad}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("timestamp_ms,input_length,output_length\n0,x,1\n", ":2: lengths"),
        ("timestamp_ms,input_length,output_length\nnoon,1,1\n", ":2: 'noon'"),
        ("timestamp_ms,input_length,output_length\n0,1\n", ":2: 2 columns"),
        ('{"turns": [[1, 2]]}\n{"turns": [[1]]}\n', ":2: turns"),
        ('{"turns": [[1, 2]]}\n{"turns": [[1, -2]]}\n', ":2: turns"),
        ('{"turns": [[1, 2, 3]]}\n{"turns": [[1, 2]]}\n', ":2: turns"),
        (f"{SERVEGEN}0,0,1,1,Gamma,1\n", ":2: 6 columns"),
        (f"{SERVEGEN}0,0,fast,1,Gamma,1,1\n", ":2: .*fast"),
        (f"{SERVEGEN}0,0,1,1,Pareto,1,1\n", ":2: pattern"),
        (f"{SERVEGEN}0,0,1,1,Gamma,0,1\n", ":2: out of range: a rate of 1, shape 0"),
        ("hello\n", ":1: not a trace in a known format"),
        ("", "not a trace"),
        ("timestamp_ms,input_length,output_length\n", "holds no request"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read(tmp_path, text, LENGTHS)


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="chat_id"):
        read(tmp_path, GOOD, ReadOptions(format=TraceFormat.QWEN, page_tokens=512))
    with pytest.raises(InvalidRequest, match="turns"):
        read(tmp_path, GOOD, ReadOptions(format=TraceFormat.SESSIONS))


def test_the_error_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(GOOD.encode() * 500)[:-20])
    with pytest.raises(InvalidRequest, match=r"broken\.gz"):
        read_trace(broken)


def test_think_times_are_read_from_timings_of_people(tmp_path: Path) -> None:
    shipped = load_think_times(None)
    assert len(shipped) == 1000
    assert sorted(shipped)[500] == 17
    path = tmp_path / "timing.jsonl"
    path.write_text('{"turns": [[0, 3, 9], [10, 12, 9], [11, 20, 9]]}\n')
    assert load_think_times(path) == [7.0, 0.0]
    path.write_text('{"turns": 5}\n')
    with pytest.raises(InvalidRequest, match=":1"):
        load_think_times(path)


@pytest.mark.parametrize("outgrown", list(Outgrown))
def test_a_session_that_outgrows_the_window_ends_or_is_truncated(
    tmp_path: Path, outgrown: Outgrown
) -> None:
    """A turn has 30 prompt and 20 answer tokens. The third would reach 150, the window is 120."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"turns": [[30, 20]] * 4}) + "\n")
    options = ReadOptions(page_tokens=10, context_tokens=120, outgrown=outgrown)
    requests = read_trace(path, options).requests
    sizes = [request.input_tokens for request in requests]
    keys = [list(request.keys) for request in requests]
    kept = [list(request.kept) for request in requests]
    assert keys[:2] == [[0, 1, 2], list(range(8))]
    assert kept[1] == list(range(10))
    if outgrown is Outgrown.LEFT_OUT:
        assert sizes == [30, 80]
        return
    assert sizes == [30, 80, 100 - 60 + 30, 90 - 60 + 30]
    first = 6 if outgrown is Outgrown.KEPT else 10
    assert keys[2] == list(range(first, first + 7))
    assert kept[2] == list(range(first, first + 9))


def test_overflow_needs_lengths_and_a_window(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"turns": [[30, 20]]}) + "\n")
    with pytest.raises(ConfigError, match="context-tokens"):
        read_trace(path, ReadOptions(outgrown=Outgrown.KEPT))
    with pytest.raises(ConfigError, match="mooncake"):
        read(
            tmp_path,
            mooncake(0, 512, [1]),
            ReadOptions(context_tokens=9, outgrown=Outgrown.INVALID),
        )
