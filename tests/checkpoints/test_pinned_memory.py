import torch
from torch.distributed.checkpoint.staging import StagingOptions

from mxtrain.checkpoints.pinned_memory import KeptStager


def test_two_saves_use_the_same_memory():
    """Without pinned memory and background copies, which need a GPU."""
    stager = KeptStager(StagingOptions(False, False, False, False))
    weight = torch.ones(64)
    first = stager.stage({"weight": weight})["weight"]
    weight += 1
    second = stager.stage({"weight": weight})["weight"]
    assert torch.equal(second, weight) and second.data_ptr() == first.data_ptr() != weight.data_ptr()
    stager.close()
