"""MXFP4: E2M1 elements, one E8M0 (power of two) scale per block of 32.

A fixed Hadamard transform of wgrad's operands along the tokens, in blocks of 32, comes from arXiv 2605.09825.
"""

from mxtrain.formats.recipe import SCALE_ROUNDINGS, Format, Layout, quantization_args

MXFP4 = Format(
    name="mxfp4",
    block_size=32,
    element_max=6.0,
    element_max_exponent=2,
    element_bits=4,
    element="float4_e2m1fn_x2",
    settings={"scale_rounding": SCALE_ROUNDINGS, "hadamard": (True, False)},
    # ``MXFP4PackedCompressor`` in compressed_tensors/compressors/mxfp4/base.py (0.20). Activations stay in bf16.
    layout=Layout("mxfp4-pack-quantized", quantization_args(4, 32, "group", "torch.uint8"), activations=None),
    implementation="mxtrain.formats.mx.ops:MXKernelOps",
)
