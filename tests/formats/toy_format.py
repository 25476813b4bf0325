"""A format that mxtrain does not have, as a user declares it: E5M2 elements in blocks of 16."""

from mxtrain.formats import Format, Recipe, register_format

TOY = Format(
    name="toy",
    block_size=16,
    element_max=57344.0,
    element_max_exponent=15,
    element_bits=8,
    element="float8_e5m2",
)
register_format(TOY, Recipe("toy", TOY))
