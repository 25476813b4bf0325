"""Casts to MX formats, by kernel or in PyTorch."""

import torch

from mxtrain.formats.hardware import HAS_TRITON, MERGED, operand_mode, runs_kernels
from mxtrain.formats.matrices import JOIN_VALUES, KERNEL_FORM, PLAIN, Codes, Operand
from mxtrain.formats.mx.merged import GROUP, check_parts
from mxtrain.formats.mx.reference import MXOps
from mxtrain.formats.ops import Fusions

if HAS_TRITON:
    from mxtrain.formats.cast_kernels import MERGED_FORMS
    from mxtrain.formats.mx import cast as kernels
    from mxtrain.formats.mx.decode import decode_tiles
    from mxtrain.formats.mx.norm import NORM, mxnorm_cast
    from mxtrain.formats.mx.swiglu_cast import is_fused, swiglu_backward_cast, swiglu_cast
    from mxtrain.launch.launch import converts_fp8


class MXKernelOps(MXOps):
    """``MXOps`` with kernels for casts, alone and after a norm or SwiGLU."""

    if HAS_TRITON:
        casts, norms, weight_casts = (kernels.CAST,), (NORM,), (kernels.CAST_TILES, JOIN_VALUES)
        fusions = Fusions(kernels.CAST, swiglu_cast, swiglu_backward_cast, is_fused)

    def _form(self, recipe, mode, role, device_type, columns, as_codes=False):
        """The form that kernels write, or None: plain PyTorch computes. ``columns`` are to be whole groups."""
        mode = operand_mode(recipe, mode)
        if not runs_kernels(mode, device_type):
            return None
        if as_codes:
            return "codes"
        if mode == MERGED:
            return None if columns % GROUP else f"merged_{role}"
        return KERNEL_FORM[mode]

    def cast(self, parts, recipe, mode, dims, spec=PLAIN):
        columns = parts[0].shape[1] if 1 in dims else 0
        form = self._form(recipe, mode, spec.role, parts[0].device.type, columns, spec.as_codes)
        if form is None:
            return super().cast(parts, recipe, mode, dims, spec)
        if form in MERGED_FORMS:
            check_parts(parts, spec.axis)
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

    def decode_tiles(self, data, scales, values, mode):
        is_8_bit = self.format.element_bits == 8 and runs_kernels(mode, data.device.type)
        if is_8_bit and (converts_fp8(data) or not data.is_cuda):
            decode_tiles(data.view(getattr(torch, self.format.element)), scales, values)
        else:
            super().decode_tiles(data, scales, values, mode)

    def normalize(self, x, estimate, recipe, mode, group=None, as_codes=False):
        form = self._form(recipe, mode, "input", x.device.type, x.shape[1], as_codes)
        if form is None:
            return super().normalize(x, estimate, recipe, mode, group, as_codes)
        result = mxnorm_cast(x, estimate, recipe, form)
        return (Codes if as_codes else Operand)(result.data, result.scales), result.rho
