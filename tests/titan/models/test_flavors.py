import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain import ConfigError
from mxtrain.titan.models.flavors import vocab_size
from mxtrain.titan.parse import parse_job_config


def build(*flags):
    job_config = parse_job_config(list(flags))
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"):
        return spec.model_cls(args), args, job_config


@pytest.mark.parametrize(
    ("flavor", "dim", "layers", "parameters"),
    [("125M", 768, 12, 135e6), ("1B", 2048, 16, 1.498e9), ("8B", 4096, 32, 8.03e9)],
)
def test_llama3_flavors(flavor, dim, layers, parameters):
    model, args, _ = build(f"--model.flavor={flavor}")
    assert (args.dim, args.n_layers) == (dim, layers)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("deepseek_v3", "debugmodel"),
        ("llama4", "debugmodel"),
        ("qwen3", "debugmodel_moe"),
        ("qwen3", "debugmodel_moe_16"),
    ],
)
def test_experts_run_one_by_one_where_there_is_no_grouped_product(name, flavor, monkeypatch):
    models = [f"torchtitan.models.{model}.model.args" for model in ("deepseek_v3", "llama4")]
    for capability in ((8, 0), (9, 0)):
        for module in ("mxtrain.titan.models.flavors", *models):
            monkeypatch.setattr(f"{module}.has_cuda_capability", lambda *needed, has=capability: has >= needed)
        model, args, _ = build(f"--model.name={name}", f"--model.flavor={flavor}")
        experts = [layer.moe.experts for layer in model.layers.values() if layer.moe_enabled]
        assert experts and {e.use_grouped_mm for e in experts} == {args.moe_args.use_grouped_mm} == {
            capability >= (9, 0)
        }


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3", "deepseek_v3"])
def test_the_configured_vocabulary_is_the_models(name):
    model, _, job_config = build(f"--model.name={name}", "--data.vocab_size=4096")
    assert vocab_size(job_config) == 4096
    assert model.tok_embeddings.num_embeddings == model.output.out_features == 4096


def test_without_one_the_flavors_stays():
    model, _, job_config = build("--model.flavor=debugmodel")
    assert vocab_size(job_config) == model.tok_embeddings.num_embeddings == 2048


def test_unknown_flavor():
    job_config = parse_job_config([])
    job_config.model.flavor = "0B"
    with pytest.raises(ConfigError, match="model.flavor = '0B' is not one of"):
        vocab_size(job_config)


def test_negative_vocabulary():
    with pytest.raises(ConfigError, match="data.vocab_size = -1 should be greater"):
        vocab_size(parse_job_config(["--data.vocab_size=-1"]))
