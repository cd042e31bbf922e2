"""Rounding a weight to 4 bits, in groups of columns that share a scale and a zero point.

`nearest` uses only the weight. `for_inputs` minimises the change of the product's outputs over the
inputs from a text: r G r', where G is the Gram matrix of these inputs and r the error of a row.
Columns are rounded one by one, those with the largest inputs first, and later columns compensate
the error of earlier ones (GPTQ). Then scales are fitted by least squares and columns rounded again
with all others fixed (coordinate descent).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = 15  # the largest
MIDDLE = 8
# this part of the Gram matrix's mean diagonal is added to it, since there are few tokens. Less of
# it, or more sweeps, fits the calibration text better and other text worse (docs/log/cpu.md)
_DAMPING = 0.05
_SHRINKS = tuple(1.0 - 0.04 * step for step in range(10))  # factors of the range that levels cover
_BLOCK = 48  # columns whose effect on later ones is computed in one product
_SWEEPS = 1


@dataclass(frozen=True, slots=True)
class Grid:
    group: int  # columns
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight, stored with columns first, since they are processed one by one."""

    levels: Tensor  # fp32 [in, out], whole numbers of 0 to 15
    scales: Tensor  # [in / group, out], exactly representable in fp16
    zeros: Tensor  # [in / group, out], whole numbers of 0 to 15

    @property
    def weight(self) -> Tensor:
        """[out, in]"""
        return self._columns().t().contiguous()

    def _columns(self) -> Tensor:
        groups, out = self.scales.shape
        levels = self.levels.view(groups, -1, out)
        return ((levels - self.zeros[:, None]) * self.scales[:, None]).view(-1, out)


def nearest(weight: Tensor, grid: Grid) -> Rounded:
    columns = weight.t().contiguous()
    scales, zeros = _choose_scales(columns, torch.ones(len(columns)), grid, shrinks=(1.0,))
    groups, out = scales.shape
    levels = columns.view(groups, -1, out) / scales[:, None] + zeros[:, None]
    levels = levels.round_().clamp_(0, LEVELS).view(-1, out)
    return Rounded(levels, scales, zeros)


def for_inputs(weight: Tensor, gram: Tensor, grid: Grid) -> Rounded:
    """`gram` [in, in] is the mean of x' x over the inputs x."""
    columns, gram = weight.t().contiguous(), damped(gram, _DAMPING)
    scales, zeros = _choose_scales(columns, gram.diagonal(), grid, _SHRINKS)
    rounded = Rounded(_round_columns(columns, gram, grid.group, scales, zeros), scales, zeros)
    for _ in range(_SWEEPS):
        scales = _fit_scales(columns, gram, rounded)
        rounded = Rounded(rounded.levels, scales, zeros)
        _round_again(columns, gram, grid.group, rounded)
    return rounded


def damped(gram: Tensor, share: float) -> Tensor:
    damped = gram.clone()
    damped.diagonal().add_(share * gram.diagonal().mean() + 1e-12)
    return damped


def _choose_scales(
    columns: Tensor, importance: Tensor, grid: Grid, shrinks: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Scales and zeros of the ranges with the least error, weighted by the importance [in] of
    columns. A range covers all numbers of a group, or a part of them."""
    out = columns.shape[1]
    numbers, weights = columns.view(-1, grid.group, out), importance.view(-1, grid.group, 1)
    highest, lowest = numbers.amax(1).clamp(min=0), numbers.amin(1).clamp(max=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in shrinks:
        if grid.is_symmetric:
            scales = torch.maximum(highest, -lowest) * (shrink / (MIDDLE - 0.5))
        else:
            scales = (highest - lowest) * (shrink / LEVELS)
        scales = scales.clamp_(min=1e-7).half().float()
        zeros = torch.full_like(scales, MIDDLE)
        if not grid.is_symmetric:
            zeros = (-lowest * shrink / scales).round_().clamp_(0, LEVELS)
        found = (numbers / scales[:, None]).add_(zeros[:, None]).round_().clamp_(0, LEVELS)
        found.sub_(zeros[:, None]).mul_(scales[:, None])
        errors = found.sub_(numbers).square_().mul_(weights).sum(1)
        if best is None:
            best = scales, zeros, errors
        else:
            is_better = errors < best[2]
            new = (scales, zeros, errors)
            best = tuple(torch.where(is_better, a, b) for a, b in zip(new, best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best[0], best[1]


def _round_columns(
    columns: Tensor, gram: Tensor, group: int, scales: Tensor, zeros: Tensor
) -> Tensor:
    """The levels [in, out], for given scales and zeros."""
    size, out = columns.shape
    order = gram.diagonal().argsort(descending=True)
    left, gram = columns[order], gram[order][:, order]
    # row i of the factor: how later columns compensate a change of column i
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    factor = torch.linalg.cholesky(inverse, upper=True)
    pivots = factor.diagonal().tolist()
    levels = torch.empty_like(columns)
    for first in range(0, size, _BLOCK):
        end = min(first + _BLOCK, size)
        errors = torch.empty(end - first, out)
        for place in range(first, end):
            column = int(order[place])
            scale, zero = scales[column // group], zeros[column // group]
            level = (left[place] / scale).add_(zero).round_().clamp_(0, LEVELS)
            levels[column] = level
            error = (left[place] - (level - zero) * scale).div_(pivots[place])
            errors[place - first] = error
            left[place + 1 : end].addr_(factor[place, place + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[first:end, end:].t(), errors, alpha=-1)
    return levels


def _fit_scales(columns: Tensor, gram: Tensor, rounded: Rounded) -> Tensor:
    """Least squares over all groups of a row, the levels fixed; scales move by at most 1.6."""
    groups, out = rounded.scales.shape
    size = len(columns) // groups
    steps = rounded.levels.view(groups, size, out) - rounded.zeros[:, None]
    wanted = (steps * (gram @ columns).view(groups, size, out)).sum(1)
    normal = torch.empty(out, groups, groups)
    for index in range(groups):
        block = gram[:, index * size : (index + 1) * size]
        spread = (block @ steps[index]).view(groups, size, out)
        normal[:, :, index] = (steps * spread).sum(1).t()
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-4 * diagonal.mean(-1, keepdim=True) + 1e-10)
    found = torch.linalg.solve(normal, wanted.t()).t().half().float()
    ratio = found / rounded.scales
    return torch.where((ratio > 1 / 1.6) & (ratio < 1.6), found, rounded.scales)


def _round_again(columns: Tensor, gram: Tensor, group: int, rounded: Rounded) -> None:
    """Each column's best level with all others fixed, one after another, in place."""
    size, out = columns.shape
    levels, diagonal = rounded.levels, gram.diagonal().tolist()
    pull = gram @ (columns - rounded.weight.t())
    for first in range(0, size, _BLOCK):
        end = min(first + _BLOCK, size)
        moves = torch.empty(end - first, out)
        for column in range(first, end):
            scale = rounded.scales[column // group]
            level = (pull[column] / (scale * diagonal[column])).add_(levels[column])
            level = level.round_().clamp_(0, LEVELS)
            move = (level - levels[column]) * scale
            levels[column] = level
            moves[column - first] = move
            pull[column + 1 : end].addr_(gram[column, column + 1 : end], move, alpha=-1)
        pull[end:].addmm_(gram[end:, first:end], moves, alpha=-1)
