"""Which layers multiply images in a model whose mode is "fp8_merged", and why."""

from collections.abc import Mapping

from mxtrain.conversion.layers import LinearFacts
from mxtrain.conversion.plan import Swap, ToMXNorm, ToQuantized, folded
from mxtrain.formats.mx.merged import why_not_merged
from mxtrain.formats.recipe import GEMMS
from mxtrain.nn.experts import QuantizedExperts


def image_layers(swaps: Mapping[str, Swap], layers: Mapping[str, LinearFacts]) -> tuple[dict[str, str], list[str]]:
    """Return {FQN of a layer or norm that runs in mode "emulated" instead: the reason}, and lines about all images.

    A norm and the linears that it feeds have one mode.
    """
    quantized, images, others = {fqn: s for fqn, s in swaps.items() if isinstance(s, ToQuantized)}, {}, {}
    for fqn, swap in quantized.items():
        reason = why_not_merged(layers[fqn].in_features, layers[fqn].out_features)
        reason = "PyTorch has no grouped products with these scales" if swap.kind is QuantizedExperts else reason
        if reason:
            images[fqn] = reason
        elif apart := [gemm for gemm in GEMMS if getattr(swap.recipe, gemm).gradient_format]:
            others[fqn] = f"{' and '.join(apart)} multiplies images: its output gradients have another format"
    for fqn, swap in swaps.items():
        if isinstance(swap, ToMXNorm):
            fed = (*swap.feeds, *([swap.mixture.experts] if swap.mixture else []))
            if found := next((each for each in fed if each in images), None):
                images |= {each: f"goes with {found}" for each in (fqn, *fed) if each not in images}
    return images, [*folded({fqn: f"mode emulated: {reason}" for fqn, reason in images.items()}), *folded(others)]
