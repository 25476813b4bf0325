"""Exports in MXFP8 and NVFP4 against the weights that the run's own model multiplies."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mxtrain.errors import ConfigError
from mxtrain.formats.ops import FormatOps
from mxtrain.hugging_face.text import load
from mxtrain.nn import experts
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.hugging_face.export import export, open_run
from mxtrain.titan.hugging_face.models import parameters
from mxtrain.titan.releases import engine
from tests.support import saved_runs
from tests.support.stored_values import VALUES

MIXED = "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"
EXPERTS, HIDDEN = "qwen3 small_experts", 32
# Format, model with its flavor if not "small", converter and settings of [mxnorm]
RUNS = {
    "mxfp8, 2 processes": ("mxfp8", "llama3", "mxnorm", {}),
    "mxfp8, floor, qwen3": ("mxfp8", "qwen3", "mxnorm", {"scale_rounding": "floor"}),
    "nvfp4, 2 processes": ("nvfp4", "llama3", "mxnorm", {"recipe": "nvfp4", "high_precision_share": 0.5}),
    "nvfp4 without tiles": ("nvfp4", "llama3", "mx_linear", {"recipe": "nvfp4_row", "weight_tiles": False}),
    "mixed": ("nvfp4", "llama3", "mxnorm", {"recipe": MIXED, "recipes": {"layers.*.feed_forward.w2": "mxfp8"}}),
    "scheduled RMSNorm": ("mxfp8", "llama3", "mxnorm", {"schedule": [{"from_step": 3, "norm": "rmsnorm"}]}),
    "mxfp8 experts": ("mxfp8", EXPERTS, "mxnorm", {}),
    "nvfp4 experts, 2 processes": ("nvfp4", EXPERTS, "mx_linear", {"recipe": "nvfp4"}),
    "mxfp8 deepseek, 2 processes": ("mxfp8", "deepseek_v3", "mxnorm", {}),
    "nvfp4 deepseek": ("nvfp4", "deepseek_v3", "mx_linear", {"recipe": "nvfp4"}),
    "quantized head": ("mxfp8", "llama3", "mxnorm", {"filter_fqns": ["layers.0"]}),
}


@pytest.fixture(autouse=True)
def flavors(monkeypatch):
    saved_runs.add_flavors(monkeypatch)


def operands(run, dtype, monkeypatch) -> dict[str, torch.Tensor]:
    """Name of every quantized weight -> the weight [N, D] or [E, N, D] that the run's model multiplies in a forward."""
    model = saved_runs.load(run, has_converters=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    found, current, matmul, matmul_rows = {}, [], FormatOps.matmul, experts.matmul_rows

    def recorded(ops, a, b, out_dtype):
        found[f"{current[-1]}.weight"] = b.data
        return matmul(ops, a, b, out_dtype)

    def recorded_rows(a, b, ends, out_dtype):
        stacked = b.data.unflatten(0, (len(ends), -1))
        for part in stacked.split(HIDDEN, 1) if stacked.shape[2] == 64 else [stacked]:  # w1 and w3, perhaps at once; w2
            name = next(n for n in ("w1", "w3", "w2") if f"{current[-1]}.{n}" not in found)
            found[f"{current[-1]}.{name}"] = part
        return matmul_rows(a, b, ends, out_dtype)

    for name, module in model.named_modules():
        fqn = engine().saved_name(name)
        if isinstance(module, QuantizedLinear | experts.QuantizedExperts):
            module.mode = "reference"
            module.register_forward_pre_hook(lambda module, arguments, fqn=fqn: current.append(fqn))
        elif hasattr(module, "mode"):
            module.mode = "reference"
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(FormatOps, "matmul", recorded)
        patch.setattr(experts, "matmul_rows", recorded_rows)
        model(torch.zeros(1, 32, dtype=torch.long))
    return found


def in_order(rows, place):
    return rows if place.order is None else rows[place.order]


def check_gains(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Gains that training folded become ones, and no others do."""
    gains = [n for n in tensors if "layernorm" in n or n == "model.norm.weight"]
    ones = {n for n in gains if tensors[n].eq(1).all()}
    norms = [n for n in gains if n != "model.norm.weight"]
    expected = {
        "nvfp4 without tiles": [],
        "nvfp4 experts, 2 processes": [],
        "nvfp4 deepseek": [],
        "scheduled RMSNorm": [],
        "nvfp4, 2 processes": norms[:2],
        "quantized head": [*norms[2:], "model.norm.weight"],
    }
    assert ones == set(expected.get(name, norms)) and len(norms) >= 4


@pytest.mark.parametrize("name", RUNS)
def test_the_exported_codes_are_those_that_training_multiplied(name, tmp_path, monkeypatch):
    """With two processes, FSDP rounds weights and gains to bf16 before they are cast."""
    format, model, converter, settings = RUNS[name]
    model, flavor = (*model.split(), "small")[:2]
    run = saved_runs.save_run(tmp_path / "run", model, flavor, converters=[converter], mxnorm=settings)
    processes = 2 if name.endswith("2 processes") else 1
    saved_runs.add_manifest(run / "checkpoint" / "step-3", processes)
    _, lines = export(run, tmp_path / "out", format=format)
    assert ("note        training had a scale for each row of inputs" in lines) == (name == "nvfp4 without tiles")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    saved = open_run(run)
    places, dtype = parameters(saved.model), torch.bfloat16 if processes == 2 else torch.float32
    compared = 0
    for fqn, operand in operands(saved, dtype, monkeypatch).items():
        place = places[fqn]
        for hf_name, matrix in zip(place.names, operand if operand.ndim == 3 else [operand], strict=True):
            linear = hf_name.removesuffix(".weight")
            if fqn == "output.weight":
                assert torch.equal(tensors[hf_name].float(), matrix) and linear in ignored
            elif linear in ignored:
                assert name == "mixed" and fqn.endswith("w2.weight")
                assert torch.equal(tensors[hf_name], saved.weights[fqn].bfloat16())
            else:
                assert torch.equal(VALUES[format](tensors, linear), in_order(matrix, place)), fqn
                compared += 1
    counts = {"nvfp4, 2 processes": (7, 8), "mixed": (12, 3), "quantized head": (7, 8), "scheduled RMSNorm": (4, 11)}
    of_model = {
        EXPERTS: (2 * (4 + 4 * 3), 3),  # the head and two gates stay
        "deepseek_v3": (2 * 5 + 3 + 3 + 16 * 3, 2),
    }
    assert (compared, len(ignored)) == counts.get(name, of_model.get(RUNS[name][1], (14, 1)))
    check_gains(name, tensors)
    if model == "deepseek_v3":  # in fp32, which a bias needs
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert torch.equal(bias, saved.weights["layers.1.moe.expert_bias"]) and bias.any()
        joined = [("self_attn", "q_a_proj", "kv_a_proj_with_mqa"), ("mlp.shared_experts", "gate_proj", "up_proj")]
        for place, *linears in joined if format == "nvfp4" else []:
            scales = [tensors[f"model.layers.1.{place}.{linear}.weight_global_scale"] for linear in linears]
            assert scales[0] == scales[1]
    is_mixture = RUNS[name][1] in (EXPERTS, "deepseek_v3")
    with pytest.raises(
        ConfigError, match="cannot read experts in '" if is_mixture else "transformers cannot load it: "
    ):
        load(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "mxtrain.json").read_text())
    assert (report["dtype"], report["format"]) == ("bfloat16", format)
