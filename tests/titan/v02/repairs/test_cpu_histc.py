"""Repair of 0.2.2: counts of tokens on a CPU."""

import pytest
import torch

from mxtrain.titan.v02.repairs.cpu_histc import histc


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_histc_counts_integers(dtype):
    chosen = torch.tensor([[0, 2], [2, 3], [3, 3]])
    counts = histc(chosen.to(dtype), bins=4, min=0, max=4)
    assert counts.dtype == dtype and counts.tolist() == [1, 0, 2, 3]
