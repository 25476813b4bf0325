"""Plans: values that follow from a survey and settings. No model is built here."""

import re
from dataclasses import fields, replace

import pytest
import torch.nn as nn

from mxtrain import ConfigError
from mxtrain.conversion.converters import CONVERTERS, get_converter
from mxtrain.conversion.forward_pass import Uses
from mxtrain.conversion.layers import LinearFacts, NormFacts
from mxtrain.conversion.plan import Plan, ToFusedNorm, ToMXNorm, ToQuantized, ToRouter, folded
from mxtrain.conversion.survey import Survey, WeightFacts
from mxtrain.formats.hardware import MERGED, resolve_mode
from mxtrain.formats.recipe import RECIPES
from mxtrain.nn.decompose_k.router import DecomposeKRouter
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNormLinear

NORM = NormFacts(nn.RMSNorm, (64,), 1e-6)
NO_LOOKALIKES = {nn.RMSNorm: {}, nn.LayerNorm: {}}
LINEAR = LinearFacts(64, 64, "Linear", is_plain=True, is_gate=False, shares_weight=False)


def block(linears=("wq", "wk", "wo"), **changes) -> Survey:
    """A survey of one norm that feeds wq and wk, of wo, and of an output head."""
    names = ("norm", *linears, "output")
    facts = Survey(
        kind="Block",
        device_type="cpu",
        fqns=names,
        blocks=(),
        norms={"norm": NORM},
        lookalikes=NO_LOOKALIKES,
        linears=dict.fromkeys((*linears, "output"), LINEAR),
        experts={},
        mixtures={},
        heads=("output",),
        unswappable={},
        weights={f"{fqn}.weight": WeightFacts((64, 64), (fqn,), 1.0, "") for fqn in (*linears, "output")},
        converted={},
        uses=Uses({"norm": ("wq", "wk")}, {"norm": ()}, dict.fromkeys(("norm", *linears), 1), ()),
    )
    return replace(facts, **changes)


def plan(survey, converter="mxnorm", **settings) -> Plan:
    return get_converter(converter, settings).plan(survey)


def test_a_norm_and_the_linears_it_feeds():
    recipe = RECIPES["mxfp8"]
    result = plan(block(), p=1, eps=1e-3, mode="emulated", seed=7)
    assert result.swaps == {
        "norm": ToMXNorm(NORM, ("wq", "wk"), 1, "pre_round", 1e-3, recipe, "emulated", 7, True),
        "wq": ToQuantized(MXNormLinear, recipe, "emulated", 7),
        "wk": ToQuantized(MXNormLinear, recipe, "emulated", 7),
        "wo": ToQuantized(MXLinear, recipe, "emulated", 7),
    }
    assert result.skipped == {"output": "is the output head"}
    assert (result.norms, result.linears) == ({"norm": ["wq", "wk"]}, ["wo"])
    assert str(result).splitlines() == [
        "mxnorm mxfp8 p=1, mode emulated: 1 norm and 3 linears swapped, 1 kept; "
        "75.0 % of the weights' multiplications are quantized",
        "  norm: MXNorm, feeds wq, wk",
        "  wq: MXNormLinear, mxfp8",
        "  wk: MXNormLinear, mxfp8",
        "  wo: MXLinear, mxfp8",
        "  output: kept because it is the output head; 25.0 % of the multiplications",
    ]


def test_mode_auto_stays_auto_and_the_headline_says_what_it_is_now():
    for survey, now in ((block(), "reference"), (block(device_type=None), resolve_mode("auto"))):
        result = plan(survey, "mx_linear")
        assert result.swaps["wo"].mode == "auto"
        assert result.headline.startswith(f"mx_linear mxfp8, mode {now}: ")


def test_a_mode_that_no_device_of_the_machine_runs_is_refused(monkeypatch):
    monkeypatch.setattr("mxtrain.formats.hardware.default_device_type", lambda: "cpu")
    for device_type in ("cpu", None):
        with pytest.raises(ConfigError, match="mode = 'native' cannot run here: needs MX tensor cores"):
            plan(block(device_type=device_type), mode="native")


def test_a_norm_stays_unless_it_provably_feeds_linears_alone():
    for uses, linears, reason in [
        (Uses({"norm": ("wq",)}, {"norm": ("add", "mul")}, {"wq": 1}, ()), {}, "feeds something .* a linear: add, mul"),
        (Uses({"norm": ()}, {"norm": ()}, {}, ()), {}, "feeds no linear"),
        (Uses({"norm": ()}, {"norm": ()}, {}, ("0, broken",)), {}, "feeds no linear; not followed: 0, bro"),
        (Uses({"norm": ("wq",)}, {"norm": ()}, {"wq": 2}, ()), {}, "feeds wq, which is called more than once"),
        (Uses({"norm": ("wq", "wq")}, {"norm": ()}, {"wq": 2}, ()), {}, "feeds wq, which is called more than once"),
        (
            Uses({"norm": ("wq", "wk")}, {"norm": ()}, {"wq": 1, "wk": 1}, ()),
            {"wk": replace(LINEAR, is_gate=True)},
            "feeds wk, which is the gate of a router",
        ),
        (
            Uses({"norm": ("wq", "wk")}, {"norm": ()}, {"wq": 1, "wk": 1}, ()),
            {"wk": replace(LINEAR, out_features=1)},
            "feeds wk, which does not fit: out_features = 1 is not a multiple of the block size 32",
        ),
        (Uses({"norm": ("output",)}, {"norm": ()}, {"output": 1}, ()), {}, "feeds output, which is the output head"),
    ]:
        survey = block()
        survey = replace(survey, uses=uses, linears={**survey.linears, **linears})
        with pytest.raises(
            ConfigError, match=f"finds nothing to convert in this Block\n  norm: it {reason}(?s:.*)'mx_linear'"
        ):
            plan(survey)


def test_linears_that_stay():
    survey = block(
        linears=("gate", "own", "tied", "odd", "wo"),
        norms={},
        uses=None,
    )
    kinds = {
        "gate": replace(LINEAR, is_gate=True, out_features=8),
        "own": replace(LINEAR, kind="MyLinear", is_plain=False),
        "tied": replace(LINEAR, shares_weight=True),
        "odd": replace(LINEAR, in_features=40),
    }
    result = plan(replace(survey, linears={**survey.linears, **kinds}), "mx_linear")
    assert result.linears == ["wo"] and result.skipped == {
        "gate": "is the gate of a router, whose choices are sensitive to rounding",
        "own": "is a MyLinear",
        "tied": "shares its weight with another module",
        "odd": "does not fit: in_features = 40 is not a multiple of the block size 32 of recipe 'mxfp8'",
        "output": "is the output head",
    }


def test_the_norm_draws_signs_if_any_of_its_linears_needs_them():
    result = plan(block(), recipes={"wk": "fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4"})
    assert result.swaps["norm"].recipe == result.swaps["wk"].recipe != result.swaps["wq"].recipe
    assert str(result.swaps["wk"]) == "MXNormLinear, fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4"


def test_norms_and_gates():
    layer, square = NormFacts(nn.LayerNorm, (64,), 1e-6, bias=True), NormFacts(nn.RMSNorm, (2, 32), 1e-6)
    survey = block(
        norms={"norm": NORM, "layer": layer, "square": square, "tagged": layer},
        lookalikes={nn.RMSNorm: {"strange": "is strange"}, nn.LayerNorm: {"other": "is other"}},
        unswappable={"tagged": "has a forward hook"},
    )
    result = plan(survey, "fused_norm", when_compiled="kernel")
    assert result.quantized_share == 0
    assert result.swaps == {"norm": ToFusedNorm(NORM, "kernel"), "layer": ToFusedNorm(layer, "kernel")}
    assert result.fused_norms == ["norm", "layer"]
    assert result.skipped == {
        "strange": "is strange",
        "other": "is other",
        "square": "normalizes more than one dimension",
        "tagged": "has a forward hook",
    }
    survey = block(linears=("gate", "own"))
    gates = {"gate": replace(LINEAR, is_gate=True), "own": replace(LINEAR, is_gate=True, is_plain=False, kind="Mine")}
    result = plan(replace(survey, linears=gates), "decompose_k_router")
    assert result.swaps == {"gate": ToRouter(DecomposeKRouter)} and result.skipped == {"own": "is of class Mine"}


def test_a_model_whose_norms_are_mxnorms_has_no_norm_left_to_fuse():
    assert plan(block(norms={}, converted={"norm": "MXNorm"}), "fused_norm").swaps == {}
    with pytest.raises(ConfigError, match="finds nothing to convert in this Block$"):
        plan(block(norms={}), "fused_norm")


def test_a_converter_refuses_settings_of_another():
    for converter, setting, known in [
        ("mx_linear", "p", "'filter_fqns', 'recipe'"),
        ("fused_norm", "recipe", "'filter_fqns', 'when_compiled'"),
        ("decompose_k_router", "mode", "'filter_fqns'"),
        ("mxnorm", "when_compiled", "'filter_fqns', 'recipe', .*'estimator', 'eps'"),
    ]:
        with pytest.raises(
            ConfigError, match=f"^{setting} = None is not a setting of converter '{converter}'; allowed are: {known}"
        ):
            get_converter(converter, {setting: None})


def test_a_converter_refuses_values_of_a_wrong_type():
    for name, converter in CONVERTERS.items():
        for setting in fields(converter):
            for value in (object(), 1.5j, print):
                with pytest.raises(ConfigError, match=f"^{setting.name} = {re.escape(repr(value))} "):
                    get_converter(name, {setting.name: value})


def test_none_stands_for_the_default():
    settings = dict.fromkeys(("p", "recipe", "recipes", "filter_fqns", "eps", "mode", "hadamard", "seed"))
    assert get_converter("mxnorm", settings) == get_converter("mxnorm", {})


def stack(count) -> Survey:
    """A survey of so many blocks with one linear each."""
    blocks = tuple(f"layers.{i}" for i in range(count))
    linears = {f"{block}.wo": LINEAR for block in blocks}
    return block(
        fqns=(*blocks, *linears, "norm"), blocks=blocks, norms={}, linears=linears, uses=None, weights={}, heads=()
    )


def test_a_share_of_the_blocks_is_rounded_to_nearest():
    for share, blocks, count in [(0.15, 12, 2), (0.15, 3, 0), (0.5, 3, 2), (0.5, 5, 3), (0.0, 4, 0), (0.34, 3, 1)]:
        result = plan(stack(blocks), "mx_linear", high_precision_share=share)
        reason = f"is in the last {count} of {blocks} blocks (high_precision_share = {share})"
        assert result.skipped == {f"layers.{i}.wo": reason for i in range(blocks - count, blocks)}
        note = f"high_precision_share = {share} keeps {count} of {blocks} blocks"
        assert result.notes == ((note,) if share else ())


def test_a_number_of_blocks_takes_the_place_of_the_share():
    result = plan(stack(12), "mx_linear", recipe="nvfp4", high_precision_last=4)
    assert result.skipped == {
        f"layers.{i}.wo": "is in the last 4 of 12 blocks (high_precision_last = 4)" for i in range(8, 12)
    }
    assert result.notes == ("high_precision_last = 4 keeps 4 of 12 blocks",)
    with pytest.raises(ConfigError, match="^high_precision_last = 13 is too many .*; allowed are 0 to 12 blocks"):
        plan(stack(12), "mx_linear", high_precision_last=13)


def test_a_block_whose_name_begins_as_a_kept_one_is_not_kept():
    survey = stack(0)
    survey = replace(survey, blocks=("layers.10", "layers.1"), linears={"layers.10.wo": LINEAR, "layers.1.wo": LINEAR})
    survey = replace(survey, fqns=(*survey.blocks, *survey.linears))
    assert plan(survey, "mx_linear", high_precision_share=0.5).linears == ["layers.10.wo"]


def test_a_range_names_no_module_with_another_text():
    names = [f"layers.{i}.experts.{j}" for i in (0, 1, 3) for j in range(3)]
    assert [*folded(dict.fromkeys(names, "swapped"))] == ["layers.0,1,3.experts.0-2: swapped"]
    lines = folded(dict.fromkeys(names, "swapped") | {"layers.1.experts.1": "kept"})
    assert lines["layers.1.experts.1: kept"] == ["layers.1.experts.1"]
    assert lines["layers.1.experts.0,2: swapped"] == ["layers.1.experts.0", "layers.1.experts.2"]


def test_mode_fp8_merged_names_the_layers_with_images_and_why():
    """A norm goes with its linears, and a mixture's experts make theirs images."""
    wide, odd = replace(LINEAR, in_features=128, out_features=256), replace(LINEAR, in_features=128, out_features=96)
    linears = {"wq": wide, "wk": odd, "wo": wide, "output": wide}
    result = plan(replace(block(), linears=linears), mode=MERGED)
    assert {fqn: swap.mode for fqn, swap in result.swaps.items()} == {
        **dict.fromkeys(("norm", "wq", "wk"), "emulated"),
        "wo": MERGED,
    }
    assert result.notes == (
        "wk: mode emulated: 128 does not divide its 96 output features",
        "norm: mode emulated: goes with wk",
        "wq: mode emulated: goes with wk",
    )
    later = plan(replace(block(), linears=linears), mode=MERGED, recipe="unquantized")  # which a schedule may change
    assert {fqn for fqn, swap in later.swaps.items() if swap.mode == "emulated"} == {"norm", "wq", "wk"}
    linears = dict.fromkeys(linears, wide)
    result = plan(replace(block(), linears=linears), mode=MERGED, recipe="fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8")
    assert {swap.mode for swap in result.swaps.values()} == {MERGED}
    assert result.notes[-1] == "wo: dgrad multiplies images: its output gradients have another format"
    with pytest.raises(ConfigError, match="which NVFP4 does not have"):
        plan(replace(block(), linears=linears), mode=MERGED, recipes={"wo": "nvfp4"})
