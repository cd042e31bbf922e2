"""Rounding a weight to 4 bits, in groups of columns that share a scale and a zero point.

`nearest` uses only the weight. `for_inputs` minimises the change of the product's outputs over the
inputs from a text: r G r', where G is the Gram matrix of these inputs and r the error of a row.
Columns are rounded one by one, groups with the largest inputs first, and later columns compensate
the error of earlier ones (GPTQ). Each group is rounded with several scales, and each row keeps the
scale with the least error. Then scales are fitted by least squares and columns rounded again with
all others fixed (coordinate descent).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = 15  # the largest level
MIDDLE = 8
# this part of the mean of the Gram matrix's diagonal is added to the diagonal, since there are few
# tokens. A smaller part fits the calibration text better and other text worse (docs/log/cpu.md)
_DAMPING = 0.15
# scales that are tried: levels cover this part of a group's range. More ratios gain little
_RATIOS = tuple(0.8 + 0.4 * step / 19 for step in range(20))
_BLOCK = 48  # columns whose effect on the rest is computed in one product
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
    numbers = columns.view(-1, grid.group, columns.shape[1])
    scales, zeros = (each[:, 0] for each in _scales(numbers, grid, (1.0,)))
    levels = (numbers / scales[:, None] + zeros[:, None]).round_().clamp_(0, LEVELS)
    return Rounded(levels.view(columns.shape), scales, zeros)


def for_inputs(weight: Tensor, gram: Tensor, grid: Grid) -> Rounded:
    """`gram` [in, in] is the mean of x' x over the inputs x."""
    columns, gram = weight.t().contiguous(), damped(gram, _DAMPING)
    rounded = _round_groups(columns, gram, grid)
    for _ in range(_SWEEPS):
        scales = _fit_scales(columns, gram, rounded)
        rounded = Rounded(rounded.levels, scales, rounded.zeros)
        _round_again(columns, gram, grid.group, rounded)
    return rounded


def damped(gram: Tensor, share: float) -> Tensor:
    damped = gram.clone()
    damped.diagonal().add_(share * gram.diagonal().mean() + 1e-12)
    return damped


def _scales(numbers: Tensor, grid: Grid, ratios: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Scales and zeros [groups, ratios, out] of numbers [groups, columns, out]: levels cover these
    parts of the range of each group."""
    highest = numbers.amax(1, keepdim=True).clamp(min=0)
    lowest = numbers.amin(1, keepdim=True).clamp(max=0)
    parts = torch.tensor(ratios, device=numbers.device)[:, None]
    if grid.is_symmetric:
        scales = torch.maximum(highest, -lowest) * (parts / (MIDDLE - 0.5))
    else:
        scales = (highest - lowest) * (parts / LEVELS)
    scales = scales.clamp_(min=1e-7).half().float()
    if grid.is_symmetric:
        return scales, torch.full_like(scales, MIDDLE)
    return scales, (LEVELS / 2 - (highest + lowest) / (2 * scales)).round_().clamp_(0, LEVELS)


def _round_groups(columns: Tensor, gram: Tensor, grid: Grid) -> Rounded:
    """Round group by group, with the scales that leave the least error in each row."""
    (size, out), group = columns.shape, grid.group
    loudness = gram.diagonal().view(-1, group)
    inside = loudness.argsort(dim=1, descending=True)
    groups = loudness.sum(1).argsort(descending=True)
    order = (groups[:, None] * group + inside[groups]).flatten()
    # row i of the factor: how later columns compensate a change of column i
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram[order][:, order].double()))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    left = columns[order]
    levels = torch.empty_like(columns)
    scales, zeros = columns.new_empty(2, size // group, out)
    for place, index in enumerate(groups.tolist()):
        first, end = place * group, (place + 1) * group
        tried = _scales(left[None, first:end], grid, _RATIOS)
        found, errors = _try_scales(left[first:end], factor[first:end, first:end], *tried)
        best = errors.square().sum(0).argmin(0)[None]  # [1, out]
        scales[index], zeros[index] = (each[0].gather(0, best)[0] for each in tried)
        kept = best.expand(group, 1, out)
        levels[order[first:end]] = found.gather(1, kept)[:, 0]
        left[end:].addmm_(factor[first:end, end:].t(), errors.gather(1, kept)[:, 0], alpha=-1)
    return Rounded(levels, scales, zeros)


def _try_scales(
    numbers: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor]:
    """Levels and errors [columns, ratios, out] of a group [columns, out], column by column."""
    group, ratios = len(numbers), scales.shape[1]
    left = numbers[:, None].repeat(1, ratios, 1)
    levels, errors = torch.empty_like(left), torch.empty_like(left)
    for place in range(group):
        level = (left[place] / scales[0]).add_(zeros[0]).round_().clamp_(0, LEVELS)
        levels[place] = level
        errors[place] = (left[place] - (level - zeros[0]) * scales[0]) / factor[place, place]
        after = left.view(group, -1)[place + 1 :]
        after.addr_(factor[place, place + 1 :], errors[place].view(-1), alpha=-1)
    return levels, errors


def _fit_scales(columns: Tensor, gram: Tensor, rounded: Rounded) -> Tensor:
    """Least squares over all groups of a row, with fixed levels; a scale that would change by more
    than a factor of 1.6 is kept."""
    groups, out = rounded.scales.shape
    size = len(columns) // groups
    steps = rounded.levels.view(groups, size, out) - rounded.zeros[:, None]
    wanted = (steps * (gram @ columns).view(groups, size, out)).sum(1)
    normal = columns.new_empty(out, groups, groups)
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
    """Give each column its best level with all others fixed, one after another, in place."""
    size, out = columns.shape
    levels, diagonal = rounded.levels, gram.diagonal().tolist()
    pull = gram @ (columns - rounded.weight.t())
    for first in range(0, size, _BLOCK):
        end = min(first + _BLOCK, size)
        moves = columns.new_empty(end - first, out)
        for column in range(first, end):
            scale = rounded.scales[column // group]
            level = (pull[column] / (scale * diagonal[column])).add_(levels[column])
            level = level.round_().clamp_(0, LEVELS)
            move = (level - levels[column]) * scale
            levels[column] = level
            moves[column - first] = move
            pull[column + 1 : end].addr_(gram[column, column + 1 : end], move, alpha=-1)
        pull[end:].addmm_(gram[end:, first:end], moves, alpha=-1)
