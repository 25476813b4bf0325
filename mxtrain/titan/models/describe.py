"""A job's model on the meta device, and its conversion there: shapes and plans without memory."""

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from mxtrain.conversion.plan import Plan
from mxtrain.titan.converters import TITAN_CONVERTERS


def build_on_meta(job_config) -> torch.nn.Module:
    """Return a job's model as TorchTitan builds it before converters."""
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(args)


def convert_on_meta(job_config, model: torch.nn.Module) -> dict[str, Plan | None]:
    """Apply a job's converters to its model in order. Return their plans by name; None for TorchTitan's own, left out.

    Raises:
        ConfigError: a converter refuses the model.
    """
    ours = {kind.name: kind for kind in TITAN_CONVERTERS}
    return {
        name: ours[name](job_config, None).apply_to(model) if name in ours else None
        for name in job_config.model.converters
    }
