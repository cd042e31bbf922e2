"""The load generator against a scripted server on loopback."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Event, Lock, Thread
from time import sleep

import pytest

from mainstem.core.errors import ConfigError, MainstemError
from mainstem_bench import gaps
from mainstem_bench.conversations import Dialogue, DialogueShape, from_file, made_up
from mainstem_bench.serve import LoadLimits, main, summary, take
from mainstem_bench.sse_client import Endpoint, StreamedAnswer
from tests.bench.rounded import printed
from tests.server.running import a_server

KEY = "k-123"


class FakeServer(ThreadingHTTPServer):
    """The name of the model decides what it answers. Records requests and how many ran at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = Lock()
        self.asked: list[dict[str, object]] = []
        self.num_open = self.most_open = 0
        self.is_crowded = Event()  # more than `crowd` requests were open at once
        self.crowd = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send_json({"data": [{"id": "plain"}, {"id": "other"}]}, 200)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
            if self.server.num_open > self.server.crowd:
                self.server.is_crowded.set()
        self.server.is_crowded.wait(300)
        self._answer(asked)

    def _leave(self) -> None:
        """Before the client can know that the request has ended."""
        with self.server.lock:
            self.server.num_open -= 1

    def _answer(self, asked: dict[str, object]) -> None:
        model = asked["model"]
        if model == "keyed" and self.headers.get("Authorization") != f"Bearer {KEY}":
            self._send_json({"error": {"message": "no key"}}, 401)
            return
        if model == "full":
            self._send_json({"error": {"message": "the queue is full"}}, 429)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        is_chunked = model == "chunked"
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        self._event(is_chunked, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for word in ("three", " short", " words"):
            sleep(0.01)
            self._event(is_chunked, {"choices": [{"index": 0, "delta": {"content": word}}]})
        if model == "cut":
            return
        if model == "broken":
            self._event(is_chunked, {"error": {"message": "the engine is gone"}})
            return
        usage: dict[str, object] = {"prompt_tokens": 40, "completion_tokens": 4}
        if model != "plain":
            usage["prompt_tokens_details"] = {"cached_tokens": 32}
        self._event(is_chunked, {"choices": [], "usage": usage})
        self._leave()
        self._event(is_chunked, "[DONE]")
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _event(self, is_chunked: bool, event: object) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}\n\n".encode()
        for piece in (data[:7], data[7:]):  # a client must not rely on whole events
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            self.wfile.flush()

    def _send_json(self, body: object, status: int) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as made:
        thread = Thread(target=made.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def measure(
    server: FakeServer, capsys: pytest.CaptureFixture[str], flags: str
) -> tuple[int, dict[str, object]]:
    status = main(["--url", server.url, "--json", "--warmup", "0", *flags.split()])
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return status, result


@pytest.mark.parametrize("model", ["plain", "chunked"])
def test_a_closed_loop_measures_every_request(
    server: FakeServer, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    flags = f"--requests 10 --concurrency 3 --model {model} --prefix 20 --own 5 --max-tokens 7"
    status, result = measure(server, capsys, flags)
    assert status == 0
    assert result["requests"] == 10
    assert result["failed"] == 0
    assert result["output_tokens"] == 40
    assert result["prompt_tokens"] == 400
    assert result["cached_tokens"] == (None if model == "plain" else 320)
    assert server.most_open <= 3
    # the server waits 10 ms before each of the three words
    assert float(str(result["ttft_ms_p50"])) >= 10
    assert float(str(result["e2e_ms_p50"])) >= 30
    assert (printed(result["norm_ms_mean"], 2) * 4).may_be(printed(result["e2e_ms_mean"], 2))
    asked = server.asked[0]
    assert asked["max_tokens"] == 7
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}
    openings = {json.dumps(each["messages"][0]) for each in server.asked}  # type: ignore[index]
    assert len(openings) == 1  # one system prompt for all


def test_poisson_arrivals_do_not_wait_for_answers(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.crowd = 5
    status, result = measure(server, capsys, "--requests 20 --rate inf --prefix 0 --own 3")
    assert status == 0
    assert result["model"] == "plain"  # the first model that the server lists
    assert server.most_open > 5
    status, timed = measure(server, capsys, "--requests 20 --rate 50 --prefix 0 --own 3")
    assert status == 0
    assert float(str(timed["seconds"])) > 0.4  # 19 gaps of 20 ms on average: the seed's take 0.46


def test_turns_carry_the_answers_before_them(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(server, capsys, "--requests 5 --concurrency 1 --turns 3 --prefix 4 --own 2")
    lengths = [len(each["messages"]) for each in server.asked]  # type: ignore[arg-type]
    assert lengths == [2, 4, 6, 2, 4]  # the second conversation is cut at the fifth request
    assert server.asked[1]["messages"][2] == {  # type: ignore[index]
        "role": "assistant",
        "content": "three short words",
    }


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("full", "the queue is full"),
        ("cut", "ended before [DONE]"),
        ("broken", "the engine is gone"),
        ("keyed", "401"),
    ],
)
def test_failures_are_reported_and_left_out_of_the_numbers(
    server: FakeServer, capsys: pytest.CaptureFixture[str], model: str, reason: str
) -> None:
    flags = ["--json", "--warmup", "0", "--requests", "3", "--model", model, "--prefix", "0"]
    assert main(["--url", server.url, *flags]) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["failed"] == 3
    assert result["requests_per_s"] == 0
    assert result["ttft_ms_mean"] is None
    assert f"3 failed: {'HTTP ' if reason == '401' else ''}" in said.err
    assert reason in said.err


def test_a_key_comes_from_a_file(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    status, _ = measure(server, capsys, f"--requests 1 --model keyed --api-key-file {path}")
    assert status == 0


def test_our_own_server_reports_cached_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with a_server() as running:
        flags = "--json --requests 6 --concurrency 2 --prefix 40 --own 4 --max-tokens 5"
        assert main(["--url", running.url, *flags.split(), "--ignore-eos"]) == 0
        running.settle()
    result = json.loads(capsys.readouterr().out)
    assert result["output_tokens"] == 30
    assert result["cached_tokens"] > result["prompt_tokens"] // 2


def test_gaps_of_streams_are_measured_beside_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """The streams still run when the prompts are answered; the lines name their tokens."""
    with a_server() as running:
        flags = ["--url", running.url, "--streams", "2", "--prompts", "9,60", "--alone-s", "0"]
        assert gaps.main(flags) == 0
        running.settle()
    alone, *beside = map(json.loads, capsys.readouterr().out.splitlines())
    assert (alone["bench"], alone["streams"], alone["prompt_tokens"]) == ("gaps", 2, 0)
    assert 9 < beside[0]["prompt_tokens"] < beside[1]["prompt_tokens"]
    assert all(each["prompt_ttft_s"] >= 0 for each in beside)
    assert "gap_ms_max" in alone


def test_gaps_need_a_server() -> None:
    with pytest.raises(MainstemError, match="Connect call failed"):
        gaps.main(["--url", "http://127.0.0.1:9"])


def test_without_json_the_result_is_a_table(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", f"{server.url}/v1/", "--requests", "2"]) == 0
    assert "goodput_per_s" in capsys.readouterr().out


def test_a_missing_server_is_an_error_without_a_traceback() -> None:
    with pytest.raises(MainstemError, match=r"127\.0\.0\.1"):
        main(["--url", "http://127.0.0.1:1", "--requests", "1", "--timeout-s", "5"])


@pytest.mark.parametrize(
    "flags",
    [
        "--rate 0",
        "--rate nan",
        "--url ftp://x",
        "--api-key-file nowhere",
    ],
)
def test_wrong_flags_are_refused(flags: str) -> None:
    with pytest.raises(ConfigError):
        main(flags.split())


def an_answer(first_s: float, gap_s: float) -> StreamedAnswer:
    pieces = [10 + first_s + gap_s * index for index in range(3)]
    return StreamedAnswer(sent_s=10, piece_s=pieces, ended_s=pieces[-1], output_tokens=3)


def test_latencies_are_those_of_the_answers_in_milliseconds() -> None:
    result = summary([an_answer(0.1, 0.01), an_answer(0.3, 0.03)], 2.0, LoadLimits())
    names = ("ttft_ms_mean", "itl_ms_mean", "e2e_ms_mean", "norm_ms_mean")
    assert [result[name] for name in names] == [200.0, 20.0, 240.0, 80.0]


def test_goodput_counts_requests_within_both_limits() -> None:
    answers = [an_answer(0.1, 0.01), an_answer(0.9, 0.01), an_answer(0.1, 0.5)]
    assert summary(answers, 2.0, LoadLimits())["goodput_per_s"] == 1.5
    assert summary(answers, 2.0, LoadLimits(ttft_s=0.5))["goodput_per_s"] == 1.0
    assert summary(answers, 2.0, LoadLimits(ttft_s=0.5, itl_s=0.1))["goodput_per_s"] == 0.5


def test_the_first_minute_is_told_apart() -> None:
    """A server that compiles at its first requests answers only these late."""
    late = [an_answer(5.0, 0.01), an_answer(0.1, 0.01)]
    quick = [replace(an_answer(0.2, 0.01), sent_s=70.0, piece_s=[70.2, 70.21, 70.22])]
    found = summary([*quick, *late], 62.0, LoadLimits())
    assert found["minute_ttft_ms_p99"] == pytest.approx(4951)
    assert found["later_ttft_ms_p99"] == pytest.approx(200)
    assert summary(late, 2.0, LoadLimits())["later_ttft_ms_p99"] is None


def test_synthetic_conversations_are_seeded_and_groups_share_an_opening() -> None:
    shape = DialogueShape(prefix_words=6, own_words=3, groups=2, turns=2)
    first = list(islice(made_up(shape, 1), 6))
    assert first == list(islice(made_up(shape, 1), 6))
    assert first != list(islice(made_up(shape, 2), 6))
    assert len({each.opening[0]["content"] for each in first}) == 2
    assert all(len(each.questions) == 2 for each in first)
    assert len({question for each in first for question in each.questions}) == 12


def test_take_cuts_the_last_conversation() -> None:
    taken = take(iter([Dialogue((), ("a", "b")), Dialogue((), ("c", "d"))]), 3)
    assert [each.questions for each in taken] == [("a", "b"), ("c",)]


def test_every_format_of_a_dataset_is_read(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"prompt": "q"},
        {"turns": ["q", "r"]},
        {"system": "s", "turns": ["q"]},
        {"messages": [{"role": "system", "content": "s"}, user, answer, user]},
        {"messages": [{"role": "system", "content": "s"}, user, answer, user, answer]},
        {"custom_id": "1", "body": {"messages": [user]}},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "set.jsonl").write_text(text)
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found = from_file(tmp_path / "set.jsonl")
    assert found == from_file(tmp_path / "set.jsonl.gz")
    shapes = [(len(each.opening), each.questions) for each in found]
    assert shapes == [
        (0, ("q",)),
        (0, ("q", "r")),
        (1, ("q",)),
        (3, ("q",)),
        (1, ("q", "q")),
        (0, ("q",)),
        (0, ("q",)),
    ]


@pytest.mark.parametrize("row", ["[]", "{}", "{", '{"prompt": 3}', '{"messages": []}', ""])
def test_a_bad_dataset_names_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ConfigError, match=r"line 1|is empty"):
        from_file(path)


def test_urls_may_carry_a_path_and_v1() -> None:
    assert Endpoint.parse("http://h") == Endpoint("h", 80, "", False)
    assert Endpoint.parse("https://h/v1/") == Endpoint("h", 443, "", True)
    assert Endpoint.parse("http://h:9/a/v1", "k") == Endpoint("h", 9, "/a", False, "k")
