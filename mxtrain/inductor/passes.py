"""All passes over compiled graphs, and their registration with Inductor."""

from pathlib import Path

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from mxtrain.inductor.swiglu import fuse_swiglu

JOINT = (fuse_swiglu,)
"""Functions f(graph: torch.fx.Graph) -> None, called in this order on every graph before PyTorch splits it into forward
and backward"""


class _Joint(CustomGraphPass):
    """``JOINT``, then the passes that were set before."""

    def __init__(self, others: tuple):
        self.others = others

    def __call__(self, graph: Graph) -> None:
        for one in (*JOINT, *self.others):
            one(graph)

    def uuid(self) -> object | None:
        """Part of the key of Inductor's cache. A pass of others without a uuid switches the cache off."""
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        files = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))
        return None if None in theirs else (get_hash_for_files(files), *theirs)


def install() -> None:
    """Let Inductor run the passes on all graphs that this process compiles from now on.

    Graphs without mxtrain's operations stay as they are. A pass in ``joint_custom_pre_pass`` still runs, after these.
    Whoever sets that field later replaces these passes: compiled models are then correct, but slower.
    """
    before = config.joint_custom_pre_pass
    if isinstance(before, _Joint):
        return
    others = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
    config.joint_custom_pre_pass = _Joint(tuple(others))


def remove() -> None:
    """Undo ``install`` for graphs that are compiled from now on."""
    installed = config.joint_custom_pre_pass
    if isinstance(installed, _Joint):
        # One pass alone: PyTorch 2.11 takes no sequence.
        config.joint_custom_pre_pass = installed.others[0] if len(installed.others) == 1 else installed.others or None
