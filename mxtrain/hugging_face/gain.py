"""Folding of norm gains: W diag(gamma) in place of W after a norm with gain gamma, whose gain then is ones.

RMSNorm multiplies column j of its result by gamma_j, and a linear sums over these columns: X diag(gamma) W^T is
X (W diag(gamma))^T. This holds for a norm that feeds only linears. Qwen3's norms of queries and keys and a last norm
whose linear shares its weight with the embedding are none of those and keep their gains.
"""

import re

import torch

# End of a norm's FQN in TorchTitan -> ends of the parameters that it feeds. Experts stack their weights, and the
# router's gate is a linear, too.
_FEEDS = {
    "attention_norm": ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"),
    "ffn_norm": (
        "feed_forward.w1.weight",
        "feed_forward.w3.weight",
        "moe.experts.w1",
        "moe.experts.w3",
        "moe.router.gate.weight",
    ),
}
_NORM_OF = {parameter: norm for norm, parameters in _FEEDS.items() for parameter in parameters}


def norm_before(fqn: str) -> str | None:
    """Return the FQN of the norm whose gain can be folded into this parameter: "layers.0.attention_norm", or None."""
    block, parameter = _split(fqn)
    return f"{block}.{_NORM_OF[parameter]}" if parameter in _NORM_OF else None


def folded_norm(fqn: str) -> str | None:
    """Return the norm of which the parameter ``fqn`` is the gain, if that gain can be folded into linears."""
    block, parameter = _split(fqn)
    norm = parameter.removesuffix(".weight")
    return f"{block}.{norm}" if norm in _FEEDS else None


def fold(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return W diag(gamma), fp32.

    Args:
        weight: [..., N, D], any floating-point dtype; experts are stacked in front.
        gain: [D], any floating-point dtype.
    """
    return weight.float() * gain.float()


def _split(fqn: str) -> tuple[str, str]:
    """Split a parameter's FQN into its block and the rest: "layers.0", "attention.wq.weight"."""
    found = re.fullmatch(r"(layers\.\d+)\.(.+)", fqn)
    return (found[1], found[2]) if found else ("", fqn)
