"""Casts to MX formats, by kernel or in PyTorch."""

from mxtrain.formats.hardware import HAS_TRITON, MERGED, operand_mode, runs_kernels
from mxtrain.formats.matrices import KERNEL_FORM, PLAIN, Codes, Operand
from mxtrain.formats.mx.reference import MXOps
from mxtrain.formats.ops import Fusions

if HAS_TRITON:
    from mxtrain.formats.mx import cast as kernels
    from mxtrain.formats.mx.norm import NORM, mxnorm_cast
    from mxtrain.formats.mx.swiglu_cast import swiglu_backward_cast, swiglu_cast


class MXKernelOps(MXOps):
    """``MXOps`` with kernels for casts, alone and after a norm or SwiGLU."""

    if HAS_TRITON:
        casts, norms, weight_casts = (kernels.CAST,), (NORM,), (kernels.CAST_TILES,)
        fusions = Fusions(kernels.CAST, swiglu_cast, swiglu_backward_cast)

    def cast(self, parts, recipe, mode, dims, spec=PLAIN):
        if not runs_kernels(mode, parts[0].device.type) or (operand_mode(recipe, mode) == MERGED and not spec.as_codes):
            return super().cast(parts, recipe, mode, dims, spec)
        form = "codes" if spec.as_codes else KERNEL_FORM[operand_mode(recipe, mode)]
        if recipe.has_tiles(spec.role):
            results = kernels.cast_tiles(parts, recipe, dims, form, spec.column_factor, spec.experts)
        else:
            factors, hadamard = (spec.row_factor, spec.column_factor), 0 in dims and spec.is_transformed(recipe)
            others = spec.axis, spec.source, spec.experts, hadamard
            results = kernels.cast(parts, recipe, dims, form, *factors, *others)
        if spec.as_codes:
            return {dim: Codes(*result) for dim, result in results.items()}
        # The kernel transposes codes because the tensor cores need that. Images only need a transposed view.
        return {
            dim: Operand(data.t() if dim == 0 and form == "image" else data, scales)
            for dim, (data, scales) in results.items()
        }

    def normalize(self, x, estimate, recipe, mode, group=None, as_codes=False):
        if not runs_kernels(mode, x.device.type) or (operand_mode(recipe, mode) == MERGED and not as_codes):
            return super().normalize(x, estimate, recipe, mode, group, as_codes)
        form = "codes" if as_codes else KERNEL_FORM[operand_mode(recipe, mode)]
        result = mxnorm_cast(x, estimate, recipe, form)
        return (Codes if as_codes else Operand)(result.data, result.scales), result.rho
