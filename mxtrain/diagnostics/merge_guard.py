"""Watches mode "fp8_merged": a layer whose codes merging changes too often multiplies images for the rest of the run.

Diagnostics count, for each cast of a layer, the codes that merging changes (``mxtrain.formats.mx.merged``): the figures
that end with "_merged". They are read in steps with diagnostics alone, so no other step waits for the device.
"""

from collections.abc import Callable, Iterable

import torch

from mxtrain.analysis.metrics_file import IMAGE_LAYERS, MERGED_SHARE, NUMERICS
from mxtrain.conversion.plan import folded
from mxtrain.conversion.schedule import GRAPHS, allow_graphs
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.ranks import gather


class MergeGuard:
    """Compares the shares of changed codes with a limit, and gives layers above it mode "emulated".

    All norms and linears that share a cast with such a layer go with it.

    Args:
        limit: of the share of a cast's nonzero elements.
        model_parts, name_of: as for ``Numerics``.
        log_event: (step, text) tells the user.

    Attributes:
        images: FQNs of the layers above the limit so far, on all processes. A checkpoint's manifest keeps them.
    """

    def __init__(
        self,
        limit: float,
        model_parts: Iterable[torch.nn.Module],
        name_of: Callable[[str], str],
        log_event: Callable[[int, str], None],
    ):
        self.limit, self.images, self._log_event = limit, [], log_event
        modules = {name_of(fqn): module for part in model_parts for fqn, module in part.named_modules()}
        self._linears = {fqn: module for fqn, module in modules.items() if isinstance(module, QuantizedLinear)}

    def check(self, step: int, figures: dict[str, float]) -> None:
        """Look at the figures of a step, which only rank 0 has. All ranks must call it."""
        shares = {key: share for key, share in figures.items() if key.endswith(MERGED_SHARE) and share > self.limit}
        # The layers in the order of the model, which are measured from the last to the first.
        found = [*reversed({key.removeprefix(NUMERICS).rpartition("/")[0]: None for key in shares})]
        found, largest = gather((found, max(shares.values(), default=0.0)))[0]
        if found:
            self.restore(found)
            limit = f"mxnorm.merge_limit = {self.limit:g}, found up to {largest:.2g}"
            text = f"multiplies images from now on ({limit}; {IMAGE_LAYERS}{len(self.images)})"
            for line in folded(dict.fromkeys(found, text)):
                self._log_event(step, line)

    def restore(self, images: Iterable[str]) -> None:
        """Let these layers multiply images, if this process has them."""
        for fqn in images:
            self.images = sorted({*self.images, fqn})
            if (linear := self._linears.get(fqn)) is not None:
                norms = linear.fed_by or ()
                fed = [other for other in self._linears.values() if any(norm in norms for norm in other.fed_by or ())]
                for module in (linear, *norms, *fed):
                    module.mode = "emulated"
                allow_graphs(torch.compiler.config.recompile_limit + GRAPHS)  # of this block
