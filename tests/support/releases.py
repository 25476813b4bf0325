"""What tests take from the installed release of TorchTitan."""

import math

import pytest
from torchtitan.distributed import ParallelDims

from mxtrain.settings.fields import Settings
from mxtrain.settings.titan import known_fields
from mxtrain.titan.releases import RELEASE

only_022 = pytest.mark.skipif(RELEASE != "v02", reason="TorchTitan 0.3 does not have what this tests")
Checkpoint = type(Settings(known_fields(), {}).values.checkpoint)
"""Settings [checkpoint]"""


def parallel_dims(**degrees: int) -> ParallelDims:
    """The layout with these degrees of parallelism; the others are 1."""
    names = ["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", *(["etp"] if RELEASE == "v02" else [])]
    return ParallelDims(**dict.fromkeys(names, 1) | degrees, world_size=math.prod(degrees.values()))
