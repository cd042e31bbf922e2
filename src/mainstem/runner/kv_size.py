"""What keys and values take, from a model's config.json alone: no weights, no torch."""

from dataclasses import dataclass
from pathlib import Path

from mainstem.core.config import DType
from mainstem.models.families import read_spec


@dataclass(frozen=True, slots=True)
class KvSize:
    """K and V of one token over all layers."""

    bytes_per_token: int
    dtype: DType


def kv_size(folder: Path, dtype: DType = DType.AUTO) -> KvSize:
    """As the engine keeps them: in the checkpoint's dtype, unless another is named.

    Raises UnsupportedModel for a model that the engine cannot run.
    """
    spec = read_spec(folder)
    kept = spec.dtype if dtype is DType.AUTO else dtype
    element_bytes = 4 if kept is DType.FP32 else 2
    return KvSize(spec.kv_elements_per_token * element_bytes, kept)
