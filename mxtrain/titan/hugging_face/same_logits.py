"""Compares an imported model with transformers' own, because two readings of one config.json may be two models."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.pretrained import LOCAL, call

LAYERS = 2
"""How many of the first layers are compared. They take little memory of any model"""
POSITIONS = torch.tensor([[0, 1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2047]])
"""Of the tokens. Low frequencies, which a scaling changes, show at large ones"""
TOLERANCE = 1e-3
"""The largest difference of two logits, as a share of their standard deviation"""


@torch.inference_mode()
def require_same_logits(source: Path, model: str, args, weights: Mapping[str, torch.Tensor], where: str) -> str:
    """Compute a few tokens' logits after the first layers, in fp32 on the CPU, with TorchTitan and with transformers.

    Returns a line for the user. Raises ConfigError, beginning with ``where``, if they differ or transformers fails.
    """
    try:
        import transformers
    except ImportError:
        return "the logits were not compared with transformers', which is not installed"
    tokens = torch.linspace(0, args.vocab_size - 1, POSITIONS.numel()).long()[None]
    args = replace(args, n_layers=min(LAYERS, args.n_layers), max_seq_len=int(POSITIONS.max()) + 1)
    with torch.device("meta"):
        module = get_train_spec(model).model_cls(args)
    module.init_weights(buffer_device=torch.device("cpu"))  # computes the buffers; parameters have no memory
    module.load_state_dict({fqn: weights[fqn] for fqn in module.state_dict()}, assign=True)
    ours = module(tokens, positions=POSITIONS)
    del module  # before the other model is loaded
    config = call(where, transformers.AutoConfig.from_pretrained, source, **LOCAL)
    config.num_hidden_layers = args.n_layers
    options = {"config": config, "dtype": torch.float32, "use_safetensors": True}
    module = call(where, transformers.AutoModelForCausalLM.from_pretrained, source, **options, **LOCAL)
    # With a mask, because jumps of the positions would begin new documents without one.
    theirs = call(where, module, tokens, attention_mask=torch.ones_like(tokens), position_ids=POSITIONS).logits
    difference, spread = (ours - theirs).abs().max().item(), theirs.std().item()
    peer = f"those of transformers {transformers.__version__} on {tokens.numel()} tokens after {args.n_layers} layers"
    if not difference <= TOLERANCE * spread:  # NaN, too
        raise ConfigError(
            f"{where}: the logits of TorchTitan's {model} differ from {peer} by up to {difference:.2g}, and their "
            f"standard deviation is {spread:.2g}: transformers reads config.json or the weights in another way"
        )
    return f"the logits are {peer}, up to {difference:.1g}; their standard deviation is {spread:.2g}"
