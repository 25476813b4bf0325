"""TorchTitan 0.2.2's expert parallelism with codes (``mxtrain.parallel.expert_dispatch``)."""

from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.utils import _unpermute

from mxtrain.nn.routed_rows import RoutedRows
from mxtrain.parallel.expert_dispatch import SentRows, returned, returns_codes


class CodesExpertParallel(ExpertParallel):
    """``ExpertParallel`` that also takes ``RoutedRows``. For tensors it does the same."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        rows, counts = inputs
        if not isinstance(rows, RoutedRows):
            return super()._token_dispatch(mod, inputs, device_mesh)
        packed, counts = super()._token_dispatch(mod, (rows.packed[rows.index], counts), device_mesh)
        self.input_shape = (self.input_shape[0], rows.h.shape[1])  # of the results, not of the bytes
        h = SentRows.apply(rows.h, rows.index, self.permuted_indices, *self._exchange(device_mesh))
        return RoutedRows(h, packed), counts

    def _token_combine(self, mod, routed_output, device_mesh):
        if not returns_codes(mod):
            return super()._token_combine(mod, routed_output, device_mesh)
        y = _unpermute(routed_output, self.input_shape, self.permuted_indices)
        return returned(y, *self._exchange(device_mesh), mod)

    def _exchange(self, device_mesh) -> tuple[list[int], list[int], str]:
        return self.input_splits, self.output_splits, device_mesh.get_group().group_name
