"""Computes times and prices in the simulator's virtual time.

Without `Batching`, one device serves one request after another. It loads stored pages layer by
layer and, at the same time, prefills the tokens that are not stored (AttentionStore 3.2.1); then it
decodes. Decoding is counted at the throughput of a full batch: a request adds its share of the
device's time.

With `Batching`, a request loads its pages while the device runs the steps of others; when all have
come, its prompt joins their steps (batch.py).
"""

from dataclasses import dataclass

import numpy as np

from mainstem.core.errors import ConfigError

GB = 1e9
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class ServiceRates:
    """Speeds of the device and of its links; the defaults are for an 8B model on an H200."""

    prefill_tokens_per_s: float = 30_000.0
    decode_tokens_per_s: float = 6_000.0
    host_gb_per_s: float = 50.0
    disk_gb_per_s: float = 4.2

    def __post_init__(self) -> None:
        for name in ServiceRates.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def decode_s(self, tokens: int) -> float:
        return tokens / self.decode_tokens_per_s

    def host_load_s(self, num_bytes: float) -> float:
        return num_bytes / GB / self.host_gb_per_s

    def disk_read_s(self, num_bytes: float) -> float:
        return num_bytes / GB / self.disk_gb_per_s


@dataclass(frozen=True, slots=True)
class Batching:
    """Requests that run at once. A step reads the weights and the KV of all answers; prompt tokens
    add their time, since reading the weights does not overlap with computing."""

    max_running: int
    weights_s: float  # to read the weights once
    token_s: float  # to read the K and V of one token
    chunk_tokens: int = 2048  # most tokens of a step
    shares_device: bool = False  # running requests take their room from the cache on the device
    answer_s: float = 0.0  # to compute the token of one answer
    # prompt tokens of a step and what they add, as measured, in order; without: at the rate
    prompts: tuple[tuple[int, float], ...] = ()

    def step_s(self, answers: int, context_tokens: int) -> float:
        """A step without prompts."""
        return self.weights_s + self.answer_s * answers + self.token_s * context_tokens

    def prompts_s(self, tokens: int, rates: ServiceRates) -> float:
        """What prompt tokens add to a step. Measured times are joined by lines."""
        if not self.prompts or not tokens:
            return rates.prefill_s(tokens)
        sizes, seconds = zip((0, 0.0), *self.prompts, strict=True)
        if tokens > sizes[-1]:
            return float(seconds[-1] * tokens / sizes[-1])
        return float(np.interp(tokens, sizes, seconds))


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per hour; the defaults are the paper's (4.2): A100 GPUs, DRAM and SSD at AWS."""

    gpu: float = 5.0  # one GPU
    dram_gb: float = 0.0088
    disk_gb: float = 0.000082
    num_gpus: int = 1

    def device_cost(self, device_s: float) -> float:
        return self.gpu * self.num_gpus * device_s / SECONDS_PER_HOUR

    def storage_cost(self, host_gb: float, disk_gb: float, length_s: float) -> float:
        per_hour = host_gb * self.dram_gb + disk_gb * self.disk_gb
        return per_hour * length_s / SECONDS_PER_HOUR
