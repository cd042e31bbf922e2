"""Computes the memory that keys and values take from a model's config.json only, without weights
and torch."""

from dataclasses import dataclass
from pathlib import Path

from mainstem.core.config import CacheConfig, DType
from mainstem.models.families import read_spec
from mainstem.runner.division import KvCosts
from mainstem.runner.kv_form import ROUNDED_BYTES


@dataclass(frozen=True, slots=True)
class KvSize:
    """K and V of one token over all layers."""

    bytes_per_token: int
    bytes_per_state: int  # of all recurrent layers after one token; 0 if there are none
    dtype: DType
    max_positions: int
    # of these, the bytes that only tokens in a sequence's last `window` keep, since other layers
    # have none; 0 and None: all tokens keep all bytes
    windowed_bytes_per_token: int
    window: int | None
    # how many of the other bytes, in the mean, are no longer in their layer's window at the end of
    # the longest context. They stay in memory, since all layers have a window
    unread_bytes_per_token: int
    # the form of the weights in the checkpoint: a dtype, or a quantized format in words
    weights: str
    # of a token in a full page that is rounded to fp8, scales included; 0: not supported
    fp8_bytes_per_token: int = 0


def kv_size(folder: Path, dtype: DType = DType.AUTO) -> KvSize:
    """The size of K and V in the checkpoint's dtype, or in the given one.

    Raises UnsupportedModel for a model that the engine cannot run.
    """
    spec = read_spec(folder)
    kept = spec.dtype if dtype is DType.AUTO else dtype
    element_bytes = 4 if kept is DType.FP32 else 2
    costs = KvCosts.of(spec, element_bytes)
    rounded, page = KvCosts.of(spec, ROUNDED_BYTES), CacheConfig().page_size
    unread = 0 if costs.window else spec.unread_kv_elements(spec.max_positions)
    return KvSize(
        bytes_per_token=costs.bytes_per_token,
        bytes_per_state=spec.state_bytes(element_bytes),
        dtype=kept,
        max_positions=spec.max_positions,
        windowed_bytes_per_token=costs.windowed_bytes,
        window=costs.window,
        unread_bytes_per_token=unread * element_bytes,
        fp8_bytes_per_token=0 if spec.recurrences else -(-rounded.page_bytes(page) // page),
        weights=str(spec.quantized or spec.dtype.value),
    )
