import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain import ConfigError
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.models.flavors import vocab_size


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


PUBLISHED = {
    # meta-llama's model cards and safetensors indices on Hugging Face
    ("llama3", "3.2-1B"): 1_235_814_400,
    ("llama3", "3.2-3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    # Qwen's; those up to 4B share one weight between embedding and head
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
}
"""Parameters of the published models"""


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_flavors_have_the_parameters_of_the_published_models(name, flavor):
    model, args, _ = build(f"--model.name={name}", f"--model.flavor={flavor}")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name, flavor]
    parameters, flops = args.get_nparams_and_flops(model, seq_len=0)
    assert parameters == PUBLISHED[name, flavor]
    if name == "llama3":  # without experts, every weight multiplies but an embedding of its own
        idle = 0 if args.enable_weight_tying else model.tok_embeddings.weight.numel()
        assert flops == 6 * (parameters - idle)


def test_a_separate_head_makes_a_tied_model_larger():
    model, *_ = build("--model.name=qwen3", "--model.flavor=0.6B", "--model_args.no_enable_weight_tying")
    assert sum(p.numel() for p in model.parameters()) == 751_632_384


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("deepseek_v3", "debugmodel"),
        ("llama4", "debugmodel"),
        ("qwen3", "debugmodel_moe"),
        ("qwen3", "debugmodel_moe_16"),
    ],
)
def test_experts_run_one_by_one_where_there_is_no_grouped_product(name, flavor, monkeypatch, caplog):
    models = [f"torchtitan.models.{model}.model.args" for model in ("deepseek_v3", "llama4")]
    for capability in ((8, 0), (9, 0)):
        for module in ("mxtrain.titan.models.flavors", *models):
            monkeypatch.setattr(f"{module}.has_cuda_capability", lambda *needed, has=capability: has >= needed)
        model, args, _ = build(f"--model.name={name}", f"--model.flavor={flavor}")
        experts = [layer.moe.experts for layer in model.layers.values() if layer.moe_enabled]
        assert experts and {e.use_grouped_mm for e in experts} == {args.moe_args.use_grouped_mm} == {
            capability >= (9, 0)
        }
    assert "grouped mm" not in caplog.text  # TorchTitan's warning of a failure


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
