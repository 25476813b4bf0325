"""Put mxtrain's styles into plans of tensor parallelism: TorchTitan's plans and the plans of a user's own models."""

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.parallel.expert_styles import boundary, inner_style, is_boundary
from mxtrain.titan.parallel.local_heads import with_local_heads
from mxtrain.titan.parallel.tensor_parallel import check_part, style_for
from mxtrain.titan.parallel.tied_weights import stays_tied


@contextmanager
def plans_with_own_styles() -> Iterator[set[nn.Module]]:
    """While active, plans serve models with swapped modules, and give mixtures of experts right gradients.

    ``parallelize_module`` is replaced in every Python module that has imported it by name, except PyTorch's own.

    Yields:
        A set that collects the modules within mixtures of experts while plans are applied to them.
    """
    inner: set[nn.Module] = set()

    @functools.wraps(parallelize_module)
    def parallelize(module, device_mesh=None, parallelize_plan=None, **others):
        if isinstance(parallelize_plan, dict):
            modules = dict(module.named_modules())
            parallelize_plan = _own_plan(modules, parallelize_plan, inner, device_mesh)
            for fqn, style in parallelize_plan.items():
                if isinstance(linear := modules.get(fqn), QuantizedLinear):
                    check_part(fqn, linear, style, device_mesh.size())
        elif module in inner:
            parallelize_plan = inner_style(parallelize_plan)
        with stays_tied(module):
            return parallelize_module(module, device_mesh, parallelize_plan, **others)

    with ExitStack() as patches:
        for name, holder in list(sys.modules.items()):
            is_own = name == __name__ or name.split(".")[0] == "torch"
            if not is_own and vars(holder).get("parallelize_module") is parallelize_module:
                patches.enter_context(patch.object(holder, "parallelize_module", parallelize))
        yield inner


def _own_plan(
    modules: dict[str, nn.Module], plan: dict[str, ParallelStyle], inner: set[nn.Module], device_mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Return ``plan`` with mxtrain's styles, and put the modules within boundaries into ``inner``."""
    for fqn, style in plan.items():
        if fqn in modules and is_boundary(style):
            inner.update(set(modules[fqn].modules()) - {modules[fqn]})
    own = {}
    for fqn, style in with_local_heads(plan).items():
        if is_boundary(style):
            own[fqn] = boundary(style)
        elif modules.get(fqn) in inner:
            own[fqn] = inner_style(style)
        else:
            own[fqn] = style_for(fqn, modules.get(fqn), style, device_mesh)
    return own
