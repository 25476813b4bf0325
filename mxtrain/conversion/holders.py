"""Modules that other attributes hold as well, besides the module tree. A swap would not reach them there."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType

import torch
import torch.nn as nn

# A class or imported module is not the model's own, and a tensor holds no module.
_HOLDS_NOTHING = (NoneType, str, bytes, bool, int, float, complex, type, ModuleType, torch.Tensor)

# Followed from one attribute, in a fraction of a second. More is a data set or another library's state.
_MOST_OBJECTS = 100_000


def attributes_that_hold_modules(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """id of every module that an attribute holds, in a list for example, and not as a child -> that attribute's name.

    Args:
        modules: every module of a model by FQN.
    """
    held, own, seen = {}, {id(module) for module in modules.values()}, {}
    for fqn, module in modules.items():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            for found in _modules_in(value, module, own, seen):
                if found is not module:
                    held[id(found)] = f"{fqn}.{name}".removeprefix(".")
    return held


def _modules_in(
    value, holder: nn.Module, own: Collection[int], seen: dict[int, tuple[object, list[nn.Module]]]
) -> Iterator[nn.Module]:
    """Yield the modules in a value and in what it holds, nearest first.

    Args:
        holder: the module whose attribute this is.
        own: ids of the modules to find; what these hold is not followed.
        seen: id of every object that was followed -> itself, and for which holders. Two are enough: a module that is
            found counts unless it is the holder itself.
    """
    waiting, followed = deque([value]), 0
    while waiting and followed < _MOST_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, _HOLDS_NOTHING):
            continue
        if id(value) in own:
            yield value
            continue
        _, holders = seen.setdefault(id(value), (value, []))
        if len(holders) < 2 and not any(holder is other for other in holders):
            holders.append(holder)
            followed += 1
            waiting += _parts(value)


def _parts(value) -> list:
    """What a container, method, partial, function or any other object holds."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        return [*_closure(value), value.__defaults__, value.__kwdefaults__]
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts += value
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            parts += _slots(value, kind)
    return parts


def _slots(value, kind: type) -> Iterator:
    """Yield what an object has in the slots that this class of it defines."""
    for member in vars(kind).values():
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):  # an empty slot
                yield member.__get__(value)


def _closure(function: FunctionType) -> Iterator:
    """Yield the values of the variables that a function takes from the function around it."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable without a value
            yield cell.cell_contents
