"""How the round trip to a server changes the time to the first token, with a real model.

Run as a script, this prints its measurements: 90,000 tokens of prompts, minutes on a CPU. The test
has a fifth of them.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import pytest

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Int32s
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from tests.kv.redis_server import RedisServer
from tests.needs import skip_without

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS, SHORTEST, LONGEST = 50, 64, 2048
FEW_REQUESTS, RATHER_LONG = 20, 1024  # of the test
NEW = 16  # tokens after a prefix
LATENCIES_MS = (1, 10, 100)
VOCAB = 40_000


@contextmanager
def proxy_url(server: RedisServer, delay_ms: float) -> Iterator[str]:
    """A proxy in a separate process, so that it does not share Python's lock."""
    command = [sys.executable, "-m", "tests.kv.redis_server", str(server.port), str(delay_ms / 1e3)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"redis://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


class Asked:
    """An engine on smollm2; counts the prompt tokens that it did not have to compute."""

    def __init__(self, folder: Path, remote: str | None) -> None:
        bus = EventBus()
        store = StoreConfig() if remote is None else StoreConfig(host_gb=0.4, remote=remote)
        config = EngineConfig(
            model=ModelConfig(), cache=CacheConfig(kv_tokens=4 * LONGEST), store=store
        )
        self.engine: Engine = build_engine(folder, config, bus)
        self._num_asked = self.num_cached = 0

    def first_s(self, prompt: Int32s) -> tuple[float, int]:
        """Returns the seconds to the first token, and that token."""
        self._num_asked += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        began_s = perf_counter()
        self.engine.submit(Request(RequestId(str(self._num_asked)), prompt, sampling))
        token = -1
        while self.engine.has_work:
            for news in self.engine.step():
                token = int(news.token_ids[0])
                self.num_cached += news.num_cached_tokens
        return perf_counter() - began_s, token


@dataclass(frozen=True)
class Found:
    """By engine: seconds to the first token of each request, and prompt tokens not computed."""

    seconds: dict[str, list[float]]
    cached: dict[str, int]

    def mean_s(self, name: str) -> float:
        return float(np.mean(self.seconds[name]))


def prompts(seed: int, lengths: Sequence[int]) -> list[Int32s]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def measure_traffic(
    folder: Path,
    server: RedisServer,
    num_requests: int = NUM_REQUESTS,
    longest: int = LONGEST,
) -> Found:
    """Half of the requests find their prefix on the server. Requests are sent one after the other,
    each to an engine without a store and to one engine for each latency, so that the machine is in
    the same state for all engines."""
    rng = np.random.default_rng(0)
    lengths = np.geomspace(SHORTEST, longest, num_requests).astype(int)
    rng.shuffle(lengths)
    known = prompts(1, lengths[::2].tolist())
    writer = Asked(folder, server.url)
    for prefix in known:
        writer.first_s(prefix)
        writer.engine.flush()
    writer.engine.close()
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engines = {"none": Asked(folder, None)}
        for latency_ms in LATENCIES_MS:
            url = stack.enter_context(proxy_url(server, latency_ms))
            engines[f"{latency_ms} ms"] = Asked(folder, url)
        for name, engine in engines.items():
            for prompt in prompts(3, [200, 200]):  # to warm up
                engine.first_s(prompt)
            seconds[name] = []
        for index, length in enumerate(lengths.tolist()):
            tokens = set()
            for number, (name, engine) in enumerate(engines.items()):
                seed = 100 if index % 2 == 0 else 1000 * (number + 1) + index
                prefix = known[index // 2] if index % 2 == 0 else prompts(seed, [length])[0]
                prompt = np.concatenate([prefix, *prompts(index + 5000, [NEW])])
                took_s, token = engine.first_s(prompt)
                seconds[name].append(took_s)
                tokens.add(token)
            assert index % 2 or len(tokens) == 1, "pages from the server changed an answer"
        cached = {name: engine.num_cached for name, engine in engines.items()}
        for engine in engines.values():
            engine.engine.close()
    return Found(seconds, cached)


def measure_hit(folder: Path, server: RedisServer, num_tokens: int = 1024) -> Found:
    """Compares computing a prefix with loading it from a server 1 ms away, in a new engine."""
    seconds: dict[str, list[float]] = {"none": [], "1 ms": []}
    num_cached = 0
    with proxy_url(server, 1) as url:
        for repeat in range(3):
            (prefix,) = prompts(70 + repeat, [num_tokens])
            writer = Asked(folder, server.url)
            for prompt in prompts(3, [200, 200]):
                writer.first_s(prompt)
            took_s, _ = writer.first_s(np.append(prefix, np.int32(5)))
            seconds["none"].append(took_s)
            writer.engine.close()
            reader = Asked(folder, url)
            for prompt in prompts(4 + repeat, [200, 200]):
                reader.first_s(prompt)
            took_s, _ = reader.first_s(np.append(prefix, np.int32(5)))
            seconds["1 ms"].append(took_s)
            num_cached += reader.num_cached
            reader.engine.close()
    return Found(seconds, {"1 ms": num_cached})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    skip_without("redis-server")
    made = RedisServer(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.torch
def test_a_prefix_from_a_server_nearby_is_quicker_than_computing_it(
    smollm2_folder: Path, server: RedisServer
) -> None:
    found = measure_hit(smollm2_folder, server)
    assert found.cached["1 ms"] == 3 * 1024
    assert found.mean_s("1 ms") <= 0.25 * found.mean_s("none")


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.torch
@pytest.mark.timeout(3000)
def test_a_server_at_any_distance_adds_at_most_a_fifth_to_the_mean_time(
    smollm2_folder: Path, server: RedisServer
) -> None:
    found = measure_traffic(smollm2_folder, server, FEW_REQUESTS, RATHER_LONG)
    for latency_ms in LATENCIES_MS:
        assert found.mean_s(f"{latency_ms} ms") <= 1.2 * found.mean_s("none")


def main() -> None:
    from mainstem.checkpoints.hub import resolve_model  # noqa: PLC0415

    folder = resolve_model("smollm2")
    with TemporaryDirectory() as place:
        server = RedisServer(Path(place))
        for measure in (measure_hit, measure_traffic):
            found = measure(folder, server)
            for name, seconds in found.seconds.items():
                hits, misses = seconds[::2], seconds[1::2]
                print(
                    f"{measure.__name__} {name}: mean {np.mean(seconds):.3f} s, "
                    f"{np.mean(seconds) / found.mean_s('none'):.3f} times that of `none`; requests "
                    f"0, 2, ... {np.mean(hits):.3f} s, 1, 3, ... {np.mean(misses):.3f} s; median "
                    f"{np.median(seconds):.3f} s; {found.cached.get(name)} tokens from the server",
                    flush=True,
                )
        server.stop()


if __name__ == "__main__":
    main()
