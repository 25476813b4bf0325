"""Models that no converter takes: what was done to them belongs after conversion."""

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from mxtrain.errors import ConfigError

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)


def refuse_unfit_model(model: nn.Module) -> None:
    """Raise ConfigError unless ``model`` is a module tree that was not yet wrapped, sharded or compiled."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    for fqn, module in model.named_modules():
        name, kind = fqn or "the model", type(module).__name__
        if isinstance(module, _WRAPPERS):
            raise ConfigError(f"{name} is a {kind}: convert the model first, then wrap it")
        if isinstance(module, FSDPModule):
            raise ConfigError(f"{name} is sharded (class {kind}): convert the model first, then call fully_shard")
        # torch.compile(module) makes a module with this child, module.compile() sets this attribute.
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ConfigError(f"{name} is compiled: convert the model first, then compile it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"{name} is a DTensor: convert the model first, then distribute it")
        if is_lazy(parameter):
            raise ConfigError(f"{name} has no shape yet (a lazy module): run the model once, then convert it")
