"""TorchTitan 0.2.2's models without data, as converters see them."""

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils


def build_on_meta(job_config) -> nn.Module:
    """Return a job's model as TorchTitan builds it before converters, on the meta device."""
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(args)


def example_inputs(model: nn.Module) -> tuple:
    """Arguments for one forward pass of a TorchTitan language model: token ids, and the mask its attention takes."""
    tokens = torch.zeros(1, 32, dtype=torch.long)
    attn_type = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    if attn_type == "flex":
        causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
        return tokens, causal
    if attn_type == "varlen":
        offsets = torch.tensor([0, 32], dtype=torch.int32)
        return tokens, VarlenMetadata(offsets, offsets, 32, 32)
    return (tokens,)
