"""Recipes from files and flags, and the settings that a run records."""

import torch
import torch.nn as nn

from mxtrain import (
    MXNorm,
)
from mxtrain.titan.converters import active_settings
from mxtrain.titan.job_config import parse_job_config
from tests.support.converter_checks import config, converted


def test_active_settings():
    settings = active_settings(config("--mxnorm.mode=reference", "--mxnorm.p=1"))
    assert settings == {
        "converter": "mxnorm",
        "recipe": "mxfp8",
        "p": 1,
        "estimator": "pre_round",
        "scale_rounding": "rceil",
        "tensor_scale": None,
        "weight_tiles": False,
        "hadamard": False,
        "stochastic_rounding": False,
        "four_over_six": False,
        "four_over_six_error": None,
        "backward": "quantized",
        "high_precision_share": 0.0,
        "high_precision_last": 0,
        "mode": "reference",
        "eps": None,
    }
    nvfp4 = active_settings(config("--mxnorm.recipe=nvfp4", "--mxnorm.hadamard=False", "--mxnorm.mode=emulated"))
    assert nvfp4 == settings | {
        "recipe": "nvfp4",
        "p": 2,
        "scale_rounding": None,
        "tensor_scale": "static",
        "weight_tiles": True,
        "stochastic_rounding": True,
        "four_over_six_error": "mae",
        "high_precision_share": 0.15,
        "mode": "emulated",
    }
    linear = active_settings(config("--mxnorm.mode=reference", converter="mx_linear"))
    assert linear["converter"] == "mx_linear" and linear["p"] is None and linear["recipe"] == "mxfp8"
    for no_mx in ("", "fused_norm", "decompose_k_router"):
        assert set(active_settings(config(converter=no_mx)).values()) == {"none", None}
    assert active_settings(config(converter="fused_norm,mx_linear"))["converter"] == "mx_linear"


def ffn_norms(modules) -> list[type]:
    return [type(module) for name, module in modules.items() if name.endswith(".ffn_norm")]


def test_nvfp4_settings_reach_the_modules():
    """Each switch is one key, and signs and random bits follow from debug.seed."""
    flags = ["--mxnorm.recipe=nvfp4", "--mxnorm.mode=reference"]
    switches = ["--mxnorm.tensor_scale=dynamic", "--mxnorm.high_precision_last=3"]
    switches += ["--mxnorm.four_over_six=weights", "--mxnorm.four_over_six_error=mse"]
    switches += [f"--mxnorm.{name}=False" for name in ("weight_tiles", "hadamard", "stochastic_rounding")]

    with converted(config(*flags, *switches)) as modules:
        for name in ("layers.0.ffn_norm", "layers.2.feed_forward.w1", "layers.2.attention.wo"):
            r = modules[name].recipe
            switched = (r.tensor_scale, r.weight_tiles, r.hadamard, r.stochastic_rounding)
            assert switched == ("dynamic", False, False, False)
            assert (r.four_over_six, r.four_over_six_error) == ("weights", "mse")
        assert ffn_norms(modules) == [MXNorm] * 3 + [nn.RMSNorm] * 3

    def seeds(*more):
        device = torch.device("cpu")
        with converted(config(*flags, *more)) as modules:
            swapped = [modules[f"layers.1.{name}"] for name in ("attention_norm", "attention.wq", "feed_forward.w2")]
        return [int(module.signs(device)) for module in swapped], [module.draws(device)[:1] for module in swapped[1:]]

    (signs, keys), (same_signs, same_keys) = seeds(), seeds("--debug.seed=0")
    assert signs == same_signs and torch.equal(torch.stack(keys), torch.stack(same_keys))
    other_signs, other_keys = seeds("--debug.seed=1")
    assert signs != other_signs and not (torch.stack(keys) == torch.stack(other_keys)).any()


FORWARD = "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"


def mixed_config(tmp_path, *flags):
    text = f"""[model]\nconverters = ["mxnorm"]\n[mxnorm]\nrecipe = "{FORWARD}"
[mxnorm.recipes]\n"layers.*.feed_forward.w2" = "mxfp8"\n"layers.0" = "bf16"\n"""
    (tmp_path / "job.toml").write_text(text)
    return parse_job_config([f"--job.config_file={tmp_path / 'job.toml'}", "--mxnorm.mode=reference", *flags])


def test_a_dequantized_backward_by_toml(tmp_path):
    (tmp_path / "job.toml").write_text(
        """[model]\nconverters = ["mx_linear"]\n[mxnorm]\nrecipe = "nvfp4"\nbackward = "dequantized"\n"""
    )
    job = parse_job_config([f"--job.config_file={tmp_path / 'job.toml'}", "--mxnorm.mode=reference"])
    with converted(job) as modules:
        assert modules["layers.0.attention.wq"].recipe.name == "fprop=nvfp4, dgrad=dequantized, wgrad=dequantized"


def test_mixed_recipes_reach_the_modules_from_a_file(tmp_path):
    """And switches of both formats those GEMMs that have them."""
    flags = ["--mxnorm.scale_rounding=floor", "--mxnorm.weight_tiles=False"]
    with converted(mixed_config(tmp_path, *flags)) as modules:
        assert ffn_norms(modules) == [nn.RMSNorm] + [MXNorm] * 4 + [nn.RMSNorm]
    w1, w2 = (modules[f"layers.1.feed_forward.{name}"].recipe for name in ("w1", "w2"))
    assert (w1.name, w2.name) == (FORWARD, "mxfp8")
    assert w2 == w1.dgrad and w2.scale_rounding == "floor"
    assert not w1.fprop.weight_tiles
