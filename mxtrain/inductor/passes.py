"""The passes of mxtrain over graphs of torch.compile, and how Inductor learns of them."""

from pathlib import Path

import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from mxtrain.inductor.swiglu import fuse_swiglu

JOINT = (fuse_swiglu,)
"""Passes over the joint graph of forward and backward, before PyTorch splits it"""


class _Passes(CustomGraphPass):
    """Run passes one after the other. Inductor caches what it compiles by ``uuid``."""

    def __init__(self, passes):
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for one in self._passes:
            one(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files(tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py"))))


def install() -> None:
    """Let Inductor run the passes over every graph that this process compiles from now on."""
    torch._inductor.config.joint_custom_pre_pass = _Passes(JOINT)
