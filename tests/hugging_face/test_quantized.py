"""Which linears of a run an export quantizes, under which names, and what the others become."""

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.hugging_face.formats import RunFacts
from mxtrain.hugging_face.registry import FORMATS
from mxtrain.ops import quantize
from mxtrain.recipes.parse import get_recipe
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


class Run:
    """A block of Llama between an embedding and a head, with recipes by the ends of names; "" is all others."""

    def __init__(self, recipes: dict[str, str | None], is_tied: bool = False):
        linears = {f"layers.0.{own}": f"{LAYER}{hf}" for own, hf in NAMES.items()} | {"output": "lm_head"}
        self.names = {f"{fqn}.weight": f"{hf}.weight" for fqn, hf in linears.items()}
        self.names |= {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        if is_tied:
            del self.names["output.weight"]
        named = {fqn: recipes.get(fqn.rpartition(".")[2], recipes.get("")) for fqn in linears} | {"output": None}
        self.facts = RunFacts(
            recipes={fqn: None if name is None else get_recipe(name) for fqn, name in named.items()},
            merged_norms=frozenset(),
            names={fqn: (hf,) for fqn, hf in self.names.items()} | ({"output.weight": ()} if is_tied else {}),
            shapes={fqn: self.weight(fqn).shape for fqn in self.names},
            weight_dtype=torch.float32,
        )

    def weight(self, fqn: str) -> torch.Tensor:
        if fqn == "norm.weight":
            return torch.linspace(0.5, 1.5, D)
        generator = torch.Generator().manual_seed(list(self.names).index(fqn))
        scale = {"layers.0.attention.wk.weight": 0.3, "layers.0.feed_forward.w3.weight": 0.001}.get(fqn, 0.02)
        return torch.randn(2 * D, D, generator=generator) * scale

    def write(self, name: str) -> tuple[dict[str, torch.Tensor], dict]:
        """Export in this format. Return all tensors, and the config of the quantization."""
        written = FORMATS[name](self.facts, torch.bfloat16)
        tensors = {}
        for fqn, hf in self.names.items():
            new = written.tensors(fqn, hf, self.weight(fqn), lambda rows: rows)
            assert not tensors.keys() & new.keys()
            tensors |= new
        return tensors, written.config()["quantization_config"]

    def operand(self, own: str) -> torch.Tensor:
        """The weight [N, D] that fprop multiplies."""
        recipe = self.facts.recipes[f"layers.0.{own}"].fprop
        return quantize.weights([self.weight(f"layers.0.{own}.weight")], recipe, "reference", 1, None).data


@pytest.mark.parametrize("name", ("mxfp8", "nvfp4"))
def test_linears_become_their_operands_and_all_else_is_rounded(name):
    run = Run({"": name})
    tensors, config = run.write(name)
    for own, hf in NAMES.items():
        assert torch.equal(VALUES[name](tensors, LAYER + hf), run.operand(own)), own
    assert config["ignore"] == ["lm_head"]
    for fqn in ("output.weight", "tok_embeddings.weight", "norm.weight"):
        assert torch.equal(tensors[run.names[fqn]], run.weight(fqn).bfloat16())
    suffixes = {"mxfp8": 2, "nvfp4": 3}
    assert len(tensors) == len(NAMES) * suffixes[name] + 3


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
def test_linears_of_other_formats_stay_in_high_precision(name):
    other = {"mxfp8": "nvfp4", "nvfp4": "mxfp8"}[name]
    run = Run({"": name, "wo": None, "w2": f"fprop={other}, dgrad={name}, wgrad={name}"})
    tensors, config = run.write(name)
    assert config["ignore"] == ["lm_head", f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.o_proj"]
    for own in ("attention.wo", "feed_forward.w2"):
        weight = run.weight(f"layers.0.{own}.weight").bfloat16()
        assert torch.equal(tensors[f"{LAYER}{NAMES[own]}.weight"], weight)


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
    run = Run({"": "nvfp4"})
    tiny = run.weight("layers.0.attention.wv.weight") * 1e-9
    weight = run.weight
    run.weight = lambda fqn: tiny if fqn == "layers.0.attention.wv.weight" else weight(fqn)
    tensors, config = run.write("nvfp4")
    assert config["ignore"] == ["lm_head", *(f"{LAYER}self_attn.{own}_proj" for own in "kqv")]
    for own in ("attention.wq", "attention.wk", "attention.wv"):
        assert torch.equal(tensors[f"{LAYER}{NAMES[own]}.weight"].float(), run.operand(own))


def test_tensors_are_as_vllm_declares_them():
    """``weight`` and ``weight_scale`` of CompressedTensorsW8A8Mxfp8; three tensors of CompressedTensorsW4A4Fp4."""
    linear = f"{LAYER}self_attn.o_proj"
    tensors, _ = Run({"": "mxfp8"}).write("mxfp8")
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name.startswith(linear)}
    assert found == {
        f"{linear}.weight": (torch.float8_e4m3fn, (2 * D, D)),
        f"{linear}.weight_scale": (torch.uint8, (2 * D, D // 32)),
    }
    tensors, _ = Run({"": "nvfp4"}).write("nvfp4")
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name.startswith(linear)}
    assert found == {
        f"{linear}.weight_packed": (torch.uint8, (2 * D, D // 2)),
        f"{linear}.weight_scale": (torch.float8_e4m3fn, (2 * D, D // 16)),
        f"{linear}.weight_global_scale": (torch.float32, (1,)),
    }


def test_the_config_names_the_scheme():
    weights, activations = {}, {}
    for name in ("mxfp8", "nvfp4"):
        config = Run({"": name}).write(name)[1]
        (group,) = config["config_groups"].values()
        assert config["quant_method"] == "compressed-tensors" and config["format"] == group["format"]
        weights[name], activations[name] = group["weights"], group["input_activations"]
    assert (weights["mxfp8"]["num_bits"], weights["mxfp8"]["group_size"]) == (8, 32)
    assert (weights["nvfp4"]["num_bits"], weights["nvfp4"]["group_size"]) == (4, 16)
    assert activations["mxfp8"] == weights["mxfp8"] | {"dynamic": True} and activations["nvfp4"] is None


@pytest.mark.parametrize(
    ("recipes", "name", "has"),
    [
        ({"": "mxfp8"}, "nvfp4", "mxfp8 or high-precision weights"),
        ({"": "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "wo": "unquantized"}, "mxfp8", "nvfp4 or high-precision"),
        ({"": None}, "mxfp8", "have high-precision weights"),
    ],
)
def test_a_format_that_no_linear_trained_with_is_refused(recipes, name, has):
    with pytest.raises(ConfigError) as caught:
        Run(recipes).write(name)
    message = str(caught.value)
    assert message.startswith(f"--format = {name!r}: ") and has in message and "\n" not in message


def test_weights_that_are_not_finite_are_refused():
    run = Run({"": "nvfp4"})
    run.weight = lambda fqn: torch.full((2 * D, D), torch.nan)
    with pytest.raises(ConfigError, match=r"^--format = 'nvfp4': layers\.0\.attention\.wq\.weight has values"):
        run.write("nvfp4")
