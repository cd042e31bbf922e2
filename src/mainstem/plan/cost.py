"""Computes bytes, FLOPs and seconds of attention; decides which shared runs become spans.

A decode step reads, for each KV head of a key, `2 * head_dim` elements (K and V) and does `4 *
head_dim` FLOPs per query head. A span that many sequences share is read once instead of once per
sequence. But it needs its own units of work, and for each of its rows a Partial must be written and
merged.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mainstem.core.calibrated import Calibrated, complete
from mainstem.core.step import Bools

Floats = NDArray[np.float64]
Ints = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Card:
    """Rates of one device, as measured."""

    name: str
    bytes_per_s: float  # reading device memory
    flops_per_s: float  # sustained, in the model's dtype
    launch_s: float  # an empty launch, from begin to end
    unit_s: float  # fixed cost of an attention unit (a tile of rows, one KV head)
    parallel_units: int  # units that run in parallel
    tile_rows: int  # query heads x members that one unit takes
    merge_s: float  # added cost of a step in which a token has Partials


H200 = Card("NVIDIA H200", 4.3e12, 666e12, 7e-6, 10e-6, 264, 64, 5e-6)
GENERIC_CPU = Card("cpu", 20e9, 60e9, 30e-6, 10e-6, 1, 1 << 30, 0.0)
# Cards that nobody calibrated: bytes/s and dense 16-bit FLOP/s from the datasheet, and the number
# of SMs. Long copies reach about 9/10 of these bytes/s, large GEMMs about 2/3 of these FLOP/s.
DATASHEETS = {
    "H200": (4.8e12, 989e12, 132),
    "H100": (3.35e12, 989e12, 132),
    "A100": (2.0e12, 312e12, 108),
    "L40S": (0.86e12, 362e12, 142),
    "L4": (0.3e12, 121e12, 58),
    "A10": (0.6e12, 125e12, 72),
    "RTX 4090": (1.0e12, 165e12, 128),
    "MI300X": (5.3e12, 1307e12, 304),
}
UNKNOWN_GPU = (0.6e12, 100e12, 60)


CARDS = Calibrated("cards.json", partial(complete, Card))  # by device name


def measured_card(device_name: str) -> Card | None:
    """Return the calibrated card of that name, or else the built-in one; None if there is
    neither."""
    built_in = {card.name: card for card in (H200, GENERIC_CPU)}
    return CARDS.load().get(device_name) or built_in.get(device_name)


def card_for(device_name: str) -> Card:
    """Return the measured card of that name, or else an estimate from its datasheet."""
    measured = measured_card(device_name)
    if measured is not None:
        return measured
    known = next((name for name in DATASHEETS if name in device_name), None)
    bytes_per_s, flops_per_s, num_sms = DATASHEETS[known] if known else UNKNOWN_GPU
    return Card(
        device_name, 0.9 * bytes_per_s, flops_per_s * 2 / 3, H200.launch_s, H200.unit_s,
        2 * num_sms, H200.tile_rows, H200.merge_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """What a model's attention reads and computes per key and query."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one key token, for all heads of a layer."""
        return 4 * self.heads * self.head_dim

    @property
    def partial_bytes(self) -> int:
        """Bytes to write and read a query token's Partial. Counted in fp32, although Hopper packs
        it."""
        return 2 * 4 * self.heads * (self.head_dim + 1)


def shared_s(card: Card, model: Heads, members: Ints, tokens: Ints) -> Floats:
    """Return the seconds for a run of `tokens` keys that `members` query tokens read together, as
    one span."""
    count, keys = members.astype(np.float64), tokens.astype(np.float64)
    read_s = keys * model.key_bytes / card.bytes_per_s
    compute_s = count * keys * model.pair_flops / card.flops_per_s
    partial_s = count * model.partial_bytes / card.bytes_per_s
    units = model.kv_heads * np.ceil(count * (model.heads // model.kv_heads) / card.tile_rows)
    return np.maximum(read_s, compute_s) + partial_s + units * card.unit_s / card.parallel_units


def unshared_s(card: Card, model: Heads, members: Ints, tokens: Ints) -> Floats:
    """Return the seconds for the same run if each member reads it as part of its own span."""
    pairs = members.astype(np.float64) * tokens
    return np.maximum(
        pairs * model.key_bytes / card.bytes_per_s, pairs * model.pair_flops / card.flops_per_s
    )


def worth_sharing(card: Card, model: Heads, members: Ints, tokens: Ints) -> Bools:
    """Return which shared runs of a step become spans: the runs that are faster as spans, if
    together they save more than merging costs. Vectorised over runs.
    """
    gain_s = unshared_s(card, model, members, tokens) - shared_s(card, model, members, tokens)
    has_company: Bools = members >= np.int32(2)
    chosen = np.logical_and(gain_s > 0, has_company)
    return np.logical_and(chosen, float(gain_s[chosen].sum()) > card.merge_s)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of a model that decide what a step costs."""

    num_params: float  # in the layers
    num_head_params: float  # of the LM head
    kv_bytes_per_token: float  # over all layers
    bytes_per_param: float = 2.0
    elementwise_bytes_per_token: float = 5.6e6  # norms, rope, activations: read and written
    pair_flops: float = 0.0  # of one query token with one key token, over all layers
    # weights of experts that a token does not use; a step reads them all the same
    num_idle_params: float = 0.0


LLAMA_8B = ModelSize(
    num_params=6.98e9, num_head_params=0.525e9, kv_bytes_per_token=131_072, pair_flops=524_288
)


def step_s(
    card: Card, model: ModelSize, num_tokens: int, num_samples: int, key_tokens_read: int
) -> float:
    """Return the seconds of one forward pass over `num_tokens`; `num_samples` of them go through
    the LM head.

    Nothing overlaps in this model: GEMM (or reading the weights, if that takes longer), reading K
    and V, and elementwise traffic are added up.
    """
    flops = 2 * (model.num_params * num_tokens + model.num_head_params * num_samples)
    params = model.num_params + model.num_idle_params + model.num_head_params
    weights = params * model.bytes_per_param
    gemm_s = max(flops / card.flops_per_s, weights / card.bytes_per_s)
    traffic = key_tokens_read * model.kv_bytes_per_token
    traffic += num_tokens * model.elementwise_bytes_per_token
    return gemm_s + traffic / card.bytes_per_s


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds per token of a long job, in which all steps are full."""

    prompt_s: float  # a prompt token that is computed
    pair_s: float  # attention of a prompt token to one earlier key
    output_s: float  # a generated token
    key_s: float  # reading one key for a generated token


def token_costs(card: Card = H200, model: ModelSize = LLAMA_8B, batch: int = 256) -> TokenCosts:
    """Return what a token costs in full steps: chunks of prompts, and decodes of `batch`
    sequences."""
    chunk = full_speed_tokens(card)
    return TokenCosts(
        prompt_s=step_s(card, model, chunk, 0, 0) / chunk,
        pair_s=model.pair_flops / card.flops_per_s,
        output_s=step_s(card, model, batch, batch, 0) / batch,
        key_s=model.kv_bytes_per_token / card.bytes_per_s,
    )


def full_speed_tokens(card: Card, bytes_per_param: float = 2.0) -> int:
    """S_chunk of BatchLLM: the smallest step size, a power of two, at which GEMMs take at least 20
    times as long as reading the weights. In fp8 both times are halved, so the size is the same.
    """
    tokens_per_read = card.flops_per_s / card.bytes_per_s * bytes_per_param / 2  # 2 FLOPs a weight
    return 1 << (int(20 * tokens_per_read) - 1).bit_length()


def prefill_tokens(num_params: float, pair_flops: float, num_tokens: int) -> float:
    """Return what computing the first tokens of a prompt costs, as a number of tokens that see no
    others: each sees those before it. Layers have `num_params`, and a pair of tokens takes
    `pair_flops` in them."""
    num_pairs = num_tokens * num_tokens / 2
    return num_tokens + num_pairs * pair_flops / (2 * num_params)
