"""Makes a CpuRunner from weights. The free memory decides how many pages it has."""

import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from mainstem.core.config import (
    DEFAULT_CHUNK_TOKENS,
    CacheConfig,
    DType,
    EngineConfig,
    KvDType,
    Quantize,
)
from mainstem.core.errors import ConfigError
from mainstem.models.collectives import ALONE, Collectives, smallest
from mainstem.models.cpu.decoder import Decoder, make_decoder, pack
from mainstem.models.cpu.quantize import check_quantizable, quantize_decoder
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.quantized.kv_scales import KvScales
from mainstem.models.spec import ModelSpec
from mainstem.models.weights import Checkpoint, compute_dtype
from mainstem.runner.cpu import LAYOUT, CpuRunner
from mainstem.runner.division import Division, KvCosts, divide, open_pages
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.kv_form import ROUNDED_BYTES, rounds_pages
from mainstem.runner.machine import available_bytes
from mainstem.runner.origin import Origin, context_of, make_facts
from mainstem.runner.pages import DevicePages
from mainstem.runner.rounded_pages import ROUNDED_LAYOUT, SCALES_LAYOUT, RoundedPages
from mainstem.runner.states import pages_per_state, rows_for
from mainstem.runner.weights import CpuParts, LoadFacts, RunnerWeights

_MAX_AUTO_TOKENS = 262_144
_KV_SHARE = 0.4  # of the memory that the weights leave, at most
_PACKED_SHARE = 0.15  # of the same memory, at most: for a packed copy of the weights


def load_cpu_runner(
    origin: Origin, config: EngineConfig, ranks: Collectives = ALONE, num_parts: int | None = None
) -> tuple[CpuRunner, RunnerFacts]:
    """Load weights and allocate pages. All ranks have the same number: the least that any can have.

    If `cache.kv_tokens` is not set, weights and pages take `cache.memory_share` of the available
    memory. If that is not set either, pages take 40 % of what the weights leave, but at most
    262,144 tokens. If `model.threads` is set, sets torch's thread count for the process.
    `num_parts`: RunnerFacts.num_parts; None: as the memory is divided.
    """
    model, cache = config.model, config.cache
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    available = available_bytes()
    context = context_of(origin.spec, config)
    spec = origin.spec.at_context(context)
    dtype = compute_dtype(model.dtype, spec.dtype)
    if model.quantize is Quantize.INT8:
        if model.dtype not in (DType.AUTO, DType.FP32):
            raise ConfigError("quantize=int8 computes in float32; set dtype to auto or float32")
        check_quantizable(spec)
        dtype = torch.float32
    is_int8, device = model.quantize is Quantize.INT8, torch.device("cpu")
    is_rounded = rounds_pages(cache, spec, DType(str(dtype).removeprefix("torch.")))
    shifts = KeyShifts.read(origin.open(dtype, device), spec, ranks.shard) if is_rounded else None
    decoder = make_decoder(origin.open(dtype, device), spec, ranks)
    is_packed = False
    if is_int8:
        decoder = quantize_decoder(decoder)
    else:
        is_packed = pack(decoder, int(available_bytes() * _PACKED_SHARE) // ranks.shard.of)
    part = decoder.spec
    memory = _divide(part, config, ranks, dtype, context, available, num_parts, is_rounded)
    kv, num_open = memory.kv, memory.num_open
    scales = _kv_scales(origin, decoder, cache) if is_rounded else None
    layout = LAYOUT
    if shifts is not None:
        layout += (ROUNDED_LAYOUT if scales is None else SCALES_LAYOUT) + shifts.layout
    facts = make_facts(origin, config, ranks.shard, dtype, context, kv, layout)
    rows = rows_for(config, part, dtype, torch.float32, memory.page_bytes, by_default=True)
    facts = facts.with_states(
        memory.num_states, memory.pages_per_state, rows.per_state, rows.num_rows
    )
    if is_rounded:
        facts = facts.with_open_pages(num_open, memory.open_bytes)
    pages: DevicePages | RoundedPages
    if is_rounded:
        pages = RoundedPages(
            part, kv.num_pages, cache.page_size, dtype, kv.num_parts,
            num_open=num_open, scales=scales, shifts=shifts,
        )  # fmt: skip
    else:
        pages = DevicePages(part, kv.num_pages, cache.page_size, dtype, kv.num_parts)
    runner = CpuRunner(decoder, pages, context, num_states=memory.num_states, rows=rows)

    def make(source: Checkpoint) -> Decoder:
        made = make_decoder(source, spec, ranks)
        if is_int8:
            return quantize_decoder(made)
        pack(made, sys.maxsize if is_packed else -1)
        return made

    def identify(other: Origin) -> bytes:
        return make_facts(other, config, ranks.shard, dtype, context, kv, layout).identity

    loaded = LoadFacts(origin, dtype, device, identify, shifts)
    runner.weights = RunnerWeights(loaded, CpuParts(runner, make))
    return runner, facts


class _Memory(NamedTuple):
    """What a rank allocates for K, V and states."""

    kv: Division
    page_bytes: int
    num_states: int
    pages_per_state: int
    num_open: int  # pages that are being filled, if full ones are rounded
    open_bytes: int  # of each


def _divide(
    part: ModelSpec,
    config: EngineConfig,
    ranks: Collectives,
    dtype: torch.dtype,
    context: int,
    available_before: int,
    num_parts: int | None,
    is_rounded: bool,
) -> _Memory:
    """Divide the memory that the weights have left. `available_before`: bytes before they were
    loaded; `num_parts`: see load_cpu_runner."""
    cache, sched, device = config.cache, config.sched, torch.device("cpu")
    costs = KvCosts.of(part, ROUNDED_BYTES if is_rounded else dtype.itemsize)
    page_bytes = costs.page_bytes(cache.page_size)
    kv_bytes = -(-page_bytes // cache.page_size)
    budget = _page_budget(cache, available_before, kv_bytes, ranks.shard.of)
    per_state = pages_per_state(part, dtype.itemsize, page_bytes)
    state_bytes, has_tiers = per_state * page_bytes, config.store.host_bytes > 0
    num_states = cache.num_states(
        budget, kv_bytes, state_bytes, sched.max_seqs, has_tiers=has_tiers
    )
    state_memory = (num_states + 1) * state_bytes  # one slot is for padding
    budget -= state_memory
    left = available_bytes()  # before any rank allocates pages
    chunk_tokens = sched.chunk_tokens or DEFAULT_CHUNK_TOKENS
    kv = divide(costs, cache, budget, context, chunk_tokens)
    num_open = open_bytes = 0
    if is_rounded:
        open_bytes = part.kv_elements_per_token * dtype.itemsize * cache.page_size
        num_open = open_pages(kv, cache, context, sched.max_seqs, open_bytes)
        num_open = smallest(num_open, ranks, device)
        kv = divide(costs, cache, budget - num_open * open_bytes, context, chunk_tokens)
    most_parts = kv.num_parts if num_parts is None else num_parts
    kv = replace(
        kv,
        num_pages=smallest(kv.num_pages, ranks, device),
        num_parts=smallest(most_parts, ranks, device),
    )
    needed = kv.num_bytes + state_memory + num_open * open_bytes
    cache.check_fits(ranks.shard.of * needed, left)
    return _Memory(kv, page_bytes, num_states, per_state, num_open, open_bytes)


def _kv_scales(origin: Origin, decoder: Decoder, cache: CacheConfig) -> KvScales | None:
    """The checkpoint's scales of K and V; None: each page has its own."""
    # gains that are part of queries here are part of keys in the checkpoint
    has_gains = any(gain is not None for gain in decoder.query_gains)
    return None if has_gains or cache.kv_dtype is not KvDType.AUTO else origin.kv_scales()


def _page_budget(cache: CacheConfig, available_before: int, kv_bytes: int, num_ranks: int) -> int:
    """Return the bytes for a rank's pages if `kv_tokens` is not set. The weights are loaded
    already, and all ranks share the memory."""
    left = available_bytes()
    if cache.memory_share is None:
        return min(int(left * _KV_SHARE) // num_ranks, _MAX_AUTO_TOKENS * kv_bytes)
    budget = int(available_before * cache.memory_share) - (available_before - left)
    budget //= num_ranks
    if cache.kv_tokens is None and budget < kv_bytes * cache.page_size:
        raise ConfigError(f"memory_share={cache.memory_share} leaves no room for KV")
    return budget
