"""A user's code for ``tests/test_types.py``: every public name, with the types that checkers must see in it.

Nobody runs it. Lines with "type: ignore" are mistakes: a checker that accepts one reports an unused comment.
"""

from typing import Any, Literal, assert_type

import torch
import torch.nn as nn

import mxtrain
from mxtrain import ConfigError, DecomposeKRouter, FusedLayerNorm, FusedRMSNorm, MXLinear, MXNorm, MXNormLinear, Recipe
from mxtrain.conversion.plan import Plan
from mxtrain.titan import override_with_mxtrain, with_mxtrain

model, x, weight = nn.Sequential(), torch.ones(4, 64), torch.ones(64)
recipe = Recipe("mine", None, 32, high_precision_share=0.1)

# Converters and their settings

plan = mxtrain.convert(model)
assert_type(plan, Plan)
assert_type(plan.norms, dict[str, list[str]])
assert_type(plan.headline, str)
for p in (1, 2):
    mxtrain.convert(model, "mxnorm", p=p, estimator="exact", eps=1e-6, group_linears=False, example_inputs=(x,))
mxtrain.convert(model, recipe="fprop=nvfp4, dgrad=mxfp8, wgrad=bf16", recipes={"layers.0": "bf16", "wq": recipe})
mxtrain.convert(model, converter="mx_linear", recipe=recipe, scale_rounding="floor", mode="emulated", seed=3)
mxtrain.convert(model, "mx_linear", recipe="nvfp4", tensor_scale="dynamic", weight_tiles=False, hadamard=True)
mxtrain.convert(model, "mx_linear", stochastic_rounding=None, high_precision_share=0, graph_passes=False)
mxtrain.convert(model, "fused_norm", filter_fqns=["norm"], when_compiled="kernel", example_inputs={"tokens": x})
mxtrain.convert(model, "fused_norm", filter_fqns=(f"layers.{i}" for i in range(3)))
mxtrain.convert(model, "decompose_k_router", prefix="layers.0", filter_fqns=None)


def convert_some(names: list[Literal["mx_linear", "fused_norm"]]) -> list[Plan]:
    return [mxtrain.convert(model, name, filter_fqns=["output"]) for name in names]


mxtrain.convert("model")  # type: ignore
mxtrain.convert(model, "mx_norm")  # type: ignore
mxtrain.convert(model, p="2")  # type: ignore
mxtrain.convert(model, estimator="pre-round")  # type: ignore
mxtrain.convert(model, filters=["output"])  # type: ignore
mxtrain.convert(model, filter_fqns=[1])  # type: ignore
mxtrain.convert(model, example_inputs=x)  # type: ignore
print(mxtrain.convert(model).nothing)  # type: ignore

# Layers

layers = (
    MXNorm(64, p=1, recipe=recipe, device="meta"),
    MXNormLinear(64, 64, bias=False, recipe="nvfp4", mode="reference"),
    MXLinear(64, 64, dtype=torch.bfloat16),
    FusedRMSNorm(64, None, when_compiled="formula"),
    FusedLayerNorm(64, bias=False),
    DecomposeKRouter(64, 8, False),
)
assert_type(layers, tuple[MXNorm, MXNormLinear, MXLinear, FusedRMSNorm, FusedLayerNorm, DecomposeKRouter])
assert_type(MXNormLinear.from_linear(nn.Linear(64, 64)), MXNormLinear)
assert_type(MXNorm.from_rms_norm(nn.RMSNorm(64), estimator="exact"), MXNorm)
model.append(layers[0])
MXNorm("64")  # type: ignore
MXLinear(64, 64, mode="fast")  # type: ignore
FusedRMSNorm(64, when_compiled=True)  # type: ignore
MXNorm.from_rms_norm(nn.LayerNorm(64))  # type: ignore

# Functions

assert_type(mxtrain.rms_norm(x, weight, eps=1e-6), torch.Tensor)
assert_type(mxtrain.rms_norm(x, residual=x), tuple[torch.Tensor, torch.Tensor])
assert_type(mxtrain.layer_norm(x, weight, None), torch.Tensor)
assert_type(mxtrain.layer_norm(x, None, None, 1e-5, x), tuple[torch.Tensor, torch.Tensor])
codes, scales, rho = mxtrain.mxnorm_cast(x, p=1, recipe="mxfp8", scale_rounding="rceil")
assert_type(rho, torch.Tensor)
assert_type(mxtrain.decompose_k_mm(x, x.t(), epilogue="softmax", out_dtype=torch.float32), torch.Tensor)
assert_type(mxtrain.norm_constant(2, 32), float)
assert_type(mxtrain.static_tensor_scale(4096, p=1, estimator="exact"), float)
mxtrain.set_rounding_step(3, microbatch=1)
mxtrain.set_rounding_step(None)
mxtrain.rms_norm(x, residual=1.0)  # type: ignore
mxtrain.mxnorm_cast([1.0])  # type: ignore
mxtrain.decompose_k_mm(x, x, epilogue="gelu")  # type: ignore
mxtrain.norm_constant(3, 32)  # type: ignore
mxtrain.static_tensor_scale("4096")  # type: ignore
mxtrain.set_rounding_step("1")  # type: ignore

# Other names

assert_type(mxtrain.__version__, str)
assert_type(recipe.fprop, Recipe)
Recipe("mine", "mxfp8", 32)  # type: ignore
print(mxtrain.nothing)  # type: ignore


def spec_with_mxtrain(spec: Any) -> None:
    with_mxtrain(spec)
    with_mxtrain(spec, ["mxnorm", "fused_norm"], mxnorm={"recipe": "nvfp4"})
    with_mxtrain(spec, "mxnorm", 1)  # type: ignore
    override_with_mxtrain(spec.model, mxnorm={"recipe": "nvfp4"})
    override_with_mxtrain(spec.model, recipe="nvfp4")  # type: ignore


try:
    pass
except ConfigError as error:
    wrong: ValueError = error
