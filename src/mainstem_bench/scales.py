"""Trains the scales of a rounded model, all layers at once. Levels and zero points stay.

Rounding makes each product's outputs right. What counts is the last output: training minimises the
KL divergence of the rounded model's predictions from the original model's, over a text.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from mainstem.checkpoints.progress import Progress
from mainstem_bench.llama import ByKind, Llama
from mainstem_bench.rounding import Rounded

BATCH = 2  # sequences of a step
_RATE = 3e-4  # of the mean scale of a product (docs/log/cpu.md)
_WARMUP = 0.1  # of the steps


def train_scales(
    model: Llama,
    layers: list[ByKind[Rounded]],
    sequences: Tensor,
    steps: int,
    progress: Progress,
) -> tuple[list[ByKind[Rounded]], list[float]]:
    """Train on BATCH of these `sequences` [sequences, length] in each step. Every pass over them
    has a new random order. Returns the products and, for each step, the divergence before it."""
    progress("train", 0.0)
    plain = [model.layer(index) for index in range(len(layers))]
    ends = model.ends()

    def predictions(token_ids: Tensor, weights: Iterator[ByKind[Tensor]]) -> Tensor:
        """Log-probabilities [tokens, vocab]."""
        x = model.embed(token_ids)
        for layer, each in zip(plain, weights, strict=True):
            x = model.run(layer, each, x)
        return F.log_softmax(model.logits(ends, x), dim=-1)

    trained = _changed(layers, lambda scales: scales.clone().requires_grad_())
    scales = [product.scales for layer in trained for product in layer.values()]
    groups = [{"params": [each], "lr": _RATE * float(each.detach().mean())} for each in scales]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(adam, lambda step: _rate(step, steps))
    losses = []
    for step, batch in enumerate(_batches(sequences, steps)):
        with torch.no_grad():
            wanted = predictions(batch, (layer.weights for layer in plain))
        found = predictions(batch, (_weights(layer) for layer in trained))
        loss = F.kl_div(found, wanted, reduction="sum", log_target=True) / batch.numel()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        schedule.step()
        losses.append(loss.detach())
        progress("train", (step + 1) / steps)
    rounded = _changed(trained, lambda scales: scales.detach().half().float())
    return rounded, torch.stack(losses).tolist()


def _batches(sequences: Tensor, steps: int) -> Iterator[Tensor]:
    """[BATCH, length] for each step."""
    random = torch.Generator().manual_seed(0)
    passes = math.ceil(steps * BATCH / len(sequences))
    order = torch.cat([torch.randperm(len(sequences), generator=random) for _ in range(passes)])
    order = order[: steps * BATCH].to(sequences.device)
    for chosen in order.view(steps, BATCH):
        yield sequences[chosen]


def _rate(step: int, steps: int) -> float:
    """Rises for the first steps, then falls like a cosine."""
    risen = min(1.0, (step + 1) / max(1.0, _WARMUP * steps))
    return risen * 0.5 * (1 + math.cos(math.pi * step / steps))


def _weights(layer: ByKind[Rounded]) -> ByKind[Tensor]:
    return {kind: product.weight for kind, product in layer.items()}


def _changed(
    layers: list[ByKind[Rounded]], change: Callable[[Tensor], Tensor]
) -> list[ByKind[Rounded]]:
    """The same products with other scales."""
    return [
        {kind: replace(each, scales=change(each.scales)) for kind, each in layer.items()}
        for layer in layers
    ]
