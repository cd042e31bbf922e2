"""Copies the tensors of a new part of a model over those of the old one, in place.

CUDA graphs and other parts hold the addresses of the old tensors. Both parts were made by the same
code, so they are the same records around other tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

# what may be anywhere in a part, and never changes
PLAIN = (bool, int, float, str, bytes, type(None), Enum, torch.dtype, torch.device, type)


class CannotPour(Exception):
    """Two parts differ in more than the contents of their tensors; says where."""


def pour(old: object, new: object, shared: tuple[type, ...] = ()) -> None:
    """Copy all tensors of `new` over those of `old`. Objects of the types `shared` belong to the
    whole model and stay as they are. Raises CannotPour before anything was copied."""
    pairs = list(tensor_pairs(old, new, shared))
    for before, after in pairs:
        before.copy_(after)


def tensors_in(part: object, shared: tuple[type, ...] = ()) -> list[Tensor]:
    """All tensors of a part, each once."""
    return [tensor for tensor, _ in tensor_pairs(part, part, shared, goes_into_same=True)]


def tensor_pairs(
    old: object, new: object, shared: tuple[type, ...], *, goes_into_same: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of `old` with the one at the same place in `new`. Without `goes_into_same`, what
    both have in common is left out."""
    seen: set[int] = set()
    todo: list[tuple[str, Any, Any]] = [(type(old).__name__, old, new)]
    while todo:
        where, a, b = todo.pop()
        if id(a) in seen or isinstance(a, shared) or (a is b and not goes_into_same):
            continue
        if isinstance(a, PLAIN) or isinstance(b, PLAIN):
            if a != b:
                raise CannotPour(f"{where} is {a!r} and would be {b!r}")
            continue
        seen.add(id(a))
        if type(a) is not type(b):
            raise CannotPour(f"{where} is a {type(a).__name__} and would be a {type(b).__name__}")
        if isinstance(a, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
                raise CannotPour(
                    f"{where} is {a.dtype} {list(a.shape)} and would be {b.dtype} {list(b.shape)}"
                )
            yield a, b
            continue
        ours, theirs = _inside(a), _inside(b)
        if ours.keys() != theirs.keys():
            raise CannotPour(f"{where} has other parts")
        todo += [(f"{where}.{name}", ours[name], theirs[name]) for name in ours]


def _inside(part: Any) -> dict[Any, Any]:
    """What an object holds, by name."""
    match part:
        case dict():
            return part
        case list() | tuple():
            return dict(enumerate(part))
        case MethodType():
            return {"self": part.__self__}
        case partial():
            return {"func": part.func, "args": part.args, "keywords": part.keywords}
        case FunctionType():
            return _closure(part)
        case _ if is_dataclass(part):
            return {each.name: getattr(part, each.name) for each in fields(part)}
        case _:
            slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
            held = {name: getattr(part, name) for name in slots if hasattr(part, name)}
            return held | dict(getattr(part, "__dict__", {}))


def _closure(function: Callable[..., object]) -> dict[str, Any]:
    assert isinstance(function, FunctionType)
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))
