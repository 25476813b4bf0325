"""TorchTitan 0.3's expert parallelism with codes (``mxtrain.parallel.expert_dispatch``)."""

from dataclasses import replace

import torch.nn as nn
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.routed_rows import RoutedRows
from mxtrain.parallel.expert_dispatch import SentRows


class CodesDispatcher(AllToAllTokenDispatcher):
    """``AllToAllTokenDispatcher`` that also takes the result of an MXNorm. For tensors it does the same."""

    def dispatch(self, x_TD, *routing):
        rows = x_TD[:] if isinstance(x_TD, NormedInput) else x_TD
        if not isinstance(rows, RoutedRows):
            return super().dispatch(rows, *routing)
        packed, counts, sent = super().dispatch(rows.packed, *routing)
        index, splits = sent.token_indices_experts_sorted_N, (sent.input_splits, sent.output_splits)
        h = SentRows.apply(rows.h, index, sent.permuted_indices, *splits, self._group())
        of_results = replace(sent, input_shape=(packed.shape[0], h.shape[1]))
        return RoutedRows(h, packed, rows.format), counts, of_results

    def _group(self) -> str:
        return self.ep_mesh.get_group().group_name


def use_codes(model: nn.Module) -> None:
    """Let dispatchers send what norms choose (``choose_exchange``)."""
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.token_dispatcher.__class__ = CodesDispatcher
