"""In which form full pages of K and V are kept: in the compute dtype, or rounded to fp8."""

from mainstem.core.config import CacheConfig, DType, KvDType
from mainstem.core.errors import ConfigError
from mainstem.models.spec import ModelSpec

ROUNDED_BYTES = 1  # of a number in a rounded page
# Sequences that run at once have an open page each, in the compute dtype. Unless max_seqs is set,
# there is one for this many pages: they take 3 % of the memory.
PAGES_PER_OPEN = 64
LEAST_OPEN, MOST_OPEN = 8, 1024


def rounds_pages(cache: CacheConfig, spec: ModelSpec, dtype: DType) -> bool:
    """Whether full pages are rounded to fp8; raises ConfigError if the model cannot have the
    `kv_dtype` that was set. `dtype` is the compute dtype."""
    wanted = cache.kv_dtype
    if wanted is KvDType.BF16 and dtype is not DType.BF16:
        raise ConfigError(
            f"kv_dtype=bf16 keeps K and V in the compute dtype, which is {dtype.value} here: set "
            "dtype=bfloat16, or leave out kv_dtype"
        )
    if wanted is KvDType.AUTO:
        return spec.has_fp8_kv and not spec.recurrences
    if wanted is KvDType.FP8 and spec.recurrences:
        raise ConfigError(
            "kv_dtype=fp8 is not supported for models with recurrent layers: their states are kept "
            "in the middle of pages, which cannot be continued once they are rounded. Use "
            "kv_dtype=auto"
        )
    return wanted is KvDType.FP8


def open_pages(max_seqs: int | None, num_pages: int) -> int:
    """How many sequences have an open page."""
    if max_seqs is not None:
        return min(max_seqs, num_pages)
    return min(max(num_pages // PAGES_PER_OPEN, LEAST_OPEN), MOST_OPEN, num_pages)
