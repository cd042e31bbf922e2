"""Pages on a server that processes share: the next process finds and checks them, and answers
without them if the server fails in any way."""

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic
from typing import Any

import pytest

from mainstem.core.config import Fetch, RemoteSecrets, StoreConfig
from mainstem.core.errors import ConfigError, StoreError
from mainstem.core.events import EventBus, PagesEvicted, PagesLoaded, PagesLost, SavesSkipped
from mainstem.core.ids import PageKey
from mainstem.engine.tiers import make_remote
from mainstem.kv import stack as stack_module
from mainstem.kv.bytes import line as line_module
from mainstem.kv.bytes import remote as remote_module
from mainstem.kv.bytes.line import (
    Address,
    Command,
    LineError,
    Overdue,
    RemoteLine,
    RemoteRefusal,
    Reply,
    check_url,
)
from mainstem.kv.bytes.remote import RemoteTier
from mainstem.kv.tier import Answer, Read, ReadJob, WriteJob, Written
from mainstem.kv.transfer import DistantLink
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.redis_server import LONG_S, Proxy, RedisServer, free_port, wait_long
from tests.kv.tiered import REMOTE, Tiered, a_tiered_engine
from tests.needs import skip_without
from tests.waiting import until

PROMPT = list(range(40))
PAGE = 256
ENOUGH_S = 100.0  # to answer, on any machine; far less than LONG_S
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    skip_without("redis-server")
    (tmp_path / "redis").mkdir()
    made = RedisServer(tmp_path / "redis")
    yield made
    made.stop()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long(monkeypatch)


class Seen:
    """Events of an engine about its tiers."""

    def __init__(self) -> None:
        self.bus = EventBus()
        self.loaded: list[PagesLoaded] = []
        self.lost: list[PagesLost] = []
        self.skipped: list[SavesSkipped] = []
        self.evicted: list[PagesEvicted] = []
        self.bus.subscribe(PagesLoaded, self.loaded.append)
        self.bus.subscribe(PagesLost, self.lost.append)
        self.bus.subscribe(SavesSkipped, self.skipped.append)
        self.bus.subscribe(PagesEvicted, self.evicted.append)

    def num_loaded(self, tier: str = "remote") -> int:
        return sum(event.num_pages for event in self.loaded if event.tier == tier)


def answer(tiered: Tiered, prompt: list[int] = PROMPT) -> None:
    """Ask, and check the answer."""
    request = a_request(prompt, 4)
    got = run_all(tiered.engine, [request])
    assert got.tokens[str(request.request_id), 0] == fake_answer(prompt, 4, VOCAB)
    tiered.engine.check()


def store_prompt(url: str, prompt: list[int] = PROMPT) -> None:
    """An engine computes a prompt and closes."""
    first = a_tiered_engine(remote=Address(url))
    answer(first, prompt)
    first.engine.close()


# -- connections -----------------------------------------------------------------------------------


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def exchange(address: Address) -> None:
    """Write pages, ask for them, and read them back."""
    tier = RemoteTier(address, PAGE, REMOTE)
    for number in range(20):
        assert tier.take_place(key(number))
        tier.write(WriteJob(key(number), b"tokens", memoryview(bytes([number]) * PAGE)))
    tier.flush()
    assert list(tier.poll()) == [Written(key(number)) for number in range(20)]
    tier.ask([key(number) for number in range(30)])
    assert wait(tier, 1) == [Answer(key(29), [key(number) for number in range(20)])]
    buffers = [memoryview(bytearray(PAGE)) for _ in range(20)]
    tier.read([ReadJob(key(number), buffers[number]) for number in range(20)], LONG_S)
    for done in wait(tier, 20):
        assert isinstance(done, Read)
        assert done.problem is None
        assert done.token_ids == b"tokens"
    assert buffers == [bytes([number]) * PAGE for number in range(20)]
    tier.close()


def wait(tier: RemoteTier, count: int) -> list[object]:
    found: list[object] = []

    def has_come() -> bool:
        found.extend(tier.poll())
        return len(found) >= count

    until(has_come)
    return found


def test_pages_are_exchanged_over_tcp_with_either_url_scheme(server: RedisServer) -> None:
    exchange(Address(server.url))
    exchange(Address(server.url.replace("redis://", "valkey://") + "/3"))


def test_pages_are_exchanged_over_a_unix_socket(server: RedisServer) -> None:
    exchange(Address(f"unix://{server.socket}"))


def test_pages_are_exchanged_over_tls(tmp_path: Path) -> None:
    skip_without("redis-server")
    skip_without("openssl")
    certificate, private = tmp_path / "server.crt", tmp_path / "server.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(private), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = RedisServer(tmp_path, "--tls-cert-file", str(certificate), "--tls-key-file",
                         str(private), "--tls-auth-clients", "no", "--tls-port", "0")  # fmt: skip
    try:
        port = remote_port(server)
        exchange(Address(f"rediss://localhost:{port}?ssl_ca_certs={certificate}"))
        exchange(Address(f"valkeys://localhost:{port}?ssl_ca_certs={certificate}"))
        untrusting = RemoteTier(Address(f"rediss://localhost:{port}"), PAGE, REMOTE)
        untrusting.ask([key(0)])  # the server's certificate is not trusted
        assert Answer(key(0), ()) in wait(untrusting, 2)
        untrusting.close()
    finally:
        server.stop()


def remote_port(server: RedisServer) -> int:
    """A second port, for TLS."""
    port = free_port()
    assert server.call("CONFIG", "SET", "tls-port", str(port)) == b"OK"
    return port


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:secret@host:1", "remote-secrets"),
        ("redis://user@host", "remote-secrets"),
        ("http://host", "redis://HOST:PORT"),
        ("redis://", "redis://HOST:PORT"),
        ("redis://host:port", "redis://HOST:PORT"),
        ("redis://host?retries=3", "unknown option 'retries'"),
    ],
)
def test_bad_addresses_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_url(url)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_certificate_must_name_the_host(scheme: str) -> None:
    connection: Any = RemoteLine(Address(f"{scheme}://host"))._connection
    assert connection.check_hostname


def test_secrets_are_not_printed() -> None:
    assert "right" not in repr(Address("redis://host", "pages", "right"))
    assert "right" not in repr(replace(REMOTE, secret=b"right"))


def test_without_a_client_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_module, "CLIENTS", ("no_such_client",))
    with pytest.raises(ConfigError, match=r"pip install 'mainstem\[remote\]'"):
        RemoteTier(Address("redis://host"), PAGE, REMOTE)


def test_credentials_come_from_a_file_or_the_environment(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.call("ACL", "SETUSER", "pages", "on", ">right", "~*", "+@all")
    server.call("CONFIG", "SET", "requirepass", "other")
    secrets = tmp_path / "secrets.toml"
    config = StoreConfig(remote=server.url, remote_secrets=str(secrets))

    def open_it(config: StoreConfig) -> None:
        make_remote(server.url, b"model", PAGE, config).close()

    secrets.write_text('username = "pages"\npassword = "right"\nkey = "k"\n')
    open_it(config)
    secrets.write_text('username = "pages"\npassword = "wrong"\n')
    with pytest.raises(StoreError, match="refuses us") as caught:
        open_it(config)
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    monkeypatch.setenv("MAINSTEM_REMOTE_PASSWORD", "other")
    open_it(StoreConfig(remote=server.url))
    secrets.write_text('passphrase = "x"\n')
    with pytest.raises(ConfigError, match="passphrase"):
        open_it(config)
    assert "right" not in repr(RemoteSecrets(password="right"))


# -- what is shared --------------------------------------------------------------------------------


def test_the_next_engine_finds_computed_pages(server: RedisServer) -> None:
    store_prompt(server.url)
    seen = Seen()
    second = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    answer(second)
    assert seen.num_loaded() == 9, "all but the page of the last token"
    second.engine.close()


ANOTHER = """
import sys
from tests.kv.test_remote import store_prompt
store_prompt(sys.argv[1])
"""


def test_another_process_finds_computed_pages(server: RedisServer) -> None:
    subprocess.run([sys.executable, "-c", ANOTHER, server.url], check=True, cwd=ROOT)
    seen = Seen()
    second = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    answer(second, [*PROMPT, 1, 2, 3])
    assert seen.num_loaded() == 10
    second.engine.close()


def test_models_and_secrets_have_separate_pages(server: RedisServer) -> None:
    store_prompt(server.url)
    for other in (replace(REMOTE, identity=b"other"), replace(REMOTE, secret=b"other")):
        seen = Seen()
        tiered = a_tiered_engine(remote=Address(server.url), remote_settings=other, bus=seen.bus)
        answer(tiered)
        assert seen.num_loaded() == 0
        assert not seen.lost
        tiered.engine.close()


def test_values_not_written_with_the_secret_are_refused(server: RedisServer) -> None:
    """Values of other pages, changed bytes, and values that are not pages."""
    store_prompt(server.url)
    names = sorted(server.names())
    values = [server.call("GET", name) for name in names]
    damages: list[list[object]] = [values[1:] + values[:1]]
    damages.append([value[:-1] + b"\x55" for value in values if isinstance(value, bytes)])
    damages += [[b""] * len(names), [b"x" * 70] * len(names)]
    for damaged in damages:
        for name, value in zip(names, damaged, strict=True):
            assert isinstance(value, bytes)
            server.call("SET", name, value)
        seen = Seen()
        tiered = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
        answer(tiered)
        assert {event.reason for event in seen.lost} <= {"checksum", "format"}
        assert seen.lost
        assert seen.num_loaded() == 0
        tiered.engine.close()
    server.call("DEL", names[0])
    server.call("LPUSH", names[0], "not a string")
    tiered = a_tiered_engine(remote=Address(server.url))
    answer(tiered)
    tiered.engine.close()


def test_damaged_pages_are_stored_again(server: RedisServer) -> None:
    store_prompt(server.url)
    for name in server.names():
        server.call("SET", name, b"rubbish")
    store_prompt(server.url)
    seen = Seen()
    third = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    answer(third)
    assert seen.num_loaded() == 9
    third.engine.close()


def test_pages_evicted_from_disk_go_to_the_server(server: RedisServer, tmp_path: Path) -> None:
    """Even if the server was down when they were saved."""
    tiered = a_tiered_engine(
        num_slots=48, num_records=50, disk_dir=tmp_path / "disk", remote=Address(server.url)
    )
    server.stop()
    answer(tiered)
    tiered.store.flush()
    server.start()
    until_tried_again(tiered)
    rng = Random(0)
    for _ in range(50):
        answer(tiered, [rng.randrange(VOCAB) for _ in range(8)])
        tiered.store.flush()
    tiered.engine.close()
    seen = Seen()
    second = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    answer(second)
    assert seen.num_loaded() == 9
    second.engine.close()


# -- failures -------------------------------------------------------------------------------


def until_tried_again(tiered: Tiered) -> None:
    """Wait until the pause after the last failure is over."""
    (remote,) = (tier for _, tier in tiered.stack.below if tier.name == "remote")
    until(lambda: remote.can_write)


def test_an_unreachable_server_is_logged_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    with caplog.at_level(logging.WARNING, "mainstem.store"):
        tiered = a_tiered_engine(remote=Address(server.url))
        for first in range(10):
            answer(tiered, list(range(first, first + 40)))
    assert len([line for line in caplog.messages if "failed" in line]) == 1
    server.start()
    others = iter(range(10, 50))

    def is_back() -> bool:
        first = next(others)
        answer(tiered, list(range(first, first + 40)))
        tiered.store.flush()
        until_tried_again(tiered)
        return "is back" in caplog.messages[-1]

    until(is_back)
    answer(tiered, list(range(50, 90)))
    tiered.store.flush()
    assert server.names()
    tiered.engine.close()


def test_a_restarted_server_costs_hits_and_no_answer(server: RedisServer) -> None:
    seen = Seen()
    tiered = a_tiered_engine(num_slots=4, remote=Address(server.url), bus=seen.bus)
    answer(tiered)
    tiered.store.flush()
    server.restart()
    for first in range(4):
        answer(tiered, list(range(first, first + 40)))
    answer(tiered)
    assert not seen.lost or {event.reason for event in seen.lost} == {"server lost"}
    tiered.engine.close()


def test_a_server_that_hangs_before_a_read_delays_no_request(server: RedisServer) -> None:
    """Nothing but the request's own limit ends the read: all others are long."""
    store_prompt(server.url)
    tiered = a_tiered_engine(remote=Address(server.url), fetch=Fetch.AUTO)
    asked = tiered.store.loader.questions.ask(
        tiered.store.chain(a_request(PROMPT, 1).prompt_ids, b"").keys
    )
    assert asked is not None
    while tiered.store.loader.questions.is_open(asked):
        tiered.engine.step()
    server.pause()
    began_s = monotonic()
    answer(tiered)
    assert monotonic() - began_s < ENOUGH_S
    server.go_on()
    tiered.engine.close()


def test_a_request_does_not_wait_for_a_slow_answer(server: RedisServer, proxy: Proxy) -> None:
    """Computing 40 tokens takes 40 ms here. A request waits at most 5 % of that, 2 ms, for the
    server to say which pages it has."""
    store_prompt(server.url)
    seen = Seen()
    tiered = a_tiered_engine(remote=Address(proxy.url), fetch=Fetch.AUTO, bus=seen.bus)
    proxy.hold()
    began_s = monotonic()
    answer(tiered)
    assert monotonic() - began_s < ENOUGH_S
    assert seen.num_loaded() == 0
    proxy.let_go()
    tiered.engine.close()


def test_a_server_that_hangs_before_it_answers_delays_no_request(server: RedisServer) -> None:
    """The server was quick until then."""
    store_prompt(server.url)
    tiered = a_tiered_engine(remote=Address(server.url), fetch=Fetch.AUTO)
    server.pause()
    began_s = monotonic()
    answer(tiered)
    assert monotonic() - began_s < ENOUGH_S
    server.go_on()
    tiered.engine.close()


def test_queued_questions_to_a_hanging_server_are_dropped(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question times out, and the others are not sent."""
    monkeypatch.setattr(remote_module, "PAUSE_S", LONG_S)
    tier = RemoteTier(Address(server.url), PAGE, REMOTE)
    monkeypatch.setattr(remote_module, "ASK_LIMIT_S", 0.2)
    asked: list[object] = []
    call = RemoteLine.call

    def noted(line: RemoteLine, commands: Sequence[Command], limit_s: float) -> Iterator[Reply]:
        asked.append(commands)
        return call(line, commands, limit_s)

    monkeypatch.setattr(RemoteLine, "call", noted)
    server.pause()
    for number in range(20):
        tier.ask([key(number)])
    tier.close()
    assert len(asked) == 1
    answers = [done for done in tier.poll() if isinstance(done, Answer)]
    assert answers == [Answer(key(number), ()) for number in range(20)]


def test_a_connection_that_is_cut_while_it_opens_sends_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = RemoteLine(Address(server.url))
    find = socket.getaddrinfo

    def find_late(*args: Any, **options: Any) -> object:
        assert line.cut_if_overdue(), "the name lookup takes longer than the time limit of the call"
        return find(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_late)
    with pytest.raises(Overdue, match="connecting took too long"):
        list(line.call([("SET", "name", "value")], 0.0))
    monkeypatch.undo()
    assert list(line.call([("EXISTS", "name")], 10.0)) == [0]
    line.close()


def test_a_slow_name_lookup_is_given_up(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, look_up = Event(), socket.getaddrinfo

    def slow(host: str, *more: Any, **others: Any) -> Any:
        answered.wait(LONG_S)
        return look_up("127.0.0.1", *more, **others)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(line_module, "OPEN_S", 0.1)
    line = RemoteLine(Address(f"redis://kv.internal:{server.port}"))
    for words in ("no connection after 0.1 s", "has not ended"):
        with pytest.raises(LineError, match=words):
            list(line.call([("PING",)], 1.0))
    answered.set()
    monkeypatch.setattr(line_module, "OPEN_S", LONG_S)
    while True:  # the late lookup ends and closes its connection
        with suppress(LineError):
            assert list(line.call([("PING",)], 10.0)) == [b"PONG"]
            break
    line.close()


def test_a_full_server_is_not_written_to(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "maxmemory", "1")
    seen = Seen()
    tiered = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    answer(tiered)
    tiered.store.flush()
    assert {(event.tier, event.reason) for event in seen.skipped} == {("remote", "server full")}
    answer(tiered, PROMPT[5:])
    tiered.engine.close()


def test_a_full_server_is_still_read_from(server: RedisServer) -> None:
    store_prompt(server.url)
    seen = Seen()
    small = replace(REMOTE, max_bytes=1000)
    tiered = a_tiered_engine(remote=Address(server.url), remote_settings=small, bus=seen.bus)
    answer(tiered, PROMPT[5:])
    tiered.store.flush()
    assert {event.reason for event in seen.skipped} == {"server full"}
    assert seen.num_loaded() == 0
    answer(tiered)
    assert seen.num_loaded() == 9
    tiered.engine.close()


def write_one(server: RedisServer) -> str | None:
    """Write a page and return its problem. Checks that writing pauses afterwards."""
    tier = RemoteTier(Address(server.url), PAGE, REMOTE)
    tier.write(WriteJob(key(0), b"tokens", memoryview(bytes(PAGE))))
    tier.flush()
    (written,) = tier.poll()
    assert isinstance(written, Written)
    assert tier.is_open
    assert not tier.can_write
    tier.close()
    return written.problem


def test_a_cluster_is_reported_as_unsupported(tmp_path: Path) -> None:
    skip_without("redis-server")
    server = RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    try:
        assert write_one(server) == "clusters are not supported"
    finally:
        server.stop()
    moved = RemoteRefusal("MovedError", "866 10.0.0.2:6379")
    assert remote_module._problem(moved) == "clusters are not supported"


def test_any_refusal_of_a_page_has_one_reason_and_is_logged_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.call("REPLICAOF", "127.0.0.1", free_port())
    assert write_one(server) == "server refuses"
    assert len([words for words in caplog.messages if "refuses a page: ReadOnly" in words]) == 1


def test_closing_does_not_wait_long_for_a_slow_server(
    server: RedisServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the first of ten pages when the time for closing is over."""
    monkeypatch.setattr(remote_module, "CLOSE_LIMIT_S", 0.0)
    monkeypatch.setattr(remote_module, "WRITE_BATCH", 1)
    seen = Seen()
    tiered = a_tiered_engine(remote=Address(proxy.url), fetch=Fetch.AUTO, bus=seen.bus)
    proxy.hold()
    answer(tiered)
    end_soon = RemoteTier.end_soon

    def end(tier: RemoteTier) -> None:
        end_soon(tier)
        proxy.let_go()

    monkeypatch.setattr(RemoteTier, "end_soon", end)
    tiered.engine.close()
    assert {(event.tier, event.reason) for event in seen.skipped} == {
        ("remote", "no time at the end")
    }
    assert len(server.names()) <= 1


def test_a_server_without_a_memory_limit_is_held_to_our_limit(server: RedisServer) -> None:
    seen = Seen()
    small = replace(REMOTE, max_bytes=100_000)
    tiered = a_tiered_engine(remote=Address(server.url), remote_settings=small, bus=seen.bus)
    answer(tiered)
    tiered.store.flush()
    assert {event.reason for event in seen.skipped} == {"server full"}
    assert not server.names()
    tiered.engine.close()


def test_a_server_that_evicts_costs_hits_and_no_answer(server: RedisServer) -> None:
    store_prompt(server.url)
    seen = Seen()
    tiered = a_tiered_engine(remote=Address(server.url), bus=seen.bus)
    asked = tiered.store.loader.questions.ask(
        tiered.store.chain(a_request(PROMPT, 1).prompt_ids, b"").keys
    )
    assert asked is not None
    while tiered.store.loader.questions.is_open(asked):
        tiered.store.poll()
    server.call("FLUSHALL")
    answer(tiered)
    assert not seen.lost
    assert sum(event.num_pages for event in seen.evicted if event.tier == "remote") > 0
    tiered.engine.close()


def test_pages_expire_unless_they_are_used(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(stack_module, "monotonic", lambda: now_s)

    def left_ms(name: bytes) -> int:
        reply = server.call("PTTL", name)
        assert isinstance(reply, int)
        return reply

    tiered = a_tiered_engine(num_pages=32, remote=Address(server.url))
    answer(tiered)
    answer(tiered, list(range(50, 90)))
    tiered.store.flush()
    names = server.names()
    assert len(names) == 20
    assert all(2_000_000 < left_ms(name) <= 3_600_000 for name in names)
    for name in names:
        server.call("PEXPIRE", name, 1_000_000)
    answer(tiered)
    now_s += 10.0
    tiered.store.poll()
    tiered.store.flush()
    used = [name for name in names if left_ms(name) > 2_000_000]
    assert 9 <= len(used) <= 10, "only the last token's page was not used"
    tiered.engine.close()


def test_an_unexpected_error_in_a_thread_fails_its_loads(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_prompt(server.url)
    seen = Seen()
    tiered = a_tiered_engine(remote=Address(server.url), bus=seen.bus)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RemoteTier, "_take", fail)
        answer(tiered)
        assert {event.reason for event in seen.lost} == {"server lost"}
        patch.setattr(RemoteTier, "_value", fail)
        patch.setattr(RemoteTier, "_ask", fail)
        answer(tiered, PROMPT[3:])
        tiered.store.flush()
    until_tried_again(tiered)
    answer(tiered, PROMPT[6:])
    tiered.store.flush()
    answer(tiered, PROMPT[6:])
    tiered.engine.close()


def test_a_connection_may_be_cut_at_any_moment(proxy: Proxy) -> None:
    tiered = a_tiered_engine(num_slots=8, remote=Address(proxy.url))
    for first in range(30):
        if first % 3 == 0:
            proxy.cut()
        answer(tiered, list(range(first % 5, first % 5 + 40)))
    tiered.engine.close()


# -- the round trip --------------------------------------------------------------------------------


def test_the_round_trip_is_measured_separately_from_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 10.0
    monkeypatch.setattr("mainstem.kv.transfer.perf_counter", lambda: now_s)
    link = DistantLink(100e6)
    for _ in range(20):
        link.note_round_trip(0.1)
    assert link.pass_s(100_000_000) == pytest.approx(1.1)
    assert link.expect_s(0) == 0.0, "nothing is queued"
    link.note_round_trip(0.001)
    assert link.round_trip_s == pytest.approx(0.001)
    link.note_late()
    assert link.pass_s(100_000_000) == pytest.approx(2.001)
    now_s += 100.0
    assert link.pass_s(100_000_000) == pytest.approx(1.001), "the link is tried again"
