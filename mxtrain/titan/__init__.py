"""mxtrain in TorchTitan: ``experimental.custom_import = "mxtrain.titan"`` is all that a config needs.

Importing this package points TorchTitan at the CPU where there is no accelerator, and registers mxtrain's converters
and its versions of the models. It works the same under ``-m mxtrain.train`` and ``-m torchtitan.train``.
"""

import torch

from mxtrain.titan import cpu

# Before anything else of TorchTitan is imported: its modules copy the device type when they are.
if not torch.cuda.is_available():
    cpu.use_cpu()

from mxtrain.titan.converters import register_converters  # noqa: E402
from mxtrain.titan.train_specs import register_train_specs  # noqa: E402

register_converters()
register_train_specs()
