"""A format that mxtrain does not have, as a user declares it: E5M2 elements in blocks of 32."""

from mxtrain.formats import Format, Recipe, register_format

MXFP8_E5M2 = Format(
    name="mxfp8_e5m2",
    block_size=32,
    element_max=57344.0,
    element_max_exponent=15,
    element_bits=8,
    element="float8_e5m2",
)
register_format(MXFP8_E5M2, Recipe("mxfp8_e5m2", MXFP8_E5M2))
