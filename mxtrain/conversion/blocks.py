"""The blocks and the output heads of a model, found in the tree of its modules; nothing runs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch.nn as nn

# Names of the output head in TorchTitan's models and in Hugging Face's.
HEAD_NAMES = ("output", "lm_head")


def find_blocks(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The layers that a model repeats, in its order.

    They are the members of a ModuleList, and of a ModuleDict with numbers as keys. In a model without those they are
    the members of another ModuleDict or of a Sequential whose class occurs more than once, or the linears of a list.
    A member may hold blocks instead of being one: a list of one class, a dict, or a whole model with an embedding.
    Members without linears are no blocks.

    Args:
        modules: every module of a model by FQN, the model itself as "".
    """
    return _in_lists(modules, "") or _repeated(modules, "") or _linears_in_lists(modules)


def _in_lists(modules: Mapping[str, nn.Module], outer: str) -> tuple[str, ...]:
    """Members of lists that lie in ``outer``."""
    blocks: list[str] = []
    is_list = _is_list(modules[outer]) and not _holds_only_linears(modules[outer])
    for member in _members(modules, outer):
        inner = _in_lists(modules, member) if not is_list or _may_hold_blocks(modules[member]) else ()
        if inner or not is_list:
            blocks += inner
        elif _holds_linears(modules[member]):
            blocks.append(member)
    return tuple(blocks)


def _repeated(modules: Mapping[str, nn.Module], outer: str) -> tuple[str, ...]:
    """Members whose class occurs more than once in a container that lies in ``outer``."""
    container, members = modules[outer], _members(modules, outer)
    kinds = Counter()
    if isinstance(container, nn.ModuleDict | nn.Sequential):
        kinds.update(type(modules[member]) for member in members if _holds_linears(modules[member]))
    blocks: list[str] = []
    for member in members:
        is_linear = isinstance(modules[member], nn.Linear)
        is_block = kinds[type(modules[member])] > 1 and not is_linear
        blocks += (member,) if is_block else _repeated(modules, member)
    return tuple(blocks)


def _linears_in_lists(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    lists = [fqn for fqn, module in modules.items() if _is_list(module) and _holds_only_linears(module)]
    return tuple(member for fqn in lists for member in _members(modules, fqn))


def _members(modules: Mapping[str, nn.Module], outer: str) -> list[str]:
    members = (f"{outer}.{name}".removeprefix(".") for name, _ in modules[outer].named_children())
    return [member for member in members if member in modules]  # a module that has two names is there once


def _is_list(module: nn.Module) -> bool:
    is_numbered = isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)
    return isinstance(module, nn.ModuleList) or is_numbered


def _may_hold_blocks(member: nn.Module) -> bool:
    """Whether a member of a list is no block if blocks are found in it. A list of several classes is one layer."""
    if isinstance(member, nn.ModuleList):
        return len({type(module) for module in member}) == 1
    return isinstance(member, nn.ModuleDict) or any(isinstance(child, nn.Embedding) for child in member.children())


def _holds_linears(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Linear) for part in module.modules())


def _holds_only_linears(module: nn.Module) -> bool:
    return all(isinstance(member, nn.Linear) for member in module.children())


def find_heads(modules: Mapping[str, nn.Module], linears: Collection[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """The linears from the last hidden state to logits; usually one, or none.

    Heads lie outside the blocks. They are called "output" or "lm_head". In a model without these names, the head is

    - the last linear whose weight has the shape of an embedding's. A square one may have it by chance, so it counts
      only if there is no other head, and no other such linear.
    - the only linear that is not square, stands behind the blocks, and is a child of a module that holds them.

    Args:
        modules: as for ``find_blocks``.
        linears: FQNs of the linears.
    """
    outside = [fqn for fqn in linears if not any(f"{fqn}.".startswith(f"{block}.") for block in blocks)]
    if named := [fqn for fqn in outside if fqn.rpartition(".")[2] in HEAD_NAMES]:
        return tuple(named)
    shapes = {fqn: (modules[fqn].out_features, modules[fqn].in_features) for fqn in outside}
    square = [fqn for fqn, (rows, columns) in shapes.items() if rows == columns]
    embeddings = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    shaped = [fqn for fqn in outside if shapes[fqn] in embeddings]
    if not_square := [fqn for fqn in shaped if fqn not in square]:
        return tuple(not_square[-1:])
    behind = [fqn for fqn in outside if fqn not in square and _is_behind(modules, fqn, blocks)]
    return tuple(behind if len(behind) == 1 else shaped if len(shaped) == 1 else ())


def _is_behind(modules: Mapping[str, nn.Module], fqn: str, blocks: Sequence[str]) -> bool:
    if not blocks:
        return False
    parent, _, _ = fqn.rpartition(".")
    order = list(modules)
    holds_blocks = parent == "" or blocks[-1].startswith(f"{parent}.")
    return holds_blocks and order.index(fqn) > order.index(blocks[-1])
