"""Measures how well a decoder predicts a text, which shows what quantization costs."""

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.core.step import Int32s, Spans
from mainstem.models.block import OpenGate
from mainstem.models.cpu.decoder import Decoder
from mainstem.models.spec import ModelSpec
from mainstem.runner.attention import CpuAttention
from mainstem.runner.inputs import Inputs, Places
from mainstem.runner.pages import DevicePages
from mainstem.runner.rounded_pages import RoundedPages

Losses = NDArray[np.float64]

_PAGE_SIZE = 16
_HEAD_ROWS = 128  # rows whose full logits are held at once


class Pages(Protocol):
    """How pages of K and V are made: DevicePages, or RoundedPages for K and V in fp8."""

    def __call__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> DevicePages | RoundedPages: ...


def perplexity(
    decoder: Decoder,
    token_ids: Int32s,
    window: int = 1024,
    stride: int = 512,
    pages: Pages = DevicePages,
) -> float:
    """Return exp of the mean negative log-likelihood of the tokens that `losses` scores."""
    return math.exp(losses(decoder, token_ids, window, stride, pages).mean())


def losses(
    decoder: Decoder, token_ids: Int32s, window: int, stride: int, pages: Pages = DevicePages
) -> Losses:
    """Return the negative log-likelihood of every token after the first.

    Windows of `window` tokens move by `stride`. Each token is scored once, in the first window that
    holds it. So every token, except those of the first window, has at least window - stride tokens
    before it. If windows do not overlap, the first token of each window has no token before it and
    is not scored.
    """
    if not 0 < stride <= window or min(window, len(token_ids)) < 2:
        raise ValueError(f"cannot score {len(token_ids)} tokens, window {window}, stride {stride}")
    found: list[Losses] = []
    scored = 0  # tokens that were scored in earlier windows
    for first in range(0, len(token_ids), stride):
        ids = token_ids[first : first + window]
        skipped = max(scored - first, 1)  # leading tokens of this window that are not scored
        if skipped < len(ids):
            found.append(_window_losses(decoder, ids, skipped, pages))
        scored = first + len(ids)
        if scored == len(token_ids):
            break
    return np.concatenate(found)


@torch.inference_mode()
def _window_losses(decoder: Decoder, token_ids: Int32s, skipped: int, make: Pages) -> Losses:
    """Return the negative log-likelihood of the window's tokens from number `skipped` on."""
    count = len(token_ids)
    num_pages = -(-count // _PAGE_SIZE)
    pages = make(decoder.spec, num_pages, _PAGE_SIZE, decoder.dtype)
    spans = Spans(
        query_starts=np.array([0, count], np.int32),
        query_rows=np.arange(count, dtype=np.int32),
        page_starts=np.array([0, num_pages], np.int32),
        page_ids=np.arange(num_pages, dtype=np.int32),
        key_tokens=np.array([count], np.int32),
        is_causal=np.array([True]),
        key_positions=np.zeros(1, np.int32),
    )
    ids = torch.from_numpy(token_ids.astype(np.int64))
    places = Places(torch.arange(count))
    inputs = Inputs(
        token_ids=ids,
        positions=torch.arange(count),
        seq_slots=np.zeros(1, np.int32),
        seq_starts=np.array([0, count], np.int32),
        places=places,
        windowed=places,
        window_parts=None,
        hidden_rows=None,
    )
    layers = CpuAttention(decoder.spec, pages, count, decoder.sinks, decoder.query_gains)
    rows = torch.arange(skipped - 1, count - 1)
    hidden = decoder.forward(ids, rows, layers.plan(inputs, spans), OpenGate())
    parts = []
    for start in range(0, len(hidden), _HEAD_ROWS):
        logits = decoder.logits(hidden[start : start + _HEAD_ROWS])
        targets = ids[skipped + start : skipped + start + len(logits)]
        parts.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(parts).double().numpy()
