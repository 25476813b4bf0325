"""MXFP8: E4M3 elements, one E8M0 (power of two) scale per block of 32. Output gradients may have E5M2 elements."""

from dataclasses import replace

from mxtrain.formats.recipe import SCALE_ROUNDINGS, Format, Layout, quantization_args

MXFP8 = Format(
    name="mxfp8",
    block_size=32,
    element_max=448.0,
    element_max_exponent=8,
    element_bits=8,
    element="float8_e4m3fn",
    settings={"scale_rounding": SCALE_ROUNDINGS, "weight_tiles": (True, False)},
    is_native=True,
    merges=True,
    # ``MXFP8QuantizationCompressor`` in compressed_tensors/compressors/mxfp8/base.py (0.20); in vLLM 0.33
    # ``CompressedTensorsW8A8Mxfp8``, which also casts activations to MXFP8. The stored codes and scales are training's.
    # A new cast may differ: compressed-tensors takes the next scale from a block maximum of exactly 448 times the scale
    # on, training's RCEIL just above.
    layout=Layout(
        compression="mxfp8-quantized",
        weights=quantization_args(8, 32, "group", "torch.uint8"),
        activations=quantization_args(8, 32, "group", "torch.uint8", dynamic=True),
    ),
    implementation="mxtrain.formats.mx.ops:MXKernelOps",
)
MXFP8_E5M2 = replace(
    MXFP8,
    name="mxfp8_e5m2",
    element_max=57344.0,
    element_max_exponent=15,
    element="float8_e5m2",
    gradients_of="mxfp8",
    merges=False,
    layout=None,
)
