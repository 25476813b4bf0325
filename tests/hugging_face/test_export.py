"""Which linears become codes, which gains are folded, and how all else is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mxtrain import ConfigError
from mxtrain.formats.parse import get_recipe
from mxtrain.hugging_face.export import Exporter, Trained, norm_before
from mxtrain.hugging_face.model_config import ModelShape, Parameter
from tests.support.casts import cast
from tests.support.stored_values import VALUES

NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
D = 32
LAYER = "model.layers.0."


def fprop_operand(parts, recipe) -> torch.Tensor:
    return cast(parts, recipe, "reference", (1,), role="weight")[1].data


class Run:
    """A block of Llama between an embedding and a head, with recipes by the ends of names; "" is all others.

    Args:
        merged: norms whose gains training folded.
        orders: FQNs of parameters -> the order of their rows in Hugging Face.
        weights: FQNs of parameters -> other weights.
        dtype: in which training read the weights.
    """

    def __init__(
        self, recipes: dict[str, str | None], is_tied=False, merged=(), orders=None, weights=None, dtype=torch.float32
    ):
        linears = {f"layers.0.{own}": f"{LAYER}{hf}" for own, hf in NAMES.items()} | {"output": "lm_head"}
        self.names = {f"{fqn}.weight": f"{hf}.weight" for fqn, hf in linears.items()}
        self.names |= {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        self.names |= {"layers.0.attention_norm.weight": f"{LAYER}input_layernorm.weight"}
        self.names |= {"layers.0.ffn_norm.weight": f"{LAYER}post_attention_layernorm.weight"}
        named = {fqn: recipes.get(fqn.rpartition(".")[2], recipes.get("")) for fqn in linears}
        named |= {"output": recipes.get("output")}
        self.recipes = {fqn: None if name is None else get_recipe(name) for fqn, name in named.items()}
        self.weights = {fqn: self._draw(fqn) for fqn in self.names} | (weights or {})
        places = {
            fqn: Parameter(self.weights[fqn].shape, (hf,), (orders or {}).get(fqn)) for fqn, hf in self.names.items()
        }
        if is_tied:
            places["output.weight"] = Parameter(places["output.weight"].shape, (), None)
        shape = ModelShape("llama", D, 1, 2, 2, 16, 2 * D, 2 * D, 1e-5, 1e4, None, is_tied, 2048)
        self.trained = Trained(
            shape, places, self.weights, self.recipes, frozenset(merged), dtype, Path("no tokenizer")
        )

    def _draw(self, fqn: str) -> torch.Tensor:
        if "norm" in fqn:
            return torch.linspace(0.5, 1.5, D)
        generator = torch.Generator().manual_seed(list(self.names).index(fqn))
        scale = {"layers.0.attention.wk.weight": 0.3, "layers.0.feed_forward.w3.weight": 0.001}.get(fqn, 0.02)
        return torch.randn(2 * D, D, generator=generator) * scale

    def write(self, name: str, **options) -> tuple[dict[str, torch.Tensor], dict]:
        """Export in this format. Return all tensors, and the config of the quantization."""
        exporter = Exporter(self.trained, name, **options)
        tensors = list(exporter.tensors())
        assert len(dict(tensors)) == len(tensors)
        return dict(tensors), exporter.quantization().get("quantization_config", {})

    def operand(self, own: str) -> torch.Tensor:
        """The weight [N, D] that fprop multiplies."""
        recipe = self.recipes[f"layers.0.{own}"].fprop
        return fprop_operand([self.weights[f"layers.0.{own}.weight"]], recipe)


@pytest.mark.parametrize("order", [None, torch.arange(2 * D - 1, -1, -1)])
@pytest.mark.parametrize("name", ("mxfp8", "mxfp4", "nvfp4"))
def test_linears_become_their_operands_and_all_else_is_rounded(name, order):
    """Rows are put in order after the cast, whose tiles would have other scales otherwise."""
    run = Run({"": name}, orders={"layers.0.attention.wq.weight": order})
    tensors, config = run.write(name)
    for own, hf in NAMES.items():
        operand = run.operand(own)
        operand = operand if order is None or own != "attention.wq" else operand[order]
        assert torch.equal(VALUES[name](tensors, LAYER + hf), operand), own
    assert config["ignore"] == ["lm_head"]
    for fqn in ("output.weight", "tok_embeddings.weight", "norm.weight", "layers.0.ffn_norm.weight"):
        assert torch.equal(tensors[run.names[fqn]], run.weights[fqn].bfloat16())
    assert len(tensors) == len(NAMES) * {"mxfp8": 2, "mxfp4": 2, "nvfp4": 3}[name] + 5


@pytest.mark.parametrize("name", ("mxfp8", "nvfp4"))
def test_a_head_that_is_the_embedding_is_ignored(name):
    """Its weight is not in the files, and a reader that took it for quantized would make up codes and scales."""
    tensors, config = Run({"": name}, is_tied=True).write(name)
    assert config["ignore"] == ["lm_head"] and not any(n.startswith("lm_head") for n in tensors)


def test_weights_that_vllm_joins_have_one_tensor_scale():
    tensors, _ = Run({"": "nvfp4"}).write("nvfp4")
    scales = {own: tensors[f"{LAYER}{hf}.weight_global_scale"].item() for own, hf in NAMES.items()}
    assert scales["attention.wq"] == scales["attention.wk"] == scales["attention.wv"] != scales["attention.wo"]
    assert scales["feed_forward.w1"] == scales["feed_forward.w3"]


@pytest.mark.parametrize("name", ("mxfp8", "nvfp4"))
def test_weights_that_vllm_joins_are_values_if_only_some_are_quantized(name):
    run = Run({"": name, "wv": None})
    tensors, config = run.write(name)
    joined = [f"{LAYER}self_attn.{own}_proj" for own in "kqv"]
    assert config["ignore"] == ["lm_head", *joined]
    for own in ("attention.wq", "attention.wk"):
        values = tensors[f"{LAYER}{NAMES[own]}.weight"]
        assert values.dtype == torch.bfloat16 and torch.equal(values.float(), run.operand(own))


def test_weights_that_vllm_joins_are_values_if_no_tensor_scale_serves_them_all():
    value = "layers.0.attention.wv.weight"
    run = Run({"": "nvfp4"}, weights={value: Run({}).weights[value] * 1e-9})
    tensors, config = run.write("nvfp4")
    assert config["ignore"] == ["lm_head", *(f"{LAYER}self_attn.{own}_proj" for own in "kqv")]
    for own in ("attention.wq", "attention.wk", "attention.wv"):
        assert torch.equal(tensors[f"{LAYER}{NAMES[own]}.weight"].float(), run.operand(own))


def test_weights_with_exact_tensor_scales_are_values_where_vllm_joins_them():
    """The divisor of the others is rounded, which changes their values by less than fp32's rounding."""
    run = Run({"": "nvfp4_4over6", "wk": "nvfp4"})
    joined = [own for own in NAMES if own not in ("attention.wo", "feed_forward.w2")]
    for dtype, error in ((torch.bfloat16, 2.0**-8), (torch.float32, 2e-7)):
        exporter = Exporter(run.trained, "nvfp4", dtype=dtype)
        tensors = dict(exporter.tensors())
        ignored = exporter.quantization()["quantization_config"]["ignore"]
        assert ignored == sorted(["lm_head", *(LAYER + NAMES[own] for own in joined)])
        (note,) = exporter.notes()
        assert note.startswith(f"5 linears are values, not codes, such as {LAYER}self_attn.q_proj: vLLM joins each")
        for own, hf in NAMES.items():
            fprop = run.recipes[f"layers.0.{own}"].fprop
            data, _, scale = cast([run.weights[f"layers.0.{own}.weight"]], fprop, "reference", (1,), role="weight")[1]
            expected = data.double() * (1 if scale is None else scale.double())
            found = tensors[f"{LAYER}{hf}.weight"] if own in joined else VALUES["nvfp4"](tensors, LAYER + hf)
            off = (found.double() - expected).abs()
            assert (off <= expected.abs() * (error if own in joined else 2e-7)).all(), own


def test_what_a_layout_cannot_store_is_said():
    notes = {}
    for name in ("nvfp4", "nvfp4_row"):
        exporter = Exporter(Run({"": name, "output": name}).trained, "nvfp4")
        list(exporter.tensors())
        notes[name] = exporter.notes()
    assert notes["nvfp4"] == [] and notes["nvfp4_row"] == [
        "training had a scale for each row of inputs (tensor_scale = 'row'): nvfp4-pack-quantized has none, so readers "
        "leave inputs in high precision"
    ]


@pytest.mark.parametrize("name, is_small", [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)])
def test_every_expert_has_codes_of_its_own_or_all_of_a_layer_are_values(name, is_small):
    """w1 and w3 of an expert, which vLLM joins, have one tensor scale; ``is_small``: those of expert 1 cannot."""
    run, recipe = Run({"": name}), get_recipe(name)
    stacked = {f"layers.0.moe.experts.w{i}": torch.randn(3, 2 * D, D) * scale for i, scale in enumerate((1, 8, 0.1), 1)}
    stacked["layers.0.moe.experts.w3"][1] *= 1e-9 if is_small else 1
    run.weights |= stacked
    for fqn, own in zip(stacked, ("gate_proj", "down_proj", "up_proj"), strict=True):
        run.recipes[fqn] = recipe
        names = tuple(f"{LAYER}mlp.experts.{i}.{own}.weight" for i in range(3))
        run.trained.parameters[fqn] = Parameter(stacked[fqn].shape, names, None)
    exporter = Exporter(run.trained, name)
    tensors = dict(exporter.tensors())
    ignored = exporter.quantization()["quantization_config"]["ignore"]
    assert len(ignored) == (10 if is_small else 1)
    for fqn, weight in stacked.items():
        for i, hf in enumerate(run.trained.parameters[fqn].names):
            linear = hf.removesuffix(".weight")
            found = tensors[hf].float() if is_small else VALUES[name](tensors, linear)
            assert torch.equal(found, fprop_operand([weight[i]], recipe.fprop)) and (linear in ignored) == is_small
    if name == "nvfp4" and not is_small:
        scales = [tensors[f"{LAYER}mlp.experts.0.{own}_proj.weight_global_scale"] for own in ("gate", "up", "down")]
        assert scales[0] == scales[1] and len({*map(float, scales)}) == 2


def test_tensors_and_config_are_as_vllm_declares_them():
    """``weight`` and ``weight_scale`` of CompressedTensorsW8A8Mxfp8; three tensors of CompressedTensorsW4A4Fp4.

    MXFP4's are those of MXFP4PackedCompressor.
    """
    linear, groups = f"{LAYER}self_attn.o_proj", {}
    expected = {
        "mxfp8": {"weight": (torch.float8_e4m3fn, (2 * D, D)), "weight_scale": (torch.uint8, (2 * D, D // 32))},
        "mxfp4": {"weight_packed": (torch.uint8, (2 * D, D // 2)), "weight_scale": (torch.uint8, (2 * D, D // 32))},
        "nvfp4": {
            "weight_packed": (torch.uint8, (2 * D, D // 2)),
            "weight_scale": (torch.float8_e4m3fn, (2 * D, D // 16)),
            "weight_global_scale": (torch.float32, (1,)),
        },
    }
    for name, own in expected.items():
        tensors, config = Run({"": name}).write(name)
        found = {n.removeprefix(f"{linear}."): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if linear in n}
        assert found == own
        (groups[name],) = config["config_groups"].values()
        assert config["quant_method"] == "compressed-tensors" and config["format"] == groups[name]["format"]
    mxfp8, mxfp4, nvfp4 = (groups[name]["weights"] for name in expected)
    assert [(of["num_bits"], of["group_size"]) for of in (mxfp8, mxfp4, nvfp4)] == [(8, 32), (4, 32), (4, 16)]
    assert mxfp4["strategy"] == "group" and groups["mxfp4"]["input_activations"] is None
    assert groups["mxfp8"]["input_activations"] == mxfp8 | {"dynamic": True}
    assert groups["nvfp4"]["input_activations"] is None


def test_weights_that_are_not_finite_are_refused():
    name = "layers.0.attention.wq.weight"
    with pytest.raises(ConfigError) as caught:
        Run({"": "nvfp4"}, weights={name: torch.full((2 * D, D), torch.nan)}).write("nvfp4")
    assert str(caught.value).startswith(f"--format = 'nvfp4': {name} is not finite; choose another --step")


def test_gains_are_folded_as_training_folded_them():
    """In a block format, behind MXNorms only; the head's if it is in the format and not the embedding."""
    attention, last = "layers.0.attention_norm", "norm"
    run = Run({"": "mxfp8", "output": "mxfp8"}, merged=[attention, last])
    tensors, config = run.write("mxfp8")
    gain, recipe = torch.linspace(0.5, 1.5, D), run.recipes["output"].fprop
    for fqn, folded in {attention: True, last: True, "layers.0.ffn_norm": False}.items():
        written = tensors[run.names[f"{fqn}.weight"]]
        assert torch.equal(written, (torch.ones(D) if folded else gain).bfloat16()), fqn
    for own, factor in {"attention.wk": gain, "feed_forward.w1": 1.0, "attention.wo": 1.0}.items():
        weight = run.weights[f"layers.0.{own}.weight"] * factor
        operand = fprop_operand([weight], recipe)
        assert torch.equal(VALUES["mxfp8"](tensors, LAYER + NAMES[own]), operand), own
    assert "lm_head" in config["ignore"]
    head = fprop_operand([run.weights["output.weight"] * gain], recipe)
    assert torch.equal(tensors["lm_head.weight"].float(), head)
    tied, _ = Run({"": "mxfp8"}, is_tied=True, merged=[last]).write("mxfp8")
    assert torch.equal(tied["model.norm.weight"], gain.bfloat16())


def test_fold_gain_leaves_the_function_as_it_is_and_the_last_norm():
    run = Run({"": None})
    tensors, config = run.write("hf", fold_gain=True)
    x, gain, own = torch.randn(5, D), torch.linspace(0.5, 1.5, D), f"{LAYER}self_attn.k_proj.weight"
    plain = F.rms_norm(x, (D,), gain, 1e-5) @ run.weights["layers.0.attention.wk.weight"].t()
    torch.testing.assert_close(F.rms_norm(x, (D,), torch.ones(D), 1e-5) @ tensors[own].t(), plain)
    assert config == {} and torch.equal(tensors["model.norm.weight"], gain)
    assert torch.equal(tensors[f"{LAYER}input_layernorm.weight"], torch.ones(D))
    with pytest.raises(ConfigError, match="--fold-gain does not fit --format = 'mxfp8'"):
        Run({"": "mxfp8"}).write("mxfp8", fold_gain=True)


def test_folding_rounds_as_training_and_multiplies_in_fp32():
    run = Run({"": "mxfp8"}, merged=["layers.0.attention_norm"], dtype=torch.bfloat16)
    tensors = dict(Exporter(run.trained, "mxfp8").tensors())
    weight, gain = run.weights["layers.0.attention.wq.weight"], run.weights["layers.0.attention_norm.weight"]
    rounded = weight.bfloat16().float() * gain.bfloat16().float()
    operand = fprop_operand([rounded], get_recipe("mxfp8").fprop)
    assert torch.equal(VALUES["mxfp8"](tensors, f"{LAYER}self_attn.q_proj"), operand)


def test_weights_that_were_gathered_as_codes_are_cast_as_they_are():
    run = Run({"": "mxfp8_2d"}, merged=["layers.0.attention_norm"], dtype=torch.bfloat16)
    coded = replace(run.trained, coded_layers=frozenset(["layers.0.attention.wq"]))
    tensors = dict(Exporter(coded, "mxfp8").tensors())
    gain = run.weights["layers.0.attention_norm.weight"]
    for own, dtype in (("q", torch.float32), ("v", torch.bfloat16)):
        weight = run.weights[f"layers.0.attention.w{own}.weight"].to(dtype).float() * gain.to(dtype).float()
        operand = fprop_operand([weight], get_recipe("mxfp8_2d").fprop)
        assert torch.equal(VALUES["mxfp8"](tensors, f"{LAYER}self_attn.{own}_proj"), operand), own


FED = {
    "attention_norm": ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"),
    "ffn_norm": ("feed_forward.w1.weight", "feed_forward.w3.weight", "moe.experts.w1", "moe.experts.w3",
                 "moe.router.gate.weight"),
    None: ("attention.wo.weight", "feed_forward.w2.weight", "moe.experts.w2", "attention.q_norm.weight"),
}  # fmt: skip


def test_which_norm_feeds_a_parameter():
    for norm, parameters in FED.items():
        for parameter in parameters:
            assert norm_before(f"layers.12.{parameter}") == (norm and f"layers.12.{norm}"), parameter
    assert norm_before("output.weight") == "norm" and norm_before("tok_embeddings.weight") is None


def test_the_files_are_tensors_and_configs(tmp_path):
    size, (note,) = Exporter(Run({"": "mxfp8"}).trained, "mxfp8").write(tmp_path)
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert size == sum(tensor.nbytes for tensor in load_file(tmp_path / files[2]).values())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["quantization_config"]["ignore"] == ["lm_head"]
    assert "has no tokenizer" in note
