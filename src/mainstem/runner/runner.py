"""CpuRunner: a Step in, a StepResult out. Loading is here too; everything else is elsewhere."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mainstem.core.config import CacheConfig, DType, ModelConfig, Quantize
from mainstem.core.errors import ConfigError
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Step, StepResult
from mainstem.models.config import ModelSpec, read_spec
from mainstem.models.decoder import Decoder, Gate, OpenGate, load_decoder, pack
from mainstem.models.layers import rotary_table
from mainstem.models.quantize import quantize_decoder
from mainstem.models.weights import checkpoint_digest, compute_dtype
from mainstem.runner.attention import AttentionPlan
from mainstem.runner.inputs import make_inputs
from mainstem.runner.pages import DevicePages
from mainstem.runner.sampler import Sampler, logprobs_of
from mainstem.runner.single import SingleTokenPass

_LAYOUT = b"cpu:1:adjacent-pairs"  # of K and V in a page; part of the model's identity
_MAX_AUTO_TOKENS = 262_144
_KV_SHARE = 0.4  # of the available memory, at most
_PACKED_SHARE = 0.15  # likewise, for the second copy of the weights
_LOGPROB_ROWS = 64  # prompt rows whose full logits are held at once


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What the control plane must know about a loaded model."""

    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    identity: bytes  # weights, dtype, quantization and page layout: part of every PageKey
    eos_ids: tuple[int, ...]
    bos_id: int | None
    kv_bytes_per_token: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DType  # computed in
    checkpoint_dtype: DType
    quantize: Quantize


class Finished:
    """A step that has already run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class CpuRunner:
    """Runs each step at once. Owns weights, pages and sampler."""

    def __init__(
        self, decoder: Decoder, pages: DevicePages, max_positions: int, gate: Gate | None = None
    ) -> None:
        self._decoder = decoder
        self._pages = pages
        self._gate = OpenGate() if gate is None else gate
        self._turns = rotary_table(decoder.spec.rope, max_positions)
        self._previous = torch.empty(0, dtype=torch.long)
        self._single = SingleTokenPass.make(decoder, pages, self._turns)
        self.sampler = Sampler()

    @property
    def can_overlap(self) -> bool:
        return False

    @property
    def pages(self) -> DevicePages:
        return self._pages

    def launch(self, step: Step) -> Finished:
        """Run the step; see Runner in core.step."""
        with torch.inference_mode():
            return Finished(self._run(step))

    def close(self) -> None:
        """Drop the references; memory goes with the last one."""
        self._previous = torch.empty(0, dtype=torch.long)

    def _run(self, step: Step) -> StepResult:
        for started in step.started:
            self.sampler.start(started)
        hidden = self._forward(step)
        num_rows = len(step.sample_rows)
        logprobs: dict[int, TokenLogprobs] = {}
        token_ids = torch.empty(0, dtype=torch.long)
        if num_rows:
            token_ids, logprobs = self._sample(hidden[:num_rows], step)
        self._previous = token_ids
        return StepResult(
            token_ids=token_ids.numpy().astype(np.int32),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(hidden[num_rows:], step),
        )

    def _forward(self, step: Step) -> Tensor:
        """Hidden states of the sampled rows, then of the rows whose prompt logprobs are wanted."""
        inputs = make_inputs(step, self._previous)
        if self._single is not None and self._single.can_run(step):
            return self._single.run(step, inputs.token_ids, self._gate)
        turns = self._turns.index_select(0, inputs.positions)[:, None]
        attention = AttentionPlan(
            self._decoder.spec,
            self._pages,
            turns,
            inputs.write_slots,
            step.spans,
            inputs.copies,
        )
        return self._decoder.forward(inputs.token_ids, inputs.hidden_rows, attention, self._gate)

    def _sample(self, hidden: Tensor, step: Step) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        logits = self._decoder.logits(hidden)
        wanted = np.flatnonzero(step.sampling.wants_logprobs)
        # the sampler edits in place, and logprobs are of the model's own distribution
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None
        token_ids = self.sampler.sample(logits, step)
        if raw is None:
            return token_ids, {}
        counts = step.sampling.num_logprobs[wanted]
        records = logprobs_of(raw, token_ids[torch.from_numpy(wanted)], counts)
        return token_ids, dict(zip(wanted.tolist(), records, strict=True))

    def _prompt_logprobs(self, hidden: Tensor, step: Step) -> tuple[TokenLogprobs, ...]:
        targets = torch.from_numpy(step.prompt_logprob_targets).long()
        records: list[TokenLogprobs] = []
        for first in range(0, len(hidden), _LOGPROB_ROWS):
            rows = slice(first, first + _LOGPROB_ROWS)
            logits = self._decoder.logits(hidden[rows])
            records += logprobs_of(logits, targets[rows], step.num_prompt_logprobs[rows])
        return tuple(records)


def load_runner(
    folder: Path, model: ModelConfig, cache: CacheConfig, max_model_len: int | None
) -> tuple[CpuRunner, RunnerFacts]:
    """Load the checkpoint in `folder` and allocate its pages.

    Without `cache.kv_tokens` weights and pages take `cache.memory_share` of the memory that is
    available; without that either, pages take 40 % of what the weights leave, and no more than
    262,144 tokens. Sets torch's thread count for the process when `model.threads` does.
    """
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    spec = read_spec(folder)
    available = available_bytes()
    context = _context(spec, max_model_len)
    dtype = compute_dtype(model.dtype, spec.dtype)
    if model.quantize is Quantize.INT8:
        if model.dtype not in (DType.AUTO, DType.FP32):
            raise ConfigError("quantize=int8 computes in float32; set dtype to auto or float32")
        dtype = torch.float32
    decoder = load_decoder(folder, spec, dtype)
    if model.quantize is Quantize.INT8:
        decoder = quantize_decoder(decoder)
    else:
        pack(decoder, int(available_bytes() * _PACKED_SHARE))
    kv_bytes = spec.kv_elements_per_token * dtype.itemsize
    num_pages = cache.num_pages(
        _page_budget(cache, available, kv_bytes), kv_bytes * cache.page_size
    )
    facts = RunnerFacts(
        num_pages=num_pages,
        page_size=cache.page_size,
        vocab_size=spec.vocab_size,
        max_model_len=context,
        identity=_identity(folder, dtype, model.quantize),
        eos_ids=spec.eos_ids,
        bos_id=spec.bos_id,
        kv_bytes_per_token=kv_bytes,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=DType(str(dtype).removeprefix("torch.")),
        checkpoint_dtype=spec.dtype,
        quantize=model.quantize,
    )
    return CpuRunner(decoder, DevicePages(spec, num_pages, cache.page_size, dtype), context), facts


def _page_budget(cache: CacheConfig, available_before: int, kv_bytes: int) -> int:
    """Bytes for pages where no number of tokens was asked for; the weights are loaded already."""
    left = available_bytes()
    if cache.memory_share is None:
        return min(int(left * _KV_SHARE), _MAX_AUTO_TOKENS * kv_bytes)
    budget = int(available_before * cache.memory_share) - (available_before - left)
    if cache.kv_tokens is None and budget < kv_bytes * cache.page_size:
        raise ConfigError(f"memory_share={cache.memory_share} leaves no room for KV")
    return budget


def _context(spec: ModelSpec, max_model_len: int | None) -> int:
    context = spec.max_positions if max_model_len is None else max_model_len
    if context > spec.max_positions:
        raise ConfigError(
            f"max_model_len={context} is more than the model's {spec.max_positions} positions"
        )
    spec.check_context(context)
    return context


def _identity(folder: Path, dtype: torch.dtype, quantize: Quantize) -> bytes:
    """Equal for two loads exactly when one may read the pages of the other."""
    digest = hashlib.sha256(checkpoint_digest(folder))
    digest.update(f"{dtype}:{quantize.value}:".encode() + _LAYOUT)
    return digest.digest()


def available_bytes() -> int:
    """Memory that can be taken without swapping; a cautious 4 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
