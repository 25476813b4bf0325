"""Formats and recipes. Each format has a folder, which declares the format's numbers, recipes and operations.

To add a recipe of known formats, add a line where the format is registered. To add a format, add a folder, and a line
here. A module outside of mxtrain calls ``register_format``.
"""

from mxtrain.formats.mxfp4 import MXFP4
from mxtrain.formats.mxfp8 import MXFP8, MXFP8_E5M2
from mxtrain.formats.nvfp4 import NVFP4, NVFP4_4OVER6, NVFP4_DYNAMIC, NVFP4_RL, NVFP4_ROW, NVFP4_STATIC
from mxtrain.formats.nvfp4 import static_tensor_scale as static_tensor_scale
from mxtrain.formats.recipe import DEQUANTIZED, HIGH_PRECISION_RECIPE, LONGEST_BLOCK, Format, Recipe, register_format
from mxtrain.formats.recipe import FORMATS as FORMATS

__all__ = ["FORMATS", "Format", "Recipe", "register_format", "static_tensor_scale"]

register_format(MXFP8, Recipe("mxfp8", MXFP8), Recipe("mxfp8_2d", MXFP8, weight_tiles=True))
# TransformerEngine's recipe HYBRID: output gradients alone are E5M2.
register_format(MXFP8_E5M2, Recipe("mxfp8_e5m2", MXFP8, gradient_format=MXFP8_E5M2, only=("dgrad", "wgrad")))
# No cast: only MXNorm's estimate, folding and backward. Separates the effects of norm and cast, and lets tests check
# the gradients in float64.
register_format(None, Recipe("unquantized", None, LONGEST_BLOCK))
register_format(NVFP4, NVFP4_STATIC, NVFP4_DYNAMIC, NVFP4_ROW, NVFP4_4OVER6, NVFP4_RL)
register_format(MXFP4, Recipe("mxfp4", MXFP4, hadamard=True))
register_format(None, DEQUANTIZED, Recipe(HIGH_PRECISION_RECIPE, None, LONGEST_BLOCK))
