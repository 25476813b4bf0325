"""mxtrain in TorchTitan. A config enables it with ``experimental.custom_import = "mxtrain.titan"``.

Importing this package makes TorchTitan use the CPU if there is no accelerator, and registers mxtrain's converters and
its versions of the models. It works under ``-m mxtrain.train`` and ``-m torchtitan.train`` alike.
"""

import torch

from mxtrain.titan.repairs import cpu

# First, because TorchTitan's modules copy the device type when they are imported.
if not torch.cuda.is_available():
    cpu.use_cpu()

from mxtrain.titan.converters import register_converters  # noqa: E402
from mxtrain.titan.models.train_specs import register_train_specs, with_mxtrain  # noqa: E402

__all__ = ["with_mxtrain"]

register_converters()
register_train_specs()
