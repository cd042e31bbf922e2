"""Arguments of scripts that were written for vLLM. An argument that means the same here is
accepted. Any other is refused, with its name and what to use instead; none is silently ignored.

Arguments of the same name and meaning (`max_model_len`, `gpu_memory_utilization`, `seed`) are plain
settings and not listed here.
"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Protocol, TypedDict

from mainstem.core import request
from mainstem.core.config import SETTINGS
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.neutral import OnlyAt
from mainstem.core.spelling import did_you_mean

_ONE_ENGINE = "an engine is split by tensor_parallel only; leave it out"
_FIXED_MEMORY = "use kv_tokens, or gpu_memory_utilization for weights and pages together"

# vLLM's name of an argument of LLM -> our name for the same
SAME_MEANING = {
    "max_num_batched_tokens": "chunk_tokens",
    "block_size": "page_size",
    "kv_cache_dtype": "kv_dtype",
    "max_num_seqs": "max_seqs",
    "tensor_parallel_size": "tensor_parallel",
}

LLM_ARGUMENTS: dict[str, OnlyAt] = {
    "pipeline_parallel_size": OnlyAt((1, None), _ONE_ENGINE),
    "data_parallel_size": OnlyAt((1, None), _ONE_ENGINE),
    "distributed_executor_backend": OnlyAt((None, "mp"), "ranks are processes; leave it out"),
    "enforce_eager": OnlyAt(
        (False, None), "small steps always run as CUDA graphs, which change no answer; leave it out"
    ),
    "trust_remote_code": OnlyAt(
        (False, None), "code that comes with a checkpoint is never run; leave it out"
    ),
    "quantization": OnlyAt(
        (None,),
        "for plain weights use quantize='int8' (CPU) or quantize='fp8' (GPU); the format of a "
        "quantized checkpoint is read from its config.json: leave it out",
    ),
    "enable_prefix_caching": OnlyAt((True, None), "use share='none' to share nothing"),
    "enable_chunked_prefill": OnlyAt((True, None), "prompts are always cut to chunk_tokens"),
    "swap_space": OnlyAt((0, None), "use host_gb: memory for pages that leave the device"),
    "cpu_offload_gb": OnlyAt((0, None), "weights must fit on the device; use quantize"),
    "num_gpu_blocks_override": OnlyAt((None,), "use kv_tokens: tokens of KV on the device"),
    "kv_cache_memory_bytes": OnlyAt((None,), _FIXED_MEMORY),
    "kv_transfer_config": OnlyAt((None,), "use host_gb and disk_dir"),
    "tokenizer": OnlyAt((None,), "the tokenizer is the one in the model's folder"),
    "tokenizer_mode": OnlyAt(
        ("auto", None), "the format is found in the model's folder; leave it out"
    ),
    "skip_tokenizer_init": OnlyAt((False, None), "always loaded; prompts may be token ids"),
    "revision": OnlyAt(
        (None,), "fetch it with `hf download ID --revision REV --local-dir DIR`, then LLM(DIR)"
    ),
    "download_dir": OnlyAt((None,), "set the environment variable HF_HOME"),
    "hf_token": OnlyAt((None,), "log in with `hf auth login`"),
    "hf_overrides": OnlyAt((None,), "edit config.json in a copy of the model's folder"),
    "load_format": OnlyAt(("auto", "safetensors", None), "weights are read from safetensors"),
    "disable_log_stats": OnlyAt((True, None), "no statistics are logged; llm.counters has them"),
    "enable_sleep_mode": OnlyAt((True, False, None), "every LLM can sleep; leave it out"),
    "logprobs_mode": OnlyAt(
        ("raw_logprobs", None), "outputs have drawn_logprobs, which are vLLM's processed ones"
    ),
    "model_impl": OnlyAt(("auto", None), "models are those of this engine; leave it out"),
    "enable_lora": OnlyAt((False, None), "not supported: merge adapters into the weights"),
    "speculative_config": OnlyAt((None,), "not supported; leave it out"),
    "compilation_config": OnlyAt((None,), "torch.compile is not used; leave it out"),
    "runner": OnlyAt(("auto", "generate", None), "only models that generate text are supported"),
    "task": OnlyAt(("auto", "generate", None), "only models that generate text are supported"),
}


class VllmArguments(TypedDict, total=False):
    """The types of vLLM's arguments of LLM, for type checkers. Most have one accepted value."""

    max_num_batched_tokens: int | None
    block_size: int | None
    max_num_seqs: int | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    distributed_executor_backend: str | None
    enforce_eager: bool | None
    trust_remote_code: bool | None
    quantization: str | None
    kv_cache_dtype: str | None
    enable_prefix_caching: bool | None
    enable_chunked_prefill: bool | None
    swap_space: float | None
    cpu_offload_gb: float | None
    num_gpu_blocks_override: object
    kv_cache_memory_bytes: object
    kv_transfer_config: object
    tokenizer: object
    tokenizer_mode: str | None
    skip_tokenizer_init: bool | None
    revision: str | None
    download_dir: str | None
    hf_token: object
    hf_overrides: object
    load_format: str | None
    disable_log_stats: bool | None
    enable_sleep_mode: bool | None
    logprobs_mode: str | None
    model_impl: str | None
    enable_lora: bool | None
    speculative_config: object
    compilation_config: object
    runner: str | None
    task: str | None


# in the order in which vLLM's SamplingParams declares them
SAMPLING_ARGUMENTS: dict[str, OnlyAt] = {
    "best_of": OnlyAt(
        (None,), "ask for n answers with logprobs=0 and keep the best by cumulative_logprob"
    ),
    "use_beam_search": OnlyAt((False, None), "beam search is not supported; use n"),
    "guided_decoding": OnlyAt(
        (None,), "use structured_outputs=StructuredOutputsParams(json=..., regex=..., choice=...)"
    ),
    "logits_processors": OnlyAt((None, [], ()), "use logit_bias, or structured_outputs"),
    "bad_words": OnlyAt((None, [], ()), "use logit_bias with -100 for their tokens"),
    "allowed_token_ids": OnlyAt((None,), "use structured_outputs with a choice or a regex"),
    "truncate_prompt_tokens": OnlyAt((None,), "use overflow='recompute', or cut the prompt"),
    "detokenize": OnlyAt((True, None), "answers always have text; leave it out"),
}

_DTYPES = {"half": "float16", "float": "float32"}


def own_arguments(given: Mapping[str, object], others: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a call of LLM under our names: `given`, which has our names already,
    and `others`, which may have vLLM's.

    Raises ConfigError for arguments that have no meaning here, or that were given twice.
    """
    settings = dict(given)
    dtype = str(given["dtype"]).removeprefix("torch.")
    settings["dtype"] = _DTYPES.get(dtype, dtype)
    defaults = {row.argument: row.default for row in SETTINGS}
    for name, value in others.items():
        own = SAME_MEANING.get(name)
        rule = LLM_ARGUMENTS.get(name)
        if own is not None:
            if value is None:
                continue
            if given[own] != defaults[own]:
                raise ConfigError(f"LLM: {name} and {own} mean the same; give {own} only")
            settings[own] = value
        elif rule is None:
            meant = did_you_mean(name, list(defaults))
            raise ConfigError(f"LLM: unknown setting {name!r}.{meant} See docs/settings.md")
        elif not rule.takes(value) and not (name == "tokenizer" and value == given["model"]):
            raise ConfigError(f"LLM: {name}={value!r} is not supported: {rule.instead}")
    return settings


class WrittenForm(Protocol):
    """A form of answers as a caller describes it."""

    @property
    def form(self) -> str:
        """The form as text, in the format of text/grammar.py."""


@dataclass(frozen=True, slots=True)
class SamplingParams(request.SamplingParams):
    """How to choose tokens and when to stop. Names and defaults as in vLLM.

    The constructor raises InvalidRequest, which names the field and the allowed range.
    """

    structured_outputs: WrittenForm | None = None  # the form in vLLM's words; sets `grammar`
    best_of: InitVar[object] = None
    use_beam_search: InitVar[object] = False
    guided_decoding: InitVar[object] = None
    logits_processors: InitVar[object] = None
    bad_words: InitVar[object] = None
    allowed_token_ids: InitVar[object] = None
    truncate_prompt_tokens: InitVar[object] = None
    detokenize: InitVar[object] = True

    def __post_init__(self, *others: object) -> None:
        """`others`: the arguments in SAMPLING_ARGUMENTS, in order."""
        for (name, rule), value in zip(SAMPLING_ARGUMENTS.items(), others, strict=True):
            is_all = name == "best_of" and value == self.n  # the best n of n are all answers
            if not (value is None or is_all or rule.takes(value)):
                raise InvalidRequest(name, f"{value!r} is not supported: {rule.instead}")
        self._take_form()
        request.SamplingParams.__post_init__(self)  # super() does not work with slots

    def _take_form(self) -> None:
        if self.structured_outputs is None:
            return
        form = getattr(self.structured_outputs, "form", None)
        if not isinstance(form, str):
            got = f"got {self.structured_outputs!r:.80}"
            raise InvalidRequest("structured_outputs", f"must be StructuredOutputsParams, {got}")
        if self.grammar not in (None, form):
            raise InvalidRequest("structured_outputs", "cannot be combined with grammar")
        object.__setattr__(self, "grammar", form)
