from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain import (
    ConfigError,
    DecomposeKRouter,
    FusedRMSNorm,
    MXLinear,
    MXNorm,
    MXNormLinear,
    convert,
    set_rounding_step,
)
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import QuantizedLayer
from mxtrain.titan.converters import active_settings, convert_on_meta, titan_converter
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta
from tests.support.converter_checks import config, count, model_and_args
from tests.support.jobs import with_setting

CONFIGS = Path(__file__).parents[3] / "train_configs"


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel_flex_attn", "debugmodel_varlen_attn"])
def test_llama3(flavor):
    model, args = model_and_args("llama3", flavor)
    titan_converter("mxnorm", config()).convert(model)
    layers = args.n_layers
    assert count(model, MXNorm) == 2 * layers
    assert count(model, MXNormLinear) == 5 * layers
    assert count(model, MXLinear) == 2 * layers
    assert count(model, nn.RMSNorm) == 1 and count(model, nn.Linear) == 1, "norm and output stay"


MIXTURES = {"deepseek_v3": "debugmodel", "llama4": "debugmodel", "qwen3": "debugmodel_moe"}


@pytest.mark.parametrize("name", ["llama3", *MIXTURES])
def test_every_matrix_in_high_precision_is_reported_with_its_multiplications(name):
    model, args = model_and_args(name, MIXTURES.get(name, "debugmodel"))
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim >= 2}
    plan = convert(model, mode="reference", example_inputs=(torch.zeros(1, 32, dtype=torch.long),))
    layers = [fqn for fqn, module in model.named_modules() if isinstance(module, QuantizedLayer)]
    quantized = {name for name in matrices if name.rpartition(".")[0] in layers}
    assert any(".experts." in name for name in quantized) == (name in MIXTURES)
    expected = dict(matrices)
    for name, elements in matrices.items():
        if name == "tok_embeddings.weight":
            expected[name] = 0
        if ".experts." in name:
            experts = model.layers["1"].moe.experts.num_experts
            expected[name] = elements * model.layers["1"].moe.router.top_k / experts
            assert plan.weights[name].note == f"top {model.layers['1'].moe.router.top_k} of {experts} experts"
    assert {name: use.multiplications for name, use in plan.weights.items()} == expected
    share = sum(expected[name] for name in quantized) / sum(expected.values())
    assert plan.quantized_share == pytest.approx(share) and 0.6 < share < 0.999
    assert plan.headline.endswith(f"; {100 * share:.1f} % of the weights' multiplications are quantized")
    unquantized = [name for name in matrices if name not in quantized]
    assert [name for name, use in plan.weights.items() if not use.quantized] == unquantized
    assert plan.details.endswith("\n  tok_embeddings.weight: in high precision, only looked up")


@pytest.mark.parametrize("name", MIXTURES)
def test_decompose_k_router_takes_the_gates(name):
    model, _ = model_and_args(name, MIXTURES[name])
    names, linears = list(model.state_dict()), count(model, nn.Linear)
    titan_converter("decompose_k_router", config(converter="decompose_k_router")).convert(model)
    mixtures = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    assert mixtures and all(type(moe.router.gate) is DecomposeKRouter for moe in mixtures)
    assert count(model, DecomposeKRouter) == len(mixtures) == linears - count(model, nn.Linear)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("score_func", ["sigmoid", pytest.param("softmax", marks=pytest.mark.sweep)])
def test_a_router_compiles_without_a_graph_break_and_once_for_all_numbers_of_tokens(score_func):
    """As TorchTitan compiles it, every part of a mixture of experts by itself."""
    torch.manual_seed(0)
    router = TokenChoiceTopKRouter(64, 8, 4, 2, 3, score_func, True, 2.5, gate_bias=True)
    convert(router, "decompose_k_router")
    torch._dynamo.reset()
    compiled = torch.compile(router, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (50, 7, 300):
            x = torch.randn(tokens, 64)
            results = []
            for function in (router, compiled):
                router.zero_grad()
                scores, chosen, counts = function(x, torch.zeros(8))
                scores.square().sum().backward()
                assert scores.dtype == torch.float32 and counts.sum() == 3 * tokens
                results.append([scores, chosen, counts, *(p.grad for p in router.parameters())])
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("converters", ["mxnorm,fused_norm", "fused_norm,mxnorm"])
def test_converters_go_together_in_either_order(converters):
    model, args = model_and_args("qwen3", "debugmodel")
    build_model_converters(config(converter=converters), None).convert(model)
    kinds = (MXNorm, MXNormLinear, MXLinear, FusedRMSNorm, nn.RMSNorm)
    assert [count(model, kind) for kind in kinds] == [
        2 * args.n_layers,
        5 * args.n_layers,
        2 * args.n_layers,
        2 * args.n_layers + 1,
        0,
    ]


def test_settings_of_a_fused_norm_reach_the_modules():
    model, args = model_and_args("llama3", "debugmodel")
    flags = ["--fused_norm.when_compiled=kernel", "--fused_norm.filter_fqns=norm,layers.0"]
    titan_converter("fused_norm", config(*flags, converter="fused_norm")).convert(model)
    assert type(model.norm) is nn.RMSNorm and type(model.layers["0"].ffn_norm) is nn.RMSNorm
    assert model.layers["1"].ffn_norm.when_compiled == "kernel"
    assert count(model, FusedRMSNorm) == 2 * (args.n_layers - 1)


def test_the_guard_of_merged_codes_needs_mxtrains_trainer():
    model, _ = model_and_args("llama3", "debugmodel")
    with pytest.raises(ConfigError, match="^mxnorm.diagnostics.every = 200 needs mxtrain's trainer; .* or set 0$"):
        titan_converter("mxnorm", config("--mxnorm.mode=fp8_merged")).convert(model)


@pytest.mark.parametrize(("mode", "lax"), [("emulated", False), ("reference", True)])
def test_a_run_in_emulated_mode_has_fp32_sums_in_all_bf16_products(mode, lax):
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = True
    try:
        model, _ = model_and_args("llama3", "debugmodel")
        titan_converter("mx_linear", config(f"--mxnorm.mode={mode}", converter="mx_linear")).convert(model)
        assert settings.allow_bf16_reduced_precision_reduction == lax
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(
    ("flags", "step", "warns"),
    [
        (["--mxnorm.recipe=nvfp4"], None, True),
        (["--mxnorm.recipe=nvfp4"], 0, False),
        (["--mxnorm.recipe=nvfp4", "--mxnorm.stochastic_rounding=false"], None, False),
        (["--mxnorm.recipe=mxfp8"], None, False),
        (["--mxnorm.recipes", "wo", "nvfp4"], None, True),
    ],
)
def test_random_bits_that_no_resumed_run_repeats_are_warned_of(flags, step, warns, monkeypatch):
    """Plain TorchTitan sets no step; mxtrain's trainer does, before it builds the model."""
    lines = []
    monkeypatch.setattr("mxtrain.titan.converters.logger.warning", lines.append)
    model, _ = model_and_args("llama3", "debugmodel")
    set_rounding_step(step)
    titan_converter("mxnorm", config(*flags)).convert(model)
    assert len(lines) == warns and all("a resumed run does not repeat them; train with -m mxtrain" in s for s in lines)


@pytest.mark.parametrize(
    ("converters", "name", "flavor"),
    [
        ("mxnorm", "llama3", "debugmodel"),
        ("mx_linear", "qwen3", "debugmodel_moe_16"),
        ("fused_norm,decompose_k_router", "qwen3", "debugmodel_moe_16"),
    ],
)
def test_weights_initialise_as_before_the_swap(converters, name, flavor):
    states = []
    for active in ("", converters):
        job_config = config(f"--model.name={name}", f"--model.flavor={flavor}", converter=active)
        spec = get_train_spec(name)
        args = spec.model_args[flavor]
        args.update_from_config(job_config)
        with torch.device("meta"):
            model = spec.model_cls(args)
        build_model_converters(job_config, None).convert(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# Linears and norms of a layer that a converter swaps, in a plain layer, with latent attention, and with experts.
SWAPPED = {
    "mxnorm": {MXNorm: (2, 3, 2), MXNormLinear: (5, 5, 3), MXLinear: (2, 2, 1)},
    "mx_linear": {MXNorm: (0, 0, 0), MXNormLinear: (0, 0, 0), MXLinear: (7, 7, 7)},
    "none": {MXNorm: (0, 0, 0), MXNormLinear: (0, 0, 0), MXLinear: (0, 0, 0)},
}


def test_every_config_builds_its_converters_and_they_convert_its_model():
    """With four layers: what they refuse are the sizes of one."""
    for path in sorted(CONFIGS.glob("*.toml")):
        job_config = parse_job_config([f"--job.config_file={path}", "--model_args.n_layers=4"])
        model, names = build_on_meta(job_config), job_config.model.converters
        build_model_converters(job_config, None).convert(model)
        routes, fuses = "decompose_k_router" in names, "fused_norm" in names
        latent = job_config.model.name == "deepseek_v3"
        kind = 1 if latent else 2 if routes else 0
        swapped = {kind_: counts[kind] for kind_, counts in SWAPPED[active_settings(job_config)["converter"]].items()}
        # The last block of NVFP4 stays as it is, and the first one where it is named.
        left = ("nvfp4" in job_config.mxnorm.recipe) + ("layers.0" in job_config.mxnorm.recipes)
        assert {kind_: count(model, kind_) / (4 - left) for kind_ in swapped} == swapped, path
        mixtures = [DecomposeKRouter] * routes + [QuantizedExperts] * (routes and "mxnorm" in names)
        for part in (DecomposeKRouter, QuantizedExperts):
            found = sum(isinstance(module, part) for module in model.modules())
            assert found == (4 - latent if part in mixtures else 0), path
        assert bool(count(model, FusedRMSNorm)) == fuses and not (fuses and count(model, nn.RMSNorm)), path


TITANS = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")


@pytest.mark.parametrize("theirs", TITANS)
@pytest.mark.parametrize("ours", ["mxnorm", "mx_linear"])
def test_torchtitans_own_quantization_is_refused_beside_ours(ours, theirs):
    for names in (f"{ours},{theirs}", f"{theirs},fused_norm,{ours}"):
        job_config = JobConfig()
        job_config.model.converters = names.split(",")
        message = f"^model.converters = .* has '{ours}' and '{theirs}', which both quantize; remove one of them$"
        with pytest.raises(ConfigError, match=message):
            active_settings(job_config)


def test_torchtitans_own_quantization_comes_before_the_router():
    with pytest.raises(ConfigError, match="' after 'decompose_k_router', whose gates it would replace"):
        config(converter="decompose_k_router,quantize.linear.float8")
    names = ["quantize.linear.float8", "decompose_k_router", "fused_norm"]
    job_config = parse_job_config(["--model.converters=fused_norm,decompose_k_router"])
    job_config = with_setting(job_config, "model.converters", names)
    assert active_settings(job_config)["converter"] == "none"


@pytest.mark.parametrize("converter", ["mxnorm", "fused_norm", "decompose_k_router"])
def test_without_the_custom_config_section(converter):
    job_config = JobConfig()
    job_config.model.converters = [converter]
    message = rf"^\[{converter}\] needs job.custom_config_module = 'mxtrain.titan.job_config'$"
    with pytest.raises(ConfigError, match=message):
        titan_converter(converter, job_config)


def test_no_parameter_has_memory_before_and_after_its_conversion():
    job_config = parse_job_config(["--model.converters=mxnorm,fused_norm", "--training.dtype=bfloat16"])
    model = build_on_meta(job_config)
    assert {(p.is_meta, p.dtype) for p in model.parameters()} == {(True, torch.bfloat16)}
    assert torch.get_default_dtype() == torch.float32
    plans = convert_on_meta(job_config, model)
    assert list(plans) == ["mxnorm", "fused_norm"] and plans["mxnorm"].quantized_share > 0.5
    assert all(p.is_meta for p in model.parameters())
