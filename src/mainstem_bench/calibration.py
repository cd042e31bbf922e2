"""Runs a model over a text product by product; each product is rounded before the next one is run.

Two models run in parallel: the original and the one rounded so far. A product is rounded so that
its outputs in the rounded model are close to those in the original model. This corrects errors of
earlier products as far as possible. For products that are added to the residual, each token is
weighted by one over the residual's size there, because the next norm divides by it.
"""

import torch
from torch import Tensor

from mainstem_bench.llama import ByKind, Llama
from mainstem_bench.rounding import Grid, Rounded, damped, for_inputs

_REPAIR_DAMPING = 0.5  # of the least squares that correct earlier errors


class CalibratedLayers:
    """The layers of a model, to be rounded in order."""

    def __init__(self, model: Llama, token_ids: Tensor) -> None:
        """`token_ids` [sequences, tokens]"""
        self._model = model
        self._plain = model.embed(token_ids)
        self._rounded = self._plain.clone()

    def round(self, index: int, grid: Grid) -> ByKind[Rounded]:
        """Round the products of the next layer, and run it."""
        model, layer = self._model, self._model.layer(index)
        found: ByKind[Rounded] = {}

        def product(
            kind: str, plain: Tensor, rounded: Tensor, is_added: bool = False
        ) -> tuple[Tensor, Tensor]:
            """The outputs of both models."""
            weight = layer.weights[kind]
            if is_added:
                shares = (x + plain @ weight.t()).square().mean(1, keepdim=True).rsqrt_()
                found[kind] = _round(weight, plain * shares, rounded * shares, grid)
            else:
                found[kind] = _round(weight, plain, rounded, grid)
            return plain @ weight.t(), rounded @ found[kind].weight.t()

        x, y = self._plain, self._rounded
        gain = layer.attention_gain
        qkv = product("qkv", model.norm(x, gain), model.norm(y, gain))
        mixed = model.attend(qkv[0]), model.attend(qkv[1])
        _add((x, y), product("out", *mixed, is_added=True))
        gain = layer.mlp_gain
        first = product("first", model.norm(x, gain), model.norm(y, gain))
        acts = model.activate(first[0]), model.activate(first[1])
        _add((x, y), product("down", *acts, is_added=True))
        return found


def _round(weight: Tensor, plain: Tensor, rounded: Tensor, grid: Grid) -> Rounded:
    """Round a weight [out, in] for the inputs [tokens, in] of both models."""
    gram = rounded.t() @ rounded / len(rounded)
    # solve wanted @ rounded' = weight @ plain' by least squares; `repair` is wanted - weight
    missing = weight @ ((plain - rounded).t() @ rounded / len(rounded))
    repair = torch.linalg.solve(damped(gram, _REPAIR_DAMPING), missing.t()).t()
    return for_inputs(weight + repair, gram, grid)


def _add(totals: tuple[Tensor, Tensor], answers: tuple[Tensor, Tensor]) -> None:
    for total, answer in zip(totals, answers, strict=True):
        total.add_(answer)
