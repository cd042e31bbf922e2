"""Runs a decoder over a text product by product; each product is rounded before the next one is
run.

Two models run in parallel: the original and the one rounded so far. A product is rounded so that
its outputs in the rounded model are close to those in the original model. This corrects errors of
earlier products as far as possible. For products that are added to the residual, each token is
weighted by one over the residual's size there, because the next norm divides by it.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.errors import UnsupportedModel
from mainstem.models.cpu.activations import gated
from mainstem.models.cpu.layers import RmsNorm, norm_scale
from mainstem.models.rope import adjacent_pairs, rotary_table
from mainstem.models.spec import MlpSpec, ModelSpec, NormKind, NormPlace, QkNorm, Residual
from mainstem.models.tensors import LayerTensors, MlpTensors, NormTensors, TensorReader
from mainstem.models.weights import Checkpoint
from mainstem_bench.rounding import Grid, Rounded, damped, for_inputs

_REPAIR_DAMPING = 0.5  # of the least squares that correct earlier errors


class CalibratedLayers:
    """The layers of a model in Llama's layout, to be rounded in order."""

    def __init__(self, folder: Path, spec: ModelSpec, token_ids: Tensor) -> None:
        """`token_ids` [sequences, tokens]"""
        _check(spec)
        self._spec = spec
        self._reader = TensorReader(
            Checkpoint(folder, torch.float32, names=spec.names, quantized=spec.quantized), spec
        )
        embedding = self._reader.embedding()
        self._length = token_ids.shape[1]
        self._plain = F.embedding(token_ids.reshape(-1), embedding)
        self._rounded = self._plain.clone()

    def weights(self, index: int) -> dict[str, Tensor]:
        """The weights of a layer's products, by name."""
        tensors, mlp = self._tensors(index)
        found = self._by_name(index, "qkv", tensors.qkv.dense)
        found |= self._by_name(index, "out", tensors.out.dense)
        found |= self._by_name(index, "first", mlp.first.dense)
        return found | self._by_name(index, "down", mlp.down.dense)

    def round(self, index: int, grid: Grid) -> dict[str, Rounded]:
        """Round the products of the next layer, and run it."""
        spec, (tensors, mlp) = self._spec, self._tensors(index)
        mlp_spec = spec.layers[index].mlp
        assert isinstance(mlp_spec, MlpSpec)
        activate = gated(mlp_spec.activation)
        found: dict[str, Rounded] = {}

        def product(
            kind: str, weight: Tensor, plain: Tensor, rounded: Tensor, is_added: bool = False
        ) -> tuple[Tensor, Tensor]:
            """The outputs of both models."""
            if is_added:
                shares = (x + plain @ weight.t()).square().mean(1, keepdim=True).rsqrt_()
                made = _round(weight, plain * shares, rounded * shares, grid)
            else:
                made = _round(weight, plain, rounded, grid)
            found.update(self._split(index, kind, made))
            return plain @ weight.t(), rounded @ made.weight.t()

        x, y = self._plain, self._rounded
        norm = _norm(tensors.attention_norm, spec)
        qkv = product("qkv", tensors.qkv.dense, norm(x), norm(y))
        mixed = self._attend(index, qkv[0]), self._attend(index, qkv[1])
        _add((x, y), product("out", tensors.out.dense, *mixed, is_added=True))
        norm = _norm(tensors.mlp_norm, spec)
        first = product("first", mlp.first.dense, norm(x), norm(y))
        acts = activate(first[0]), activate(first[1])
        _add((x, y), product("down", mlp.down.dense, *acts, is_added=True))
        return found

    def _tensors(self, index: int) -> tuple[LayerTensors, MlpTensors]:
        tensors = self._reader.layer(index)
        assert isinstance(tensors.mlp, MlpTensors)
        return tensors, tensors.mlp

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        """Causal attention within every sequence."""
        spec, attention = self._spec, self._spec.layers[index].attention
        heads = qkv.view(-1, self._length, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=2)
        if attention.rope is not None:
            turns = rotary_table(attention.rope, self._length)[None, :, None]
            pairs = adjacent_pairs(spec.head_dim, spec.rotary_dim)
            q, k = (_turned(each[..., pairs], turns) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(qkv), -1)

    def _names(self, index: int, kind: str) -> tuple[list[str], list[int]]:
        """Names of the tensors of a product, and their rows."""
        spec, names = self._spec, self._spec.names
        mlp = spec.layers[index].mlp
        assert isinstance(mlp, MlpSpec)
        rows = {
            "qkv": [spec.num_heads * spec.head_dim] + [spec.num_kv_heads * spec.head_dim] * 2,
            "out": [spec.hidden_size],
            "first": [mlp.size, mlp.size],
            "down": [spec.hidden_size],
        }[kind]
        found = {
            "qkv": names.qkv, "out": (names.out,), "first": names.gate_up, "down": (names.down,),
        }[kind]  # fmt: skip
        if len(found) == 1:
            rows = [sum(rows)]
        prefix = names.layer.format(index)
        return [f"{prefix}.{name}" for name in found], rows

    def _by_name(self, index: int, kind: str, weight: Tensor) -> dict[str, Tensor]:
        names, rows = self._names(index, kind)
        return dict(zip(names, torch.split(weight, rows), strict=True))

    def _split(self, index: int, kind: str, made: Rounded) -> dict[str, Rounded]:
        names, rows = self._names(index, kind)
        parts = (torch.split(each, rows, dim=1) for each in (made.levels, made.scales, made.zeros))
        return {
            name: Rounded(levels, scales, zeros)
            for name, levels, scales, zeros in zip(names, *parts, strict=True)
        }


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


def _turned(pairs: Tensor, turns: Tensor) -> Tensor:
    """[.., dim] with rotary pairs side by side, rotated; dims beyond them stay."""
    count = 2 * turns.shape[-1]
    found = torch.view_as_complex(pairs[..., :count].reshape(*pairs.shape[:-1], -1, 2)) * turns
    return torch.cat((torch.view_as_real(found).flatten(-2), pairs[..., count:]), dim=-1)


def _norm(tensors: NormTensors | None, spec: ModelSpec) -> RmsNorm:
    assert tensors is not None
    return RmsNorm(norm_scale(tensors.gain), spec.hidden_size, spec.norm.eps)


def _check(spec: ModelSpec) -> None:
    is_known = (
        spec.norm.kind is NormKind.RMS
        and spec.norm_place is NormPlace.BEFORE
        and spec.residual is Residual.SERIAL
        and spec.qk_norm is QkNorm.NONE
        and spec.residual_scale == spec.embedding_scale == 1.0
        and not (spec.has_qkv_bias or spec.has_out_bias)
        and all(isinstance(layer.mlp, MlpSpec) and layer.mlp.is_gated for layer in spec.layers)
        and all(layer.attention == spec.layers[0].attention for layer in spec.layers)
        and spec.layers[0].attention.window is None
        and spec.quantized is None
    )
    if not is_known:
        raise UnsupportedModel(
            f"{spec.architecture}: only plain models in Llama's layout can be quantized here"
        )
