"""Weights -> a GpuRunner. Everything a step needs is allocated here; pages get the memory left."""

from dataclasses import replace

import torch

from mainstem.core.config import DType, EngineConfig, KvDType, ModelConfig
from mainstem.core.errors import ConfigError
from mainstem.kernels.attention.ops import PAGE_SIZES, AttentionLimits
from mainstem.kernels.dense.fp8 import has_fp8
from mainstem.kernels.recurrent import gpu as recurrent_kernels
from mainstem.models.collectives import ALONE, Collectives, smallest
from mainstem.models.gpu.decoder import load_gpu_decoder
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.shard import part_of
from mainstem.models.spec import ModelSpec
from mainstem.runner.division import Division, KvCosts, divide, open_pages
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.gpu import GpuRunner
from mainstem.runner.gpu_attention import GpuAttention, LayerSpans, SpanSettings
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.gpu_rounded import OpenPlaces, RoundedGpuPages, num_open_places
from mainstem.runner.gpu_weights import GpuParts
from mainstem.runner.graphs import FEW_TOKENS, graph_sizes
from mainstem.runner.kv_form import ROUNDED_BYTES, rounds_pages
from mainstem.runner.origin import Origin, context_of, make_facts
from mainstem.runner.recurrence import Recurrence
from mainstem.runner.rounded_pages import ROUNDED_LAYOUT
from mainstem.runner.states import DeviceStates, pages_per_state, rows_for
from mainstem.runner.weights import LoadFacts, RunnerWeights

LAYOUT = b"gpu:1:halves"  # of K and V in a page; part of the model's identity
DEFAULT_TOKENS = 2048  # in a step, unless the config says otherwise
DETERMINISTIC_KEYS = 512  # a span is cut at multiples of this many keys, in every batch
_MEMORY_SHARE = 0.9  # of the card, for weights and pages
_RESERVE = 1 << 30  # bytes for graphs and library workspaces
_SAMPLING_ROWS = 1024  # rows whose logits may be held in fp32, with copies
# Each level of shared reads costs one Partial per token, 8 or 16 KB with 32 heads of 128. Steps of
# up to _DEEP_TOKENS have room for all levels. Larger steps are mostly prompts, which gain less by
# sharing: they have room for _PROMPT_LEVELS.
_MAX_SPAN_LEVELS = 8
_PROMPT_LEVELS = 4
_DEEP_TOKENS = 2048
_SPAN_PAGES = 1 << 22  # page ids over all spans of a step


def load_gpu_runner(
    origin: Origin,
    config: EngineConfig,
    device: torch.device,
    ranks: Collectives = ALONE,
    num_parts: int | None = None,
) -> tuple[GpuRunner, RunnerFacts]:
    """Load weights and allocate pages. Without `cache.kv_tokens`, weights and pages together take
    `cache.memory_share` of the card (default 0.9). All ranks have as many pages as the rank with
    the least memory. `num_parts`: RunnerFacts.num_parts; None: as the memory is divided.

    A device of "cpu" runs the kernels in Triton's interpreter, for tests."""
    model, cache = config.model, config.cache
    _check(config)
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    context = context_of(origin.spec, config)
    spec = origin.spec.at_context(context)
    part = part_of(spec, ranks.shard)
    dtype = _dtype(model, spec)
    # a step has room for a decode and a token of a prompt
    max_tokens = max(config.sched.chunk_tokens or DEFAULT_TOKENS, 2)
    is_rounded = _rounds_pages(config, part, dtype, device)
    shifts = _key_shifts(origin, spec, ranks, dtype) if is_rounded else None
    space = Workspace.make(part, max_tokens, dtype, device)
    decoder = load_gpu_decoder(
        origin.open(dtype, device),
        spec,
        space,
        quantize=model.quantize,
        is_deterministic=model.deterministic,
        ranks=ranks,
    )
    deterministic_keys = DETERMINISTIC_KEYS if model.deterministic else None
    limits = _limits(max_tokens, context if model.deterministic else None)
    settings = SpanSettings(cache.page_size, dtype, device, limits, deterministic_keys, is_rounded)
    spans = LayerSpans(part, settings)
    costs = KvCosts.of(part, ROUNDED_BYTES if is_rounded else dtype.itemsize)
    page_bytes = costs.page_bytes(cache.page_size)
    token_bytes = -(-page_bytes // cache.page_size)
    free_bytes = _free_bytes(config, spec, device) if cache.kv_tokens is None else 0
    per_state = pages_per_state(part, dtype.itemsize, page_bytes)
    state_bytes = per_state * page_bytes
    num_states = cache.num_states(
        free_bytes,
        token_bytes,
        state_bytes,
        config.sched.max_seqs,
        has_tiers=config.store.host_bytes > 0,
    )
    state_memory = (num_states + 1) * state_bytes  # one slot is for padding
    free_bytes -= state_memory
    num_open = num_places = open_bytes = 0
    if is_rounded:
        open_bytes = part.kv_elements_per_token * dtype.itemsize * cache.page_size
        step_bytes = num_open_places(0, max_tokens, cache.page_size) * open_bytes
        memory = divide(costs, cache, free_bytes - step_bytes, context, max_tokens)
        # of each sequence, which has two open places (gpu_rounded.py)
        num_open = smallest(
            open_pages(memory, cache, context, config.sched.max_seqs, 2 * open_bytes), ranks, device
        )
        num_places = num_open_places(num_open, max_tokens, cache.page_size)
        free_bytes -= num_places * open_bytes
    kv = divide(costs, cache, free_bytes, context, max_tokens)
    if num_parts is not None:
        kv = replace(kv, num_parts=num_parts)
    kv = replace(
        kv,
        num_pages=smallest(kv.num_pages, ranks, device),
        num_parts=smallest(kv.num_parts, ranks, device),
    )
    if device.type == "cuda":
        needed = kv.num_bytes + state_memory + num_places * open_bytes
        cache.check_fits(needed, torch.cuda.mem_get_info(device)[0])
    open_places = OpenPlaces(num_open, max_tokens, cache.page_size) if is_rounded else None
    pages = _make_pages(part, kv, cache.page_size, dtype, device, open_places, shifts)
    attention = GpuAttention(
        part, pages, spans, space, decoder.head_norms, decoder.sinks, decoder.query_gains
    )
    recurrence, rows = None, rows_for(config, part, dtype, dtype, page_bytes, by_default=False)
    if num_states:
        states = DeviceStates(part, num_states, dtype, device, pages.page_bytes, rows)
        recurrence = Recurrence(
            part,
            decoder.recurrent,
            states,
            recurrent_kernels,
            is_deterministic=model.deterministic,
        )
    runner = GpuRunner(
        decoder,
        pages,
        attention,
        max_tokens,
        device,
        recurrence=recurrence,
        open_places=open_places,
    )
    # Nobody has measured how much memory collectives take in graphs, so ranks capture few sizes.
    most = max_tokens if ranks.shard.is_whole else min(max_tokens, FEW_TOKENS)
    runner.warm_up(graph_sizes(spec, most) if ranks.is_capturable else ())
    layout = LAYOUT if shifts is None else LAYOUT + ROUNDED_LAYOUT + shifts.layout
    facts = make_facts(origin, config, ranks.shard, dtype, context, kv, layout)
    if is_rounded:
        facts = facts.with_open_pages(num_open, open_bytes)

    def identify(other: Origin) -> bytes:
        return make_facts(other, config, ranks.shard, dtype, context, kv, layout).identity

    loaded = LoadFacts(origin, dtype, device, identify, shifts)
    runner.weights = RunnerWeights(loaded, GpuParts(runner, spec))
    facts = facts.with_states(num_states, per_state, rows.per_state, rows.num_rows)
    return runner, facts.on_device(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter",
        max_step_tokens=max_tokens,
        max_span_levels=_MAX_SPAN_LEVELS,
        span_align_tokens=deterministic_keys,
    )


def _rounds_pages(
    config: EngineConfig, part: ModelSpec, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether full pages are rounded: only if `kv_dtype` says so, since scales of checkpoints are
    read on CPUs only."""
    compute = DType(str(dtype).removeprefix("torch."))
    wanted = rounds_pages(config.cache, part, compute)
    if config.cache.kv_dtype is not KvDType.FP8 or not wanted:
        return False
    if not has_fp8(device):
        raise ConfigError(
            "kv_dtype=fp8 needs an NVIDIA card of compute capability 8.9 or more; leave it out"
        )
    return True


def _key_shifts(
    origin: Origin, spec: ModelSpec, ranks: Collectives, dtype: torch.dtype
) -> KeyShifts:
    return KeyShifts.read(origin.open(dtype, torch.device("cpu")), spec, ranks.shard)


def _make_pages(  # the sizes
    part: ModelSpec,
    kv: Division,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    open_places: OpenPlaces | None,
    shifts: KeyShifts | None,
) -> GpuPages | RoundedGpuPages:
    """Allocate pages; `open_places` and `shifts`: None unless full pages are rounded."""
    if open_places is None:
        return GpuPages(part, kv.num_pages, page_size, dtype, device, kv.num_parts)
    return RoundedGpuPages(
        part, kv.num_pages, page_size, dtype, device, kv.num_parts,
        num_open=open_places.num_places, shifts=shifts,
    )  # fmt: skip


def _limits(max_tokens: int, deterministic_context: int | None) -> AttentionLimits:
    """Sizes of attention's buffers for steps of `max_tokens`. If deterministic, the number of
    Partials per token grows with the context."""
    deep = (_MAX_SPAN_LEVELS + 1) * min(max_tokens, _DEEP_TOKENS)
    partials = max((_PROMPT_LEVELS + 1) * max_tokens, deep)
    if deterministic_context is not None:
        partials = -(-deterministic_context // DETERMINISTIC_KEYS) * max_tokens
    return AttentionLimits(
        max_tokens=max_tokens,
        max_pages=_SPAN_PAGES,
        max_entries=(_MAX_SPAN_LEVELS + 1) * max_tokens,
        max_partials=partials,
    )


def _check(config: EngineConfig) -> None:
    if config.cache.kv_dtype is KvDType.FP8 and config.model.deterministic:
        raise ConfigError(
            "kv_dtype=fp8 cannot be combined with deterministic; leave one of them out"
        )
    page_size = config.cache.page_size
    if page_size not in PAGE_SIZES:
        raise ConfigError(f"page_size on a GPU must be one of {PAGE_SIZES}, got {page_size}")
    levels = config.sched.span_levels
    if levels is not None and levels > _MAX_SPAN_LEVELS:
        raise ConfigError(f"span_levels on a GPU must be at most {_MAX_SPAN_LEVELS}, got {levels}")


def _dtype(model: ModelConfig, spec: ModelSpec) -> torch.dtype:
    wanted = spec.dtype if model.dtype is DType.AUTO else model.dtype
    dtype: torch.dtype = getattr(torch, wanted.value)
    return dtype


def _free_bytes(config: EngineConfig, spec: ModelSpec, device: torch.device) -> int:
    """Memory left on the card for pages, after the peak of sampling."""
    free, total = torch.cuda.mem_get_info(device)
    share = config.cache.memory_share or _MEMORY_SHARE
    sampling = 3 * 4 * _SAMPLING_ROWS * spec.vocab_size
    budget = free - int(total * (1 - share)) - sampling - _RESERVE
    if budget <= 0:
        raise ConfigError(f"memory_share={share} leaves no room for KV on this card")
    return budget
