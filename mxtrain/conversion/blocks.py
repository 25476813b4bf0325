"""The blocks and the output heads of a model, found in the tree of its modules; nothing runs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch.nn as nn

# Names of the output head in TorchTitan's models and in Hugging Face's.
HEAD_NAMES = ("output", "lm_head")


def find_blocks(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The layers that a model repeats, in its order.

    They are the members of a ModuleList, and of a ModuleDict with numbers as keys. In another ModuleDict and in a
    Sequential they are the members whose class occurs more than once. A member may also hold blocks instead of being
    one: a list, a dict, or a whole model, which has an embedding. Members without linears are no blocks, and linears
    are blocks only in a model without others.

    Args:
        modules: every module of a model by FQN, the model itself as "".
    """
    blocks: list[str] = []

    def visit(fqn: str) -> None:
        repeated = _repeated_members(modules[fqn])
        for name, _ in modules[fqn].named_children():
            member = f"{fqn}.{name}".removeprefix(".")
            if name in repeated:
                blocks.append(member)
            elif member in modules:  # not a second name of a module
                visit(member)

    visit("")
    return tuple(block for block in blocks if not isinstance(modules[block], nn.Linear)) or tuple(blocks)


def _repeated_members(container: nn.Module) -> Collection[str]:
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return ()
    kinds = {name: type(member) for name, member in container.named_children() if _may_be_block(member)}
    if isinstance(container, nn.ModuleList):
        return kinds
    if isinstance(container, nn.ModuleDict) and all(name.isdigit() for name in kinds):
        return kinds
    counts = Counter(kinds.values())
    return [name for name, kind in kinds.items() if counts[kind] > 1 and kind is not nn.Linear]


def _may_be_block(member: nn.Module) -> bool:
    if isinstance(member, nn.ModuleList | nn.ModuleDict):
        return False
    is_model = any(isinstance(child, nn.Embedding) for child in member.children())
    return not is_model and any(isinstance(module, nn.Linear) for module in member.modules())


def find_heads(modules: Mapping[str, nn.Module], linears: Collection[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """The linears from the last hidden state to logits; usually one, or none.

    Heads lie outside the blocks. They are called "output" or "lm_head". In a model without these names, the head is the
    last linear whose weight has the shape of an embedding's, or else the last linear behind the blocks. A square
    weight may have an embedding's shape by chance.

    Args:
        modules: as for ``find_blocks``.
        linears: FQNs of the linears.
    """
    outside = [fqn for fqn in linears if not any(f"{fqn}.".startswith(f"{block}.") for block in blocks)]
    if named := [fqn for fqn in outside if fqn.rpartition(".")[2] in HEAD_NAMES]:
        return tuple(named)
    embeddings = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    shapes = {fqn: (modules[fqn].out_features, modules[fqn].in_features) for fqn in outside}
    if shaped := [fqn for fqn, (rows, columns) in shapes.items() if rows != columns and (rows, columns) in embeddings]:
        return tuple(shaped[-1:])
    order = {fqn: place for place, fqn in enumerate(modules)}
    last_block = max((order[block] for block in blocks), default=len(order))
    return tuple([fqn for fqn in outside if order[fqn] > last_block][-1:])
