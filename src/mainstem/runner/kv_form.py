"""In which form full pages of K and V are kept: in the compute dtype, or rounded to fp8."""

from mainstem.core.config import CacheConfig, DType, KvDType
from mainstem.core.errors import ConfigError
from mainstem.models.spec import ModelSpec

ROUNDED_BYTES = 1  # of a number in a rounded page


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
