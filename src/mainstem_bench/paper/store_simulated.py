"""Runs AttentionStore's workload with our store's policy, in virtual time: Fig. 13 to 17, 21 to 24.

Speeds of the paper's A100s follow from their data sheet: 60 % of the 16-bit rate for prompts (its
360 ms for 2,000 tokens of LLaMA-65B on four cards agree), 80 % of the bandwidth for decoding.

Requests arrive in virtual time, up to 24 run at once, and the policy knows only requests that have
come. A step has a token of each answer and up to 2,048 tokens of prompts. Loads take the link's and
the disk's time, one after another; they overlap the steps of other requests, but not the request's
own prefill. Saving is free: it has the other direction of the link. With an H200's measured speeds
the same simulation agrees with the engine on that card (`mainstem bench agree`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile

from mainstem.plan.cost import DATASHEETS
from mainstem_bench.paper.item import Line, Settings
from mainstem_bench.paper.lengths import sharegpt_turns
from mainstem_simulate.capacity import CapacityQuestion, curve, plan_capacity
from mainstem_simulate.printed import rounded
from mainstem_simulate.service import Batching, Prices, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, SimulationReport, simulate
from mainstem_simulate.trace_records import Outgrown, ReadOptions, Trace
from mainstem_simulate.traces import read_trace

SESSIONS = 9000  # as in the paper
# the paper's conversations are longer than those of our file: with this factor 49 % of them have
# more than 2,048 tokens, and 30 % more than 4,096 (paper: 47 and 30 %)
LONGER = 2.1
BATCH = 24
PCIE_GB_PER_S, DISK_GB_PER_S = 26.0, 5.0  # as in the paper; one link, however many cards
DEVICE_GB, HOST_GB, DISK_GB = 10.0, 128.0, 10_000.0
MEDIA = {"HBM": (0.0, 0.0), "HBM+DRAM": (HOST_GB, 0.0), "HBM+DRAM+SSD": (HOST_GB, DISK_GB)}
WARM_SHARE = 10 / 52  # share of the turns that warm the store up, as in the paper
SMALL = ((16.0, 48.0), (32.0, 128.0), (64.0, 256.0), (128.0, 2000.0), (128.0, 10_000.0))
POLICIES = ("lookahead", "lru", "fifo")


@dataclass(frozen=True, slots=True)
class Served:
    """A model as the paper serves it."""

    params: float
    kv_mb_per_token: float
    context_tokens: int
    gpus: int

    @property
    def rates(self) -> ServiceRates:
        _, flops_per_s, _ = DATASHEETS["A100"]
        prefill = 0.6 * flops_per_s * self.gpus / (2 * self.params)
        return ServiceRates(prefill, host_gb_per_s=PCIE_GB_PER_S, disk_gb_per_s=DISK_GB_PER_S)

    @property
    def batching(self) -> Batching:
        bytes_per_s, _, _ = DATASHEETS["A100"]
        rate = 0.8 * bytes_per_s * self.gpus
        return Batching(BATCH, 2 * self.params / rate, self.kv_mb_per_token * 1e6 / rate)


MODELS = {
    "LLaMA-13B": Served(13e9, 0.78, 4096, 2),
    "LLaMA-65B": Served(65e9, 2.5, 2048, 4),
    "LLaMA-70B": Served(70e9, 0.31, 4096, 4),
    "Falcon-40B": Served(40e9, 0.12, 2048, 4),
}


@cache
def sharegpt_trace(
    context_tokens: int, is_quick: bool, outgrown: Outgrown = Outgrown.KEPT
) -> Trace:
    """Return conversations as long as the paper's. On average one starts each second. If it
    outgrows the window, half a window at its beginning is dropped."""
    options = ReadOptions(context_tokens=context_tokens, outgrown=outgrown, rate=1.0)
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        for turns in conversations(300 if is_quick else SESSIONS):
            file.write(json.dumps({"turns": turns}) + "\n")
        file.flush()
        return read_trace(Path(file.name), options)


def conversations(count: int) -> list[list[tuple[int, int]]]:
    """Draw conversations of ShareGPT, with lengths times LONGER, as (user tokens, answer tokens) of
    each turn."""
    drawn = Random(0).choices([turns for turns in sharegpt_turns() if turns], k=count)
    return [
        [(round(LONGER * user), round(LONGER * answer)) for user, answer in turns]
        for turns in drawn
    ]


def simulated(
    served: Served,
    trace: Trace,
    host_gb: float,
    disk_gb: float,
    policy: str = "lookahead",
    device_gb: float = 0.0,
) -> SimulationReport:
    """Run one simulation with the paper's prices and speeds."""
    config = SimulationConfig(
        kv_bytes_per_token=served.kv_mb_per_token * 1e6,
        host_gb=host_gb,
        disk_gb=disk_gb,
        device_gb=device_gb,
        policy=policy,
        warmup=round(WARM_SHARE * len(trace.requests)),
        rates=served.rates,
        prices=Prices(num_gpus=served.gpus),
        queue=Queue.ARRIVALS,
        batching=served.batching,
    )
    return simulate(trace, config)


def _line(report: SimulationReport) -> Line:
    return rounded(asdict(report))


def run_models(settings: Settings) -> Iterator[Line]:
    """Fig. 13 to 17, simulated once: four models with the store, and computing everything again."""
    yield from settings.once("models", lambda: _models(settings))


def _models(settings: Settings) -> Iterator[Line]:
    for name, served in MODELS.items():
        trace = sharegpt_trace(served.context_tokens, settings.is_quick)
        for way, (host_gb, disk_gb) in {"RE": (0.0, 0.0), "AS": (HOST_GB, DISK_GB)}.items():
            report = simulated(served, trace, host_gb, disk_gb)
            decode_s = report.device_s - report.prefill_tokens / served.rates.prefill_tokens_per_s
            # storage is paid for as long as the cards work, not for the pauses of the last users
            prices = Prices(num_gpus=served.gpus)
            storage = prices.storage_cost(host_gb, disk_gb, report.device_s)
            yield {
                "model": name,
                "way": way,
                **_line(report),
                "cost": round(prices.device_cost(report.device_s) + storage, 6),
                "cost_storage": round(storage, 6),
                "prefill_share": round(1 - decode_s / report.device_s, 4),
                "first_token_s": round(report.mean_ttft_s - report.mean_wait_s, 6),
                "link_busy": round(report.loaded_gb / PCIE_GB_PER_S / report.virtual_s, 4),
            }


def run_policies(settings: Settings) -> Iterator[Line]:
    """Fig. 21."""
    served = MODELS["LLaMA-13B"]
    trace = sharegpt_trace(served.context_tokens, settings.is_quick)
    for host_gb, disk_gb in SMALL[:1] if settings.is_quick else SMALL:
        for policy in POLICIES:
            yield _line(simulated(served, trace, host_gb, disk_gb, policy))


def run_overflow(settings: Settings) -> Iterator[Line]:
    """Fig. 22: after a cut, the KV of the rest stays valid (AS) or is computed again (OF)."""
    for name, served in MODELS.items():
        for way, outgrown in (("AS", Outgrown.KEPT), ("OF", Outgrown.INVALID)):
            trace = sharegpt_trace(served.context_tokens, settings.is_quick, outgrown)
            report = simulated(served, trace, HOST_GB, DISK_GB)
            yield {"model": name, "way": way, **_line(report)}


def run_media(settings: Settings) -> Iterator[Line]:
    """Fig. 24: pages only on the device, also in host memory, also on disk."""
    for name, served in MODELS.items():
        trace = sharegpt_trace(served.context_tokens, settings.is_quick)
        for way, (host_gb, disk_gb) in MEDIA.items():
            report = simulated(served, trace, host_gb, disk_gb, device_gb=DEVICE_GB)
            yield {"model": name, "way": way, **_line(report)}


def run_capacity(settings: Settings) -> Iterator[Line]:
    """Fig. 23: hit rate and throughput by capacity, with a TTL of one hour."""
    served = MODELS["LLaMA-13B"]
    trace = sharegpt_trace(served.context_tokens, settings.is_quick)
    question = CapacityQuestion(
        0.5 if settings.is_quick else 0.85,
        "lookahead",
        served.kv_mb_per_token * 1e6,
        ttl_s=3600.0,
        context_tokens=served.context_tokens,
    )
    report, replay = plan_capacity(trace, question, lambda _stage, _done: None)
    yield {"part": "capacity", **rounded(asdict(report))}
    for point in curve(trace, replay, report):
        yield {"part": "point", **rounded(asdict(point))}


def ratio(lines: Sequence[Line], model: str, name: str) -> float:
    """Return the ratio of RE (recompute) to AS (the store)."""
    found = {line["way"]: line[name] for line in lines if line["model"] == model}
    return float(found["RE"] / found["AS"])
