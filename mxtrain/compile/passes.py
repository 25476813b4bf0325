"""All passes over compiled graphs, and their registration with Inductor."""

import os
from pathlib import Path

from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import config, custom_graph_pass
from torch._inductor.async_compile import maybe_warm_pool, shutdown_compile_workers
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import needs_realized_inputs
from torch.fx import Graph

from mxtrain.compile.casts_for_backward import compute_casts_in_backward
from mxtrain.compile.complex_products import split_complex_products
from mxtrain.compile.first_step import describe_launches, note_launches
from mxtrain.compile.kernel_inputs import fuse_residual_add, fuse_rounding
from mxtrain.compile.launches import launch_from_graphs
from mxtrain.compile.swiglu import fuse_swiglu

JOINT = (split_complex_products, fuse_swiglu, compute_casts_in_backward, note_launches)
"""Functions f(graph: torch.fx.Graph) -> None, called in this order on every graph before PyTorch splits it into forward
and backward"""

POST_GRAD = (fuse_residual_add, fuse_rounding, launch_from_graphs)
"""Functions with the same signature, called on forward graphs and on backward graphs after Inductor's own passes"""

PASSES = {"joint_custom_pre_pass": JOINT, "post_grad_custom_post_pass": POST_GRAD}
"""Field of Inductor's configuration -> the passes that ``install`` adds there"""

LAUNCHER = "static_launch_user_defined_triton_kernels"
"""Field of Inductor's configuration: graphs launch our kernels, too, in C++, which takes 11 instead of 18 us"""

VARIABLE = f"TORCHINDUCTOR_{LAUNCHER.upper()}"

# The base class of passes that learn whether a graph is for inference. PyTorch 2.11 does not have this class.
InferenceAware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class _Passes(InferenceAware or CustomGraphPass):
    """mxtrain's passes, then the passes that the field held before."""

    def __init__(self, ours: tuple, others: tuple):
        self.ours, self.others = ours, others

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for one in (*self.ours, *self.others):
            if InferenceAware and isinstance(one, InferenceAware):
                one(graph, is_inference)
            else:
                one(graph)

    def uuid(self) -> object | None:
        """Part of the key of Inductor's cache; None, which switches the cache off, if another pass has no uuid."""
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        files = tuple(map(str, sorted(Path(__file__).parents[1].rglob("*.py"))))  # compiled graphs hold kernels
        return None if None in theirs else (get_hash_for_files(files), *theirs)


def start_compile_workers() -> None:
    """Start compile workers while the rest is imported and built.

    A pool takes seconds to start. Until then, the training process itself compiles kernels, one by one.
    """
    os.environ.setdefault(VARIABLE, "1")
    maybe_warm_pool()


def install() -> None:
    """Let Inductor run the passes on all graphs that are compiled from now on with the caller's configuration.

    In PyTorch 2.13 each thread and each ``contextvars`` context has a configuration of its own. Call this function in
    the thread and context that first run the model, because they compile it.

    Graphs that have neither mxtrain's operations nor products of complex numbers do not change. Passes that Inductor's
    fields held before still run, after mxtrain's. Code that sets these fields later replaces the passes: compiled
    models are then correct, but slower.
    """
    for field, ours in PASSES.items():
        before = getattr(config, field)
        if not isinstance(before, _Passes):
            others = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
            setattr(config, field, _Passes(ours, tuple(others)))
    describe_launches(True)
    setattr(config, LAUNCHER, True)
    # Else Inductor computes and stores a tensor once for every kernel that reads it.
    needs_realized_inputs.add(triton_kernel_wrapper_mutation)
    # Compile workers prepare launches. They read the field from the environment in which they start.
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "1"
        shutdown_compile_workers()  # of an earlier compilation; the next one starts others


def remove() -> None:
    """Undo ``install`` for graphs that are compiled from now on."""
    for field in PASSES:
        installed = getattr(config, field)
        if isinstance(installed, _Passes):
            # A single pass is not put into a tuple: PyTorch 2.11 accepts no sequence.
            others = installed.others
            setattr(config, field, others[0] if len(others) == 1 else others or None)
    describe_launches(False)
    setattr(config, LAUNCHER, False)
    needs_realized_inputs.discard(triton_kernel_wrapper_mutation)
