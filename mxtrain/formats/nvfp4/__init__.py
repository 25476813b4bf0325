"""NVFP4: E2M1 elements, one E4M3 scale per block of 16, one fp32 scale per tensor.

As in torchao, the smallest block scale is E4M3's smallest normal number; TransformerEngine lets block scales go down to
zero.
"""

import math
from dataclasses import replace
from typing import Literal

from mxtrain.errors import require_one_of, require_positive_integer
from mxtrain.formats.estimate import P_VALUES, P, norm_constant
from mxtrain.formats.recipe import (
    DEQUANTIZED,
    FLAGS,
    FOUR_OVER_SIX,
    FOUR_OVER_SIX_ERRORS,
    TENSOR_SCALES,
    Format,
    Layout,
    MixedRecipe,
    Recipe,
    quantization_args,
)

NVFP4 = Format(
    name="nvfp4",
    block_size=16,
    element_max=6.0,
    element_max_exponent=2,
    element_bits=4,
    element="float4_e2m1fn_x2",
    settings={
        "tensor_scale": TENSOR_SCALES,
        **dict.fromkeys(FLAGS, (True, False)),
        "four_over_six": FOUR_OVER_SIX,
        "four_over_six_error": FOUR_OVER_SIX_ERRORS,
    },
    has_tensor_scale=True,
    has_signs=True,
    is_native=True,
    # ``NVFP4PackedCompressor`` in compressed_tensors/compressors/nvfp4/base.py (0.20); in vLLM 0.33
    # ``CompressedTensorsW4A4Fp4(use_a16=True)``. Activations stay in bf16: a layout with NVFP4 activations needs a
    # constant tensor scale for each linear, and training takes the scales of most linears from each activation.
    layout=Layout(
        compression="nvfp4-pack-quantized",
        weights=quantization_args(4, 16, "tensor_group", "torch.float8_e4m3fn"),
        activations=None,
    ),
    implementation="mxtrain.formats.nvfp4.ops:NVFP4Ops",
)
SCALE_MAX = 448.0
SCALE_MIN = 2.0**-6
# The largest magnitude, in units of the tensor scale.
RANGE = NVFP4.element_max * SCALE_MAX
# The same under four over six, whose block scales grow by half where 4 is the largest element.
FOUR_OVER_SIX_RANGE = NVFP4.element_max * 256
# With smaller tensor scales, (1 / tensor scale) / SCALE_MIN overflows fp32, and zeros become NaN.
TENSOR_SCALE_MIN = 2.0**-121

# The recipe of NVIDIA's "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), TransformerEngine and
# torchao.
NVFP4_STATIC = Recipe(
    "nvfp4",
    NVFP4,
    scale_rounding=None,
    tensor_scale="static",
    weight_tiles=True,
    hadamard=True,
    stochastic_rounding=True,
    high_precision_share=0.15,
)
NVFP4_DYNAMIC = replace(NVFP4_STATIC, name="nvfp4_dynamic", tensor_scale="dynamic")
# As TransformerEngine's row-scaled activations, but with scales that are powers of two.
NVFP4_ROW = replace(NVFP4_STATIC, name="nvfp4_row", tensor_scale="row")
# In tiles of 16 x 16, 4 is almost never the better choice.
NVFP4_4OVER6 = replace(NVFP4_STATIC, name="nvfp4_4over6", four_over_six="both", weight_tiles=False)
# What reinforcement learning asks of TransformerEngine: a token's codes depend on no other token, and the backward sees
# the weights and inputs of the forward.
_RL = Recipe("nvfp4_rl", NVFP4, scale_rounding=None, tensor_scale="row", four_over_six="both")
NVFP4_RL = MixedRecipe(_RL, DEQUANTIZED, DEQUANTIZED, own_name="nvfp4_rl")


def static_tensor_scale(
    columns: int,
    p: P = 2,
    estimator: Literal["pre_round", "exact"] = "pre_round",
    constant: float | None = None,
    top: float = RANGE,
) -> float:
    """Return a tensor scale that no row of MXNorm's output exceeds. It is known before training.

    With K = columns / 16 blocks, the p-mean of block maxima is at least K^(-1/p) times the largest maximum. Hence
    |x * rho| <= c(p, 16) * K^(1/p); with the exact RMS, |x * rho| <= sqrt(columns). The scale is the smallest power of
    two >= bound / top. Multiplying by it is exact, inside a GEMM or after it.

    Args:
        columns: row length D.
        p: exponent of the mean over block maxima, 1 or 2; "exact" ignores it.
        estimator: "pre_round" or "exact" (``RMSEstimate``). "post_round" has no such bound: its
            block scales need a tensor scale before the norm is known, and saturate if that scale is too small.
        constant: c(p, 16) if already known: ``torch.compile`` cannot trace its integral.
        top: the largest element that the block scales leave room for: 6 * 448, or 6 * 256 under four over six.

    Raises:
        ValueError: for another estimator or p, or a length that is not a positive multiple of 16.
    """
    require_one_of("p", p, P_VALUES)
    require_positive_integer("columns", columns)
    if columns % NVFP4.block_size:
        raise ValueError(f"columns = {columns} is not a positive multiple of {NVFP4.block_size}")
    if estimator == "exact":
        bound = math.sqrt(columns)
    elif estimator == "pre_round":
        constant = norm_constant(p, NVFP4.block_size) if constant is None else constant
        bound = constant * (columns / NVFP4.block_size) ** (1 / p)
    else:
        raise ValueError(f"estimator = {estimator!r} does not bound the output; use one of: 'pre_round', 'exact'")
    mantissa, exponent = math.frexp(bound / top)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
