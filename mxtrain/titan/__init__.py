"""mxtrain in TorchTitan. A config enables it with ``experimental.custom_import = "mxtrain.titan"``.

Importing this package makes TorchTitan use the CPU if there is no accelerator. With release 0.2.2 it registers
mxtrain's converters and its versions of the models, under ``-m mxtrain.train`` and ``-m torchtitan.train`` alike.
"""

from typing import TYPE_CHECKING

import torch

from mxtrain.titan import cpu
from mxtrain.titan.releases import engine

# First, because TorchTitan's modules copy the device type when they are imported.
if not torch.cuda.is_available():
    cpu.use_cpu()

# Type checkers see this declaration only: it has the arguments of the other one, too.
if TYPE_CHECKING:
    from mxtrain.titan.v03.with_mxtrain import with_mxtrain
else:
    engine().register()
    with_mxtrain = engine().with_mxtrain

__all__ = ["with_mxtrain"]
