"""Arguments of a wrong type, dtype, shape or device are refused, and the message says which and what is allowed."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn as nn

from mxtrain import (
    ConfigError,
    DecomposeKRouter,
    FusedLayerNorm,
    FusedRMSNorm,
    MXLinear,
    MXNorm,
    MXNormLinear,
    Recipe,
    convert,
    decompose_k_mm,
    layer_norm,
    mxnorm_cast,
    norm_constant,
    rms_norm,
    set_rounding_step,
    static_tensor_scale,
)
from mxtrain.formats.mxfp8 import MXFP8

pytestmark = pytest.mark.usefixtures("device")

D = 64


def ones(*shape, dtype=torch.float32, **kwargs):
    return torch.ones(*shape, **kwargs).to(dtype)


SETTINGS = [
    (lambda: MXNorm("64"), "dim = '64' is not an integer of at least 1"),
    (lambda: MXNorm(0), "dim = 0 is not an integer of at least 1"),
    (lambda: MXNorm(D, eps=True), "eps = True is not a finite number >= 0"),
    (lambda: MXNorm(D, eps=float("nan")), "eps = nan is not a finite number >= 0"),
    (lambda: MXNorm(D, p=True), "p = True is not one of: 1, 2"),
    (lambda: MXNorm(D, estimator=None), "estimator = None is not one of: 'pre_round', 'post_round', 'exact'"),
    (lambda: MXNorm(D, recipe=None), "recipe = None is not one of: 'mxfp8', "),
    (lambda: MXNorm(D, mode=None), "mode = None is not one of: 'auto', 'native', 'emulated', 'reference'"),
    (lambda: MXLinear(True, D), "in_features = True is not an integer of at least 1"),
    (lambda: MXLinear("64", D), "in_features = '64' is not an integer of at least 1"),
    (lambda: FusedRMSNorm(64.0), "dim = 64.0 is not an integer of at least 1"),
    (lambda: FusedRMSNorm(D, when_compiled=True), "when_compiled = True is not one of: 'auto', 'kernel', 'formula'"),
    (lambda: DecomposeKRouter(True, 4), "in_features = True is not an integer of at least 1"),
    (
        lambda: mxnorm_cast(ones(4, D), scale_rounding=True),
        "scale_rounding = True is not one of: 'rceil', 'rceil_0_18', 'floor'",
    ),
    (lambda: mxnorm_cast(ones(4, D), mode=None), "mode = None is not one of: 'auto', "),
    (lambda: norm_constant(True, 32), "p = True is not one of: 1, 2"),
    (lambda: norm_constant(2, 32.0), "block_size = 32.0 is not an integer of at least 1"),
    (lambda: static_tensor_scale(64.0), "columns = 64.0 is not an integer of at least 1"),
    (lambda: Recipe("mine", "mxfp8", 32), "format = 'mxfp8' is not one of: None, "),
    (lambda: Recipe("mine", MXFP8, 16), "block_size = 16 is not one of: 32"),
]


def test_settings():
    for call, message in SETTINGS:
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            call()


NUMBERS = [
    (lambda: set_rounding_step(True), "step = True is not an integer from 0 to 4294967295"),
    (lambda: set_rounding_step(torch.tensor(1, device="cpu")), "step = tensor(1) is not an integer from 0 to"),
    (lambda: set_rounding_step(1, microbatch=None), "microbatch = None is not an integer from 0 to"),
    (lambda: MXLinear(D, D).set_seed(True, "wq"), "seed = True is not an integer"),
    (lambda: MXLinear(D, D, recipe="nvfp4").set_seed(1, None), "fqn = None is not a string"),
    (lambda: FusedRMSNorm(D, eps=True), "eps = True is not a number of at least 0"),
]


def test_numbers():
    for call, message in NUMBERS:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            call()


TENSORS = [
    (lambda: MXLinear(D, D)(ones(4, 32)), "x has shape (4, 32); its last dimension must be 64"),
    (lambda: MXNorm(D)(ones(4, 96)), "x has shape (4, 96); its last dimension must be 64"),
    (lambda: MXLinear(D, D, device="cpu")(ones(4, D, device="cpu").to("meta")), "device type 'meta' is not one of: "),
    (lambda: MXLinear(D, D, device="meta")(ones(4, D, device="cpu")), "weight is on meta; move it to cpu, where x is"),
    (lambda: mxnorm_cast(ones(4, 48)), "x has shape (4, 48); its last dimension must be a multiple of 32"),
    (lambda: mxnorm_cast(ones(4, D, dtype=torch.float16)), "x is torch.float16; it must be bfloat16 or float32"),
    (
        lambda: decompose_k_mm(ones(4, D), ones(D, 4), out_dtype="float32"),
        "out_dtype = float32 does not fit operands of",
    ),
    (lambda: decompose_k_mm(ones(4, D), ones(D, 4), epilogue=True), "epilogue = True is not one of: None, 'relu'"),
    (lambda: DecomposeKRouter(D, 4)(ones(4, D, dtype=torch.bfloat16)), "a is torch.bfloat16 and b is torch.float32"),
]


def test_tensors():
    for call, message in TENSORS:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            call()


def test_eps_is_any_real_number():
    x = ones(4, D) / 8

    def norm_and_linear(eps):
        model = nn.Sequential(nn.RMSNorm(D, 1e-2), nn.Linear(D, D))
        nn.init.eye_(model[1].weight)
        convert(model, eps=eps, filter_fqns=[], example_inputs=(x,))
        return model(x)

    calls = (
        lambda eps: rms_norm(x, eps=eps),
        lambda eps: layer_norm(x, eps=eps),
        lambda eps: mxnorm_cast(x, eps=eps)[2],
        lambda eps: FusedRMSNorm(D, eps)(x),
        lambda eps: FusedLayerNorm(D, eps)(x),
        lambda eps: MXNorm(D, eps)(x).rho,
        norm_and_linear,
    )
    for eps in (np.float32(1e-2), Fraction(1, 100), np.float64(1e-2)):
        for call in calls:
            torch.manual_seed(0)
            got = call(eps)
            torch.manual_seed(0)
            assert torch.equal(got, call(float(eps)))
        for norm in (FusedRMSNorm(D, eps), FusedLayerNorm(D, eps), MXNorm(D, eps)):
            assert isinstance(norm.eps, float), "torch.compile takes NumPy's numbers for tensors"


def test_dtypes_that_would_be_rounded_before_the_cast():
    for mode in ("reference", "emulated"):
        for recipe in ("mxfp8", "nvfp4", "unquantized"):
            for dtype in (torch.float16, torch.int32, torch.float8_e4m3fn):
                x = ones(4, D, dtype=dtype)
                for call in (MXLinear(D, D, recipe=recipe, mode=mode), MXNorm(D, recipe=recipe, mode=mode)):
                    with pytest.raises(ValueError, match=f"^x is {dtype}; it must be bfloat16 or float32$"):
                        call(x)
                    if dtype.is_floating_point:
                        with pytest.raises(ValueError, match=f"^weight is {dtype}; it must be bfloat16 or float32$"):
                            call.to(dtype)(ones(4, D))


def test_float64_needs_gemms_in_float64():
    for recipe, mode in [("mxfp8", "reference"), ("unquantized", "emulated")]:
        message = (
            f"^x is torch.float64 with recipe '{recipe}' in mode '{mode}'; it must be .* float64 needs recipe 'unqu"
        )
        for call in (MXLinear(D, D, recipe=recipe, mode=mode), MXNorm(D, recipe=recipe, mode=mode)):
            with pytest.raises(ValueError, match=message):
                call.double()(ones(4, D, dtype=torch.float64))
    settings = dict(recipe="unquantized", mode="reference")
    exact = nn.Sequential(MXNorm(D, **settings), MXNormLinear(D, D, **settings))
    assert exact.double()(ones(4, D, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("of_x", "of_weight"), [(torch.float64, torch.float32), (torch.bfloat16, torch.float64)], ids=str
)
@pytest.mark.parametrize("autocast", [False, True])
def test_float64_does_not_mix_with_other_dtypes(autocast, of_x, of_weight):
    settings = dict(recipe="unquantized", mode="reference")
    device, message = (
        torch.get_default_device().type,
        f"^x is {of_x} and weight is {of_weight}; both or none must be float64",
    )
    linear, x = MXNormLinear(D, D, **settings).to(of_weight), ones(4, D, dtype=of_x)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        for call in (MXLinear(D, D, **settings).to(of_weight), MXNorm(D, **settings).to(of_weight)):
            with pytest.raises(ValueError, match=message):
                call(x)
        with pytest.raises(ValueError, match=message):
            linear(MXNorm(D, **settings).to(of_x)(x))


def test_autocast_to_float16():
    with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
        for call in (MXLinear(D, D), nn.Sequential(MXNorm(D), MXNormLinear(D, D))):
            with pytest.raises(ValueError, match="^x under autocast is torch.float16; it must be bfloat16 or float32$"):
                call(ones(4, D))
